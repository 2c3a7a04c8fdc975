"""Turns and tool calls as tokens: rendering, parsing, cutting.

The template is append-only, `text` standing between special tokens:

  prompt       <bos> <tools> tool list <task> instruction <file> listing
  a turn       <act> [sampled: act ... <end>] <obs> observation <end>
  a summary    <summarize> [sampled: summary ... <end>]
  the restart  prompt <summary> summary " N turns left, K summaries" <end>

Tokens of a context never change, they only grow, and what was sampled is
carried as the tokens that were sampled: text is rendered once, on its way in,
and is never tokenised again. Special tokens come from this module alone; text
that spells one is split so that it stays text.

An act is words: a tool's name, then its arguments. An act that begins with '#'
is a note to oneself (`Text`); everything else that is not a call of an offered
tool with fitting arguments is `Broken`, and is answered and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any, Protocol

from composer.config import SessionConfig

PAD, BOS, END = '<pad>', '<bos>', '<end>'
TASK, TOOLS, FILE = '<task>', '<tools>', '<file>'
ACT, OBS = '<act>', '<obs>'
SUMMARIZE, SUMMARY = '<summarize>', '<summary>'
SPECIALS = (PAD, BOS, END, TASK, TOOLS, ACT, OBS, SUMMARIZE, SUMMARY, FILE)
_SPELT_SPECIAL = re.compile('|'.join(re.escape(piece) for piece in SPECIALS))
_LINE = re.compile(r'L[0-9]{1,6}')
_INTEGER = re.compile(r'-?[0-9]{1,18}')

JSON_SCHEMAS: Mapping[str, Mapping[str, str]] = {
  'line': {'type': 'string', 'pattern': '^L[0-9]{1,6}$'},
  'token': {'type': 'string', 'pattern': r'^\S+$'},
  'path': {'type': 'string', 'description': 'relative path in the workspace'},
  'integer': {'type': 'integer'},
  'string': {'type': 'string'},
  'text': {'type': 'string'},
}


@dataclasses.dataclass(frozen=True)
class ToolSpec:
  """What a session tells the model of a tool.

  `parameters` are (name, kind) in the order in which an act gives them. Kinds:
  'line' (L3), 'token' (one word), 'path' (a relative path, one word),
  'integer', 'string' (any; one word where an act is words), 'text' (the rest of
  the act; only as the last parameter).
  `optional` ones may be left out, from the last on. A tool of somebody else's
  has a `schema` (JSON Schema of its arguments) in place of both.
  """

  name: str
  description: str
  parameters: tuple[tuple[str, str], ...] = ()
  optional: tuple[tuple[str, str], ...] = ()
  schema: Mapping[str, Any] | None = None

  @property
  def all_parameters(self) -> tuple[tuple[str, str], ...]:
    return self.parameters + self.optional

  def __post_init__(self):
    if self.schema is not None and self.all_parameters:
      raise ValueError(
        f'ToolSpec {self.name}: parameters and a schema; give one of the two'
      )
    for place, (name, kind) in enumerate(self.all_parameters):
      if kind not in JSON_SCHEMAS:
        raise ValueError(
          f'ToolSpec {self.name}: parameter {name} has kind {kind!r}; the known'
          f' kinds are {", ".join(JSON_SCHEMAS)}'
        )
      if kind == 'text' and place != len(self.all_parameters) - 1:
        raise ValueError(
          f'ToolSpec {self.name}: parameter {name} of kind text takes the rest'
          ' of an act; make it the last parameter'
        )


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool call that can be executed; `id` is the model's name for it."""

  name: str
  arguments: Mapping[str, Any]
  id: str = ''


@dataclasses.dataclass(frozen=True)
class Text:
  """An act that calls nothing."""

  text: str


@dataclasses.dataclass(frozen=True)
class Broken:
  """An act that cannot be executed.

  `reason` is a word or two, `detail` says more; `id` as in `Call`.
  """

  reason: str
  text: str
  detail: str = ''
  id: str = ''


class Tokenizer(Protocol):
  """What this module needs of a tokenizer; each of `SPECIALS` is one token."""

  vocab_size: int

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...

  def token_id(self, piece: str) -> int: ...


def json_schema(spec: ToolSpec) -> dict:
  """The tool in the OpenAI function form (arguments are one object)."""
  parameters = spec.schema
  if parameters is None:
    parameters = {
      'type': 'object',
      'properties': {
        name: dict(JSON_SCHEMAS[kind]) for name, kind in spec.all_parameters
      },
      'required': [name for name, _ in spec.parameters],
      'additionalProperties': False,
    }
  return {
    'type': 'function',
    'function': {
      'name': spec.name,
      'description': spec.description,
      'parameters': dict(parameters),
    },
  }


def tool_list(tools: Sequence[ToolSpec]) -> str:
  """The tools as the prompt names them: 'edit LINE TOKEN ; test ; submit'.

  Optional parameters stand in brackets.
  """
  return ' ; '.join(
    ' '.join(
      (
        tool.name,
        *(name.upper() for name, _ in tool.parameters),
        *(f'[{name.upper()}]' for name, _ in tool.optional),
      )
    )
    for tool in tools
  )


# --- rendering ---------------------------------------------------------------


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
  """Ids of the special tokens."""
  return frozenset(map(tokenizer.token_id, SPECIALS))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
  """Tokens of `text`, never a special one, whatever the text spells.

  '<end>' in a text is encoded as '<' and 'end>', which decode to the same text.
  """
  ids = list(tokenizer.encode(text))
  special = special_ids(tokenizer)
  if special.isdisjoint(ids):
    return ids
  cuts = [match.start() + 1 for match in _SPELT_SPECIAL.finditer(text)]
  pieces = [
    text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)
  ]
  ids = [i for piece in pieces for i in tokenizer.encode(piece)]
  return [i for i in ids if i not in special]


def render_prompt(
  tokenizer: Tokenizer,
  tools: Sequence[ToolSpec],
  instruction: str,
  listing: str,
) -> list[int]:
  """<bos> <tools> tools <task> instruction <file> listing."""
  mark = tokenizer.token_id
  return [
    mark(BOS),
    mark(TOOLS),
    *encode_text(tokenizer, _spaced(tool_list(tools))),
    mark(TASK),
    *encode_text(tokenizer, _spaced(instruction)),
    mark(FILE),
    *encode_text(tokenizer, listing),
  ]


def open_turn(tokenizer: Tokenizer) -> list[int]:
  """<act>: what the harness writes before the model acts."""
  return [tokenizer.token_id(ACT)]


def render_act(tokenizer: Tokenizer, act: Call | Text) -> list[int]:
  """What a model samples to act so: words, then <end>; see `parse_act`.

  Raises:
    ValueError: an argument that is one word holds none, or several; or the
      last begins with a space, which would be lost.
  """
  if isinstance(act, Text):
    return [*encode_text(tokenizer, _spaced(act.text)), tokenizer.token_id(END)]
  values = [str(x) for x in act.arguments.values()]
  for name, value in list(zip(act.arguments, values, strict=True))[:-1]:
    if len(value.split()) != 1:
      raise ValueError(
        f'{act.name}: {name}={value!r} is not one word, and in template compact'
        ' acts are words; choose another template'
      )
  if values and values[-1] != values[-1].lstrip():
    raise ValueError(
      f'{act.name}: {values[-1][:40]!r} begins with a space, which template'
      ' compact loses; choose another template'
    )
  text = ' '.join((act.name, *values))
  return [*encode_text(tokenizer, _spaced(text)), tokenizer.token_id(END)]


def render_observation(
  tokenizer: Tokenizer, text: str, limit: int
) -> list[int]:
  """<obs> text <end>, at most `limit` tokens, both markers included.

  The text is rendered first and its middle is cut then, so that no cut can
  take a marker with it (a model that misses one goes on to invent the tool's
  output). Below 2, `limit` is taken as 2.
  """
  ids = encode_text(tokenizer, _spaced(text))
  room = max(limit - 2, 0)
  if len(ids) > room:
    tail = room // 2
    ids = ids[: room - tail] + ids[len(ids) - tail :]
  return [tokenizer.token_id(OBS), *ids, tokenizer.token_id(END)]


def open_summary(tokenizer: Tokenizer) -> list[int]:
  """<summarize>: what the harness writes before the model summarises."""
  return [tokenizer.token_id(SUMMARIZE)]


def render_restart(
  tokenizer: Tokenizer,
  prompt: Sequence[int],
  summary: Sequence[int],
  turns_left: int,
  summaries: int,
  todo: str = '',
) -> list[int]:
  """The context after a summary: prompt <summary> summary state <end>.

  `summary` is what the model sampled; its tokens are carried as they are,
  without the special ones (its <end>, and any that would forge a turn) and ids
  of no token.
  `summaries` counts the summaries so far, this one included.
  """
  special = special_ids(tokenizer)
  state = state_text(turns_left, summaries, todo)
  return [
    *prompt,
    tokenizer.token_id(SUMMARY),
    *(i for i in summary if i not in special and 0 <= i < tokenizer.vocab_size),
    *encode_text(tokenizer, state),
    tokenizer.token_id(END),
  ]


def state_text(turns_left: int, summaries: int, todo: str = '') -> str:
  """What the harness adds to a summary: ' 3 turns left , 1 summaries'.

  The session's todo list follows, if there is one: what the model wrote down
  last, whatever its summary says.
  """
  state = f' {turns_left} turns left , {summaries} summaries'
  return f'{state}\ntodo:\n{todo}' if todo else state


def summary_due(length: int, session: SessionConfig) -> bool:
  """Whether one more turn could take a context of `length` tokens too far.

  A turn takes at most <act>, the sampled act, an <end> if the act was cut, and
  the observation.
  """
  return length + turn_tokens(session) > session.context_tokens


def turn_tokens(session: SessionConfig) -> int:
  """The most that one turn adds to a context."""
  return 2 + session.max_act_tokens + max(session.observation_tokens, 2)


def _spaced(text: str) -> str:
  """Words have a leading space, so that the first is as every other."""
  return ' ' + text if text and not text[0].isspace() else text


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
  """Text of sampled tokens, without special ones and unknown ids."""
  special = special_ids(tokenizer)
  return tokenizer.decode(
    [i for i in tokens if 0 <= i < tokenizer.vocab_size and i not in special]
  )


# --- parsing -----------------------------------------------------------------

# What is wrong with an act -> what the model reads of it (few tokens).
_OBSERVED = {
  'no end': ' error broken text',
  'special token': ' error broken text',
  'unknown id': ' error broken text',
  'empty': ' error none',
  'unknown tool': ' error unknown tool',
  'missing argument': ' error broken call',
  'superfluous argument': ' error broken call',
}


def error_text(broken: Broken) -> str:
  """The observation that answers a broken act: ' error ...'."""
  known = _OBSERVED.get(broken.reason)
  return known or f' error {broken.reason.removeprefix("bad ")}'


def parse_act(
  tokenizer: Tokenizer, tokens: Sequence[int], tools: Sequence[ToolSpec]
) -> Call | Text | Broken:
  """Reads a sampled act; total: any sequence of ints gives one of the three.

  `tokens` end with <end>, unless the act was cut. Reasons of a `Broken`: those
  of `_OBSERVED`, and 'bad KIND' for an argument that is not of its kind.
  """
  end = tokenizer.token_id(END)
  ids = [int(i) for i in tokens]
  ended = bool(ids) and ids[-1] == end
  body = ids[:-1] if ended else ids
  text = decode(tokenizer, body)
  if body and not 0 <= min(body) <= max(body) < tokenizer.vocab_size:
    return Broken('unknown id', text)
  if not special_ids(tokenizer).isdisjoint(body):
    return Broken('special token', text)
  if not ended:
    return Broken('no end', text)
  return _parse_text(text, tools)


def _parse_text(text: str, tools: Sequence[ToolSpec]) -> Call | Text | Broken:
  words = text.split()
  if not words:
    return Broken('empty', text)
  if words[0].startswith('#'):
    return Text(text)
  spec = next((tool for tool in tools if tool.name == words[0]), None)
  if spec is None:
    return Broken('unknown tool', text)
  kinds = spec.all_parameters
  if kinds and kinds[-1][1] == 'text':
    given = text.split(None, len(kinds))[1:]
  else:
    given = words[1:]
  if len(given) < len(spec.parameters):
    return Broken('missing argument', text)
  if len(given) > len(kinds):
    return Broken('superfluous argument', text)
  arguments = {}
  for (name, kind), word in zip(kinds, given, strict=False):
    if not fits(kind, word):
      return Broken(f'bad {kind}', text)
    arguments[name] = int(word) if kind == 'integer' else word
  return Call(spec.name, arguments)


def fits(kind: str, word: str) -> bool:
  """Whether a word can be an argument of a kind."""
  if kind == 'line':
    return bool(_LINE.fullmatch(word))
  if kind == 'integer':
    return bool(_INTEGER.fullmatch(word))
  if kind == 'path':
    return not (word.startswith('/') or '\0' in word or '..' in word.split('/'))
  return True
