"""What the templates of chat models share: a session in terms of messages.

A family says how it writes messages and reads turns (`Family`); `template`
makes a session of it: the prompt is a message of the user, an observation are
messages of tools, a summary is asked for and given by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools

from composer import chat
from composer.chat import Broken
from composer.chat import Call
from composer.chat import ToolSpec
from composer.config import SessionConfig
from composer.model.vocabularies.bpe import Vocabulary
from composer.templates import calls as calls_lib
from composer.templates import pieces
from composer.templates.protocol import Answer
from composer.templates.protocol import Ids
from composer.templates.protocol import Message
from composer.templates.protocol import Reply
from composer.templates.protocol import Template
from composer.templates.protocol import Tool

REQUEST = (
  'Stop here: the context is nearly full. Think over what matters; then write'
  ' notes from which you can go on with nothing else but the task: what you know,'
  ' what you have done, and what is left to do. Where you think aloud, put a line'
  ' --- before the notes: only what follows it is kept. Call no tool.'
)
SEPARATOR = b'---'  # a line of its own
NOTES = 'Your notes:\n'
CALL_TOKENS = 8  # a call is no shorter
LINE_BREAK = 10


@dataclasses.dataclass(frozen=True)
class Family:
  """How a family writes and reads; functions as in `Template`, and:

  `end` ends a sampled turn, `others` stop it too; `thought` ends thinking ('':
  there is none); `answer` makes the message of a tool; `user` puts parts into a
  turn of the user.
  """

  needs: tuple[str, ...]
  end: str
  others: tuple[str, ...]
  thought: str
  render: Callable[[Vocabulary, Sequence[Message], Sequence[Tool]], Ids]
  extend: Callable[[Vocabulary, Sequence[int], Sequence[Message]], Ids]
  open_turn: Callable[[Vocabulary], Ids]
  close_turn: Callable[[Vocabulary, Sequence[int]], Ids]
  parse: Callable[[Vocabulary, Sequence[int], Sequence[ToolSpec] | None], Reply]
  answer: Callable[[Answer], Message]
  user: Callable[[Sequence[pieces.Part]], list[pieces.Part]]


def template(name: str, family: Family) -> Template:
  """The template of a family."""
  return Template(
    name=name,
    needs=family.needs,
    text_ends=True,
    stops=functools.partial(_stops, family),
    render=family.render,
    extend=family.extend,
    render_prompt=functools.partial(_render_prompt, family),
    open_turn=family.open_turn,
    close_turn=family.close_turn,
    render_observation=functools.partial(_render_observation, family),
    open_summary=functools.partial(_open_summary, family),
    summary_text=functools.partial(_summary_text, family),
    render_restart=functools.partial(_render_restart, family),
    parse=family.parse,
    error_text=calls_lib.error_text,
    turn_tokens=functools.partial(_turn_tokens, family),
  )


def _stops(family: Family, tokenizer: Vocabulary) -> tuple[int, ...]:
  known = tokenizer.controls
  return tuple(known[x] for x in (family.end, *family.others) if x in known)


def _render_prompt(
  family: Family,
  tokenizer: Vocabulary,
  tools: Sequence[ToolSpec],
  instruction: str,
  listing: str,
) -> Ids:
  text = '\n\n'.join(x for x in (instruction, listing) if x)
  schemas = [chat.json_schema(tool) for tool in tools]
  return family.render(tokenizer, [Message('user', text)], schemas)


def _render_observation(
  family: Family, tokenizer: Vocabulary, answers: Sequence[Answer], limit: int
) -> Ids:
  """The answers, their middles left out where they pass `limit` tokens."""

  def render(most: int) -> Ids:
    return family.extend(
      tokenizer,
      [],
      [
        family.answer(dataclasses.replace(x, text=_shortened(x.text, most)))
        for x in answers
      ],
    )

  longest = max((len(x.text) for x in answers), default=0)
  whole = render(longest)
  if len(whole) <= limit or not longest:
    return whole
  fits, passes, kept = 0, longest, render(0)
  while passes - fits > 1:
    most = (fits + passes) // 2
    tried = render(most)
    if len(tried) <= limit:
      fits, kept = most, tried
    else:
      passes = most
  return kept


def _shortened(text: str, most: int) -> str:
  """At most `most` characters of a text, and a word on those left out."""
  if len(text) <= most:
    return text
  if not most:
    return ''
  tail = most // 2
  cut = f'\n[{len(text) - most} characters left out]\n'
  return text[: most - tail] + cut + text[len(text) - tail :]


def _open_summary(
  family: Family, tokenizer: Vocabulary, context: Sequence[int]
) -> Ids:
  """A turn of the user that asks, behind the context as it is.

  Thinking of earlier turns is not dropped, as it would be were the user to
  speak: the model summarises what it really knew, the keys and values of all of
  it are there already, and no segment is written anew.
  """
  asked = pieces.write(tokenizer, family.user([REQUEST]))
  return [*context, *asked, *family.open_turn(tokenizer)]


def _summary_ids(
  family: Family, tokenizer: Vocabulary, sampled: Sequence[int]
) -> Ids:
  """The notes of what was sampled: no thinking, no control tokens, known ids."""
  ids = [int(i) for i in sampled]
  thought = tokenizer.controls.get(family.thought)
  if thought in ids:
    ids = ids[len(ids) - ids[::-1].index(thought) :]
  ids = [i for i in ids if tokenizer.has(i) and i not in tokenizer.names]
  return _behind_separator(tokenizer, ids)


def _behind_separator(tokenizer: Vocabulary, ids: Ids) -> Ids:
  """The ids behind the last line that is a separator; all where there is none.

  A token that the separator ends in is written anew, without it; notes that are
  empty count as none, so that a stray line loses nothing.
  """
  data = tokenizer.to_bytes(ids)
  lines = data.split(b'\n')
  places = [i for i, line in enumerate(lines) if line.strip() == SEPARATOR]
  if not places:
    return ids
  start = sum(len(line) + 1 for line in lines[: places[-1] + 1])
  if not data[start:].strip():
    return ids
  at = length = 0
  while length < start:
    length += len(tokenizer.to_bytes([ids[at]]))
    at += 1
  rest = data[start:length].decode('utf-8', 'replace')
  return (tokenizer.encode(rest) if rest else []) + ids[at:]


def _summary_text(
  family: Family, tokenizer: Vocabulary, sampled: Sequence[int]
) -> str:
  return tokenizer.decode(_summary_ids(family, tokenizer, sampled)).strip()


def _render_restart(
  family: Family,
  tokenizer: Vocabulary,
  prompt: Sequence[int],
  summary: Sequence[int],
  turns_left: int,
  summaries: int,
  todo: str = '',
) -> Ids:
  """prompt, then a turn of the user: the notes, and the state."""
  ids = tuple(_summary_ids(family, tokenizer, summary))
  state = '\n' + chat.state_text(turns_left, summaries, todo).strip()
  parts = family.user([NOTES, ids, state])
  return [*prompt, *pieces.write(tokenizer, parts)]


@functools.lru_cache(maxsize=256)
def _frame(
  family: Family, tokenizer: Vocabulary, name: str, answers: int
) -> tuple[int, int]:
  """Tokens of `answers` empty answers, and of all else around a turn."""
  answer = Answer('', name, f'functions.{name}:999')
  empty = _render_observation(family, tokenizer, [answer] * answers, 0)
  opened = family.open_turn(tokenizer)
  closed = family.close_turn(tokenizer, ())
  request = _open_summary(family, tokenizer, [])
  return len(empty), len(opened) + len(closed) + len(request)


def _turn_tokens(
  family: Family,
  tokenizer: Vocabulary,
  tools: Sequence[ToolSpec],
  session: SessionConfig,
) -> int:
  act, room = session.max_act_tokens, session.observation_tokens
  # One more than are read: the error that stands for the rest.
  answers = min(calls_lib.MOST, act // CALL_TOKENS) + 1
  name = max((tool.name for tool in tools), key=len, default='tool')
  empty, around = _frame(family, tokenizer, name, answers)
  return around + act + max(room, empty)


# --- for the families --------------------------------------------------------


def refuse_assistant(messages: Iterable[Message]) -> None:
  """A context grows by the assistant's turn as it was sampled, not by text."""
  if any(message.role == 'assistant' for message in messages):
    raise ValueError(
      'extend: a message of the assistant; append its sampled tokens, or render'
      ' the whole conversation'
    )


def split_before(ids: Iterable[int], starts: Sequence[int]) -> list[Ids]:
  """`ids` in runs that begin with one of `starts` (the first may not)."""
  runs: list[list[int]] = []
  for i in ids:
    if i in starts or not runs:
      runs.append([])
    runs[-1].append(i)
  return runs


def without_line_breaks(tokenizer: Vocabulary, ids: Sequence[int]) -> Ids:
  """`ids` without leading line breaks; a token that is cut is written anew."""
  ids = list(ids)
  at = 0
  while at < len(ids) and _is_text(tokenizer, ids[at]):
    data = tokenizer.to_bytes([ids[at]])
    rest = data.lstrip(b'\n')
    if rest == data:
      break
    at += 1
    if rest:
      end = at
      while end < len(ids) and _is_text(tokenizer, ids[end]):
        end += 1
      text = (rest + tokenizer.to_bytes(ids[at:end])).decode('utf-8', 'replace')
      return tokenizer.encode(text) + ids[end:]
  return ids[at:]


def _is_text(tokenizer: Vocabulary, i: int) -> bool:
  return tokenizer.has(i) and i not in tokenizer.names


def broken(reason: str, text: str, detail: str = '') -> Reply:
  """A reply that can only be answered by what is wrong with it."""
  return Reply('', '', (Broken(reason, text, detail=detail),))


def body(
  tokenizer: Vocabulary,
  sampled: Sequence[int],
  end: str,
  spelt: Sequence[str],
  allowed: Iterable[str],
) -> list[pieces.Event] | Reply:
  """The events of a sampled turn before its end, or what is wrong with it.

  `spelt` are the marks that are read where they are spelt out.
  """
  ids = [int(i) for i in sampled]
  ended = ids[-1:] == [tokenizer.controls[end]]
  events = pieces.read(tokenizer, ids[:-1] if ended else ids, spelt)
  text = pieces.plain(events)
  marks = [event.mark for event in events if event.mark]
  if pieces.UNKNOWN in marks:
    return broken('unknown id', text, 'a token that does not exist')
  wrong = [mark for mark in marks if mark not in allowed]
  if wrong:
    return broken('special token', text, f'{wrong[0]} in the middle of a turn')
  if not ended:
    return broken('no end', text, f'the turn was cut after {len(ids)} tokens')
  return events


def split_thinking(
  events: Sequence[pieces.Event], opened: bool, think: str, thought: str
) -> tuple[str, list[pieces.Event]] | Reply:
  """(thinking, what follows the last end of it), or a reply that is broken.

  Whatever stands in the thinking, calls included, is thought and not done.
  """
  marks = [event.mark for event in events]
  if thought not in marks:
    if opened or think in marks:
      return broken('unfinished thinking', pieces.plain(events))
    return '', list(events)
  at = len(marks) - 1 - marks[::-1].index(thought)
  inner = [x for x in events[:at] if x.mark not in (think, thought)]
  return pieces.plain(inner).strip(), list(events[at + 1 :])


def reply(thinking: str, text: str, acts: Sequence[Call | Broken]) -> Reply:
  """A turn that was read to its end."""
  if not text and not acts:
    acts = (Broken('empty', ''),)
  return Reply(text, thinking, calls_lib.limited(list(acts)))
