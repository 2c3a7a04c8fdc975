"""Lists of work: tiles of queries, and the blocks of keys that each sees.

An item is a row of int32:
  0 first row of queries        4 sequence, whose pages hold the keys
  1 head of queries             5 first block of keys
  2 first row of low and high   6 first block that some row sees in part
  3 head of keys                7 end of blocks
  8 splits of the blocks; where an item is one split, the number of its sums
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

COLUMNS = 9


def blocks(
  low: jax.Array, high: jax.Array, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """First block, first with a mask, and end, of tiles of rows.

  Args:
    low, high: int32 [tiles, rows], first and last key that a row sees.
    block: tokens of a block.

  Returns:
    Three int32 [tiles]. Blocks before the second are seen by all rows whole.
    There is at least one block, also where no row sees anything.
  """
  sees = high >= low
  first = jnp.min(jnp.where(sees, low // block, 2**30), axis=1)
  end = jnp.max(jnp.where(sees, high // block + 1, 0), axis=1)
  first = jnp.minimum(first, end)
  end = jnp.maximum(end, first + 1)
  # Rows that see nothing come out as 0 only where they are masked.
  whole = jnp.min((high + 1) // block, axis=1)
  starts_alike = jnp.max(low, axis=1) <= first * block
  middle = jnp.where(starts_alike, jnp.clip(whole, first, end), first)
  return first, middle, end


def splits(
  low: jax.Array, high: jax.Array, block: int, split: int
) -> jax.Array:
  """Splits of each tile, int32 [tiles], at least one.

  They are counted from the block in which the rows that see the most begin to.
  Rows of a later segment begin in the last split: what a tile holds of such a
  segment is shorter than a split, so that all of it lies in its first one.

  Args:
    low, high, block: as `blocks` takes them.
    split: blocks of a split; 0: all of them.
  """
  if not split:
    return jnp.ones(low.shape[:1], jnp.int32)
  first = jnp.where(high >= low, low // block, 2**30)
  start = jnp.min(first, axis=1)
  longest = (first == start[:, None]) & (high >= low)
  end = jnp.max(jnp.where(longest, high // block + 1, 0), axis=1)
  return jnp.maximum(-((start - end) // split), 1)


def packed_items(
  starts: jax.Array,
  ends: jax.Array,
  rows: int,
  block: int,
  heads: int,
  kv_heads: int,
  split: int = 0,
) -> jax.Array:
  """Items of packed attention, int32 [tiles * heads, 9].

  Args:
    starts, ends: int32 [T], of `attention.bounds`, T a multiple of `rows`.
    rows: of a tile.
    block: tokens of a block of keys.
    heads, kv_heads: of queries, of keys.
    split: blocks of a split; see `splits`.
  """
  tiles = starts.shape[0] // rows
  bounds = starts.reshape(tiles, rows), ends.reshape(tiles, rows), block
  cut = *blocks(*bounds), splits(*bounds, split)
  spread = lambda x: jnp.broadcast_to(x, (tiles, heads))  # noqa: E731
  row = (jnp.arange(tiles, dtype=jnp.int32) * rows)[:, None]
  head = jnp.arange(heads, dtype=jnp.int32)[None, :]
  columns = (
    row,
    head,
    row,
    head // (heads // kv_heads),
    jnp.zeros_like(head),
    *(x[:, None] for x in cut),
  )
  return jnp.stack([spread(x) for x in columns], axis=-1).reshape(-1, COLUMNS)


def key_items(
  starts: jax.Array, ends: jax.Array, rows: int, block: int, kv_heads: int
) -> jax.Array:
  """Items of tiles of keys and the blocks of queries that see them.

  Args:
    starts, ends: int32 [T], of `attention.bounds`, T a multiple of `rows`.
    rows: of a tile of keys.
    block: rows of a block of queries.
    kv_heads: of keys.

  Returns:
    int32 [tiles * kv_heads, 6]: first row, head, first block, end of blocks,
    and the first and the end of those in which every query sees every key.
  """
  t = starts.shape[0]
  row = jnp.arange(t, dtype=jnp.int32)
  begins = jnp.where(starts == row, row, t)
  # The first row of the next segment, less one.
  following = jax.lax.cummin(jnp.append(begins[1:], t), reverse=True)
  final = jnp.where(ends >= 0, following - 1, -1)
  last = final.reshape(-1, rows)
  tile = jnp.arange(t // rows, dtype=jnp.int32) * rows
  first = tile // block
  end = jnp.maximum(jnp.max(last, axis=1) // block + 1, first)
  middle = jnp.minimum(-(-(tile + rows - 1) // block), end)
  one = (starts.reshape(-1, rows)[:, -1] <= tile) & (last[:, 0] >= 0)
  after = jnp.where(one, (last[:, 0] + 1) // block, middle)
  after = jnp.clip(after, middle, end)
  head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :]
  columns = (tile, head, first, end, middle, after)
  spread = [
    jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (t // rows, kv_heads))
    for x in columns
  ]
  return jnp.stack(spread, axis=-1).reshape(-1, len(columns))


def longest_first(items: jax.Array, sms: int) -> jax.Array:
  """Items by falling number of blocks, where a multiprocessor takes several.

  Each takes one from a row of them, forth and then back, so that all end at
  about the same time.
  """
  if items.shape[0] <= sms:
    return items
  first, end = (5, 7) if items.shape[1] == COLUMNS else (2, 3)
  order = jnp.argsort(items[:, first] - items[:, end], stable=True)
  return items[order]
