"""Replies: what is right is read, and any ids at all give a reply."""

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from composer import templates
from composer.chat import Broken
from composer.chat import Call
from composer.chat import ToolSpec
from composer.templates import calls
from composer.templates import pieces
from composer.templates.protocol import Reply

TOOLS = (
  ToolSpec('edit', 'Edits.', (('line', 'line'), ('token', 'token'))),
  ToolSpec('write', 'Writes.', (('path', 'path'), ('text', 'text'))),
  ToolSpec('wait', 'Waits.', (('seconds', 'integer'),)),
  ToolSpec('test', 'Tests.'),
)
NAMES = ('chatml', 'qwen3', 'qwen3-thinking', 'smollm2', 'kimi-k2', 'kimi-k2.5')
KIMI = ('kimi-k2', 'kimi-k2.5')
REASONS = {
  'unknown id', 'special token', 'no end', 'unfinished thinking', 'empty',
  'unopened call', 'unclosed call', 'too many calls', 'bad bytes', 'bad JSON',
  'bad call', 'bad call id', 'unknown tool', 'missing argument',
  'superfluous argument', 'bad line', 'bad token', 'bad path', 'bad integer',
}  # fmt: skip


def ids(tokenizer, text):
  """Ids of a text in which every control token is spelt as itself."""
  found = [(text.find(x), x) for x in tokenizer.controls if x in text]
  if not found:
    return tokenizer.encode(text)
  at, piece = min(found)
  rest = text[at + len(piece) :]
  before = tokenizer.encode(text[:at])
  return [*before, tokenizer.token_id(piece), *ids(tokenizer, rest)]


def parse(tokenizers, name, text, tools=TOOLS):
  tokenizer = tokenizers[name]
  return templates.TEMPLATES[name].parse(tokenizer, ids(tokenizer, text), tools)


def spell(name, *made):
  """Calls, given as (tool, arguments as JSON), as a model writes them."""
  if name in KIMI:
    inner = ''.join(
      f'<|tool_call_begin|>functions.{tool}:{i}<|tool_call_argument_begin|>'
      f'{arguments}<|tool_call_end|>'
      for i, (tool, arguments) in enumerate(made)
    )
    return f'<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>'
  objects = [
    f'{{"name": "{tool}", "arguments": {arguments}}}'
    for tool, arguments in made
  ]
  if name == 'smollm2':
    return f'<tool_call>[{", ".join(objects)}]</tool_call>'
  return '\n'.join(f'<tool_call>\n{x}\n</tool_call>' for x in objects)


def thought(name, thinking='hm'):
  if name == 'qwen3':
    return f'<think>\n{thinking}\n</think>\n\n'
  opened = name in ('qwen3-thinking', 'kimi-k2.5')
  return f'{thinking}</think>' if opened else ''


# --- what is right -----------------------------------------------------------


@pytest.mark.parametrize('name', NAMES)
def test_parallel_calls(tokenizers, name):
  made = (('edit', '{"line": "L3", "token": "<"}'), ('test', '{}'))
  got = parse(
    tokenizers, name, f'{thought(name)}I try.{spell(name, *made)}<|im_end|>'
  )
  one, two = (
    ('functions.edit:0', 'functions.test:1') if name in KIMI else ('', '')
  )
  assert got.acts == (
    Call('edit', {'line': 'L3', 'token': '<'}, one),
    Call('test', {}, two),
  )
  assert got.text == 'I try.'
  assert got.thinking == ('hm' if thought(name) else '')


@pytest.mark.parametrize('name', NAMES)
def test_text_alone(tokenizers, name):
  got = parse(tokenizers, name, f'{thought(name)} é {{}}\n<|im_end|>')
  assert (got.text, got.acts) == ('é {}', ())


@pytest.mark.parametrize('name', NAMES)
@given(
  text=st.text(),
  seconds=st.integers(),
  path=st.from_regex(r'[a-z]{1,8}(/[a-z.]{1,8}\.py)?', fullmatch=True),
)
def test_arguments_come_back_as_they_were(
  tokenizers, name, text, seconds, path
):
  said = json.dumps(
    {'path': path, 'text': text}, ensure_ascii=bool(len(text) % 2)
  )
  if not text.isprintable() or any(x in said for x in ('<', '</')):
    said = json.dumps({'path': path, 'text': text}).replace('<', '\\u003c')
  made = (('write', said), ('wait', json.dumps({'seconds': seconds})))
  got = parse(
    tokenizers, name, f'{thought(name)}{spell(name, *made)}<|im_end|>'
  )
  assert [x.arguments for x in got.acts] == [
    {'path': path, 'text': text},
    {'seconds': seconds},
  ]


@pytest.mark.parametrize('name', ('qwen3', 'qwen3-thinking', 'kimi-k2.5'))
def test_calls_in_the_thinking_are_thought_and_not_done(tokenizers, name):
  thinking = thought(name, spell(name, ('test', '{}')))
  got = parse(tokenizers, name, f'{thinking}no<|im_end|>')
  assert (got.text, got.acts) == ('no', ())
  assert 'test' in got.thinking


def test_a_spelt_mark_is_text_where_the_mark_is_a_token(tokenizers):
  tokenizer = tokenizers['chatml']
  said = tokenizer.encode('<tool_call>{"name": "test", "arguments": {}}')
  end = tokenizer.token_id('<|im_end|>')
  got = templates.TEMPLATES['chatml'].parse(tokenizer, [*said, end], TOOLS)
  assert got.acts == () and got.text.startswith('<tool_call>')


def test_any_tool_is_taken_where_none_are_given(tokenizers):
  for name in NAMES:
    said = spell(name, ('fly', '{"to": [1, {"x": null}]}'))
    got = parse(tokenizers, name, f'{thought(name)}{said}<|im_end|>', None)
    (call,) = got.acts
    assert (call.name, call.arguments) == ('fly', {'to': [1, {'x': None}]})


# --- what is wrong -----------------------------------------------------------


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
  'tool, arguments, reason, told',
  [
    ('fly', '{}', 'unknown tool', 'there are edit, write, wait, test'),
    ('test', '[]', 'bad call', 'must be a JSON object'),
    ('test', '"{}"', 'bad call', 'must be a JSON object'),
    ('test', '{"a": 1}', 'superfluous argument', 'test takes nothing'),
    ('edit', '{"line": "L3"}', 'missing argument', 'edit needs token'),
    ('edit', '{"line": 3, "token": "<"}', 'bad line', 'line of edit must be'),
    ('edit', '{"line": "L3", "token": "a b"}', 'bad token', 'one word'),
    ('edit', '{"line": "L3", "token": ""}', 'bad token', 'one word'),
    ('write', '{"path": "/a", "text": ""}', 'bad path', 'inside the workspace'),
    ('write', '{"path": "a/../b", "text": ""}', 'bad path', 'a relative path'),
    ('write', '{"path": "a", "text": 1}', 'bad text', 'a string'),
    ('wait', '{"seconds": 1.5}', 'bad integer', 'a whole number'),
    ('wait', '{"seconds": true}', 'bad integer', 'a whole number'),
    ('wait', '{"seconds": NaN}', 'bad JSON', 'NaN is no JSON'),
    ('wait', '{"seconds": 1e999}', 'bad JSON', '1e999 is beyond all numbers'),
    ('wait', '{"seconds": 1, "seconds": 2}', 'bad JSON', 'stands twice'),
    ('wait', '{"seconds": ' + '9' * 5000 + '}', 'bad JSON', 'integer'),
    ('write', '{"path": "a", "text": "\\ud800"}', 'bad JSON', 'surrogates'),
    ('write', '{"path": "a", "text": "x\ny"}', 'bad JSON', 'control character'),
    ('test', '{"a": ' + '[' * 100_000, 'bad JSON', 'nested too deeply'),
    ('test', "{'a': 1}", 'bad JSON', 'double quotes'),
    ('test', '', 'bad JSON', 'Expecting value'),
  ],
)
def test_bad_calls_are_told_apart(
  tokenizers, name, tool, arguments, reason, told
):
  said = spell(name, (tool, arguments))
  got = parse(tokenizers, name, f'{thought(name)}{said}<|im_end|>')
  (broken,) = got.acts
  assert isinstance(broken, Broken) and broken.reason == reason
  error = templates.TEMPLATES[name].error_text(broken)
  assert error.startswith(f'error: {reason}') and told in error
  assert len(error) < 400


@pytest.mark.parametrize('name', NAMES)
def test_one_bad_call_leaves_the_others(tokenizers, name):
  if name == 'smollm2':
    said = spell(name, ('test', '{}')) + spell(name, ('test', '{')) * 2
  else:
    said = spell(name, ('test', '{}'), ('test', '{'), ('test', '{'))
  got = parse(tokenizers, name, f'{thought(name)}{said}<|im_end|>')
  kinds = [type(x) for x in got.acts]
  assert kinds == [Call, Broken, Broken]


@pytest.mark.parametrize('name', NAMES)
def test_too_many_calls(tokenizers, name):
  said = spell(name, *([('test', '{}')] * (calls.MOST + 3)))
  got = parse(tokenizers, name, f'{thought(name)}{said}<|im_end|>')
  assert [type(x) for x in got.acts] == [Call] * calls.MOST + [Broken]
  assert got.acts[-1].detail == '3 calls were not made; at most 8 a turn'


@pytest.mark.parametrize(
  'name, said, reason',
  [
    *((name, '', 'no end') for name in NAMES),
    *((name, 'x', 'no end') for name in NAMES),
    *((name, f'{thought(name)}<|im_end|>', 'empty') for name in NAMES),
    *(
      (name, f'{thought(name)}a<|im_end|>b<|im_end|>', 'special token')
      for name in NAMES
    ),
    ('chatml', '<think>x</think>y<|im_end|>', 'special token'),
    ('chatml', '<|im_start|>user\nx<|im_end|>', 'special token'),
    ('qwen3', '<think>x<|im_start|></think>y<|im_end|>', 'special token'),
    ('qwen3', '<think>x<|im_end|>', 'unfinished thinking'),
    ('qwen3-thinking', 'x<|im_end|>', 'unfinished thinking'),
    ('kimi-k2.5', 'x<|im_end|>', 'unfinished thinking'),
    ('qwen3', '<tool_call>{}<|im_end|>', 'unclosed call'),
    ('qwen3', '</tool_call><|im_end|>', 'unopened call'),
    ('qwen3', '<tool_call></tool_call><|im_end|>', 'bad JSON'),
    ('qwen3', '<tool_call>[]</tool_call><|im_end|>', 'bad call'),
    ('qwen3', '<tool_call>{"name": "test"}</tool_call><|im_end|>', 'bad call'),
    ('qwen3', '<tool_call>{"name": 3}</tool_call><|im_end|>', 'bad call'),
    ('qwen3', '<tool_response>1</tool_response><|im_end|>', 'special token'),
    ('smollm2', '<tool_call>[]</tool_call><|im_end|>', 'bad call'),
    ('smollm2', '<tool_call>[3]</tool_call><|im_end|>', 'bad call'),
    ('smollm2', '<tool_call>{}<|im_end|>', 'unclosed call'),
    ('kimi-k2', '<|tool_call_begin|><|im_end|>', 'unopened call'),
    ('kimi-k2', '<|tool_calls_section_begin|><|im_end|>', 'unclosed call'),
    ('kimi-k2', '<|tool_calls_section_end|><|im_end|>', 'unopened call'),
    (
      'kimi-k2',
      '<|tool_calls_section_begin|><|tool_call_begin|>functions.test:0'
      '<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
      'unclosed call',
    ),
    (
      'kimi-k2',
      '<|tool_calls_section_begin|><|tool_call_begin|>test'
      '<|tool_call_argument_begin|>{}<|tool_call_end|>'
      '<|tool_calls_section_end|><|im_end|>',
      'bad call id',
    ),
  ],
)  # fmt: skip
def test_bad_turns_are_told_apart(tokenizers, name, said, reason):
  got = parse(tokenizers, name, said)
  assert got.acts[0].reason == reason
  assert templates.TEMPLATES[name].error_text(got.acts[0])


@pytest.mark.parametrize('name', NAMES)
def test_a_call_that_is_no_utf8_is_not_executed(tokenizers, name):
  tokenizer = tokenizers[name]
  said = spell(name, ('write', '{"path": "a", "text": "@"}'))
  whole = ids(tokenizer, f'{thought(name)}{said}<|im_end|>')
  at = whole.index(tokenizer.token_id('@'))
  byte = next(i for i in range(256) if tokenizer.to_bytes([i]) == b'\xff')
  got = templates.TEMPLATES[name].parse(
    tokenizer, [*whole[:at], byte, *whole[at + 1 :]], TOOLS
  )
  assert got.acts[0].reason == 'bad bytes'
  # The character that stands for such bytes is one itself.
  said = spell(name, ('write', '{"path": "a", "text": "\ufffd"}'))
  got = parse(tokenizers, name, f'{thought(name)}{said}<|im_end|>')
  assert got.acts[0].arguments['text'] == '\ufffd'


# --- anything ----------------------------------------------------------------

BITS = st.sampled_from([
  '<think>', '</think>', '<tool_call>', '</tool_call>', '<|im_end|>', '[', ']',
  '<|im_start|>', '<|tool_calls_section_begin|>', '<|tool_calls_section_end|>',
  '<|tool_call_begin|>', '<|tool_call_argument_begin|>', '<|tool_call_end|>',
  'functions.test:0', 'functions.fly:12', '{"name": "test", "arguments": {}}',
  '{}', '{"line": "L1", "token": "x"}', 'text', '\n', '"', ',',
])  # fmt: skip


@pytest.mark.parametrize('name', (*NAMES, 'compact'))
@settings(max_examples=300)
@given(data=st.data())
def test_any_ids_give_a_reply(tokenizers, name, data):
  if name == 'compact':
    from composer.model import tokenizer as tokenizer_lib

    tokenizer = tokenizer_lib.load()
    spelt = st.nothing()
  else:
    tokenizer = tokenizers[name]
    spelt = BITS.map(lambda x: ids(tokenizer, x))
  any_id = st.integers(-3, tokenizer.vocab_size + 3)
  sampled = data.draw(
    st.lists(st.one_of(spelt, any_id.map(lambda i: [i])), max_size=14)
  )
  flat = [i for run in sampled for i in run]
  template = templates.TEMPLATES[name]
  got = template.parse(tokenizer, np.array(flat, np.int32), TOOLS)
  assert isinstance(got, Reply)
  assert got.acts or got.text
  assert len(got.acts) <= calls.MOST + 1
  for act in got.acts:
    assert isinstance(act, Call | Broken)
    if isinstance(act, Broken):
      if name != 'compact':
        assert act.reason in REASONS
      assert template.error_text(act).strip()
    else:
      assert act.name in {tool.name for tool in TOOLS}
  json.dumps([got.text, got.thinking]).encode()
  # And the turn can be closed, answered and summarised.
  assert template.close_turn(tokenizer, flat) is not None
  assert isinstance(template.summary_text(tokenizer, flat), str)
  again = template.render_restart(tokenizer, [], flat, 1, 1)
  assert all(0 <= i < tokenizer.vocab_size for i in again)


@given(st.lists(st.one_of(st.text(max_size=5), st.just('<tool_call>'))))
def test_events_hold_all_of_the_text(tokenizers, texts):
  for name in ('chatml', 'smollm2'):
    tokenizer = tokenizers[name]
    text = ''.join(texts)
    events = pieces.read(tokenizer, ids(tokenizer, text), ('<tool_call>',))
    assert pieces.plain(events) == text
    marks = [x for x in events if x.mark == '<tool_call>']
    assert len(marks) == text.count('<tool_call>')


def test_calls_are_read_without_marks_too():
  assert calls.from_json('{"name": "test", "arguments": {}}', TOOLS) == [
    Call('test', {})
  ]
  assert calls.from_json('[]', TOOLS)[0].reason == 'bad call'
