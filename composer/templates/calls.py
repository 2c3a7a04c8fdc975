"""The JSON of tool calls to `Call`s, or to typed errors that a model can read.

Reasons of a `Broken`, whatever the template:

  of the turn   unknown id, special token, no end, unfinished thinking, empty,
                unopened call, unclosed call, too many calls
  of a call     bad bytes (no UTF-8), bad JSON, bad call (no name, or arguments
                that are no object), bad call id, unknown tool, missing argument,
                superfluous argument, and 'bad KIND' by the kind of an argument
"""

from __future__ import annotations

from collections.abc import Sequence
import json
from typing import Any

from composer import chat
from composer.chat import Broken
from composer.chat import Call
from composer.chat import ToolSpec

MOST = 8  # calls of one turn that are read
Acts = list[Call | Broken]


def from_json(
  text: str,
  tools: Sequence[ToolSpec] | None,
  valid: bool = True,
  many: bool = False,
) -> Acts:
  """Calls written as {"name": ..., "arguments": {...}}.

  Args:
    text: the JSON.
    tools: what is offered; None takes any name and any arguments.
    valid: whether `text` was UTF-8.
    many: a list of calls is taken as well.
  """
  value = load(text, valid)
  if isinstance(value, Broken):
    return [value]
  if many and isinstance(value, list):
    return [_from_value(x, tools, text) for x in value] or [
      Broken('bad call', text, detail='the list of calls is empty')
    ]
  return [_from_value(value, tools, text)]


def _from_value(
  value: Any, tools: Sequence[ToolSpec] | None, text: str
) -> Call | Broken:
  name = value.get('name') if isinstance(value, dict) else None
  if not isinstance(name, str) or not name:
    return Broken(
      'bad call', text, detail='write {"name": TOOL, "arguments": {...}}'
    )
  if 'arguments' not in value:
    return Broken('bad call', text, detail=f'{name} without arguments')
  return check(name, value['arguments'], tools, text)


def load(text: str, valid: bool = True) -> Any:
  """A JSON value, or why it is none."""
  if not valid:
    return Broken('bad bytes', text, detail='the call is not UTF-8')
  try:
    value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    # A lone surrogate can be escaped in JSON, but in no file.
    json.dumps(value, ensure_ascii=False).encode('utf-8')
    return value
  except RecursionError:
    return Broken('bad JSON', text, detail='nested too deeply')
  except ValueError as error:
    return Broken('bad JSON', text, detail=str(error)[:200])


def _no_number(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) != len(pairs):
    raise ValueError('a key stands twice in one object')
  return found


def check(
  name: str,
  arguments: Any,
  tools: Sequence[ToolSpec] | None,
  text: str,
  call_id: str = '',
) -> Call | Broken:
  """A call of an offered tool with fitting arguments, or what is wrong."""

  def broken(reason: str, detail: str) -> Broken:
    return Broken(reason, text, detail=detail, id=call_id)

  if not isinstance(arguments, dict):
    return broken('bad call', f'arguments of {name} must be a JSON object')
  if tools is None:
    return Call(name, arguments, call_id)
  spec = next((tool for tool in tools if tool.name == name), None)
  if spec is None:
    known = ', '.join(tool.name for tool in tools)
    return Broken('unknown tool', text, detail=f'there are {known}')
  kinds = dict(spec.parameters)
  lacking = [x for x in kinds if x not in arguments]
  if lacking:
    return broken('missing argument', f'{name} needs {", ".join(lacking)}')
  surplus = [x for x in arguments if x not in kinds]
  if surplus:
    given = ', '.join(kinds) or 'nothing'
    return broken('superfluous argument', f'{name} takes {given}')
  for key, kind in kinds.items():
    if not _fits(kind, arguments[key]):
      return broken(f'bad {kind}', f'{key} of {name} must be {_EXPECTED[kind]}')
  return Call(name, {key: arguments[key] for key in kinds}, call_id)


_EXPECTED = {
  'line': 'a line such as "L3"',
  'token': 'one word',
  'path': 'a relative path inside the workspace',
  'integer': 'a whole number',
  'text': 'a string',
}


def _fits(kind: str, value: Any) -> bool:
  if kind == 'integer':
    return isinstance(value, int) and not isinstance(value, bool)
  if not isinstance(value, str):
    return False
  if kind == 'token' and value.split() != [value]:
    return False
  return chat.fits(kind, value)


def limited(acts: Acts) -> tuple[Call | Broken, ...]:
  """At most `MOST` acts; one error stands for the rest."""
  if len(acts) <= MOST:
    return tuple(acts)
  left = len(acts) - MOST
  detail = f'{left} calls were not made; at most {MOST} a turn'
  return (*acts[:MOST], Broken('too many calls', '', detail=detail))


def error_text(broken: Broken) -> str:
  """What the model is told: 'error: bad JSON: Expecting value: line 1 ...'."""
  return f'error: {broken.reason}' + (
    f': {broken.detail}' if broken.detail else ''
  )
