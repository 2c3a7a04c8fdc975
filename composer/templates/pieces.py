"""Control tokens and text to ids, and ids to control tokens and text.

A context is a list of parts: text, control tokens by name (`Mark`), and ids
that were sampled. Neighbouring text is encoded as one, as it would be in the
whole conversation written as a string. Nothing in a text becomes a control
token (`Vocabulary`).

A mark that the vocabulary does not have is spelt out. So does SmolLM2, which
has no token for '<tool_call>': there, text that spells one reads as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import re

from composer.model.vocabularies.bpe import Vocabulary

UNKNOWN = 'unknown id'  # the mark of an id that is of no token


@dataclasses.dataclass(frozen=True)
class Mark:
  """A control token, by name."""

  piece: str


Part = str | Mark | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Event:
  """A mark (`mark` is its name), or the text between two.

  `valid` is false for text whose bytes are no UTF-8; they read as U+FFFD.
  """

  mark: str
  text: str
  valid: bool = True


def write(tokenizer: Vocabulary, parts: Iterable[Part]) -> list[int]:
  """The ids of parts."""
  ids: list[int] = []
  text: list[str] = []

  def flush() -> None:
    if any(text):
      ids.extend(tokenizer.encode(''.join(text)))
    text.clear()

  for part in parts:
    if isinstance(part, str):
      text.append(part)
    elif isinstance(part, Mark) and part.piece not in tokenizer.controls:
      text.append(part.piece)
    else:
      flush()
      if isinstance(part, Mark):
        ids.append(tokenizer.controls[part.piece])
      else:
        ids.extend(part)
  flush()
  return ids


def read(
  tokenizer: Vocabulary, ids: Sequence[int], marks: Sequence[str] = ()
) -> list[Event]:
  """The marks and texts of ids; total.

  `marks` are names that are read where they are spelt out, if the vocabulary
  has no token for them. Every control token is a mark.
  """
  spelt = [piece for piece in marks if piece not in tokenizer.controls]
  found: list[Event] = []
  run: list[int] = []

  def flush() -> None:
    if run:
      found.extend(_texts(tokenizer.to_bytes(run), spelt))
    run.clear()

  for i in map(int, ids):
    if i in tokenizer.names or not tokenizer.has(i):
      flush()
      found.append(Event(tokenizer.names.get(i, UNKNOWN), ''))
    else:
      run.append(i)
  flush()
  return found


def _texts(data: bytes, spelt: Sequence[str]) -> Iterator[Event]:
  text = data.decode('utf-8', 'replace')
  valid = True
  if '\ufffd' in text:
    valid = text.encode('utf-8') == data
  if not spelt:
    yield Event('', text, valid)
    return
  pattern = '(' + '|'.join(map(re.escape, spelt)) + ')'
  for place, part in enumerate(re.split(pattern, text)):
    if place % 2:
      yield Event(part, '')
    elif part:
      yield Event('', part, valid)


def plain(events: Iterable[Event]) -> str:
  """The text of events; marks, as a person would spell them, included."""
  return ''.join(event.mark or event.text for event in events)


def cut(ids: list[int], room: int) -> list[int]:
  """At most `room` ids, the middle left out."""
  room = max(room, 0)
  if len(ids) <= room:
    return ids
  tail = room // 2
  return ids[: room - tail] + ids[len(ids) - tail :]
