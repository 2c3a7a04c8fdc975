"""The quick start's template, as one of several (`composer.chat` writes it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from composer import chat
from composer.chat import Tokenizer
from composer.chat import ToolSpec
from composer.config import SessionConfig
from composer.templates.protocol import Answer
from composer.templates.protocol import Ids
from composer.templates.protocol import Reply
from composer.templates.protocol import Template


def _stops(tokenizer: Tokenizer) -> tuple[int, ...]:
  return (tokenizer.token_id(chat.END),)


def _no_messages(*_) -> NoReturn:
  raise ValueError(
    'template compact writes sessions (instruction and listing), not'
    ' conversations; serve a model with a chat template'
  )


def _close_turn(tokenizer: Tokenizer, sampled: Sequence[int]) -> Ids:
  end = tokenizer.token_id(chat.END)
  return [] if len(sampled) and sampled[-1] == end else [end]


def _render_observation(
  tokenizer: Tokenizer, answers: Sequence[Answer], limit: int
) -> Ids:
  text = ' '.join(answer.text for answer in answers)
  return chat.render_observation(tokenizer, text, limit)


def _open_summary(tokenizer: Tokenizer, context: Sequence[int]) -> Ids:
  return [*context, *chat.open_summary(tokenizer)]


def _summary_text(tokenizer: Tokenizer, sampled: Sequence[int]) -> str:
  return chat.decode(tokenizer, sampled).strip()


def _parse(
  tokenizer: Tokenizer,
  sampled: Sequence[int],
  tools: Sequence[ToolSpec] | None,
) -> Reply:
  act = chat.parse_act(tokenizer, sampled, tools or ())
  if isinstance(act, chat.Text):
    return Reply(act.text, '', ())
  return Reply('', '', (act,))


def _turn_tokens(
  tokenizer: Tokenizer, tools: Sequence[ToolSpec], session: SessionConfig
) -> int:
  del tokenizer, tools
  return chat.turn_tokens(session)


COMPACT = Template(
  name='compact',
  needs=chat.SPECIALS,
  text_ends=False,
  stops=_stops,
  render=_no_messages,
  extend=_no_messages,
  render_prompt=chat.render_prompt,
  open_turn=chat.open_turn,
  close_turn=_close_turn,
  render_observation=_render_observation,
  open_summary=_open_summary,
  summary_text=_summary_text,
  render_restart=chat.render_restart,
  parse=_parse,
  error_text=chat.error_text,
  turn_tokens=_turn_tokens,
)
