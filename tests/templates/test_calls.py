"""Arguments against schemas, with the package `jsonschema` for an oracle."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jsonschema
import pytest

from composer import chat
from composer.chat import Broken
from composer.chat import Call
from composer.chat import ToolSpec
from composer.templates import calls

TYPES = ('string', 'integer', 'number', 'boolean', 'array', 'object', 'null')
NAMES = st.sampled_from('abc')
VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-9, 9)
  | st.sampled_from((0.5, 2.0, -1.0))
  | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2)
  ),
  max_leaves=4,
)


@st.composite
def schemas(draw):
  properties = {}
  for name in draw(st.sets(NAMES)):
    about = {}
    if draw(st.booleans()):
      kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, unique=True))
      about['type'] = kinds[0] if len(kinds) == 1 else kinds
    if draw(st.booleans()):
      about['enum'] = draw(st.lists(st.text(max_size=3), min_size=1))
    properties[name] = about
  schema = {'type': 'object', 'properties': properties}
  schema['required'] = sorted(draw(st.sets(NAMES)))
  if draw(st.booleans()):
    schema['additionalProperties'] = draw(st.booleans())
  return schema


@settings(deadline=None)
@given(schemas(), st.dictionaries(NAMES, VALUES))
def test_faults_are_those_of_json_schema(schema, arguments):
  fault = calls.schema_fault(schema, arguments)
  valid = jsonschema.Draft202012Validator(schema).is_valid(arguments)
  assert (fault is None) == valid, fault


def test_faults_say_what_is_wrong():
  schema = {
    'type': 'object',
    'properties': {
      'n': {'type': 'integer'},
      'how': {'enum': ['fast', 'slow']},
      'x': True,
    },
    'required': ['n'],
    'additionalProperties': False,
  }
  for arguments, fault in (
    ({}, ('missing argument', 'n must be given')),
    ({'n': 1, 'm': 2}, ('superfluous argument', 'there are n, how, x')),
    ({'n': True}, ('bad integer', 'n must be integer')),
    (
      {'n': 1, 'how': 'so'},
      ('bad choice', 'how must be one of "fast", "slow"'),
    ),
    ({'n': 2.0, 'how': 'fast', 'x': [1]}, None),
  ):
    assert calls.schema_fault(schema, arguments) == fault


READ = ToolSpec(
  'read',
  'show',
  (('path', 'path'),),
  (('start', 'integer'), ('end', 'integer')),
)


@pytest.mark.parametrize(
  'arguments, reason',
  [
    ({'path': 'a'}, ''),
    ({'path': 'a', 'end': 3}, ''),
    ({'start': 1}, 'missing argument'),
    ({'path': 'a', 'start': '1'}, 'bad integer'),
    ({'path': 'a', 'line': 1}, 'superfluous argument'),
  ],
)
def test_optional_arguments_may_be_left_out(arguments, reason):
  got = calls.check('read', arguments, [READ], '')
  if reason:
    assert isinstance(got, Broken) and got.reason == reason
  else:
    assert got == Call('read', arguments)


def test_a_tool_of_others_is_told_of_as_it_is():
  schema = {'type': 'object', 'properties': {'x': {'minimum': 3}}}
  told = chat.json_schema(ToolSpec('t', 'd', schema=schema))
  assert told['function']['parameters'] == schema
  with pytest.raises(ValueError, match='parameters and a schema'):
    ToolSpec('t', 'd', (('x', 'path'),), schema=schema)
