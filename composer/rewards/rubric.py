"""A rubric: criteria that are judged one by one, as a config writes them.

One criterion a line, NAME | WEIGHT | QUESTION; lines that begin with '#' say
nothing. The question is answered with yes where the work is good.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_NAME = re.compile(r'[a-z][a-z0-9_-]{0,39}')


@dataclasses.dataclass(frozen=True)
class Criterion:
  """One question; `weight` is its share of the part 'judge', over their sum."""

  name: str
  weight: float
  question: str


@functools.lru_cache(maxsize=32)
def read_rubric(text: str) -> tuple[Criterion, ...]:
  """The criteria of `judge.rubric`; () for an empty one.

  Raises:
    ValueError: a line is none, its weight is not above 0, or a name stands
      twice.
  """
  criteria: dict[str, Criterion] = {}
  for line in text.splitlines():
    line = line.strip()
    if not line or line.startswith('#'):
      continue
    fields = [field.strip() for field in line.split('|', 2)]
    if len(fields) != 3 or not fields[2]:
      raise ValueError(
        f'judge.rubric: {line[:60]!r} is no criterion; write NAME | WEIGHT |'
        ' QUESTION'
      )
    name, weight, question = fields
    if not _NAME.fullmatch(name) or name in criteria:
      raise ValueError(
        f'judge.rubric: the name {name!r} is taken or none; use lower-case'
        ' letters, digits, "-" and "_", another for each criterion'
      )
    criteria[name] = Criterion(name, _weight(name, weight), question)
  return tuple(criteria.values())


def _weight(name: str, text: str) -> float:
  try:
    weight = float(text)
  except ValueError:
    weight = math.nan
  if not (math.isfinite(weight) and weight > 0):
    raise ValueError(
      f'judge.rubric: weight {text!r} of {name}; use a number above 0'
    )
  return weight
