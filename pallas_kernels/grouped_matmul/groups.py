"""Which tile of rows belongs to which group, computed once for each call."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import checks

ALIGN = 8  # of tiles that are planned ahead


class Planned(NamedTuple):
  """Group sizes, and `row_tiles` of them that are at hand, aligned to `ALIGN`."""

  sizes: jax.Array  # int [E]
  tables: dict[int, tuple[jax.Array, jax.Array]]  # by the rows of a tile


def sizes_of(group_sizes: jax.Array | Planned) -> jax.Array:
  if isinstance(group_sizes, Planned):
    return group_sizes.sizes
  return group_sizes


def check_sizes(group_sizes: jax.Array, groups: int, rows: int) -> None:
  """ValueError for sizes that are not [groups], or known not to sum to rows."""
  if group_sizes.shape != (groups,):
    raise ValueError(
      f'group_sizes {group_sizes.shape} must have one size for each of the'
      f' {groups} matrices'
    )
  checks.integers(group_sizes=group_sizes)
  sizes = checks.known(group_sizes)
  if sizes is not None and ((sizes < 0).any() or sizes.sum() != rows):
    least = sizes.min() if sizes.size else 'none'
    raise ValueError(
      f'group sizes sum to {sizes.sum()} (least {least}), and x has {rows} rows;'
      ' every row must belong to one group'
    )


def bounds(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
  """First row and end of each group: two int32 [E].

  A comparison with all groups instead of a scan: it is one launch on a GPU.
  """
  sizes = group_sizes.astype(jnp.int32)
  index = jnp.arange(sizes.shape[0], dtype=jnp.int32)
  until = index[None, :] <= index[:, None]
  ends = jnp.sum(jnp.where(until, sizes[None, :], 0), axis=1, dtype=jnp.int32)
  return ends - sizes, ends


def most_tiles(rows: int, groups: int, tile: int, align: int = 1) -> int:
  """The largest number of tiles that any group sizes can need.

  A group of s rows has at most (s + align - 1 + tile - 1) / tile of them, and
  no more than it has rows (of tiles larger than the alignment).
  """
  slack = groups * (tile - 1 + align - 1)
  return max(1, min(rows, (rows + slack) // tile))


def row_tiles(
  group_sizes: jax.Array | Planned,
  rows: int,
  tile: int,
  align: int = 1,
  empty: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Tiles of `tile` rows that cover each group, in the order of the rows.

  Args:
    group_sizes: int [E], rows of each group.
    rows: M, their sum.
    tile: rows of a tile, a multiple of `align`.
    align: tiles start at multiples of it, at or before their group's start.
    empty: whether an empty group has a tile too, of no rows.

  Returns:
    int32 [T, 4]: group, first row of the tile, first row and end of its group.
    Tiles from the count on mean nothing.
    int32 [E], whose last is the count of tiles: `count_of` it in a kernel. To cut
    it out would be another launch on a GPU.
  """
  if isinstance(group_sizes, Planned):
    if align == ALIGN and not empty and tile in group_sizes.tables:
      return group_sizes.tables[tile]
    group_sizes = group_sizes.sizes
  starts, ends = bounds(group_sizes)
  groups = starts.shape[0]
  base = starts // align * align
  tiles = (ends - base + (tile - 1)) // tile
  tiles = jnp.where(ends > starts, tiles, 1 if empty else 0)
  _, last = bounds(tiles)
  most = most_tiles(rows, groups, tile, align) + (groups if empty else 0)
  number = jnp.arange(most, dtype=jnp.int32)
  group = jnp.sum(number[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
  group = jnp.minimum(group, groups - 1)
  first = base[group] + (number - (last - tiles)[group]) * tile
  table = jnp.stack([group, first, starts[group], ends[group]], axis=1)
  return table, last


def count_of(tiles):
  """The count of tiles, of the second result of `row_tiles` in memory."""
  return tiles[tiles.shape[0] - 1]
