"""Tools as Kimi K2.5 is told of them: a namespace of TypeScript functions.

    # Tools

    ## functions
    namespace functions {
    // What it does.
    type edit = (_: {
      // Where.
      // pattern: ^L[0-9]+$
      line: string,
      token?: string
    }) => any;
    }

Required parameters come first, each group by name; a description and the
constraints of a type stand above it as comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from typing import Any

INDENT = '  '
SCALARS = {
  'string': 'string',
  'number': 'number',
  'integer': 'number',
  'boolean': 'boolean',
  'null': 'null',
  'any': 'any',
}
CONSTRAINTS = {
  'string': ('maxLength', 'minLength', 'pattern'),
  'number': ('maximum', 'minimum'),
  'integer': ('maximum', 'minimum'),
  'array': ('maxItems', 'minItems'),
}
# Of a list of types, where nothing more is said of them.
LOOSE = {**SCALARS, 'object': '{}', 'array': 'Array<any>'}


class _Beyond(Exception):
  """A schema that this notation is not written for (references, oneOf)."""


def declare(tools: Sequence[Mapping[str, Any]]) -> str | None:
  """The tools, given in the OpenAI function form.

  None where a schema has references, is none of the usual kinds or is no schema
  at all (clients send what they like): the tools are then told of in JSON.
  """
  try:
    functions = [_function(tool.get('function', tool)) for tool in tools]
  except (_Beyond, KeyError, TypeError, AttributeError, RecursionError):
    return None
  body = '\n'.join(functions)
  return f'# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n'


def _function(function: Mapping[str, Any]) -> str:
  comment = _comment(function.get('description') or '', '')
  parameters = function.get('parameters') or {}
  shape = _object(parameters, '')
  return f'{comment}type {function["name"]} = (_: {shape}) => any;'


def _comment(text: str, indent: str) -> str:
  if not text:
    return ''
  lines = [f'{indent}// {line}' if line else '' for line in text.split('\n')]
  return '\n'.join(lines) + '\n'


def _type(schema: Any, indent: str) -> str:
  """The type that a schema stands for."""
  if isinstance(schema, bool):
    return 'any' if schema else 'null'
  if not isinstance(schema, Mapping) or '$ref' in schema or '$defs' in schema:
    raise _Beyond
  if 'anyOf' in schema:
    return ' | '.join(_type(x, indent) for x in schema['anyOf'])
  if 'enum' in schema:
    return ' | '.join(
      f'"{x}"' if isinstance(x, str) else json.dumps(x) for x in schema['enum']
    )
  kind = schema.get('type', None if schema else 'any')
  if isinstance(kind, list) and all(x in LOOSE for x in kind):
    return ' | '.join(LOOSE[x] for x in kind)
  if kind == 'object':
    return _object(schema, indent)
  if kind == 'array':
    return _array(schema, indent)
  if isinstance(kind, str) and kind in SCALARS:
    return SCALARS[kind]
  raise _Beyond


def _array(schema: Mapping[str, Any], indent: str) -> str:
  items = schema.get('items') or {}
  above = _above(items, indent + INDENT)
  if not above:
    return f'Array<{_type(items, indent)}>'
  inner = _type(items, indent + INDENT)
  return f'Array<\n{above}{indent}{INDENT}{inner}\n{indent}>'


def _object(schema: Mapping[str, Any], indent: str) -> str:
  if '$defs' in schema:
    raise _Beyond
  inside = indent + INDENT
  required = set(schema.get('required') or ())
  properties = schema.get('properties') or {}
  fields = []
  for name in sorted(properties, key=lambda x: (x not in required, x)):
    entry = properties[name]
    above = _above(entry, inside)
    if isinstance(entry, Mapping) and entry.get('default') is not None:
      default = json.dumps(entry['default'], ensure_ascii=False)
      above += f'{inside}// Default: {default}\n'
    optional = '' if name in required else '?'
    fields.append(f'{above}{inside}{name}{optional}: {_type(entry, inside)}')
  others = schema.get('additionalProperties')
  if others is not None:
    kind = {True: 'any', False: 'never'}.get(
      others if isinstance(others, bool) else None
    ) or _type(others, inside)
    fields.append(f'{inside}[k: string]: {kind}')
  if not fields:
    return '{}'
  return '{\n' + ',\n'.join(fields) + f'\n{indent}}}'


def _above(schema: Any, indent: str) -> str:
  """Comments above a field: its description and its constraints."""
  if not isinstance(schema, Mapping):
    return ''
  text = _comment(schema.get('description') or '', indent)
  known: tuple[str, ...] = ()
  if 'anyOf' not in schema and 'enum' not in schema:
    kind = schema.get('type')
    known = CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
  given = [f'{x}: {schema[x]}' for x in sorted(known) if x in schema]
  return text + (f'{indent}// {", ".join(given)}\n' if given else '')
