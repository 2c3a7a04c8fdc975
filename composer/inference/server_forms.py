"""What an answer may call and how it must read, out of a request's body.

Tools, the choice among them, and forms of answers. Whether a grammar can keep a
schema is found where it is compiled (`server_grammar`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import re
from typing import Any

from composer.inference.server_values import ApiError
from composer.inference.server_values import flag
from composer.inference.server_values import invalid

TOOLS = 512
DEPTH = 32  # of a tool's schema
_NAME = re.compile(r'[A-Za-z0-9_.-]{1,64}')
_TYPES = ('object', 'array', 'string', 'number', 'integer', 'boolean', 'null')
# Words of a schema that hold other schemas: by name, in a list, and one.
_NAMED = ('properties', 'patternProperties', '$defs', 'definitions')
_LISTED = ('anyOf', 'oneOf', 'allOf', 'prefixItems')
_SINGLE = ('items', 'additionalProperties', 'not')


def _texts(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _count(value: Any) -> bool:
  return type(value) in (int, float) and value >= 0 and value % 1 == 0


# (words of a schema, whether a value can be theirs, what it must be)
_WORDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
  (_NAMED, lambda x: isinstance(x, dict), 'an object'),
  (_LISTED, lambda x: isinstance(x, list) and x, 'a list of schemas'),
  (('required',), _texts, 'a list of names'),
  (('enum',), lambda x: isinstance(x, list) and x, 'a list of values'),
  (
    ('pattern', 'format', '$ref', 'title', 'description'),
    lambda x: isinstance(x, str),
    'a text',
  ),
  (
    ('minLength', 'maxLength', 'minItems', 'maxItems')
    + ('minProperties', 'maxProperties'),
    _count,
    'a whole number of at least 0',
  ),
  (
    ('minimum', 'maximum', 'multipleOf'),
    lambda x: type(x) in (int, float),
    'a number',
  ),
)


@dataclasses.dataclass(frozen=True)
class Form:
  """What an answer must be: JSON of a schema; or, where there are some, one of
  the `choices`; or what `regex` matches as a whole.

  What of a schema cannot be kept is refused where it is `strict`, else left.
  """

  schema: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  strict: bool = False
  choices: tuple[str, ...] = ()
  regex: str = ''
  param: str = 'response_format'  # which asked for it


def _check_characters(value: Any, param: str) -> None:
  """Refuses half a surrogate pair, which no text that a model reads can hold."""
  text = json.dumps(value, ensure_ascii=False)
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise invalid(
      f'{param} holds {ascii(text[error.start])}, half of a character; write'
      ' whole ones',
      param,
    ) from None


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
  if not (isinstance(value, list) and len(value) <= TOOLS):
    raise invalid(f'tools must be a list of at most {TOOLS}', 'tools')
  seen: set[str] = set()
  for i, tool in enumerate(value):
    where = f'tools[{i}]'
    function = tool.get('function') if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get('type') != 'function':
      raise invalid(
        f'{where} must be {{"type": "function", "function": {{...}}}}',
        where,
        'invalid_function_parameters',
      )
    name = function.get('name')
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in seen:
      raise invalid(
        f'{where}.function.name={json.dumps(name)[:80]} must be 1 to 64'
        ' letters, digits and ._-, and of this tool alone',
        f'{where}.function.name',
      )
    seen.add(name)
    _check_characters(function, f'{where}.function')
    if not isinstance(function.get('description', ''), str):
      raise invalid(
        f'{where}.function.description must be a text',
        f'{where}.function.description',
      )
    if not isinstance(function.get('strict') or False, bool):
      raise invalid(
        f'{where}.function.strict must be true or false',
        f'{where}.function.strict',
        'invalid_type',
      )
    schema = function.get('parameters', {})
    _check_schema(schema, f'{where}.function.parameters', 0)
    if schema and schema.get('type') != 'object':
      raise invalid(
        f'{where}.function.parameters.type must be "object"',
        f'{where}.function.parameters',
        'invalid_function_parameters',
      )
  return tuple(value)


def form_of(body: Mapping[str, Any]) -> Form | None:
  """What `response_format` or `structured_outputs` asks for; None: any text."""
  if 'structured_outputs' in body:
    if 'response_format' in body:
      raise invalid(
        'give response_format or structured_outputs', 'structured_outputs'
      )
    _check_characters(body['structured_outputs'], 'structured_outputs')
    return _structured(body['structured_outputs'])
  value = body.get('response_format', {'type': 'text'})
  kind = value.get('type') if isinstance(value, dict) else None
  if kind == 'text':
    return None
  if kind == 'json_object':
    return Form({'type': 'object'})
  described = value.get('json_schema') if kind == 'json_schema' else None
  if isinstance(described, dict):
    described = {key: x for key, x in described.items() if x is not None}
  if not isinstance(described, dict) or not isinstance(
    described.get('schema'), dict
  ):
    raise invalid(
      f'response_format={json.dumps(value)[:80]}: use {{"type": "text"}},'
      ' {"type": "json_object"}, or {"type": "json_schema", "json_schema":'
      ' {"name": NAME, "schema": {...}}}',
      'response_format',
    )
  where = 'response_format.json_schema.schema'
  _check_characters(described, where)
  _check_schema(described['schema'], where, 0)
  return Form(described['schema'], flag(described, 'strict'))


def _structured(value: Any) -> Form:
  """One of json, choice and regex, as vLLM names them."""
  name = 'structured_outputs'
  value = value if isinstance(value, dict) else {}
  value = {key: x for key, x in value.items() if x is not None}
  if list(value) == ['json'] and isinstance(value['json'], dict):
    _check_schema(value['json'], f'{name}.json', 0)
    return Form(value['json'], strict=True, param=name)
  words = value.get('choice')
  if list(value) == ['choice'] and isinstance(words, list) and words:
    if all(isinstance(x, str) and x for x in words):
      return Form(choices=tuple(words), param=name)
  regex = value.get('regex')
  if list(value) == ['regex'] and isinstance(regex, str) and regex:
    return Form(regex=regex, param=name)
  raise invalid(
    f'{name} takes one of {{"json": SCHEMA}}, {{"choice": [TEXT, ...]}} and'
    ' {"regex": PATTERN}',
    name,
  )


def _check_schema(schema: Any, where: str, depth: int) -> None:
  """Refuses what is no JSON schema, as far as one can be told here: by the words
  that are written wrongly, not by what they mean together."""

  def wrong(what: str) -> ApiError:
    return invalid(f'{where}: {what}', where, 'invalid_function_parameters')

  if isinstance(schema, bool) and depth:
    return
  if not isinstance(schema, dict):
    raise wrong('a schema must be an object')
  if depth > DEPTH:
    raise wrong(f'nested more than {DEPTH} deep')
  kinds = _TYPES if schema.get('type') is None else schema['type']
  kinds = (kinds,) if isinstance(kinds, str) else kinds
  if not isinstance(kinds, list | tuple) or any(x not in _TYPES for x in kinds):
    raise wrong(f'type {json.dumps(kinds)[:80]} is none of JSON')
  for names, fits, what in _WORDS:
    for name in names:
      value = schema.get(name)  # null is left to those who write it so
      if value is not None and not fits(value):
        raise wrong(f'{name}={json.dumps(value)[:80]}; it must be {what}')
  for name, inner in _within(schema):
    _check_schema(inner, f'{where}.{name}', depth + 1)


def _within(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """(where, schema) of those in a schema whose words are well formed."""
  for word in _NAMED:
    for name, inner in (schema.get(word) or {}).items():
      yield f'{word}.{name[:64]}', inner
  for word in _LISTED:
    for i, inner in enumerate(schema.get(word) or ()):
      yield f'{word}[{i}]', inner
  for word in _SINGLE:
    if schema.get(word) is not None:
      yield word, schema[word]


def tool_choice(
  body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[str, bool]:
  """(choice, whether it is a tool's name)."""
  choice = body.get('tool_choice', 'auto' if tools else 'none')
  if choice in ('none', 'auto'):
    return (choice if tools else 'none'), False
  known = [tool['function']['name'] for tool in tools]
  if choice == 'required' and known:
    return choice, False
  if isinstance(choice, dict) and choice.get('type') == 'function':
    function = choice.get('function')
    name = function.get('name') if isinstance(function, dict) else None
    if name in known:
      return name, True
  raise invalid(
    f'tool_choice={json.dumps(choice)[:120]}: use none, auto, required, or one'
    f' of the tools: {", ".join(known)[:200] or "(there are none)"}',
    'tool_choice',
  )
