"""What a checkpoint's own template says before the conversation begins.

Models are trained with a system prompt of their makers' wording: a default one,
and an introduction of the tools. These words are no part of this project; they
are read out of the Jinja template that comes with the tokenizer, by rendering a
conversation of which every other part is known. Without such a template there
is no default prompt, and the tools are introduced in words of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
from typing import Any

SYSTEM, USER = 'the system speaks', 'the user asks'
FIRST, SECOND = (
  {
    'type': 'function',
    'function': {
      'name': name,
      'description': f'does {name}',
      'parameters': {'type': 'object', 'properties': {}},
    },
  }
  for name in ('first', 'second')
)


@dataclasses.dataclass(frozen=True)
class Wording:
  """Of a system turn: [system gap] before tool [between tool ...] after.

  `system` is the default prompt without tools, `with_tools` the one with.
  """

  system: str
  with_tools: str
  gap: str
  before: str
  between: str
  after: str


def plain(before: str, after: str, system: str = '') -> Wording:
  """A wording of ours."""
  return Wording(system, system, '\n\n', before, '\n', after)


@functools.lru_cache(maxsize=32)
def read(chat_template: str, opening: str, end: str, ours: Wording) -> Wording:
  """The wording of a template.

  Args:
    chat_template: Jinja, or ''.
    opening: what a system turn begins with.
    end: what it ends with.
    ours: what stands for whatever the template lacks.

  Raises:
    ValueError: the template cannot be rendered.
  """
  if not chat_template:
    return ours
  asked = [{'role': 'user', 'content': USER}]
  told = [{'role': 'system', 'content': SYSTEM}, *asked]
  system = _between(render(chat_template, asked), opening, end, '')
  with_tools = dataclasses.replace(ours, system=system, with_tools=system)
  tools = [FIRST, SECOND]
  whole = _between(render(chat_template, told, tools=tools), opening, end, '')
  first, second = (json.dumps(tool, ensure_ascii=False) for tool in tools)
  if not whole.startswith(SYSTEM) or first not in whole or second not in whole:
    return with_tools  # it knows no tools
  before, _, rest = whole.removeprefix(SYSTEM).partition(first)
  between, _, after = rest.partition(second)
  start = before.lstrip('\n')
  gap = before[: len(before) - len(start)]
  alone = _between(render(chat_template, asked, tools=tools), opening, end, '')
  default = alone.partition(start)[0].removesuffix(gap) if start else ''
  return Wording(system, default, gap, start, between, after)


def _between(text: str, opening: str, end: str, default: str) -> str:
  """The body of a first turn that begins with `opening`."""
  if not text.startswith(opening) or end not in text:
    return default
  return text.removeprefix(opening).partition(end)[0]


def render(
  chat_template: str,
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]] | None = None,
  **variables: Any,
) -> str:
  """A conversation as the template writes it, as a string.

  Raises:
    ValueError: it is no Jinja, or refuses the conversation.
  """
  import jinja2

  try:
    return _compile(chat_template).render(
      messages=list(messages),
      tools=None if tools is None else list(tools),
      **{'add_generation_prompt': False, **variables},
    )
  except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
    raise ValueError(
      f"the tokenizer's chat_template cannot be rendered ({error}); repair it,"
      ' or remove it to go without its system prompt'
    ) from error


@functools.lru_cache(maxsize=8)
def _compile(chat_template: str) -> Any:
  import jinja2
  from jinja2 import sandbox

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
  )
  environment.filters['tojson'] = tojson
  environment.globals['raise_exception'] = refuse
  # Where a template writes the day, every context would differ by it.
  environment.globals['strftime_now'] = lambda form: ''
  return environment.from_string(chat_template)
