"""Which names of a Python file are its own, and which may be builtins.

A monitor that looks for `exec` must not be put off by a file that binds the name
where it does not count, nor charge one that has a function of that name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import math


def own(tree: ast.Module) -> set[str]:
  """Names that are the file's own wherever it reads them.

  A name that the module binds for sure before it is read, and never lets go of;
  or that is read only in functions that bind it themselves. Any other may be a
  builtin: bound in vain (`if 0: exec = 0`), too late, or deleted again.
  """
  reads = _read_globally(tree)
  bound: dict[str, int] = {}
  for node in tree.body:
    for name in _binds(node):
      bound.setdefault(name, node.lineno)
  gone = {
    x.id
    for x in ast.walk(tree)
    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Del)
  }
  everywhere = {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)}
  everywhere |= {y for x in ast.walk(tree) for y in _binds(x)}
  return {
    x
    for x in everywhere
    if x not in reads or (x in bound and bound[x] < reads[x] and x not in gone)
  }


def _binds(node: ast.AST) -> Iterator[str]:
  """Names that a statement by itself binds."""
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    yield node.name
  targets: list[ast.AST] = list(getattr(node, 'targets', ()))
  if isinstance(node, ast.AnnAssign) and node.value is not None:
    targets = [node.target]
  if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
    targets = [node]
  for target in targets if not isinstance(node, ast.Delete) else ():
    for name in ast.walk(target):
      if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
        yield name.id


def _read_globally(tree: ast.Module) -> dict[str, float]:
  """Name -> line where it may first be read as a global or a builtin.

  What a function reads it reads when it is called: not before the first call
  that the module itself makes below it.
  """
  found: dict[str, float] = {}
  calls: list[int] = []  # of the module itself, by line
  within: list[tuple[str, int]] = []  # read by a function, which stands there

  def walk(node: ast.AST, local: frozenset[str], function: int) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
      if node.id not in local and function:
        within.append((node.id, function))
      elif node.id not in local:
        found[node.id] = min(node.lineno, found.get(node.id, node.lineno))
    elif isinstance(node, ast.Call) and not function:
      calls.append(node.lineno)
    for child in getattr(node, 'decorator_list', ()):
      if not function:
        calls.append(child.lineno)
    if isinstance(node, _SCOPES):
      local = local | _locals(node)
      function = function or getattr(node, 'lineno', 1)
    for child in ast.iter_child_nodes(node):
      walk(child, local, function)

  walk(tree, frozenset(), 0)
  for name, line in within:
    first = min((x for x in calls if x >= line), default=math.inf)
    found[name] = min(first, found.get(name, first))
  return found


_SCOPES = (
  ast.FunctionDef,
  ast.AsyncFunctionDef,
  ast.Lambda,
  ast.ListComp,
  ast.SetComp,
  ast.DictComp,
  ast.GeneratorExp,
)


def _locals(scope: ast.AST) -> set[str]:
  """Names that are local to a function, and thus never a builtin there."""
  found: set[str] = set()
  outer: set[str] = set()
  todo = list(ast.iter_child_nodes(scope))
  while todo:
    node = todo.pop()
    if isinstance(node, ast.arg):
      found.add(node.arg)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      found.add(node.id)
    elif isinstance(node, ast.Global):
      outer |= set(node.names)
    elif isinstance(node, ast.ExceptHandler) and node.name:
      found.add(node.name)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
      found.add(node.name)
    if not isinstance(node, (*_SCOPES, ast.ClassDef)):
      todo += ast.iter_child_nodes(node)
  return found - outer
