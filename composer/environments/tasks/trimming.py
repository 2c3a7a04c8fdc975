"""Cuts test functions out of a file, as edits of its text."""

from __future__ import annotations

import ast
from collections.abc import Collection

from composer.environments.tasks.mutations import Edit
from composer.environments.tasks.mutations import Text


def function_of(test: str) -> str:
  """Qualified name of the function of a test id, without its parameters.

  'tests/test_a.py::Case::test_b[0-x]' gives 'Case::test_b'.
  """
  return test.partition('::')[2].partition('[')[0]


def cut(
  text: Text, names: Collection[str]
) -> tuple[tuple[Edit, ...], set[str]]:
  """(edits that cut the functions out, names that were found).

  A function goes with its decorators. A class or a file that would be empty
  keeps a `pass`. Names that no `def` of the file has (inherited, or made by a
  call) are not found.
  """
  edits: list[Edit] = []
  found: set[str] = set()

  def walk(body: list[ast.stmt], prefix: str) -> None:
    gone = [x for x in body if _name(x, prefix) in names]
    found.update(_name(x, prefix) for x in gone)
    for node in gone:
      last = len(gone) == len(body) and node is gone[-1]
      edits.append(_without(text, node, 'pass' if last else ''))
    for node in body:
      if isinstance(node, ast.ClassDef):
        walk(node.body, f'{prefix}{node.name}::')

  walk(text.tree.body, '')
  return tuple(sorted(edits, key=lambda x: x.start)), found


def _name(node: ast.stmt, prefix: str) -> str:
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
    return prefix + node.name
  return ''


def _without(text: Text, node: ast.stmt, instead: str) -> Edit:
  assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
  first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
  start = text.line_start(first)
  end = text.line_start((node.end_lineno or first) + 1)
  new = f'{" " * node.col_offset}{instead}\n' if instead else ''
  return Edit(start, min(end, len(text.text)), new)
