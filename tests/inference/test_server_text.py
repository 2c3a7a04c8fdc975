"""Text of a turn as it comes: the same however the tokens are cut."""

import hypothesis
from hypothesis import strategies as st
import pytest

from composer import templates
from composer.inference import server_text
from composer.model import tokenizer as tokenizer_lib

NAMES = ('chatml', 'qwen3', 'qwen3-thinking', 'smollm2', 'kimi-k2', 'kimi-k2.5')


def turn(vocabularies, name, **fields):
  tokenizer = vocabularies[name]
  return server_text.Turn(
    templates.choose(name, tokenizer), tokenizer, **fields
  )


def read(of, ids, cuts=()):
  """(reader, pieces of content) of ids that come in runs."""
  reader, pieces = server_text.Reader(of), []
  for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True):
    pieces.append(reader.feed(ids[a:b]).content)
  pieces.append(reader.finish().content)
  return reader, pieces


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_any_ids_however_cut(vocabularies, data):
  """Pieces join to the content; what was given is never taken back."""
  name = data.draw(st.sampled_from(NAMES))
  of = turn(
    vocabularies,
    name,
    tools=data.draw(st.booleans()),
    stop=tuple(data.draw(st.sets(st.sampled_from(('ab', 'b', '\n\n', 'é'))))),
    chat=data.draw(st.booleans()),
  )
  tokenizer = of.tokenizer
  text = st.text(st.sampled_from('ab \né<>tool_call/'), max_size=8)
  part = st.one_of(
    text.map(tokenizer.encode),
    st.integers(0, 290).map(lambda i: [i]),
    st.sampled_from(sorted(tokenizer.names)).map(lambda i: [i]),
  )
  ids = [i for x in data.draw(st.lists(part, max_size=12)) for i in x]
  cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=5)))
  reader, pieces = read(of, ids, cuts)
  whole, _ = read(of, ids)
  assert ''.join(pieces) == reader.content
  assert (reader.content, reader.thinking) == (whole.content, whole.thinking)
  assert reader.stopped == whole.stopped
  said = server_text.said(reader, ids[: reader.count])
  assert said.content.startswith(reader.content)
  if reader.turn.stop and not said.broken and not of.tools:
    assert not any(word in said.content for word in of.stop)


@pytest.mark.parametrize('name', NAMES)
def test_text_comes_back(vocabularies, name):
  of = turn(vocabularies, name, tools=True)
  text = 'Grüße, 世界 <b>2 < 3</b>\n\n  done'
  ids = of.tokenizer.encode(f' \n{text} \n')
  if name in ('qwen3-thinking', 'kimi-k2.5'):
    ids = [of.tokenizer.controls['</think>'], *ids]
  reader, _ = read(of, [*ids, of.tokenizer.controls['<|im_end|>']])
  said = server_text.said(reader, ids)
  assert (said.content, said.calls, said.broken) == (text, (), ())
  # As the continuation of a text it keeps its space.
  plain = turn(vocabularies, name, chat=False)
  assert read(plain, of.tokenizer.encode(' a \n'))[0].content == ' a \n'


def test_half_characters_and_spelt_marks_are_held(vocabularies):
  of = turn(vocabularies, 'smollm2', tools=True)
  reader = server_text.Reader(of)
  given = [
    reader.feed((i,)).content for i in of.tokenizer.encode('aé <tool b <tool_')
  ]
  assert given[:3] == ['a', '', 'é']
  assert ''.join(given) == 'aé <tool b'
  assert reader.feed(of.tokenizer.encode('call>[{')).content == ''
  reader.finish()
  said = server_text.said(reader, of.tokenizer.encode('aé<tool_call>[{'))
  assert [x.reason for x in said.broken] == ['unclosed call']
  assert said.content == 'aé <tool b'


def test_a_broken_call_is_told(vocabularies):
  """Its text is content, so that a harness sees what the model did."""
  of = turn(vocabularies, 'qwen3', tools=True)
  mark = of.tokenizer.controls
  ids = [*of.tokenizer.encode('so '), mark['<tool_call>']]
  ids += [*of.tokenizer.encode('{"name": '), mark['</tool_call>']]
  reader, _ = read(of, ids)
  said = server_text.said(reader, [*ids, mark['<|im_end|>']])
  assert said.content == 'so\n{"name":' and said.calls == ()
  assert [x.reason for x in said.broken] == ['bad JSON']
  without = turn(vocabularies, 'qwen3')
  reader, _ = read(without, ids)
  said = server_text.said(reader, ids)
  assert said.content == 'so <tool_call>{"name": </tool_call>'


def test_the_quick_starts_tokenizer():
  tokenizer = tokenizer_lib.load()
  of = server_text.Turn(templates.choose('', tokenizer), tokenizer, chat=False)
  ids = tokenizer.encode(' def f(é):\n')
  assert read(of, [*ids, tokenizer.token_id('<end>')])[0].content == (
    ' def f(é):\n'
  )
  assert server_text.token_text(tokenizer, 2) == ('<end>', list(b'<end>'))
  assert server_text.token_text(tokenizer, 10**6) == ('<1000000>', None)
