"""Kimi K2 and Kimi K2.5.

    <|im_system|>tool_declare<|im_middle|>tools<|im_end|>
    <|im_system|>system<|im_middle|>prompt<|im_end|>
    <|im_user|>user<|im_middle|>what is asked<|im_end|>
    <|im_assistant|>assistant<|im_middle|>text<|tool_calls_section_begin|>
      <|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{...}
      <|tool_call_end|><|tool_calls_section_end|><|im_end|>
    <|im_system|>edit<|im_middle|>## Return of functions.edit:0
    ...<|im_end|>

(lines are broken here for reading only). K2 tells of tools in JSON and does not
think. K2.5 tells of them in TypeScript, and every turn is opened with '<think>'.
Once a turn without calls has ended the work, K2.5 empties the thinking of the
turns so far ('<think></think>'): `extend` then gives a context that does not
begin with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import json
import re

from composer.chat import Broken
from composer.chat import ToolSpec
from composer.model.vocabularies.bpe import Vocabulary
from composer.templates import calls as calls_lib
from composer.templates import pieces
from composer.templates import turns
from composer.templates import typescript
from composer.templates import wording as wording_lib
from composer.templates.pieces import Mark
from composer.templates.protocol import Answer
from composer.templates.protocol import Ids
from composer.templates.protocol import Message
from composer.templates.protocol import Reply
from composer.templates.protocol import Template
from composer.templates.protocol import Tool

SYSTEM, USER = '<|im_system|>', '<|im_user|>'
ASSISTANT = '<|im_assistant|>'
MIDDLE, END = '<|im_middle|>', '<|im_end|>'
THINK, THOUGHT = '<think>', '</think>'
SECTION, SECTION_END = (
  '<|tool_calls_section_begin|>',
  '<|tool_calls_section_end|>',
)
CALL, ARGUMENTS = '<|tool_call_begin|>', '<|tool_call_argument_begin|>'
CALL_END = '<|tool_call_end|>'
NEEDS = (
  SYSTEM, USER, ASSISTANT, MIDDLE, END,
  SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END,
)  # fmt: skip
CALL_MARKS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r'functions\.([^\s:]{1,64}):([0-9]{1,3})')


@dataclasses.dataclass(frozen=True)
class Style:
  """`thinks`: K2.5, which thinks and is told of tools in TypeScript."""

  name: str
  thinks: bool


# --- writing -----------------------------------------------------------------


def _render(
  style: Style,
  tokenizer: Vocabulary,
  messages: Sequence[Message],
  tools: Sequence[Tool],
) -> Ids:
  """A whole conversation; thinking is kept behind the last turn of text."""
  parts: list[pieces.Part] = []
  if tools:
    parts += _turn_of(SYSTEM, 'tool_declare', _declared(style, tools))
  if not messages or messages[0].role != 'system':
    words = wording_lib.read(
      tokenizer.chat_template,
      f'{SYSTEM}system{MIDDLE}',
      END,
      wording_lib.plain('', ''),
    )
    if words.system:
      parts += _turn_of(SYSTEM, 'system', words.system)
  done = [
    i
    for i, message in enumerate(messages)
    if message.role == 'assistant' and not _makes_calls(tokenizer, message)
  ]
  for i, message in enumerate(messages):
    if message.role == 'assistant':
      parts += _turn(style, tokenizer, message, not done or i > done[-1])
    else:
      parts += _said(message)
  return pieces.write(tokenizer, parts)


def _makes_calls(tokenizer: Vocabulary, message: Message) -> bool:
  if message.tokens:
    return tokenizer.controls[SECTION] in message.tokens
  return bool(message.calls)


def _extend(
  style: Style,
  tokenizer: Vocabulary,
  context: Sequence[int],
  messages: Sequence[Message],
) -> Ids:
  """`context` and what is said next, by anyone but the assistant."""
  turns.refuse_assistant(messages)
  kept = list(context)
  if style.thinks:
    kept = forget_thinking(tokenizer, kept)
  parts = [part for message in messages for part in _said(message)]
  return kept + pieces.write(tokenizer, parts)


def _turn_of(start: str, name: str, *body: pieces.Part) -> list[pieces.Part]:
  return [Mark(start), name, Mark(MIDDLE), *body, Mark(END)]


def _said(message: Message) -> list[pieces.Part]:
  """A message of anyone but the assistant."""
  start = USER if message.role == 'user' else SYSTEM
  text = message.content
  if message.role == 'tool':
    text = f'## Return of {message.call_id}\n{text}'
  return _turn_of(start, message.name or message.role, text)


def _declared(style: Style, tools: Sequence[Tool]) -> str:
  declared = typescript.declare(tools) if style.thinks else None
  if declared is None:
    return json.dumps(list(tools), ensure_ascii=False, separators=(',', ':'))
  return declared


def _turn(
  style: Style, tokenizer: Vocabulary, message: Message, kept: bool
) -> list[pieces.Part]:
  """A turn of the assistant; `kept` with its thinking."""
  if message.tokens:
    ids = [*_open_turn(style, tokenizer), *message.tokens]
    ids += _close(tokenizer, message.tokens)
    if style.thinks and not kept:
      ids = _emptied(tokenizer, ids)
    return [tuple(ids)]
  body: list[pieces.Part] = []
  if style.thinks:
    body += [Mark(THINK), message.thinking if kept else '', Mark(THOUGHT)]
  body.append(message.content)
  if message.calls:
    body.append(Mark(SECTION))
    for i, call in enumerate(message.calls):
      arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
      body += [Mark(CALL), call.id or f'functions.{call.name}:{i}']
      body += [Mark(ARGUMENTS), arguments, Mark(CALL_END)]
    body.append(Mark(SECTION_END))
  return _turn_of(ASSISTANT, 'assistant', *body)


def _open_turn(style: Style, tokenizer: Vocabulary) -> Ids:
  parts: list[pieces.Part] = [Mark(ASSISTANT), 'assistant', Mark(MIDDLE)]
  return pieces.write(tokenizer, [*parts, *([Mark(THINK)] * style.thinks)])


def _close(tokenizer: Vocabulary, sampled: Sequence[int]) -> Ids:
  end = tokenizer.controls[END]
  return [] if len(sampled) and sampled[-1] == end else [end]


def forget_thinking(tokenizer: Vocabulary, context: Sequence[int]) -> Ids:
  """A context without the thinking up to the last turn that made no call."""
  starts = [tokenizer.controls[x] for x in (SYSTEM, USER, ASSISTANT)]
  runs = turns.split_before(context, starts)
  section = tokenizer.controls[SECTION]
  done = [
    i
    for i, run in enumerate(runs)
    if run[0] == starts[-1] and section not in run
  ]
  for i in range(done[-1] + 1 if done else 0):
    runs[i] = _emptied(tokenizer, runs[i])
  return [i for run in runs for i in run]


def _emptied(tokenizer: Vocabulary, turn: Sequence[int]) -> Ids:
  """A turn with nothing between its first '<think>' and last '</think>'."""
  think, thought = tokenizer.controls[THINK], tokenizer.controls[THOUGHT]
  turn = list(turn)
  if turn[:1] != [tokenizer.controls[ASSISTANT]] or think not in turn:
    return turn
  first = turn.index(think)
  ends = [i for i, token in enumerate(turn) if token == thought and i > first]
  return turn[: first + 1] + turn[ends[-1] :] if ends else turn


# --- reading -----------------------------------------------------------------


def _parse(
  style: Style,
  tokenizer: Vocabulary,
  sampled: Sequence[int],
  tools: Sequence[ToolSpec] | None,
) -> Reply:
  allowed = {*CALL_MARKS, *((THINK, THOUGHT) if style.thinks else ())}
  events = turns.body(tokenizer, sampled, END, (), allowed)
  if isinstance(events, Reply):
    return events
  thinking = ''
  if style.thinks:
    found = turns.split_thinking(events, True, THINK, THOUGHT)
    if isinstance(found, Reply):
      return found
    thinking, events = found
  return turns.reply(thinking, *_acts(events, tools))


def _acts(
  events: Sequence[pieces.Event], tools: Sequence[ToolSpec] | None
) -> tuple[str, calls_lib.Acts]:
  """(text, acts) of a turn behind its thinking."""
  texts: list[str] = []
  acts: calls_lib.Acts = []
  inside, at = False, 0
  while at < len(events):
    event = events[at]
    if not event.mark:
      texts.append(event.text)
    elif event.mark == SECTION:
      inside = True
    elif event.mark == SECTION_END:
      if not inside:
        acts.append(Broken('unopened call', '', detail=f'{SECTION_END} alone'))
      inside = False
    elif event.mark == CALL and inside:
      act, at = _call(events, at + 1, tools)
      acts.append(act)
      continue
    else:
      why = f'{event.mark} outside of a call'
      acts.append(Broken('unopened call', '', detail=why))
    at += 1
  if inside:
    acts.append(Broken('unclosed call', '', detail=f'without {SECTION_END}'))
  return ''.join(texts).strip(), acts


def _call(
  events: Sequence[pieces.Event],
  at: int,
  tools: Sequence[ToolSpec] | None,
):
  """(act, next event) of the call whose id begins at event `at`."""
  call_id, at = _text(events, at)
  if at == len(events) or events[at].mark != ARGUMENTS:
    text = call_id.text
    return Broken('unclosed call', text, detail=f'without {ARGUMENTS}'), at
  arguments, at = _text(events, at + 1)
  text = f'{call_id.text}{arguments.text}'
  if at == len(events) or events[at].mark != CALL_END:
    return Broken('unclosed call', text, detail=f'without {CALL_END}'), at
  at += 1
  name = call_id.text.strip()
  match = _ID.fullmatch(name)
  if match is None or not call_id.valid:
    why = 'write functions.TOOL:NUMBER before the arguments'
    return Broken('bad call id', text, detail=why), at
  value = calls_lib.load(arguments.text, arguments.valid)
  if isinstance(value, Broken):
    return dataclasses.replace(value, id=name), at
  return calls_lib.check(match[1], value, tools, text, name), at


def _text(events: Sequence[pieces.Event], at: int) -> tuple[pieces.Event, int]:
  """The text at `at`, which may be none, and what is behind it."""
  if at < len(events) and not events[at].mark:
    return events[at], at + 1
  return pieces.Event('', ''), at


# --- templates ---------------------------------------------------------------


def _answer(answer: Answer) -> Message:
  return Message('tool', answer.text, name=answer.name, call_id=answer.call_id)


def _user(parts: Sequence[pieces.Part]) -> list[pieces.Part]:
  return _turn_of(USER, 'user', *parts)


def _template(style: Style) -> Template:
  thinking = (THINK, THOUGHT) if style.thinks else ()
  return turns.template(
    style.name,
    turns.Family(
      needs=(*NEEDS, *thinking),
      end=END,
      others=('[EOS]',),
      thought=THOUGHT if style.thinks else '',
      render=functools.partial(_render, style),
      extend=functools.partial(_extend, style),
      open_turn=functools.partial(_open_turn, style),
      close_turn=_close,
      parse=functools.partial(_parse, style),
      answer=_answer,
      user=_user,
    ),
  )


KIMI_K2 = _template(Style('kimi-k2', thinks=False))
KIMI_K2_5 = _template(Style('kimi-k2.5', thinks=True))
