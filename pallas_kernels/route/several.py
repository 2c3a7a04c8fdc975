"""A writer of lanes that writes each operation down for several rows.

What a warp waits for in one row, memory or another lane, it then waits for in all
of them at once. The methods are those of the writer that it writes with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

from pallas_kernels.warp import Value

_EACH = frozenset(
  (
    *('binary', 'compare', 'where', 'negate', 'value', 'load'),
    *('bits', 'float', 'count_bits', 'lowest_bit', 'exp'),
    *('ballot', 'reduce', 'shuffle', 'shuffle_up', 'shuffle_xor'),
  )
)


class Several:
  """`Value`s of it hold one of the writer's for each row.

  What is the same one for all rows is written down once, and a branch on it is
  one for all.
  """

  def __init__(self, w: Any, count: int):
    self.w, self.count = w, count
    self.active = range(count)
    self.lane = self.same(w.lane)

  def __getattr__(self, name: str) -> Callable[..., Value]:
    if name not in _EACH:
      raise AttributeError(f'{name} is not for several rows')
    return functools.partial(self._each, getattr(self.w, name))

  def of(self, values: Sequence[Value]) -> Value:
    return Value(self, values[0].kind, tuple(values))

  def same(self, value: Value) -> Value:
    return self.of([value] * self.count)

  def every(self, a: Value) -> Value:
    """Whether it holds of all rows."""
    return self.same(functools.reduce(lambda a, b: a & b, a.raw))

  def when(
    self,
    condition: Value,
    then: Callable[..., Any],
    carry: Sequence[Value] = (),
  ) -> list[Value]:
    """Of rows that differ in the condition, only what is stored is apart."""
    one = self._parts(condition)
    if _one(one):
      flat = [part for value in carry for part in self._parts(value)]
      return self._joined(
        self.w.when(
          one[0],
          lambda *flat: [
            part
            for value in then(*self._joined(flat)) or ()
            for part in self._parts(value)
          ],
          flat,
        )
      )
    assert not carry, 'rows differ in the condition'
    for i, own in enumerate(one):
      self.active = (i,)
      self.w.when(own, then)
    self.active = range(self.count)
    return []

  def store(self, ref: Any, index: Any, value: Any) -> None:
    index, value = self._parts(index), self._parts(value)
    for i in self.active:
      self.w.store(ref, index[i], value[i])

  def _parts(self, value: Any) -> tuple[Any, ...]:
    if isinstance(value, Value) and value.w is self:
      return value.raw
    return (value,) * self.count

  def _joined(self, flat: Sequence[Value]) -> list[Value]:
    starts = range(0, len(flat), self.count)
    return [self.of(flat[i : i + self.count]) for i in starts]

  def _each(self, operation: Callable[..., Value], *operands: Any) -> Value:
    parts = [self._parts(one) for one in operands]
    if all(map(_one, parts)):
      return self.same(operation(*(one[0] for one in parts)))
    return self.of([operation(*row) for row in zip(*parts, strict=True)])


def _one(parts: Sequence[Any]) -> bool:
  return all(part is parts[0] for part in parts)
