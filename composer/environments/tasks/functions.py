"""The functions that `repair` tasks are made of: folds over a list of numbers.

A function is a point of a product of words, each of which recurs in many
functions: an aggregate, the number it starts from, a map and a filter.

  sum from 2 of squares of items above k      count of even doubles
    def f(xs, k):                               def f(xs):
      t = 2                                       t = 0
      for x in xs:                                for x in xs:
        y = x * x                                   y = x + x
        if x > k:                                   if y % 2 == 0:
          t += y                                      t += 1
      return t                                    return t

Four lines hold one editable token each: the constant, the arithmetic, the
comparison and the step, always in this order, so that a model of two or three
layers can find its way. `SITES` finds it from the text of the line alone, so a
prompt, a file on disk and a scripted agent agree on what an edit replaces.

In the templates, upper-case letters are variables, named per draw.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import itertools
import re
import types

CLASSES = {
  'constant': ('0', '1', '2', '3', '4', '5'),
  'comparison': ('<', '<=', '>', '>=', '==', '!='),
  'arithmetic': ('+', '-', '*', '//', '%'),
  'step': ('+=', '-=', '*=', '//=', '%='),
}

# The first pattern that matches a line names the class of its editable token,
# which is group 1. They match listings too, which have no punctuation.
SITES = (
  ('comparison', re.compile(r'^\s*if .*?(?<=\s)([<>]=?|[=!]=)(?=\s)')),
  ('step', re.compile(r'^\s*\w+ (//=|[-+*%]=)(?=\s)')),
  ('arithmetic', re.compile(r'^\s*\w+ = \w+ (//|[-+*%])(?=\s)')),
  ('constant', re.compile(r'^\s*\w+ = (\d+)\s*$')),
)

AGGREGATES = {  # word -> (template, right token)
  'sum': ('T @ Y', '+='),
  'deficit': ('T @ Y', '-='),
  'product': ('T @ Y', '*='),
  'count': ('T @ 1', '+='),
}
NATURAL_STARTS = {'sum': 0, 'deficit': 0, 'product': 1, 'count': 0}
MAPS = {
  'squares': ('Y = X @ X', '*'),
  'doubles': ('Y = X @ X', '+'),
  'halves': ('Y = X @ 2', '//'),
  'successors': ('Y = X @ 1', '+'),
  'negatives': ('Y = 0 @ X', '-'),
}
# V is the item or the mapped value; a filter with K stands after the noun.
FILTERS = {
  'above': ('if V @ K:', '>'),
  'below': ('if V @ K:', '<'),
  'reaching': ('if V @ K:', '>='),
  'within': ('if V @ K:', '<='),
  'except': ('if V @ K:', '!='),
  'equalling': ('if V @ K:', '=='),
  'even': ('if V % 2 @ 0:', '=='),
}

# 'l' and 'o' look like digits.
NAMES = tuple('abcdefghijkmnpqrstuvwxyz')
ROLES = ('F', 'XS', 'K', 'T', 'X', 'Y')


@dataclasses.dataclass(frozen=True)
class Function:
  """One function of the family.

  `on_value` filters the mapped value ('squares above k') rather than the item
  ('squares of items above k'); a count needs it, as it looks at nothing else.
  """

  aggregate: str
  start: int
  mapping: str
  filter: str
  on_value: bool

  @property
  def id(self) -> str:
    place = 'values' if self.on_value else 'items'
    return f'{self.aggregate}{self.start}-{self.mapping}-{self.filter}-{place}'


@dataclasses.dataclass(frozen=True)
class Site:
  """An editable token: its line (counted from 1), class and right token."""

  line: int
  kind: str
  right: str


def uses_bound(function: Function) -> bool:
  """Whether the function takes the bound k beside its list."""
  return 'K' in FILTERS[function.filter][0]


def description(function: Function) -> str:
  """What the function is meant to compute, in words; K is the bound."""
  head = function.aggregate
  if NATURAL_STARTS.get(function.aggregate) != function.start:
    head += f' from {function.start}'
  before, after = (function.filter, '')
  if uses_bound(function):
    before, after = '', f'{function.filter} K'
  noun = function.mapping if function.on_value else 'items'
  filtered = ' '.join(word for word in (before, noun, after) if word)
  if function.on_value:
    return f'{head} of {filtered}'
  return f'{head} of {function.mapping} of {filtered}'


@functools.cache
def _rows(function: Function) -> tuple[tuple[int, str, str | None], ...]:
  """(indent, template, right token or None) of every line, in order."""
  test, test_right = FILTERS[function.filter]
  value, value_right = MAPS[function.mapping]
  fold, fold_right = AGGREGATES[function.aggregate]
  parameters = 'XS, K' if uses_bound(function) else 'XS'
  return (
    (0, f'def F({parameters}):', None),
    (1, 'T = @', str(function.start)),
    (1, 'for X in XS:', None),
    (2, value, value_right),
    (2, test.replace('V', 'Y' if function.on_value else 'X'), test_right),
    (3, fold, fold_right),
    (1, 'return T', None),
  )


@functools.cache
def sites(function: Function) -> tuple[Site, ...]:
  """The editable tokens of a function, by line."""
  found = []
  for number, (_, template, right) in enumerate(_rows(function), 1):
    if right is not None:
      kind, _, _ = find_site(template.replace('@', right).rstrip(':'))
      found.append(Site(number, kind, right))
  return tuple(found)


def source(
  function: Function,
  edits: Mapping[int, str] = types.MappingProxyType({}),
  names: Mapping[str, str] | None = None,
) -> str:
  """Python text of `function` with the tokens of `edits` (line -> token)."""
  text = []
  for number, (indent, template, right) in enumerate(_rows(function), 1):
    line = rename(template, names) if names else template
    if right is not None:
      line = line.replace('@', edits.get(number, right))
    text.append('  ' * indent + line)
  return '\n'.join(text) + '\n'


def rename(template: str, names: Mapping[str, str]) -> str:
  """`template` with its upper-case variables named."""
  return re.sub(r'\b[A-Z]+\b', lambda match: names[match[0]], template)


def find_site(line: str) -> tuple[str, int, int] | None:
  """(class, start, end) of the editable token of a line, or None."""
  for kind, pattern in SITES:
    match = pattern.match(line)
    if match:
      return kind, match.start(1), match.end(1)
  return None


def listing_lines(text: str) -> tuple[str, ...]:
  """Lines of Python as a prompt shows them: words and operators, one space.

  Brackets, commas and colons are left out, as they cost tokens and say nothing.
  """
  lines = text.splitlines()
  return tuple(' '.join(re.findall(r'\w+|[^\s\w(),:]+', x)) for x in lines)


def candidate_edits(lines: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
  """Every edit (line, token) that changes one of `lines` within its class."""
  edits = []
  for number, line in enumerate(lines, 1):
    site = find_site(line)
    if site:
      kind, start, end = site
      current = line[start:end]
      edits += [(number, x) for x in CLASSES[kind] if x != current]
  return tuple(edits)


def mutants(function: Function) -> tuple[tuple[int, str], ...]:
  """Every way (line, wrong token) to break one token within its class."""
  lines = listing_lines(source(function))
  return candidate_edits(lines)


def family() -> tuple[Function, ...]:
  """Every function there is, in a fixed order."""
  found = []
  for words in itertools.product(AGGREGATES, MAPS, FILTERS, (False, True)):
    aggregate, mapping, keep, on_value = words
    if aggregate == 'count' and not on_value:
      continue
    starts = range(1 if aggregate == 'product' else 0, 6)
    found += [Function(aggregate, x, mapping, keep, on_value) for x in starts]
  return tuple(found)
