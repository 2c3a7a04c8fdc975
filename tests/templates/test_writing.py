"""Contexts, by vectors written by hand and by what must hold of any."""

import json

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer import chat
from composer import templates
from composer.chat import Call
from composer.chat import ToolSpec
from composer.config import SessionConfig
from composer.templates.protocol import Answer
from composer.templates.protocol import Message

EDIT = ToolSpec('edit', 'Edits.', (('line', 'line'), ('token', 'token')))
TEST = ToolSpec('test', 'Tests.')
TOOLS = (EDIT, TEST)
SCHEMAS = [chat.json_schema(tool) for tool in TOOLS]
NAMES = ('chatml', 'qwen3', 'qwen3-thinking', 'smollm2', 'kimi-k2', 'kimi-k2.5')
CALLS = (
  Call('edit', {'line': 'L3', 'token': '<'}, 'functions.edit:0'),
  Call('test', {}, 'functions.test:1'),
)
TALK = (
  Message('system', 'S'),
  Message('user', 'fix it'),
  Message('assistant', 'I try.', thinking='hm', calls=CALLS),
  Message('tool', 'ok', name='edit', call_id='functions.edit:0'),
  Message('tool', '2 of 5', name='test', call_id='functions.test:1'),
)


def text(tokenizers, name, messages, tools=()):
  """A conversation, opened for the next turn, as a string."""
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]
  ids = template.render(tokenizer, messages, tools)
  return tokenizer.decode(ids + template.open_turn(tokenizer))


# --- by hand -----------------------------------------------------------------

CHATML = (
  '<|im_start|>system\nS<|im_end|>\n'
  '<|im_start|>user\nfix it<|im_end|>\n'
  '<|im_start|>assistant\n{thinking}I try.\n'
  '<tool_call>\n{{"name": "edit", "arguments":'
  ' {{"line": "L3", "token": "<"}}}}\n</tool_call>\n'
  '<tool_call>\n{{"name": "test", "arguments": {{}}}}\n</tool_call><|im_end|>\n'
  '<|im_start|>user\n<tool_response>\nok\n</tool_response>\n'
  '<tool_response>\n2 of 5\n</tool_response><|im_end|>\n'
  '<|im_start|>assistant\n{opening}'
)
SMOLLM2 = (
  '<|im_start|>system\nS<|im_end|>\n'
  '<|im_start|>user\nfix it<|im_end|>\n'
  '<|im_start|>assistant\nI try.<tool_call>[{"name": "edit", "arguments":'
  ' {"line": "L3", "token": "<"}}, {"name": "test", "arguments": {}}]'
  '</tool_call><|im_end|>\n'
  '<|im_start|>tool\nok<|im_end|>\n<|im_start|>tool\n2 of 5<|im_end|>\n'
  '<|im_start|>assistant\n'
)
KIMI = (
  '<|im_system|>system<|im_middle|>S<|im_end|>'
  '<|im_user|>user<|im_middle|>fix it<|im_end|>'
  '<|im_assistant|>assistant<|im_middle|>{thinking}I try.'
  '<|tool_calls_section_begin|>'
  '<|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>'
  '{{"line": "L3", "token": "<"}}<|tool_call_end|>'
  '<|tool_call_begin|>functions.test:1<|tool_call_argument_begin|>'
  '{{}}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
  '<|im_system|>edit<|im_middle|>## Return of functions.edit:0\nok<|im_end|>'
  '<|im_system|>test<|im_middle|>## Return of functions.test:1\n2 of 5<|im_end|>'
  '<|im_assistant|>assistant<|im_middle|>{opening}'
)


@pytest.mark.parametrize(
  'name, want',
  [
    ('chatml', CHATML.format(thinking='', opening='')),
    (
      'qwen3',
      CHATML.format(thinking='<think>\nhm\n</think>\n\n', opening=''),
    ),
    (
      'qwen3-thinking',
      CHATML.format(thinking='<think>\nhm\n</think>\n\n', opening='<think>\n'),
    ),
    ('smollm2', SMOLLM2),
    ('kimi-k2', KIMI.format(thinking='', opening='')),
    ('kimi-k2.5', KIMI.format(thinking='<think>hm</think>', opening='<think>')),
  ],
)
def test_a_conversation(tokenizers, name, want):
  assert text(tokenizers, name, TALK) == want


def test_tools_in_the_words_of_the_checkpoint(tokenizers):
  one, two = map(json.dumps, SCHEMAS)
  told = f'TOOLS:\n{one}\n{two}\nCALL IN <tool_call></tool_call><|im_end|>\n'
  asked = [Message('user', 'u')]
  got = text(tokenizers, 'qwen3', asked, SCHEMAS)
  assert got.startswith('<|im_start|>system\n' + told)
  got = text(tokenizers, 'qwen3', [Message('system', 'S'), *asked], SCHEMAS)
  assert got.startswith('<|im_start|>system\nS\n\n' + told)
  # The marks of the introduction are tokens, those in a tool's words are not.
  tool = {**SCHEMAS[1], 'note': '<tool_call>'}
  ids = templates.TEMPLATES['qwen3'].render(tokenizers['qwen3'], asked, [tool])
  assert ids.count(tokenizers['qwen3'].token_id('<tool_call>')) == 1


def test_a_default_prompt_may_stand_before_the_tools(make):
  """As in Qwen2.5: a prompt of the template's own, with tools or without."""
  jinja = (
    '<|im_start|>system\n{% if messages[0].role == "system" %}'
    '{{ messages[0].content }}{% else %}I am.{% endif %}{% if tools %}'
    '{{ "\n\n" }}USE: {{ tools | map("tojson") | join("; ") }}.'
    '{% endif %}<|im_end|>{{ "\n" }}'
  )
  told = {'chatml': make(('<|im_start|>', '<|im_end|>'), jinja)}
  asked = [Message('user', 'u')]
  one, two = map(json.dumps, SCHEMAS)
  got = text(told, 'chatml', asked, SCHEMAS)
  start = '<|im_start|>system\n'
  assert got.startswith(f'{start}I am.\n\nUSE: {one}; {two}.<|im_end|>\n')
  got = text(told, 'chatml', [Message('system', 'S'), *asked], SCHEMAS[:1])
  assert got.startswith(f'{start}S\n\nUSE: {one}.<|im_end|>\n')
  assert text(told, 'chatml', asked).startswith(f'{start}I am.<|im_end|>\n')


def test_tools_of_kimi(tokenizers):
  asked = [Message('user', 'u')]
  declared = '<|im_system|>tool_declare<|im_middle|>'
  got = text(tokenizers, 'kimi-k2', asked, SCHEMAS)
  compact = json.dumps(SCHEMAS, separators=(',', ':'))
  assert got.startswith(f'{declared}{compact}<|im_end|><|im_user|>user')
  got = text(tokenizers, 'kimi-k2.5', asked, SCHEMAS[1:])
  assert got.startswith(
    f'{declared}# Tools\n\n## functions\nnamespace functions {{\n// Tests.\n'
    'type test = (_: {\n  [k: string]: never\n}) => any;\n}\n<|im_end|>'
  )


@pytest.mark.parametrize('name', ('chatml', 'qwen3', 'smollm2'))
def test_a_default_prompt_is_the_checkpoints(make, name):
  jinja = (
    '{% if messages[0].role != "system" %}<|im_start|>system\nI am.<|im_end|>\n'
    '{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n'
    '{{ m.content }}<|im_end|>\n{% endfor %}'
  )
  controls = ('<|im_start|>', '<|im_end|>', '<think>', '</think>')
  told = {name: make(controls, jinja)}
  got = text(told, name, [Message('user', 'u')])
  assert got.startswith('<|im_start|>system\nI am.<|im_end|>\n<|im_start|>user')
  got = text(told, name, [Message('user', 'u')], SCHEMAS)
  assert got.startswith('<|im_start|>system\nI am.\n\n')
  assert json.dumps(SCHEMAS[0]) in got
  got = text(told, name, [Message('system', 'S'), Message('user', 'u')])
  assert 'I am.' not in got


def test_kimi_has_a_default_prompt_of_its_checkpoint(make, kimi_k2):
  jinja = '<|im_system|>system<|im_middle|>I am.<|im_end|>{{ messages }}'
  told = {'kimi-k2': make(tuple(kimi_k2.controls), jinja)}
  asked = [Message('user', 'u')]
  assert text(told, 'kimi-k2', asked).startswith(
    '<|im_system|>system<|im_middle|>I am.<|im_end|><|im_user|>user'
  )
  assert 'I am' not in text(told, 'kimi-k2', [Message('system', 'S'), *asked])


def test_qwen_forgets_the_thinking_before_the_last_question(tokenizers):
  asked = [
    *TALK,
    Message('assistant', 'done', thinking='so'),
    Message('user', 'y'),
  ]
  got = text(tokenizers, 'qwen3', asked)
  assert '<think>' not in got and '\ndone<|im_end|>' in got
  # A tool's answer that a client sends as the user's is no question.
  wrapped = Message('user', '<tool_response>\n1\n</tool_response>')
  assert '<think>\nso\n' in text(tokenizers, 'qwen3', [*asked[:-1], wrapped])
  # The last turn always has its marks.
  got = text(tokenizers, 'qwen3', [TALK[1], Message('assistant', '\n\na')])
  assert 'assistant\n<think>\n\n</think>\n\na<|im_end|>' in got


def test_kimi_forgets_the_thinking_up_to_the_last_answer(tokenizers):
  done = Message('assistant', 'done', thinking='so')
  more = Message('assistant', 'a', thinking='now', calls=CALLS[1:])
  got = text(tokenizers, 'kimi-k2.5', [*TALK, done, Message('user', 'y'), more])
  assert got.count('<think></think>') == 2 and '<think>now</think>' in got
  assert 'hm' not in got and 'so<' not in got


# --- what must hold ----------------------------------------------------------

TURNS = st.lists(
  st.tuples(
    st.sampled_from(['', 'hm', '\n\nlong\n', 'é']),  # thinking
    st.sampled_from(['', '\n\n', '\n', '\n\n\n']),  # before the text
    st.sampled_from(['', 'text', ' x\n\n']),
    st.integers(0, 2),  # calls
    st.booleans(),  # whether the turn ends
    st.booleans(),  # whether the user speaks next
  ),
  min_size=1,
  max_size=4,
)


def sample(name, tokenizer, thinking, gap, said, calls, ends):
  """The ids that a model might sample."""
  encode, mark = tokenizer.encode, tokenizer.token_id
  ids = []
  if name.startswith(('qwen3', 'kimi-k2.')) and (thinking or name != 'qwen3'):
    ids += [mark('<think>')] if name == 'qwen3' else []
    ids += [*encode(thinking), mark('</think>')]
  ids += encode(gap + said)
  for call in CALLS[:calls]:
    body = encode(json.dumps({'name': call.name, 'arguments': call.arguments}))
    if name.startswith('kimi'):
      ids += [mark('<|tool_calls_section_begin|>'), mark('<|tool_call_begin|>')]
      ids += [*encode(call.id), mark('<|tool_call_argument_begin|>')]
      ids += [*encode(json.dumps(call.arguments)), mark('<|tool_call_end|>')]
      ids += [mark('<|tool_calls_section_end|>')]
    elif name == 'smollm2':
      ids += encode('<tool_call>') + body + encode('</tool_call>')
    else:
      ids += [mark('<tool_call>'), *body, mark('</tool_call>')]
  return ids + [mark('<|im_end|>')] * ends


@pytest.mark.parametrize('name', NAMES)
@given(turns=TURNS)
def test_a_grown_context_is_the_whole_conversation(tokenizers, name, turns):
  """Token by token and at once: the same ids, sampled tokens as they were.

  Where nothing is rewritten, every context begins with the one before.
  """
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]
  told = [Message('system', 'S'), Message('user', 'u')]
  context = template.render(tokenizer, told, SCHEMAS)
  for thinking, gap, said, calls, ends, user in turns:
    ids = sample(name, tokenizer, thinking, gap, said, calls, ends)
    context += template.open_turn(tokenizer) + ids
    context += template.close_turn(tokenizer, ids)
    told.append(Message('assistant', tokens=tuple(ids)))
    news = [
      Message('tool', 'r', name=call.name, call_id=call.id)
      for call in CALLS[:calls]
    ]
    news += [Message('user', 'next')] if user or not calls else []
    before = context
    context = template.extend(tokenizer, context, news)
    told += news
    assert context == template.render(tokenizer, told, SCHEMAS)
    grown = context[: len(before)] == before
    thinks = tokenizer.controls.get('</think>') in before
    if name in ('chatml', 'smollm2', 'kimi-k2') or not thinks:
      assert grown
    if name.startswith('qwen3') and not user and calls:
      assert grown
    if name == 'qwen3' and (user or not calls):
      assert tokenizer.token_id('<think>') not in context


INJECTIONS = st.lists(
  st.sampled_from([
    '<|im_end|>', '<|im_start|>', '\n', 'assistant', '<think>', '</tool_call>',
    '</tool_response>', '<|im_system|>', '<|tool_call_begin|>', 'x',
  ])
).map(''.join)  # fmt: skip


@pytest.mark.parametrize('name', NAMES)
@given(said=INJECTIONS)
def test_no_text_writes_a_control_token(tokenizers, name, said):
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]

  def controls(content):
    told = [
      Message('system', content),
      Message('user', content),
      Message('assistant', content, calls=(Call('edit', {'token': content}),)),
      Message('tool', content, name='edit', call_id=content),
    ]
    ids = template.render(tokenizer, told, [{'x': content}])
    return [i for i in ids if i in tokenizer.names]

  # What follows 'x' says nothing of the first and last characters.
  assert controls(f'x{said}x') == controls('x')


@pytest.mark.parametrize('name', NAMES)
@given(
  said=st.lists(st.text(max_size=80), min_size=1, max_size=4),
  limit=st.integers(0, 300),
)
def test_an_observation_is_cut_to_its_limit(tokenizers, name, said, limit):
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]

  def observe(texts, most):
    answers = [Answer(x, 'edit', 'functions.edit:0') for x in texts]
    return template.render_observation(tokenizer, answers, most)

  frame = observe([''] * len(said), 0)
  got = observe(said, limit)
  assert len(got) <= max(limit, len(frame))
  marks = [i for i in got if i in tokenizer.names]
  assert marks == [i for i in frame if i in tokenizer.names]
  whole = observe(said, 10**6)
  assert all(x in tokenizer.decode(whole) for x in said)
  assert (got == whole) == (len(whole) <= limit or not any(said))


@pytest.mark.parametrize('name', NAMES)
def test_a_turn_takes_no_more_than_it_says(tokenizers, name):
  """So that a summary can be asked for before the context is full."""
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]
  session = SessionConfig(max_act_tokens=200, observation_tokens=120)
  most = template.turn_tokens(tokenizer, TOOLS, session)
  prompt = template.render_prompt(tokenizer, TOOLS, 'fix', 'code')
  ids = sample(name, tokenizer, 'hm', '\n\n', 'x' * 20, 2, False)[:200]
  context = prompt + template.open_turn(tokenizer) + ids
  context += template.close_turn(tokenizer, ids)
  answers = [Answer('y' * 500, x.name, x.id) for x in CALLS * 4]
  context += template.render_observation(tokenizer, answers, 120)
  asked = template.open_summary(tokenizer, context)
  assert len(asked) <= len(prompt) + most


@pytest.mark.parametrize('name', NAMES)
def test_a_session_restarts_from_the_tokens_of_its_summary(tokenizers, name):
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]
  prompt = template.render_prompt(tokenizer, TOOLS, 'fix it', 'x = 1')
  start = tokenizer.decode(prompt)
  assert 'fix it\n\nx = 1<|im_end|>' in start
  asked = template.open_summary(tokenizer, prompt)
  assert asked[: len(prompt)] == prompt
  sampled = sample(name, tokenizer, 'secret', '', 'note é', 0, True)
  sampled.insert(-1, tokenizer.vocab_size + 5)
  assert template.summary_text(tokenizer, sampled) in ('note é', 'secretnote é')
  again = template.render_restart(tokenizer, prompt, sampled, 3, 1)
  assert again[: len(prompt)] == prompt
  added = tokenizer.decode(again[len(prompt) :])
  assert 'note é\n3 turns left , 1 summaries<|im_end|>' in added
  assert '</think>' not in added
  if name in ('qwen3', 'qwen3-thinking', 'kimi-k2.5'):
    assert 'secret' not in added


@pytest.mark.parametrize('name', NAMES)
def test_asking_for_a_summary_keeps_the_context(tokenizers, name):
  """Its keys and values are there already; thinking is summarised too."""
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]
  prompt = template.render_prompt(tokenizer, TOOLS, 'fix', '')
  ids = sample(name, tokenizer, 'hm', '\n\n', 'text', 1, True)
  context = prompt + template.open_turn(tokenizer) + ids
  context += template.close_turn(tokenizer, ids)
  asked = template.open_summary(tokenizer, context)
  assert asked[: len(context)] == context
  added = tokenizer.decode(asked[len(context) :])
  assert added.endswith(tokenizer.decode(template.open_turn(tokenizer)))
  assert 'the context is nearly full' in added


def test_asking_qwen_drops_thinking(tokenizers):
  template, tokenizer = templates.TEMPLATES['qwen3'], tokenizers['qwen3']
  prompt = template.render_prompt(tokenizer, TOOLS, 'fix', '')
  ids = sample('qwen3', tokenizer, 'hm', '\n\n', 'text', 1, True)
  context = prompt + template.open_turn(tokenizer) + ids
  context += template.close_turn(tokenizer, ids)
  asked = template.extend(tokenizer, context, [Message('user', 'and?')])
  assert asked[: len(context)] != context
  # What stays are the tokens that were sampled.
  kept = ids[ids.index(tokenizer.token_id('</think>')) + 3 :]
  assert tokenizer.decode(kept).startswith('text<tool_call>')
  turn = template.open_turn(tokenizer) + kept
  assert asked[: len(prompt) + len(turn)] == prompt + turn


def test_line_breaks_are_cut_out_of_a_token(make):
  """'</think>' and a token of line breaks and text: only that is re-encoded."""
  tokenizer = make(('<|im_start|>', '<|im_end|>', '<think>', '</think>'))
  template = templates.TEMPLATES['qwen3']
  context = template.render(tokenizer, [Message('user', 'u')], [])
  turn = template.open_turn(tokenizer)
  for said in ('\n\n\nx', 'x', '\n', ''):
    ids = [
      *(tokenizer.token_id('<think>'), tokenizer.token_id('</think>')),
      *tokenizer.encode(said),
      tokenizer.token_id('<|im_end|>'),
    ]
    whole = context + turn + ids + template.close_turn(tokenizer, ids)
    got = template.extend(tokenizer, whole, [Message('user', 'v')])
    want = turn + tokenizer.encode(said.lstrip('\n'))
    assert got[len(context) :][: len(want)] == want


# --- choosing ----------------------------------------------------------------


def test_a_tokenizer_tells_its_template(make, qwen, smollm, kimi, kimi_k2):
  from composer.model import tokenizer as tokenizer_lib

  guess = templates.guess
  assert guess(tokenizer_lib.load()) == 'compact'
  assert guess(qwen) == 'qwen3' and guess(smollm) == 'smollm2'
  assert guess(kimi) == 'kimi-k2.5' and guess(kimi_k2) == 'kimi-k2'
  controls = tuple(qwen.controls)
  assert guess(make(controls)) == 'qwen3'
  assert guess(make(controls[:7])) == 'chatml'
  opens = (
    '{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}'
  )
  assert guess(make(controls, opens)) == 'qwen3-thinking'
  assert guess(make(controls, '<|im_start|>assistant\n')) == 'chatml'
  with pytest.raises(
    ValueError, match='set template to one of compact, chatml'
  ):
    guess(make(('<s>',)))
  with pytest.raises(ValueError, match='chat_template cannot be rendered'):
    guess(make(controls, '{% if %}'))


def test_a_template_must_fit_the_tokenizer(qwen, smollm):
  from composer.model import tokenizer as tokenizer_lib

  choose = templates.choose
  assert choose('', qwen) is choose('qwen3', qwen)
  with pytest.raises(
    ValueError, match="template='kimi-k2' needs .*<.im_system"
  ):
    choose('kimi-k2', qwen)
  with pytest.raises(ValueError, match='needs the control tokens <think>'):
    choose('qwen3', smollm)
  with pytest.raises(ValueError, match='compact.* needs'):
    choose('compact', qwen)
  with pytest.raises(ValueError, match='qwen3.* needs'):
    choose('qwen3', tokenizer_lib.load())
  with pytest.raises(
    ValueError, match="'gpt' is not known; choose one of comp"
  ):
    choose('gpt', qwen)


def test_a_config_names_every_template():
  from composer.config import CHOICES

  assert CHOICES['template'] == ('', *templates.TEMPLATES)


def test_messages_that_cannot_be(tokenizers):
  with pytest.raises(ValueError, match="role='robot'; use one of system"):
    Message('robot')
  for name in NAMES:
    template = templates.TEMPLATES[name]
    with pytest.raises(ValueError, match='append its sampled tokens'):
      template.extend(tokenizers[name], [], [Message('assistant', 'a')])
  with pytest.raises(ValueError, match='template compact writes sessions'):
    templates.TEMPLATES['compact'].render(None, [], [])


@pytest.mark.parametrize('name', NAMES)
def test_notes_stand_behind_the_last_separator(tokenizers, name):
  """A model without marks for thinking thinks above the line."""
  template, tokenizer = templates.TEMPLATES[name], tokenizers[name]

  def kept(text):
    return template.summary_text(tokenizer, tokenizer.encode(text))

  assert kept('let me see\n---\nnotes é') == 'notes é'
  assert kept('a\n---\nb\n--- \n\nc --- d\n') == 'c --- d'
  assert kept('---\nb') == 'b'
  assert kept('all of\nit - - -') == 'all of\nit - - -'
  assert kept('thoughts\n---\n') == 'thoughts\n---'
  assert kept('') == ''


def test_a_token_that_the_separator_ends_in_is_written_anew(tokenizers):
  """'\\n\\n' is one token: its second half belongs to the notes."""
  tokenizer = tokenizers['qwen3']
  template = templates.TEMPLATES['qwen3']
  (breaks,) = tokenizer.encode('\n\n')
  ids = [*tokenizer.encode('hm\n---'), breaks, *tokenizer.encode('notes')]
  again = template.render_restart(tokenizer, [], ids, 3, 1)
  assert 'Your notes:\n\nnotes\n3 turns left' in tokenizer.decode(again)
