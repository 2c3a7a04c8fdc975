"""Mutations and cuts of text: what changes, and that nothing else does."""

import ast
import inspect
import textwrap as stdlib_module

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer.environments.tasks import mutations
from composer.environments.tasks import trimming

EXAMPLE = '''
class Box:
  def half(self, values, limit=3):
    """Été: the first half, at most `limit` of it."""
    total = 0  # ä comment that stays
    for i in range(len(values)):
      if i < limit and values[i] is not None:
        total += values[i] * 2
      elif not values:
        break
    self.log("é", total)
    return total if total > 1 else values[1:]
'''


def mutants(source, name):
  text = mutations.Text(source)
  function = next(x for x in mutations.functions(text) if x.name == name)
  return text, function, mutations.mutations(text, function)


@pytest.mark.parametrize(
  ('operator', 'before', 'after'),
  [
    ('swapped_comparison', '<', '<='),
    ('swapped_comparison', 'is not', 'is'),
    ('swapped_comparison', '>', '>='),
    ('wrong_arithmetic', '+=', '-='),
    ('wrong_arithmetic', '*', '+'),
    ('off_by_one', '1', '2'),
    ('off_by_one', 'i', 'i + 1'),
    ('off_by_one', 'len(values)', 'len(values) + 1'),
    ('wrong_constant', '0', '1'),
    ('wrong_constant', '2', '0'),
    ('negated_condition', 'not values', 'values'),
    ('swapped_and_or', 'and', 'or'),
    ('dropped_branch', 'not values', 'False'),
    ('dropped_statement', 'break', 'pass'),
    ('dropped_statement', 'self.log("é", total)', 'pass'),
    ('swapped_arguments', '"é", total', 'total, "é"'),
    (
      'wrong_return',
      'total if total > 1 else values[1:]',
      'None',
    ),
  ],
)
def test_operators(operator, before, after):
  _, _, found = mutants(EXAMPLE, 'Box.half')
  assert (operator, before, after) in [
    (x.operator, x.before, x.after) for x in found
  ]


@pytest.mark.parametrize('name', ['dedent', 'TextWrapper._wrap_chunks'])
def test_a_mutation_changes_its_span_alone(name):
  source = inspect.getsource(stdlib_module)
  text, function, found = mutants(source, name)
  assert len(found) > 10
  lines = source.split('\n')
  for mutation in found:
    if not mutations.parses(source, mutation):
      continue
    edit = mutation.edit
    changed = mutations.apply(source, (edit,))
    assert source[edit.start : edit.end] == mutation.before
    assert changed[: edit.start] == source[: edit.start]
    assert changed[edit.start + len(edit.text) :] == source[edit.end :]
    assert function.first <= mutation.line <= function.last
    assert mutation.before.split('\n')[0] in lines[mutation.line - 1]
    assert ast.dump(ast.parse(changed)) != ast.dump(text.tree)


def test_a_removed_body_leaves_the_docstring():
  text, function, _ = mutants(EXAMPLE, 'Box.half')
  removed = mutations.removal(text, function)
  changed = mutations.apply(EXAMPLE, (removed.edit,))
  node = ast.parse(changed).body[0].body[0]
  assert ast.get_docstring(node).startswith('Été')
  assert [type(x) for x in node.body[1:]] == [ast.Raise]
  assert 'total' not in changed.partition('"""\n')[2]


def test_what_has_no_docstring_or_no_body_is_not_removed():
  for source in (
    'def f(x):\n  y = x\n  y += 1\n  return y\n',
    'def f(): ...\n',
  ):
    text = mutations.Text(source)
    for function in mutations.functions(text):
      assert mutations.removal(text, function) is None


@given(st.text('aé𝄞 \t', max_size=6), st.integers(0, 99))
def test_positions_count_bytes_of_the_line(prefix, number):
  source = f'def f():\n  x = "{prefix}"; y = {number}\n  return y\n'
  text = mutations.Text(source)
  node = text.tree.body[0].body[1].value
  assert text.of(node) == str(number)


TESTS = """import unittest

def helper():
  return 1


@mark(1)
@mark(2)
def test_one():
  assert helper()


class Case(unittest.TestCase):
  def test_two(self):
    pass

class Mixed:
  x = 1
  def test_three(self):
    pass
  def test_four(self):
    pass
"""


def cut(*names):
  text = mutations.Text(TESTS)
  edits, found = trimming.cut(text, names)
  return mutations.apply(TESTS, edits), found


def test_cut_takes_decorators_and_leaves_the_rest():
  text, found = cut('test_one', 'Mixed::test_three')
  assert found == {'test_one', 'Mixed::test_three'}
  assert 'mark' not in text and 'test_one' not in text
  names = [x.name for x in ast.walk(ast.parse(text)) if hasattr(x, 'name')]
  assert {'helper', 'Case', 'test_two', 'Mixed', 'test_four'} <= set(names)
  assert 'test_three' not in names


def test_an_emptied_class_is_still_python():
  text, found = cut('Case::test_two')
  assert found == {'Case::test_two'}
  case = next(
    x for x in ast.parse(text).body if getattr(x, 'name', '') == 'Case'
  )
  assert [type(x) for x in case.body] == [ast.Pass]


def test_what_is_not_there_is_not_found():
  text, found = cut('test_nine', 'Other::test_two')
  assert text == TESTS and not found


@pytest.mark.parametrize(
  ('test', 'name'),
  [
    ('a/test_b.py::test_c', 'test_c'),
    ('a/test_b.py::Case::test_c[0-::x]', 'Case::test_c'),
  ],
)
def test_function_of(test, name):
  assert trimming.function_of(test) == name
