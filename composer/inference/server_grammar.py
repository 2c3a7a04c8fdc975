"""Answers that must be JSON, or a call: grammars, and the masks that keep them.

A grammar is text of llguidance's dialect of Lark: literal text, control tokens
by id (`<[257]>`), and JSON of a schema (`%json {...}`). How a call is written is
not told here: a call is rendered by the template, and its name and arguments are
cut out of that. llguidance walks the grammar and says after every token which
may come next, whatever the vocabulary cuts text into.

What is not bound is drawn from all: thinking, and where a call is the model's
own choice everything up to the token that begins one. So a mask is of the whole
vocabulary there, and nothing is to be recorded of it.

    required, or a tool by name   one call, behind what is forced of it
    response_format,              JSON, or one of some texts, or of a pattern; or
    structured_outputs            a call, where tools may be called
    tools that are `strict`, or   any turn, whose calls are bound
    one call at a time

The package is asked for where a request needs it; the rest of the server goes
without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import importlib.util
import json
import re
from typing import Any

import numpy as np

from composer.chat import Call
from composer.inference import server_text
from composer.inference.server_forms import Form
from composer.templates import chatml
from composer.templates.protocol import Message
from composer.templates.protocol import Template

PACKAGE = 'llguidance'
LONGEST = 1 << 20  # characters of a grammar: some seconds of compiling
THINK, THOUGHT = chatml.THINK, chatml.THOUGHT
# JSON may be laid out; but models that do not know how to go on write spaces.
_SPACE = r'[\x20\x0A\x0D\x09]{0,20}'
_ARGUMENTS = {'composer_arguments_of_the_call': 0}  # stands for any
_NUMBER = '987654321'  # of a call, stands for any
_ESCAPED = {'/': r'\/', '\n': r'\n'}
_CONTROL = 256  # in flat text a byte is itself, a control token this and its id
_JSON, _DIGITS = -1, -2  # what stands for any
Mask = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Grammar:
  """What an answer must be.

  Attributes:
    text: of the grammar.
    begins: ids behind which it holds; none: from the first token on.
    thinks: an id that may be the first token instead; the grammar then holds
      behind `begins`.
    again: whether all is free behind it, up to the next of `begins`.
  """

  text: str
  begins: tuple[int, ...] = ()
  thinks: int | None = None
  again: bool = False


def missing() -> str:
  """Why no grammar can be kept here, or ''."""
  if importlib.util.find_spec(PACKAGE) is not None:
    return ''
  return (
    'answers of a given form (tool_choice, response_format, strict tools) need'
    f" {PACKAGE}, which pip install -e '.[serve]' installs"
  )


# --- what an answer must be ------------------------------------------------------


def forced_call(
  template: Template,
  tokenizer: Any,
  tools: Sequence[Mapping[str, Any]],
  name: str | None,
) -> tuple[tuple[int, ...], Grammar]:
  """(ids that need not be sampled, one call of the tool `name` or of any).

  Raises:
    ValueError: turns of the template cannot be begun with a call.
  """
  chosen = [x for x in tools if name in (None, x['function']['name'])]
  turns = [_turn(template, tokenizer, x['function']['name']) for x in chosen]
  forced = server_text.forced_call(template, tokenizer, name)
  # Up to the arguments, which may share a token with what is before them.
  while _behind(template, tokenizer, turns[0], forced) is None:
    forced = forced[:-1]
  rules = [
    _rule(_behind(template, tokenizer, turn, forced) or [], tool)
    for turn, tool in zip(turns, chosen, strict=True)
  ]
  return forced, Grammar(_any_of(rules))


def free_calls(
  template: Template,
  tokenizer: Any,
  tools: Sequence[Mapping[str, Any]],
  single: bool,
) -> Grammar:
  """Any turn, whose calls are of the tools; behind one it ends, where `single`.

  Raises:
    ValueError: no token of the vocabulary begins a call, or as `forced_call`.
  """
  rules, begins = [], 0
  for tool in tools:
    name = tool['function']['name']
    flat = _turn(template, tokenizer, name, _NUMBER)
    json_at = flat.index(_JSON)
    opening = len(_flat(tokenizer, template.open_turn(tokenizer)))
    marks = [i for i, x in enumerate(flat) if x >= _CONTROL]
    named = opening + _find(flat[opening:], list(name.encode()))
    before = [i for i in marks if opening <= i < named]
    behind = [i for i in marks if i > json_at]
    if not before or not behind:
      raise ValueError(
        f'template {template.name} spells its calls in this vocabulary, where'
        ' calls that the model chooses cannot be bound; leave out strict and'
        ' parallel_tool_calls=false, or set tool_choice'
      )
    begins = flat[before[-1]] - _CONTROL
    end = len(flat) if single else behind[0] + 1
    rules.append(_rule(flat[before[-1] + 1 : end], tool))
  return Grammar(_any_of(rules), (begins,), again=not single)


def text(form: Form) -> Grammar:
  """A text of a form, and nothing else."""
  return Grammar(_any_of([_of_form(form)]))


def answer(
  template: Template,
  tokenizer: Any,
  form: Form,
  tools: Sequence[Mapping[str, Any]],
) -> Grammar:
  """A text of a form, behind any thinking; or a call of one of `tools`.

  Raises:
    ValueError: as `forced_call`.
  """
  rules = [f'SPACE? {_of_form(form)}']
  for tool in tools:
    turn = _turn(template, tokenizer, tool['function']['name'])
    rest = _call_alone(template, tokenizer, turn)
    rules.append(f'SPACE? {_rule(rest, tool)}')
  whole = _any_of(rules) + '\nSPACE: /[\\n ]{1,4}/'
  if THOUGHT not in template.needs:
    return Grammar(whole)
  think, thought = (tokenizer.controls[x] for x in (THINK, THOUGHT))
  if think in template.open_turn(tokenizer):
    return Grammar(whole, (thought,))
  return Grammar(whole, (thought,), thinks=think)


def _turn(
  template: Template, tokenizer: Any, name: str, number: str = '0'
) -> list[int]:
  """A turn that calls the tool, flat: its opening and up to its end."""
  question = [Message('user', '?')]
  start = len(template.render(tokenizer, question, ()))
  call = Call(name, _ARGUMENTS, f'functions.{name}:{number}')  # Kimi's ids
  answer = Message('assistant', calls=(call,))
  ids = template.render(tokenizer, [*question, answer], ())[start:]
  ends = template.stops(tokenizer)
  flat = _flat(
    tokenizer, ids[: next(i for i, x in enumerate(ids) if x in ends)]
  )
  places = {json.dumps(_ARGUMENTS): [_JSON]}
  if number == _NUMBER:
    places[f':{_NUMBER}'] = [ord(':'), _DIGITS]
  for spelt, stands in places.items():
    at = _find(flat, list(spelt.encode()))
    if at >= 0:
      flat[at : at + len(spelt)] = stands
  return flat


def _flat(tokenizer: Any, ids: Iterable[int]) -> list[int]:
  """Bytes and control tokens, so that what is cut into tokens does not matter."""
  flat: list[int] = []
  for i in ids:
    if i in tokenizer.names:
      flat.append(_CONTROL + i)
    else:
      flat += tokenizer.to_bytes((i,))
  return flat


def _behind(
  template: Template, tokenizer: Any, turn: list[int], forced: Sequence[int]
) -> list[int] | None:
  """What a turn holds behind its opening, and `forced` after that; None where
  it does not go on so.

  Where turns are opened to think and this one does not, it goes on where the
  thinking ends.
  """
  opening = _flat(tokenizer, template.open_turn(tokenizer))
  begun = _flat(tokenizer, forced)
  places = [len(opening)] if turn[: len(opening)] == opening else []
  if THOUGHT in template.needs:
    thought = _CONTROL + tokenizer.controls[THOUGHT]
    places += [i for i, x in enumerate(turn) if x == thought]
  for at in places:
    if turn[at : at + len(begun)] == begun:
      return turn[at + len(begun) :]
  return None


def _call_alone(
  template: Template, tokenizer: Any, turn: list[int]
) -> list[int]:
  """What a turn holds behind its opening, and behind any thinking."""
  rest = turn[len(_flat(tokenizer, template.open_turn(tokenizer))) :]
  if THOUGHT in template.needs:
    thought = _CONTROL + tokenizer.controls[THOUGHT]
    rest = turn[turn.index(thought) + 1 :] if thought in turn else rest
  while rest[:1] == [ord('\n')]:
    rest = rest[1:]
  return rest


def _find(flat: Sequence[int], part: Sequence[int]) -> int:
  size = len(part)
  return next(
    (i for i in range(len(flat)) if list(flat[i : i + size]) == list(part)), -1
  )


def _rule(flat: Sequence[int], tool: Mapping[str, Any]) -> str:
  """Flat text as a rule; the tool's schema where its arguments stand."""
  parts, run = [], bytearray()
  for x in (*flat, None):
    if x is not None and 0 <= x < _CONTROL:
      run.append(x)
      continue
    if run:
      parts.append(json.dumps(run.decode('utf-8'), ensure_ascii=False))
      run.clear()
    if x == _JSON:
      function = tool['function']
      schema = function.get('parameters') or {
        'type': 'object',
        'properties': {},
        'additionalProperties': False,
      }
      parts.append(_json(schema, bool(function.get('strict'))))
    elif x == _DIGITS:
      parts.append('/[0-9]{1,3}/')
    elif x is not None:
      parts.append(f'<[{x - _CONTROL}]>')
  return ' '.join(parts)


def _json(schema: Mapping[str, Any], strict: bool) -> str:
  """JSON of a schema; what of it cannot be kept is left, unless `strict`."""
  options = {'whitespace_pattern': _SPACE, 'lenient': not strict}
  return '%json ' + json.dumps({**schema, 'x-guidance': options})


def _of_form(form: Form) -> str:
  if form.choices:
    words = (json.dumps(x, ensure_ascii=False) for x in form.choices)
    return f'({" | ".join(words)})'
  if form.regex:
    # Between slashes, where one of its own would end it.
    inside = re.sub(
      r'\\.|/|\n', lambda x: _ESCAPED.get(x[0], x[0]), form.regex, flags=re.S
    )
    return f'/{inside}/'
  return _json(form.schema, form.strict)


def _any_of(rules: Sequence[str]) -> str:
  names = ' | '.join(f'way_{i}' for i in range(len(rules)))
  return '\n'.join(
    [f'start: {names}', *(f'way_{i}: {x}' for i, x in enumerate(rules))]
  )


# --- keeping it ------------------------------------------------------------------


class _Tokens:
  """A vocabulary as llguidance reads it."""

  bos_token_id = None

  def __init__(self, tokenizer: Any, size: int, end: int):
    self.eos_token_id = end
    self.tokens = [
      tokenizer.to_bytes((i,)) if tokenizer.has(i) else b'' for i in range(size)
    ]
    self.special_token_ids = [i for i in tokenizer.names if i < size]
    self._encode = tokenizer.encode

  def __call__(self, text: str) -> list[int]:
    if isinstance(text, bytes):
      raise TypeError('text is encoded, not bytes')  # asked once, to find out
    return self._encode(text)


def open_vocabulary(tokenizer: Any, size: int, end: int) -> Any:
  """The vocabulary of a model, of `size` ids, for `compile_grammar`.

  Args:
    tokenizer: its.
    size: rows of its embedding.
    end: the id that ends an answer.
  """
  import llguidance

  wrapped = llguidance.TokenizerWrapper(_Tokens(tokenizer, size, end))
  return llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=end)


@functools.lru_cache(maxsize=64)  # a session's calls have the same tools
def compile_grammar(vocabulary: Any, grammar: Grammar) -> Callable[[], Mask]:
  """A function that gives a new mask (`records.SampleRequest.mask`) each time.

  Raises:
    ValueError: the grammar, and so a schema in it, cannot be kept.
  """
  import llguidance

  if len(grammar.text) > LONGEST:
    raise ValueError(
      f'{len(grammar.text)} characters as a grammar are more than the {LONGEST}'
      ' that are kept; give a smaller schema, or fewer choices'
    )
  matcher = llguidance.LLMatcher(vocabulary, grammar.text, log_level=0)
  if matcher.is_error():
    raise ValueError(_reason(matcher.get_error()))
  return lambda: _mask(matcher.deep_copy(), vocabulary.vocab_size, grammar)


def _reason(error: str) -> str:
  """An error without the place, which is in a text that no client wrote."""
  text = ' '.join(error.split('\n   1 | ')[0].split())
  return text.split('): ', 1)[-1][:300] or 'the grammar cannot be kept'


def _mask(matcher: Any, size: int, grammar: Grammar) -> Mask:
  """A mask that reads what was sampled since it was asked last.

  One of an answer alone, called on the engine's thread.
  """
  everything = np.ones(size, bool)
  read, bound = 0, not grammar.begins or grammar.thinks is not None

  def take(token: int) -> None:
    nonlocal bound
    first = read == 0
    if bound and first and token == grammar.thinks:
      bound = False
    elif bound:
      if not matcher.consume_token(token):
        raise ValueError(
          f'token {token} is not of the form that was asked for:'
          f' {_reason(matcher.get_error())}'
        )
      if grammar.again and matcher.is_stopped():
        bound = False
        matcher.reset()
    elif token in grammar.begins:
      bound = True

  def mask(sampled: np.ndarray) -> np.ndarray:
    nonlocal read
    for token in sampled[read:].tolist():
      take(token)
      read += 1
    if not bound:
      return everything
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
      raise ValueError(_reason(matcher.get_error()))
    allowed = np.unpackbits(packed, bitorder='little', count=size).astype(bool)
    if read == 0 and grammar.thinks is not None:
      allowed[grammar.thinks] = True
    return allowed

  return mask
