"""The JSON of tool calls to `Call`s, or to typed errors that a model can read.

Reasons of a `Broken`, whatever the template:

  of the turn   unknown id, special token, no end, unfinished thinking, empty,
                unopened call, unclosed call, too many calls
  of a call     bad bytes (no UTF-8), bad JSON, bad call (no name, or arguments
                that are no object), bad call id, unknown tool, missing argument,
                superfluous argument, bad choice, and 'bad KIND' by the kind (or
                the JSON type) of an argument
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import math
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
    value = json.loads(
      text,
      parse_constant=_no_number,
      parse_float=_finite,
      object_pairs_hook=_once,
    )
    # A lone surrogate can be escaped in JSON, but in no file.
    json.dumps(value, ensure_ascii=False).encode('utf-8')
    return value
  except RecursionError:
    return Broken('bad JSON', text, detail='nested too deeply')
  except ValueError as error:
    return Broken('bad JSON', text, detail=str(error)[:200])


def _no_number(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def _finite(text: str) -> float:
  """1e999 would be read as infinity, which no JSON can hold again."""
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'{text[:40]} is beyond all numbers')
  return value


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
  if spec.schema is not None:
    fault = schema_fault(spec.schema, arguments)
    return broken(*fault) if fault else Call(name, arguments, call_id)
  kinds = dict(spec.all_parameters)
  lacking = [x for x, _ in spec.parameters if x not in arguments]
  if lacking:
    return broken('missing argument', f'{name} needs {", ".join(lacking)}')
  surplus = [x for x in arguments if x not in kinds]
  if surplus:
    given = ', '.join(kinds) or 'nothing'
    return broken('superfluous argument', f'{name} takes {given}')
  given = {key: kind for key, kind in kinds.items() if key in arguments}
  for key, kind in given.items():
    if not _fits(kind, arguments[key]):
      return broken(f'bad {kind}', f'{key} of {name} must be {_EXPECTED[kind]}')
  return Call(name, {key: arguments[key] for key in given}, call_id)


_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
  'string': (str,),
  'integer': (int,),
  'number': (int, float),
  'boolean': (bool,),
  'array': (list,),
  'object': (dict,),
  'null': (type(None),),
}


def schema_fault(
  schema: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[str, str] | None:
  """(reason, detail) of the first fault of arguments, or None.

  Only what stands at the top of a schema is checked: names, types and choices.
  The rest is for whoever wrote the tool.
  """
  known = schema.get('properties', {})
  lacking = [x for x in schema.get('required', ()) if x not in arguments]
  if lacking:
    return 'missing argument', f'{", ".join(lacking)} must be given'
  surplus = [x for x in arguments if x not in known]
  if surplus and schema.get('additionalProperties', True) is False:
    return 'superfluous argument', f'there are {", ".join(known) or "none"}'
  for key, value in arguments.items():
    about = known.get(key)
    if not isinstance(about, Mapping):
      continue
    kinds = about.get('type', ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if kinds and not any(_is_json(value, kind) for kind in kinds):
      return f'bad {kinds[0]}', f'{key} must be {" or ".join(kinds)}'
    choices = about.get('enum')
    if choices is not None and value not in choices:
      shown = ', '.join(json.dumps(x, ensure_ascii=False) for x in choices)
      return 'bad choice', f'{key} must be one of {shown}'
  return None


def _is_json(value: Any, kind: str) -> bool:
  if isinstance(value, bool) and kind != 'boolean':
    return False
  if kind == 'integer' and isinstance(value, float):
    return value.is_integer()
  return isinstance(value, _JSON_TYPES.get(kind, (object,)))


_EXPECTED = {
  'line': 'a line such as "L3"',
  'token': 'one word',
  'path': 'a relative path inside the workspace',
  'integer': 'a whole number',
  'string': 'a string',
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
