"""ChatML: Qwen3 in its kinds, and SmolLM2.

    <|im_start|>system
    prompt, and the tools, one a line between <tools> and </tools><|im_end|>
    <|im_start|>user
    what is asked<|im_end|>
    <|im_start|>assistant
    <think> ... </think> text <tool_call>
    {"name": ..., "arguments": {...}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    ...
    </tool_response><|im_end|>

All answers to one turn stand in one turn. Once the user speaks again, Qwen3
drops the thinking of all earlier turns: `extend` with a message of the user
gives a context that does not begin with the one before. A summary is asked for
by such a message.

SmolLM2 thinks in no marks, writes its calls as a list, and gives every answer a
turn of its own, of the role 'tool'.
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
from composer.templates import wording as wording_lib
from composer.templates.pieces import Mark
from composer.templates.protocol import Answer
from composer.templates.protocol import Ids
from composer.templates.protocol import Message
from composer.templates.protocol import Reply
from composer.templates.protocol import Template
from composer.templates.protocol import Tool

START, END = '<|im_start|>', '<|im_end|>'
THINK, THOUGHT = '<think>', '</think>'
CALL, CALLED = '<tool_call>', '</tool_call>'
RESULT, RESULTED = '<tool_response>', '</tool_response>'
MARKS = (CALL, CALLED, RESULT, RESULTED)


@dataclasses.dataclass(frozen=True)
class Style:
  """What differs between the kinds.

  `thinks`: thinking is marked, and dropped later. `opens`: the turn is opened
  with '<think>'. `lists`: calls are a list in one mark, and answers have turns
  of their own. `ours` is the wording where the checkpoint has none.
  """

  name: str
  thinks: bool
  opens: bool
  lists: bool
  ours: wording_lib.Wording


_ONE = '{"name": TOOL, "arguments": {...}}'
_OURS = wording_lib.plain(
  'The tools that can be called, as JSON:\n<tools>\n',
  f'\n</tools>\nA call is written as\n{CALL}\n{_ONE}\n{CALLED}',
)
_OURS_LIST = wording_lib.plain(
  'The tools that can be called, as JSON:\n<tools>\n',
  f'\n</tools>\nCalls are written as {CALL}[{_ONE}, ...]{CALLED}',
)


# --- writing -----------------------------------------------------------------


def _render(
  style: Style,
  tokenizer: Vocabulary,
  messages: Sequence[Message],
  tools: Sequence[Tool],
) -> Ids:
  """A whole conversation; thinking is kept behind the last question only."""
  told = bool(messages) and messages[0].role == 'system'
  parts = _system(
    style, tokenizer, messages[0].content if told else None, tools
  )
  messages = messages[1:] if told else messages
  asked = [i for i, x in enumerate(messages) if _asks(x)]
  question = asked[-1] if asked else len(messages)
  for i, message in enumerate(messages):
    if message.role == 'assistant':
      kept, last = i > question, i == len(messages) - 1
      parts += _turn(style, tokenizer, message, kept, last)
    else:
      parts += _said(style, messages, i)
  return pieces.write(tokenizer, parts)


def _extend(
  style: Style,
  tokenizer: Vocabulary,
  context: Sequence[int],
  messages: Sequence[Message],
) -> Ids:
  """`context` and what is said next, by anyone but the assistant."""
  turns.refuse_assistant(messages)
  kept = list(context)
  if style.thinks and any(map(_asks, messages)):
    kept = forget_thinking(tokenizer, kept)
  parts: list[pieces.Part] = []
  for i in range(len(messages)):
    parts += _said(style, messages, i)
  return kept + pieces.write(tokenizer, parts)


def _asks(message: Message) -> bool:
  """Whether the user speaks; clients send a tool's answer as the user's."""
  text = message.content
  wrapped = text.startswith(RESULT) and text.endswith(RESULTED)
  return message.role == 'user' and not wrapped


def _said(
  style: Style, messages: Sequence[Message], i: int
) -> list[pieces.Part]:
  """Message `i`, of anyone but the assistant."""
  message = messages[i]
  if message.role == 'tool' and not style.lists:
    first = i == 0 or messages[i - 1].role != 'tool'
    last = i + 1 == len(messages) or messages[i + 1].role != 'tool'
    return _result(message.content, first, last)
  return [Mark(START), f'{message.role}\n{message.content}', Mark(END), '\n']


def _system(
  style: Style,
  tokenizer: Vocabulary,
  prompt: str | None,
  tools: Sequence[Tool],
) -> list[pieces.Part]:
  """The system turn, or nothing; None for a prompt takes the default one."""
  words = wording_lib.read(
    tokenizer.chat_template, f'{START}system\n', END, style.ours
  )
  if prompt is None:
    prompt = words.with_tools if tools else words.system
    if not prompt and not tools:
      return []
  parts: list[pieces.Part] = [Mark(START), 'system\n', prompt]
  if tools:
    listed = words.between.join(
      json.dumps(tool, ensure_ascii=False) for tool in tools
    )
    parts += [words.gap] if prompt else []
    parts += [*_marked(words.before), listed, *_marked(words.after)]
  return [*parts, Mark(END), '\n']


def _marked(text: str) -> list[pieces.Part]:
  """An introduction of the tools; the marks that it spells are marks.

  It was learnt as part of a string in which every spelling is the token.
  """
  pattern = '(' + '|'.join(map(re.escape, MARKS)) + ')'
  return [
    Mark(part) if place % 2 else part
    for place, part in enumerate(re.split(pattern, text))
  ]


def _turn(
  style: Style,
  tokenizer: Vocabulary,
  message: Message,
  kept: bool,
  last: bool,
) -> list[pieces.Part]:
  """A turn of the assistant; `kept` with its thinking."""
  header: list[pieces.Part] = [Mark(START), 'assistant\n']
  if message.tokens:
    opening = pieces.write(tokenizer, [*header, *_opening(style)])
    ids = [*opening, *message.tokens, *_close(tokenizer, message.tokens)]
    if style.thinks and not kept:
      ids = forget_thinking(tokenizer, ids)
    return [tuple(ids)]
  content = message.content
  if style.thinks and kept and (last or message.thinking):
    thinking = message.thinking.strip('\n')
    header += [Mark(THINK), f'\n{thinking}\n', Mark(THOUGHT), '\n\n']
    content = content.lstrip('\n')
  return [*header, content, *_called(style, message), Mark(END), '\n']


def _called(style: Style, message: Message) -> list[pieces.Part]:
  """The calls of a turn that was not sampled here."""
  made = [
    f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments":'
    f' {json.dumps(dict(call.arguments), ensure_ascii=False)}}}'
    for call in message.calls
  ]
  if style.lists:
    if not made:
      return []
    return [Mark(CALL), f'[{", ".join(made)}]', Mark(CALLED)]
  parts: list[pieces.Part] = []
  for i, call in enumerate(made):
    parts += ['\n'] if i or message.content else []
    parts += [Mark(CALL), f'\n{call}\n', Mark(CALLED)]
  return parts


def _result(content: str, first: bool, last: bool) -> list[pieces.Part]:
  parts: list[pieces.Part] = [Mark(START), 'user'] if first else []
  parts += ['\n', Mark(RESULT), f'\n{content}\n', Mark(RESULTED)]
  return parts + ([Mark(END), '\n'] if last else [])


def _opening(style: Style) -> list[pieces.Part]:
  return [Mark(THINK), '\n'] if style.opens else []


def _open_turn(style: Style, tokenizer: Vocabulary) -> Ids:
  parts = [Mark(START), 'assistant\n', *_opening(style)]
  return pieces.write(tokenizer, parts)


def _close(tokenizer: Vocabulary, sampled: Sequence[int]) -> Ids:
  end = tokenizer.controls[END]
  lacking = [] if len(sampled) and sampled[-1] == end else [end]
  return [*lacking, *tokenizer.encode('\n')]


def forget_thinking(tokenizer: Vocabulary, ids: Sequence[int]) -> Ids:
  """A context without the thinking of the assistant's turns.

  What stands in a turn up to the last '</think>' goes, and line breaks behind
  it. Ids that stay are the same ids, but for a token that is cut.
  """
  start, end = tokenizer.controls[START], tokenizer.controls[END]
  thought = tokenizer.controls[THOUGHT]
  header = pieces.write(tokenizer, [Mark(START), 'assistant\n'])
  kept: list[int] = []
  for turn in turns.split_before(ids, (start,)):
    body = turn[len(header) :]
    if turn[: len(header)] == header and thought in body:
      close = body.index(end) if end in body else len(body)
      at = max((i for i in range(close) if body[i] == thought), default=-1)
      if at >= 0:
        turn = header + turns.without_line_breaks(tokenizer, body[at + 1 :])
    kept += turn
  return kept


# --- reading -----------------------------------------------------------------


def _parse(
  style: Style,
  tokenizer: Vocabulary,
  sampled: Sequence[int],
  tools: Sequence[ToolSpec] | None,
) -> Reply:
  allowed = {CALL, CALLED, *((THINK, THOUGHT) if style.thinks else ())}
  body = turns.body(tokenizer, sampled, END, (CALL, CALLED), allowed)
  if isinstance(body, Reply):
    return body
  thinking = ''
  if style.thinks:
    found = turns.split_thinking(body, style.opens, THINK, THOUGHT)
    if isinstance(found, Reply):
      return found
    thinking, body = found
  return turns.reply(thinking, *_acts(style, body, tools))


def _acts(
  style: Style,
  events: Sequence[pieces.Event],
  tools: Sequence[ToolSpec] | None,
) -> tuple[str, calls_lib.Acts]:
  """(text, acts) of a turn behind its thinking."""
  texts: list[str] = []
  acts: calls_lib.Acts = []
  at = 0
  while at < len(events):
    event = events[at]
    at += 1
    if event.mark == CALLED:
      acts.append(Broken('unopened call', ''))
    elif event.mark != CALL:
      texts.append(event.text)
    else:
      inner = []
      while at < len(events) and not events[at].mark:
        inner.append(events[at])
        at += 1
      text = pieces.plain(inner)
      if at == len(events) or events[at].mark != CALLED:
        acts.append(Broken('unclosed call', text))
        continue
      at += 1
      valid = all(x.valid for x in inner)
      acts += calls_lib.from_json(text, tools, valid, style.lists)
  return ''.join(texts).strip(), acts


# --- templates ---------------------------------------------------------------


def _answer(answer: Answer) -> Message:
  return Message('tool', answer.text, name=answer.name)


def _user(parts: Sequence[pieces.Part]) -> list[pieces.Part]:
  return [Mark(START), 'user\n', *parts, Mark(END), '\n']


def _template(style: Style) -> Template:
  thinking = (THINK, THOUGHT) if style.thinks else ()
  return turns.template(
    style.name,
    turns.Family(
      needs=(START, END, *thinking),
      end=END,
      others=('<|endoftext|>',),
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


CHATML = _template(Style('chatml', False, False, False, _OURS))
QWEN3 = _template(Style('qwen3', True, False, False, _OURS))
QWEN3_THINKING = _template(Style('qwen3-thinking', True, True, False, _OURS))
SMOLLM2 = _template(Style('smollm2', False, False, True, _OURS_LIST))
