"""What a template is, and the records that it reads and writes.

`Template` is a record of functions; its first argument is always the tokenizer.
Contexts are lists of token ids. A session uses them in this order:

  render_prompt -> (open_turn -> [sampled] -> close_turn -> parse
                    -> render_observation) ...
  open_summary  -> [sampled] -> close_turn -> render_restart -> ...

and whoever holds a conversation as messages (a server) `render` and `extend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from composer.chat import Broken
from composer.chat import Call
from composer.chat import ToolSpec
from composer.config import SessionConfig

Ids = list[int]
Tool = Mapping[str, Any]  # in the OpenAI function form
ROLES = ('system', 'user', 'assistant', 'tool')


@dataclasses.dataclass(frozen=True)
class Message:
  """One message of a conversation.

  Attributes:
    role: one of `ROLES`.
    content: text.
    thinking: of the assistant, before its content.
    calls: of the assistant.
    name: of the tool that answers.
    call_id: which call a tool answers.
    tokens: of the assistant, as it sampled them, its end included; they are
      written as they are, and content, thinking and calls are not read.
  """

  role: str
  content: str = ''
  thinking: str = ''
  calls: tuple[Call, ...] = ()
  name: str = ''
  call_id: str = ''
  tokens: tuple[int, ...] = ()

  def __post_init__(self):
    if self.role not in ROLES:
      raise ValueError(
        f'Message.role={self.role!r}; use one of {", ".join(ROLES)}'
      )


@dataclasses.dataclass(frozen=True)
class Answer:
  """What the harness says to one act: a tool's output, or what was wrong."""

  text: str
  name: str = ''
  call_id: str = ''


@dataclasses.dataclass(frozen=True)
class Reply:
  """What a sampled turn says.

  `acts` are its tool calls in order, and what could not be read as one; empty
  where the turn only talks.
  """

  text: str
  thinking: str
  acts: tuple[Call | Broken, ...]


@dataclasses.dataclass(frozen=True)
class Template:
  """How a family of models writes turns.

  Attributes:
    name: as a config names it.
    needs: control tokens that the tokenizer must have.
    text_ends: whether a turn without an act ends the session (the model has
      nothing left to do), or is a note to oneself.
    stops: (tokenizer) -> ids that end a sampled turn; the first is the right
      one.
    render: (tokenizer, messages, tools) -> a whole context, before the turn of
      the assistant is opened.
    extend: (tokenizer, context, messages) -> the context with more messages. It
      does not begin with `context` where the template rewrites.
    render_prompt: (tokenizer, tools, instruction, listing) -> the first context.
    open_turn: (tokenizer) -> what stands before a sampled turn.
    close_turn: (tokenizer, sampled) -> what follows it.
    render_observation: (tokenizer, answers, limit) -> the answers to its acts,
      in at most `limit` tokens, or as few as their frame takes.
    open_summary: (tokenizer, context) -> the context in which the model is to
      summarise, the turn opened. Begins with `context`.
    summary_text: (tokenizer, sampled) -> the summary, for people.
    render_restart: (tokenizer, prompt, summary, turns_left, summaries, todo) ->
      the context after a summary, from the tokens that were sampled, and the
      todo list ('': none). Begins with `prompt`.
    parse: (tokenizer, sampled, tools) -> the reply. Total: any ids give one. A
      call is checked against `tools` unless that is None.
    error_text: (broken) -> what the model is told of it.
    turn_tokens: (tokenizer, tools, session) -> the most that a turn, and the
      request for a summary behind it, add to a context.
  """

  name: str
  needs: tuple[str, ...]
  text_ends: bool
  stops: Callable[[Any], tuple[int, ...]]
  render: Callable[[Any, Sequence[Message], Sequence[Tool]], Ids]
  extend: Callable[[Any, Sequence[int], Sequence[Message]], Ids]
  render_prompt: Callable[[Any, Sequence[ToolSpec], str, str], Ids]
  open_turn: Callable[[Any], Ids]
  close_turn: Callable[[Any, Sequence[int]], Ids]
  render_observation: Callable[[Any, Sequence[Answer], int], Ids]
  open_summary: Callable[[Any, Sequence[int]], Ids]
  summary_text: Callable[[Any, Sequence[int]], str]
  render_restart: Callable[
    [Any, Sequence[int], Sequence[int], int, int, str], Ids
  ]
  parse: Callable[[Any, Sequence[int], Sequence[ToolSpec] | None], Reply]
  error_text: Callable[[Broken], str]
  turn_tokens: Callable[[Any, Sequence[ToolSpec], SessionConfig], int]
