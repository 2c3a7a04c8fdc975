"""Rendering is append-only and cannot be injected; parsing is total."""

import json

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer import chat
from composer.config import SessionConfig
from composer.environments.tasks import repair
from composer.model import tokenizer as tokenizer_lib

TOOLS = (
  chat.ToolSpec('edit', 'Edits.', (('line', 'line'), ('token', 'token'))),
  chat.ToolSpec('test', 'Tests.'),
  chat.ToolSpec('submit', 'Ends.'),
)
WRITE = chat.ToolSpec('write', 'Writes.', (('path', 'path'), ('text', 'text')))
WAIT = chat.ToolSpec('wait', 'Waits.', (('seconds', 'integer'),))
TOKENIZER = tokenizer_lib.load()
SPECIAL = [TOKENIZER.token_id(piece) for piece in chat.SPECIALS]
END = TOKENIZER.token_id('<end>')


class GullibleTokenizer:
  """One token a character, but a special spelt in a text becomes that token."""

  vocab_size = 512

  def token_id(self, piece):
    return chat.SPECIALS.index(piece)

  def encode(self, text):
    ids = []
    while text:
      special = next((s for s in chat.SPECIALS if text.startswith(s)), None)
      ids.append(self.token_id(special) if special else 10 + ord(text[0]))
      text = text[len(special or text[0]) :]
    return ids

  def decode(self, ids):
    return ''.join(chat.SPECIALS[i] if i < 10 else chr(i - 10) for i in ids)


def act(text):
  return [*TOKENIZER.encode(text), END]


# --- parsing -----------------------------------------------------------------


@pytest.mark.parametrize(
  'text, want',
  [
    (' edit L3 <', chat.Call('edit', {'line': 'L3', 'token': '<'})),
    ('edit  L12 // ', chat.Call('edit', {'line': 'L12', 'token': '//'})),
    (' test', chat.Call('test', {})),
    (' # the bound is off', chat.Text(' # the bound is off')),
    ('', 'empty'),
    ('  ', 'empty'),
    (' tests', 'unknown tool'),
    (' write a b', 'unknown tool'),
    (' edit L3', 'missing argument'),
    (' edit L3 < <', 'superfluous argument'),
    (' test L3', 'superfluous argument'),
    (' edit 3 <', 'bad line'),
    (' edit L٣ <', 'bad line'),
  ],
)
def test_parse(text, want):
  got = chat.parse_act(TOKENIZER, act(text), TOOLS)
  if isinstance(want, str):
    want = chat.Broken(want, text)
  assert got == want


def test_parse_types_arguments_by_kind():
  tools = (WRITE, WAIT)
  assert chat.parse_act(TOKENIZER, act('write a/b.py  x = 1\n y\n'), tools) == (
    chat.Call('write', {'path': 'a/b.py', 'text': 'x = 1\n y\n'})
  )
  assert chat.parse_act(TOKENIZER, act('wait -3'), tools) == (
    chat.Call('wait', {'seconds': -3})
  )
  for text, reason in {
    'write a': 'missing argument',
    'write /etc/passwd x': 'bad path',
    'write a/../../b x': 'bad path',
    'write a\0b x': 'bad path',
    'wait 1.5': 'bad integer',
  }.items():
    assert chat.parse_act(TOKENIZER, act(text), tools) == (
      chat.Broken(reason, text)
    )


def test_a_cut_act_or_a_forged_marker_is_broken():
  test = TOKENIZER.encode(' test')
  cases = {
    'no end': test,
    'special token': [*test, TOKENIZER.token_id('<obs>'), END],
    'unknown id': [*test, TOKENIZER.vocab_size, END],
  }
  for reason, tokens in cases.items():
    got = chat.parse_act(TOKENIZER, tokens, TOOLS)
    assert got == chat.Broken(reason, ' test')
  # An end inside is no end.
  assert chat.parse_act(TOKENIZER, [END, *test, END], TOOLS).reason == (
    'special token'
  )


IDS = st.one_of(
  st.sampled_from(SPECIAL),
  st.sampled_from(
    [i for word in (' edit', ' L2', ' <', ' test') for i in act(word)[:1]]
  ),
  st.integers(-3, TOKENIZER.vocab_size + 3),
)


@given(st.lists(IDS, max_size=8))
def test_parsing_is_total(tokens):
  got = chat.parse_act(TOKENIZER, tokens, (*TOOLS, WRITE, WAIT))
  if isinstance(got, chat.Broken):
    text = chat.error_text(got)
    assert text.startswith(' error ')
    assert len(TOKENIZER.encode(text)) <= 10
    return
  assert tokens[-1] == END
  assert not set(tokens[:-1]) & set(SPECIAL)
  if isinstance(got, chat.Call):
    spec = {tool.name: tool for tool in (*TOOLS, WRITE, WAIT)}[got.name]
    assert list(got.arguments) == [name for name, _ in spec.parameters]
  else:
    assert got.text.strip().startswith('#')


# --- rendering ---------------------------------------------------------------


def test_prompt_is_the_template():
  task = repair.build_tasks(repair.TasksConfig()).train[0]
  listing = repair.listing(task)
  prompt = chat.render_prompt(TOKENIZER, TOOLS, task.instruction, listing)
  text = TOKENIZER.decode(prompt)
  assert text.startswith('<bos><tools> edit LINE TOKEN ; test ; submit<task>')
  assert text.endswith('<file>' + listing)
  assert task.instruction.strip() in text
  assert [i for i in prompt if i in SPECIAL] == [
    TOKENIZER.token_id(x) for x in ('<bos>', '<tools>', '<task>', '<file>')
  ]


@given(st.text(max_size=40), st.integers(0, 30))
def test_observation_is_cut_in_the_middle_and_keeps_its_markers(text, limit):
  got = chat.render_observation(TOKENIZER, text, limit)
  whole = chat.render_observation(TOKENIZER, text, 1000)
  assert got[0] == TOKENIZER.token_id('<obs>') and got[-1] == END
  assert len(got) == min(len(whole), max(limit, 2))
  head = (len(got) + 1) // 2
  assert got[:head] == whole[:head]
  assert got[head:] == whole[len(whole) - (len(got) - head) :]


@pytest.mark.parametrize('tokenizer', [TOKENIZER, GullibleTokenizer()])
@given(
  st.lists(
    st.one_of(st.sampled_from(chat.SPECIALS), st.sampled_from('<>ab ')),
    max_size=8,
  ).map(''.join)
)
def test_no_text_becomes_a_special_token(tokenizer, text):
  ids = chat.encode_text(tokenizer, text)
  assert not set(ids) & chat.special_ids(tokenizer)
  assert tokenizer.decode(ids) == text
  observed = chat.render_observation(tokenizer, text, 100)
  assert not set(observed[1:-1]) & chat.special_ids(tokenizer)
  prompt = chat.render_prompt(tokenizer, TOOLS, text, text)
  assert sum(i in chat.special_ids(tokenizer) for i in prompt) == 4


def test_restart_carries_the_summary_as_sampled_without_markers():
  prompt = [1, 50, 51]
  sampled = [300, TOKENIZER.token_id('<obs>'), 301, 301, END]
  got = chat.render_restart(TOKENIZER, prompt, sampled, 3, 1)
  state = TOKENIZER.encode(' 3 turns left , 1 summaries')
  assert len(state) == 6  # every word is a piece
  mark = TOKENIZER.token_id('<summary>')
  assert got == [*prompt, mark, 300, 301, 301, *state, END]


def test_a_turn_never_passes_the_context():
  session = SessionConfig(
    context_tokens=40, max_act_tokens=5, observation_tokens=6
  )
  longest = next(n for n in range(99) if chat.summary_due(n, session)) - 1
  turn = [
    *chat.open_turn(TOKENIZER),
    *[300] * 5,
    END,
    *chat.render_observation(TOKENIZER, ' ok' * 50, 6),
  ]
  assert longest + len(turn) == 40


# --- tools -------------------------------------------------------------------


def test_json_schema_is_the_openai_form():
  schema = json.loads(json.dumps(chat.json_schema(TOOLS[0])))
  assert schema['type'] == 'function'
  function = schema['function']
  assert function['name'] == 'edit'
  assert function['parameters']['type'] == 'object'
  assert function['parameters']['required'] == ['line', 'token']
  assert set(function['parameters']['properties']) == {'line', 'token'}


@pytest.mark.parametrize(
  'parameters, message',
  [
    ((('x', 'lines'),), "kind 'lines'; the known kinds are line, token"),
    ((('x', 'text'), ('y', 'token')), 'make it the last parameter'),
  ],
)
def test_wrong_tool_spec_is_refused(parameters, message):
  with pytest.raises(ValueError, match=message):
    chat.ToolSpec('tool', '', parameters)


def test_optional_arguments_of_an_act():
  spec = chat.ToolSpec(
    'read', 'show', (('path', 'path'),), (('start', 'integer'),)
  )
  for text, want in (
    (' read a 3', chat.Call('read', {'path': 'a', 'start': 3})),
    (' read a', chat.Call('read', {'path': 'a'})),
  ):
    ids = [*TOKENIZER.encode(text), TOKENIZER.token_id(chat.END)]
    assert chat.parse_act(TOKENIZER, ids, [spec]) == want
  for text, reason in ((' read', 'missing'), (' read a 3 4', 'superfluous')):
    ids = [*TOKENIZER.encode(text), TOKENIZER.token_id(chat.END)]
    act = chat.parse_act(TOKENIZER, ids, [spec])
    assert act.reason == f'{reason} argument'


def test_the_todo_list_is_part_of_the_state():
  assert chat.state_text(3, 1) == ' 3 turns left , 1 summaries'
  assert chat.state_text(3, 1, '[ ] a').endswith('summaries\ntodo:\n[ ] a')


@pytest.mark.parametrize(
  'act',
  [
    chat.Call('submit', {}),
    chat.Call('write', {'path': 'a/b.py', 'text': 'x = 1\n  y'}),
    chat.Call('wait', {'seconds': -3}),
  ],
)
def test_an_act_is_read_as_it_was_rendered(act):
  """What a demonstration says is what a model would have to sample."""
  tokens = chat.render_act(TOKENIZER, act)
  assert tokens[-1] == END
  assert chat.parse_act(TOKENIZER, tokens, (*TOOLS, WRITE, WAIT)) == act


def test_acts_that_words_cannot_say_are_refused():
  for value in ('two words', ''):
    act = chat.Call('write', {'path': value, 'text': 'x'})
    with pytest.raises(ValueError, match="write: path='.*not one word"):
      chat.render_act(TOKENIZER, act)
  with pytest.raises(ValueError, match='begins with a space'):
    chat.render_act(TOKENIZER, chat.Call('write', {'path': 'a', 'text': ' x'}))
  note = chat.render_act(TOKENIZER, chat.Text('# look again'))
  assert chat.parse_act(TOKENIZER, note, TOOLS) == chat.Text(' # look again')
