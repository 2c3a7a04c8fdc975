"""Tools in TypeScript, by vectors written by hand."""

import pytest

from composer.templates import typescript


def declared(parameters, **more):
  function = {'name': 'f', 'parameters': parameters, **more}
  return typescript.declare([{'type': 'function', 'function': function}])


def framed(*lines):
  text = '\n'.join(lines)
  return f'# Tools\n\n## functions\nnamespace functions {{\n{text}\n}}\n'


def of(schema):
  """The type of one required parameter `x`."""
  got = declared({'properties': {'x': schema}, 'required': ['x']})
  start, end = framed('type f = (_: {', '@', '}) => any;').split('@')
  assert got.startswith(start) and got.endswith(end)
  return got[len(start) : len(got) - len(end)]


def test_required_parameters_first_then_by_name():
  properties = {
    'b': {'type': 'integer', 'description': 'Two\n\nlines.', 'default': 3},
    'c': {'type': 'string'},
    'a': {'type': 'boolean', 'default': None},
    'd': {'type': 'string', 'pattern': '^x$', 'maxLength': 4},
  }
  got = declared(
    {'type': 'object', 'properties': properties, 'required': ['d', 'c']},
    description='Does f.',
  )
  assert got == framed(
    '// Does f.',
    'type f = (_: {',
    '  c: string,',
    '  // maxLength: 4, pattern: ^x$',
    '  d: string,',
    '  a?: boolean,',
    '  // Two',
    '',
    '  // lines.',
    '  // Default: 3',
    '  b?: number',
    '}) => any;',
  )


@pytest.mark.parametrize(
  'schema, want',
  [
    ({'type': 'number', 'minimum': 0}, '  // minimum: 0\n  x: number'),
    ({'enum': ['a', 1, None]}, '  x: "a" | 1 | null'),
    ({'type': ['string', 'null', 'array']}, '  x: string | null | Array<any>'),
    ({'anyOf': [{'type': 'string'}, {'type': 'object'}]}, '  x: string | {}'),
    ({'type': 'array', 'items': {'type': 'string'}}, '  x: Array<string>'),
    ({'type': 'array', 'minItems': 1}, '  // minItems: 1\n  x: Array<any>'),
    (
      {'type': 'array', 'items': {'type': 'string', 'description': 'D'}},
      '  x: Array<\n    // D\n    string\n  >',
    ),
    (
      {
        'type': 'object',
        'properties': {'y': {}},
        'additionalProperties': False,
      },
      '  x: {\n    y?: any,\n    [k: string]: never\n  }',
    ),
    (
      {'type': 'object', 'additionalProperties': {'type': 'integer'}},
      '  x: {\n    [k: string]: number\n  }',
    ),
    (True, '  x: any'),
    (False, '  x: null'),
  ],
)
def test_types(schema, want):
  assert of(schema) == want


def test_no_parameters():
  assert declared({}) == framed('type f = (_: {}) => any;')
  assert declared(None) == framed('type f = (_: {}) => any;')
  two = typescript.declare([{'name': 'a'}, {'name': 'b'}])
  assert two == framed('type a = (_: {}) => any;', 'type b = (_: {}) => any;')


@pytest.mark.parametrize(
  'parameters',
  [
    {'properties': {'x': {'$ref': '#/$defs/y'}}},
    {'$defs': {'y': {}}},
    {'properties': {'x': {'oneOf': [{}]}}},
    {'properties': {'x': {'type': 'tuple'}}},
    {'properties': {'x': 3}},
    {'properties': 3},
    [],
    'x',
  ],
)
def test_what_has_no_such_type_is_told_in_json(parameters):
  if parameters == []:
    assert declared(parameters) is not None
  else:
    assert declared(parameters) is None
  assert typescript.declare([{'function': 3}]) is None
