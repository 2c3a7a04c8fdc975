"""Sampled tokens as a client reads them: thinking, content, tool calls.

A turn is read twice. `Reader` takes tokens as they come and gives text as soon
as it is certain; `said` reads the whole turn with the template, for its calls.
Whether an answer is streamed or not, its content is what a `Reader` gave, and
what `said` adds behind it.

Text is held back while it might become something else: bytes of half a
character, white space that may turn out to be the turn's last, the beginning of
a stop string or of a mark that the vocabulary spells out.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
import dataclasses
import json
from typing import Any

from composer.chat import Broken
from composer.chat import Call
from composer.templates import chatml
from composer.templates import pieces
from composer.templates.protocol import Message
from composer.templates.protocol import Template

THINK, THOUGHT = chatml.THINK, chatml.THOUGHT  # Kimi's are the same
_THINKING, _TEXT, _HELD = 'thinking', 'text', 'held'


@dataclasses.dataclass(frozen=True)
class Turn:
  """How a turn is to be read.

  Attributes:
    template, tokenizer: of the model.
    forced: ids written for the model behind the opening of its turn, which are
      part of what it says.
    tools: whether calls are read; else they are text.
    stop: strings that end it.
    chat: a turn of a conversation; else a continuation of a text, which has no
      thinking and keeps its white space.
    keep_stop: the stop string that ends it is part of it.
    special: whether control tokens that mark nothing are told by their names;
      None: those that end it are not.
  """

  template: Template
  tokenizer: Any
  forced: tuple[int, ...] = ()
  tools: bool = False
  stop: tuple[str, ...] = ()
  chat: bool = True
  keep_stop: bool = False
  special: bool | None = None


@dataclasses.dataclass(frozen=True)
class Said:
  """A whole turn. `broken` are calls that could not be read; the text of each
  is part of `content` too."""

  content: str
  thinking: str
  calls: tuple[Call, ...]
  broken: tuple[Broken, ...]


@dataclasses.dataclass(frozen=True)
class Delta:
  """New text of a turn under way."""

  thinking: str = ''
  content: str = ''


class Reader:
  """Reads one turn, token by token; owned by one answer.

  Attributes:
    thinking, content: all that was given so far.
    stopped: a stop string was found; no more is read.
    stop: which.
    count: sampled tokens read, up to the one that ended a stop string.
  """

  def __init__(self, turn: Turn):
    self.turn = turn
    self.thinking = self.content = ''
    self.stopped, self.stop = False, ''
    self.count = 0
    self._bytes = codecs.getincrementaldecoder('utf-8')('replace')
    self._pending = ''
    thinks = turn.chat and THOUGHT in turn.template.needs
    opening = turn.template.open_turn(turn.tokenizer) if thinks else ()
    opened = thinks and turn.tokenizer.controls[THINK] in opening
    self._thinks = thinks
    self._phase = _THINKING if opened else _TEXT
    spelt = ()
    if turn.tools and chatml.CALL not in turn.tokenizer.controls:
      spelt = (chatml.CALL,)
    self._watched = (*spelt, *turn.stop)
    self._ends = frozenset(turn.template.stops(turn.tokenizer))
    self._take(turn.forced)

  def feed(self, ids: Iterable[int]) -> Delta:
    """Takes sampled tokens; the text that is certain now."""
    before = self.thinking, self.content
    for i in ids:
      if self.stopped:
        break
      self.count += 1
      self._take((int(i),))
    return self._since(before)

  def finish(self) -> Delta:
    """No more tokens come: what was held back is text, but for space."""
    before = self.thinking, self.content
    self._release(self._bytes.decode(b'', True), last=True)
    return self._since(before)

  def _since(self, before: tuple[str, str]) -> Delta:
    return Delta(
      self.thinking[len(before[0]) :], self.content[len(before[1]) :]
    )

  def _take(self, ids: Iterable[int]) -> None:
    tokenizer = self.turn.tokenizer
    for i in ids:
      known = tokenizer.has(i)
      if known and i not in tokenizer.names:
        self._release(self._bytes.decode(tokenizer.to_bytes((i,))))
      elif i not in self._ends:
        self._mark(tokenizer.names.get(i, ''))
      elif self.turn.special:
        self._release(self._bytes.decode(b'', True) + tokenizer.names[i])
        self._bytes.reset()

  def _mark(self, name: str) -> None:
    """A control token: the text before it is complete."""
    self._release(self._bytes.decode(b'', True))
    self._bytes.reset()
    phase = self._phase
    if phase == _HELD:
      return
    if self._thinks and name == THOUGHT:
      phase = _TEXT
    elif self._thinks and name == THINK and not self.content:
      phase = _THINKING
    elif self.turn.tools:
      phase = _HELD
    elif self.turn.special is not False:
      self._release(name)
    if phase != self._phase:
      self._release('', last=True)
      self._pending, self._phase = '', phase

  def _release(self, text: str, last: bool = False) -> None:
    """Adds text to what is pending, and gives of that what is certain."""
    if self._phase == _HELD or self.stopped:
      return
    pending = self._pending + text
    keep = 0 if last else _may_begin(pending, self._watched)
    found = _first(pending, self._watched)
    ended = found is not None and found[1] in self.turn.stop
    kept = ended and self.turn.keep_stop
    if found is not None:
      pending, keep = pending[: found[0] + kept * len(found[1])], 0
    sure = pending[: len(pending) - keep]
    given = sure.rstrip() if self.turn.chat and not kept else sure
    self._pending = pending[len(given) :]
    before = self.thinking if self._phase == _THINKING else self.content
    if self.turn.chat and not before:
      given = given.lstrip()
    if self._phase == _THINKING:
      self.thinking += given
    else:
      self.content += given
    if found is not None:
      self.stopped, self.stop = ended, found[1] if ended else ''
      self._phase = _TEXT if self.stopped else _HELD


def _first(text: str, words: Sequence[str]) -> tuple[int, str] | None:
  """(place, word) of the word that begins first in `text`."""
  found = [(text.find(word), word) for word in words if word in text]
  return min(found) if found else None


def _may_begin(text: str, words: Sequence[str]) -> int:
  """Length of the longest end of `text` with which a word may begin."""
  most = max((len(word) - 1 for word in words), default=0)
  for length in range(min(most, len(text)), 0, -1):
    if any(word.startswith(text[-length:]) for word in words):
      return length
  return 0


def said(reader: Reader, sampled: Sequence[int]) -> Said:
  """The whole turn; `reader` has read all of it, and `finish`ed.

  A turn that was cut, by a limit or a stop string, is read as if it had ended
  there.
  """
  turn = reader.turn
  if not turn.tools:
    return Said(reader.content, reader.thinking, (), ())
  ends = turn.template.stops(turn.tokenizer)
  ids = [*turn.forced, *map(int, sampled)]
  while ids and ids[-1] in ends:
    ids.pop()
  reply = turn.template.parse(turn.tokenizer, [*ids, ends[0]], None)
  calls = tuple(x for x in reply.acts if isinstance(x, Call))
  broken = tuple(
    x
    for x in reply.acts
    if isinstance(x, Broken)
    and x.reason not in ('empty', 'unfinished thinking')
  )
  texts = [reply.text, *(x.text.strip() for x in broken)]
  whole = '\n'.join(x for x in texts if x)
  content = reader.content
  if not reader.stopped and whole.startswith(content):
    content = whole
  return Said(content, reader.thinking, calls, broken)


# --- a call that is asked for -------------------------------------------------


def forced_call(
  template: Template, tokenizer: Any, name: str | None
) -> tuple[int, ...]:
  """Ids behind the opening of a turn with which a call begins.

  They are what two turns with different calls have in common: of any tool
  (`name` None), or of the one named. Where turns are opened to think, the
  thinking is ended first, as it is where a turn has none.

  Raises:
    ValueError: turns of the template cannot be begun so.
  """
  opening = template.open_turn(tokenizer)
  if name is None:
    variants = [Call('a', {}), Call('b', {})]
  else:
    variants = [Call(name, {}), Call(name, {'a': 1})]
  question = [Message('user', '?')]
  start = len(template.render(tokenizer, question, ()))
  turns = [
    template.render(
      tokenizer,
      [*question, Message('assistant', calls=(_with_id(call, name),))],
      (),
    )[start:]
    for call in variants
  ]
  common = _common(*turns)
  if common[: len(opening)] == opening:
    return tuple(common[len(opening) :])
  thought = tokenizer.controls.get(THOUGHT)
  if THOUGHT in template.needs and thought in common:
    return tuple(common[common.index(thought) :])
  raise ValueError(
    f'template {template.name} does not begin turns as it opens them'
  )


def _with_id(call: Call, name: str | None) -> Call:
  """Kimi writes the id before the arguments, and the tool's name in it."""
  return dataclasses.replace(call, id=f'functions.{name or call.name}:0')


def _common(a: Sequence[int], b: Sequence[int]) -> list[int]:
  same = [x == y for x, y in zip(a, b, strict=False)]
  return list(a[: same.index(False) if False in same else len(same)])


def arguments_text(call: Call) -> str:
  """A call's arguments as OpenAI gives them: JSON in a text."""
  return json.dumps(dict(call.arguments), ensure_ascii=False)


# --- tokens as OpenAI tells of them ----------------------------------------------


def token_text(tokenizer: Any, i: int) -> tuple[str, list[int] | None]:
  """(text, bytes) of one token; ids beyond the vocabulary have neither."""
  if not tokenizer.has(i):
    return f'<{i}>', None
  data = tokenizer.to_bytes((i,))
  return data.decode('utf-8', 'replace'), list(data)


def plain(tokenizer: Any, ids: Sequence[int]) -> str:
  """Text of ids, control tokens by their names."""
  return pieces.plain(pieces.read(tokenizer, ids))
