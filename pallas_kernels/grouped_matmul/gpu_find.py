"""GPU: a warp finds which rows a tile has, from the sizes of all groups.

A plan made before (`groups.row_tiles`) is three launches more, of a tenth of the
time that eight rows take.
"""

from __future__ import annotations

import functools

from pallas_kernels import warp


def find(w, sizes, tile, rows: int, align: int = 1):
  """The group of a tile, the first of its rows in it, and the end of the group.

  Tiles are those of `groups.row_tiles`: of `rows` rows, starting at multiples of
  `align`. Past the last one it is 0 three times. A lane counts the rows and the
  tiles of some groups that follow each other; the one that has the tile tells
  the others.
  """
  each = -(-sizes.size // warp.LANES)
  own = w.lane * each
  held = []
  for i in range(each):
    inside = own + i < sizes.size
    size = w.load(sizes, (own + i).minimum(w.value(sizes.size - 1)))
    held.append(w.where(inside, size, 0))
  rows_before = _before(w, held)
  row, bases, counts = rows_before, [], []
  for size in held:
    base, more = row, size
    if align > 1:
      base = row & (warp.ALL - (align - 1))
      more = w.where(size.equals(0), 0, row + size - base)
    bases.append(base)
    counts.append((more + (rows - 1)) // rows)
    row = row + size
  row, start = rows_before, _before(w, counts)
  found, here = [w.value(0)] * 3, w.value(False, 'pred')
  for i, (size, base, count) in enumerate(
    zip(held, bases, counts, strict=True)
  ):
    hit = (tile >= start) & (tile < start + count)
    first = base + (tile - start) * rows
    if align > 1:
      first = first.maximum(row)
    values = own + i, first, row + size
    found = [w.where(hit, *both) for both in zip(values, found, strict=True)]
    here, row, start = here | hit, row + size, start + count
  # The last lane where none has it: nothing was found there.
  lane = w.lowest_bit(w.ballot(here) | (1 << (warp.LANES - 1)))
  return [w.shuffle(one, lane) for one in found]


def _before(w, numbers):
  """What the numbers of all lanes before this one add up to."""
  own = functools.reduce(lambda a, b: a + b, numbers)
  total, by = own, 1
  while by < warp.LANES:
    total += w.where(w.lane >= by, w.shuffle_up(total, by), 0)
    by *= 2
  return total - own
