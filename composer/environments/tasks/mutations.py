"""Ways to break a function of somebody's code, as edits of its text.

A mutation replaces a span of the source, so that all else, comments and layout
included, stays as it was written. Operators are functions of a syntax node that
give (name, node or span, new text); `mutations` finds every use of them in a
function, `removal` takes its body away.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
import dataclasses

from composer.environments.tasks import sources

# Written of a function whose body is to be written anew.
STUB = 'raise NotImplementedError'
SHORT = 3  # statements of a body below which there is nothing to write


@dataclasses.dataclass(frozen=True)
class Edit:
  """Replaces characters [start, end) of a text."""

  start: int
  end: int
  text: str


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One way to break a function.

  Attributes:
    operator: name of the operator.
    line: of the change, counted from 1.
    edit: of the module's text.
    before, after: the span, for people.
  """

  operator: str
  line: int
  edit: Edit
  before: str
  after: str


@dataclasses.dataclass(frozen=True)
class Function:
  """A function of a module.

  `name` is qualified; [first, last] are the lines of its body, a docstring left
  out; `lines` those on which a statement of it starts.
  """

  name: str
  node: ast.FunctionDef
  first: int
  last: int
  lines: frozenset[int]


class Text:
  """A module's text, and where the positions of its syntax tree are in it."""

  def __init__(self, text: str):
    self.text = text
    self.tree = sources.parse(text)
    self._starts = [0]
    # As the parser counts lines: form feeds and separators end none.
    for line in text.split('\n'):
      self._starts.append(self._starts[-1] + len(line) + 1)

  def at(self, line: int, column: int) -> int:
    """Index of a position; `column` counts bytes of UTF-8."""
    start = self._starts[line - 1]
    end = min(self._starts[line], len(self.text))
    piece = self.text[start:end]
    if piece.isascii():
      return start + column
    return start + len(piece.encode()[:column].decode())

  def span(self, node: ast.AST) -> tuple[int, int]:
    return (
      self.at(node.lineno, node.col_offset),
      self.at(node.end_lineno, node.end_col_offset),
    )

  def line_start(self, line: int) -> int:
    return self._starts[line - 1]

  def of(self, node: ast.AST) -> str:
    start, end = self.span(node)
    return self.text[start:end]


def apply(text: str, edits: list[Edit] | tuple[Edit, ...]) -> str:
  """The text with all of the edits, which do not overlap."""
  for edit in sorted(edits, key=lambda x: x.start, reverse=True):
    text = text[: edit.start] + edit.text + text[edit.end :]
  return text


def functions(text: Text) -> list[Function]:
  """Functions and methods, without those inside of functions."""
  found = []

  def walk(body: list[ast.stmt], prefix: str) -> None:
    for node in body:
      if isinstance(node, ast.ClassDef):
        walk(node.body, f'{prefix}{node.name}.')
      elif isinstance(node, ast.FunctionDef):
        rest = node.body[_has_docstring(node) :]
        if rest and rest[0].lineno > node.lineno:
          lines = frozenset(
            x.lineno for y in rest for x in ast.walk(y) if hasattr(x, 'lineno')
          )
          found.append(
            Function(
              prefix + node.name,
              node,
              rest[0].lineno,
              node.end_lineno or node.lineno,
              lines,
            )
          )

  walk(text.tree.body, '')
  return found


def _has_docstring(node: ast.FunctionDef) -> bool:
  return ast.get_docstring(node, clean=False) is not None


def removal(text: Text, function: Function) -> Mutation | None:
  """The function without its body; None without a docstring, or if short."""
  node = function.node
  rest = node.body[_has_docstring(node) :]
  statements = sum(isinstance(x, ast.stmt) for y in rest for x in ast.walk(y))
  if not _has_docstring(node) or statements < SHORT:
    return None
  start, _ = text.span(rest[0])
  _, end = text.span(rest[-1])
  edit = Edit(start, end, STUB)
  return Mutation(
    'body_removed', rest[0].lineno, edit, text.text[start:end], STUB
  )


def mutations(text: Text, function: Function) -> list[Mutation]:
  """Mutations of the function's body, by place; rarely one does not parse."""
  found = []
  for statement in function.node.body[_has_docstring(function.node) :]:
    for node in ast.walk(statement):
      for name, operator in OPERATORS.items():
        for start, end, new in operator(text, node):
          old = text.text[start:end]
          if old != new:
            line = text.text.count('\n', 0, start) + 1
            found.append(Mutation(name, line, Edit(start, end, new), old, new))
  kept: dict[tuple[int, int, str], Mutation] = {}
  for mutation in sorted(found, key=lambda x: (x.edit.start, x.operator)):
    edit = mutation.edit
    kept.setdefault((edit.start, edit.end, edit.text), mutation)
  return list(kept.values())


def parses(text: str, mutation: Mutation) -> bool:
  """Whether the mutated text is Python; a span in an f-string may not be."""
  try:
    sources.parse(apply(text, (mutation.edit,)))
  except SyntaxError:
    return False
  return True


# --- operators ---------------------------------------------------------------

Spans = Iterator[tuple[int, int, str]]

COMPARISONS: Mapping[type, tuple[str, tuple[str, ...]]] = {
  ast.Lt: ('<', ('<=', '>')),
  ast.LtE: ('<=', ('<', '>=')),
  ast.Gt: ('>', ('>=', '<')),
  ast.GtE: ('>=', ('>', '<=')),
  ast.Eq: ('==', ('!=',)),
  ast.NotEq: ('!=', ('==',)),
  ast.Is: ('is', ('is not',)),
  ast.IsNot: ('is not', ('is',)),
  ast.In: ('in', ('not in',)),
  ast.NotIn: ('not in', ('in',)),
}
ARITHMETIC: Mapping[type, tuple[str, str]] = {
  ast.Add: ('+', '-'),
  ast.Sub: ('-', '+'),
  ast.Mult: ('*', '+'),
  ast.Div: ('/', '*'),
  ast.FloorDiv: ('//', '*'),
  ast.Mod: ('%', '//'),
  ast.BitAnd: ('&', '|'),
  ast.BitOr: ('|', '&'),
  ast.LShift: ('<<', '>>'),
  ast.RShift: ('>>', '<<'),
}


def _between(text: Text, left: ast.AST, right: ast.AST, old: str) -> int:
  """Where operator `old` stands between two nodes, or -1 (comments there)."""
  start, end = text.span(left)[1], text.span(right)[0]
  between = text.text[start:end]
  at = between.find(old)
  return start + at if at >= 0 and '#' not in between else -1


def _swapped_comparison(text: Text, node: ast.AST) -> Spans:
  if isinstance(node, ast.Compare) and len(node.ops) == 1:
    old, others = COMPARISONS[type(node.ops[0])]
    at = _between(text, node.left, node.comparators[0], old)
    for new in others if at >= 0 else ():
      yield at, at + len(old), new


def _wrong_arithmetic(text: Text, node: ast.AST) -> Spans:
  if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
    if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
      return  # a text is formatted
    old, new = ARITHMETIC[type(node.op)]
    at = _between(text, node.left, node.right, old)
    if at >= 0:
      yield at, at + len(old), new
  elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
    old, new = ARITHMETIC[type(node.op)]
    at = _between(text, node.target, node.value, old + '=')
    if at >= 0:
      yield at, at + len(old) + 1, new + '='


def _off_by_one(text: Text, node: ast.AST) -> Spans:
  """Bounds of slices, subscripts and ranges move by one."""
  bounds: list[ast.expr | None] = []
  if isinstance(node, ast.Subscript):
    part = node.slice
    bounds = [part.lower, part.upper] if isinstance(part, ast.Slice) else [part]
  elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    if node.func.id in ('range', 'islice'):
      bounds = list(node.args[-2:])
  for bound in bounds:
    number = isinstance(bound, ast.Constant) and type(bound.value) is int
    if number or isinstance(bound, ast.Name | ast.BinOp | ast.Call):
      start, end = text.span(bound)
      old = text.text[start:end]
      yield start, end, str(bound.value + 1) if number else f'{old} + 1'


def _wrong_constant(text: Text, node: ast.AST) -> Spans:
  if not isinstance(node, ast.Constant):
    return
  start, end = text.span(node)
  if node.value is True or node.value is False:
    yield start, end, str(not node.value)
  elif type(node.value) is int and text.text[start:end].isdigit():
    yield start, end, str(node.value + 1)
    if node.value:
      yield start, end, '0'


def _negated_condition(text: Text, node: ast.AST) -> Spans:
  if isinstance(node, ast.If | ast.While | ast.IfExp):
    test = node.test
    start, end = text.span(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
      yield start, end, text.of(test.operand)
    elif isinstance(test, ast.Name | ast.Call | ast.Attribute):
      yield start, end, f'not {text.text[start:end]}'
    elif isinstance(test, ast.BoolOp) and '\n' not in text.text[start:end]:
      yield start, end, f'not ({text.text[start:end]})'


def _swapped_and_or(text: Text, node: ast.AST) -> Spans:
  if isinstance(node, ast.BoolOp) and len(node.values) == 2:
    old, new = ('and', 'or') if isinstance(node.op, ast.And) else ('or', 'and')
    at = _between(text, node.values[0], node.values[1], old)
    if at >= 0:
      yield at, at + len(old), new


def _dropped_branch(text: Text, node: ast.AST) -> Spans:
  """A branch that is never taken, or whose work is not done."""
  if isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
    start, end = text.span(node.test)
    yield start, end, 'False'
    if node.orelse and not isinstance(node.orelse[0], ast.If):
      yield _replaced(text, node.orelse, 'pass')


def _dropped_statement(text: Text, node: ast.AST) -> Spans:
  plain = isinstance(node, ast.AugAssign | ast.Delete)
  call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
  if plain or call or isinstance(node, ast.Continue | ast.Break):
    yield _replaced(text, [node], 'pass')


def _wrong_return(text: Text, node: ast.AST) -> Spans:
  if isinstance(node, ast.Return) and node.value is not None:
    value = node.value
    if isinstance(value, ast.Constant) and value.value is None:
      return
    start, end = text.span(value)
    if isinstance(value, ast.Tuple) and text.text[start] != '(':
      return
    yield start, end, 'None'


def _swapped_arguments(text: Text, node: ast.AST) -> Spans:
  if isinstance(node, ast.Call) and len(node.args) >= 2:
    first, second = node.args[:2]
    if not any(isinstance(x, ast.Starred) for x in (first, second)):
      start, middle = text.span(first)
      again, end = text.span(second)
      one, between, two = (
        text.text[start:middle],
        text.text[middle:again],
        text.text[again:end],
      )
      yield start, end, f'{two}{between}{one}'


def _replaced(text: Text, statements: list, new: str) -> tuple[int, int, str]:
  return text.span(statements[0])[0], text.span(statements[-1])[1], new


OPERATORS: Mapping[str, Callable[[Text, ast.AST], Spans]] = {
  'swapped_comparison': _swapped_comparison,
  'wrong_arithmetic': _wrong_arithmetic,
  'off_by_one': _off_by_one,
  'wrong_constant': _wrong_constant,
  'negated_condition': _negated_condition,
  'swapped_and_or': _swapped_and_or,
  'dropped_branch': _dropped_branch,
  'dropped_statement': _dropped_statement,
  'wrong_return': _wrong_return,
  'swapped_arguments': _swapped_arguments,
}
