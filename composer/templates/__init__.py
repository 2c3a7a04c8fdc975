"""Chat templates: a session's turns and tool calls as tokens, and back.

  protocol.py    what a template is (`Template`), messages, answers, replies
  pieces.py      control tokens and text to ids, ids to control tokens and text
  calls.py       the JSON of a tool call to a `Call` or a typed error
  chatml.py      ChatML: Qwen3 in its kinds, SmolLM2
  kimi.py        Kimi K2 and Kimi K2.5
  typescript.py  tools as Kimi K2.5 is told of them
  wording.py     default system prompts, out of a checkpoint's own template
  compact.py     the quick start's template (`composer.chat`)

A context is written token by token and grows: what the model sampled stays as
the tokens that it sampled. Where a template rewrites what was said (thinking of
earlier turns is dropped once the user speaks again), the context that follows
does not begin with the one before, and the recorder starts a new segment.
"""

from __future__ import annotations

from typing import Any

from composer.templates import chatml
from composer.templates import compact
from composer.templates import kimi
from composer.templates import wording
from composer.templates.protocol import Template

TEMPLATES: dict[str, Template] = {
  template.name: template
  for template in (
    compact.COMPACT,
    chatml.CHATML,
    chatml.QWEN3,
    chatml.QWEN3_THINKING,
    chatml.SMOLLM2,
    kimi.KIMI_K2,
    kimi.KIMI_K2_5,
  )
}


def choose(name: str, tokenizer: Any) -> Template:
  """The template of a name, or, where it is '', the tokenizer's own.

  Raises:
    ValueError: an unknown name, a template whose control tokens the tokenizer
      lacks, or a tokenizer that tells of none.
  """
  template = TEMPLATES.get(name or guess(tokenizer))
  if template is None:
    raise ValueError(
      f'template={name!r} is not known; choose one of {", ".join(TEMPLATES)}'
    )
  controls = getattr(tokenizer, 'controls', None)
  if controls is None:
    lacking = () if template is compact.COMPACT else template.needs
  else:
    lacking = [piece for piece in template.needs if piece not in controls]
  if lacking:
    raise ValueError(
      f'template={template.name!r} needs the control tokens'
      f' {", ".join(lacking)}, which the tokenizer lacks; choose the template'
      ' of its model'
    )
  return template


def guess(tokenizer: Any) -> str:
  """Name of the template that a tokenizer's control tokens tell of.

  Raises:
    ValueError: they tell of none.
  """
  controls = getattr(tokenizer, 'controls', None)
  if controls is None:
    return compact.COMPACT.name
  if kimi.MIDDLE in controls:
    thinks = chatml.THINK in controls
    return (kimi.KIMI_K2_5 if thinks else kimi.KIMI_K2).name
  if chatml.START in controls and chatml.THINK not in controls:
    known = chatml.CALL in controls
    return (chatml.CHATML if known else chatml.SMOLLM2).name
  if chatml.START in controls:
    return _guess_thinking(tokenizer.chat_template).name
  raise ValueError(
    'the tokenizer has none of the control tokens that tell a template; set'
    f' template to one of {", ".join(TEMPLATES)}'
  )


def _guess_thinking(chat_template: str) -> Template:
  """Which Qwen3: by what its own template writes before the model's turn."""
  if not chat_template:
    return chatml.QWEN3
  asked = [{'role': 'user', 'content': '?'}]
  opening = wording.render(chat_template, asked, add_generation_prompt=True)
  if opening.rstrip().endswith(chatml.THINK):
    return chatml.QWEN3_THINKING
  silent = wording.render(
    chat_template, asked, add_generation_prompt=True, enable_thinking=False
  )
  return chatml.QWEN3 if chatml.THINK in silent else chatml.CHATML
