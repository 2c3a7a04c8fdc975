"""Mosaic GPU: the kernel of attention, with keys looked up in a table of pages.

The rows of an item are all queries of a sequence times all heads of queries
that share a head of keys, so that a page is read once for all of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.attention import gpu
from pallas_kernels.attention import gpu_kernel
from pallas_kernels.attention import gpu_splits
from pallas_kernels.attention import work as work_lib

SPLIT = 1024  # tokens; a context of 32k then is work for a quarter of an H100
MOST_SUMS = 2**28  # bytes that sums of splits may take while a kernel runs


def unsupported(q, k_pages, v_pages, width: int) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  return gpu.unsupported(q, k_pages, v_pages, k_pages.shape[1], width)


def forward(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  width: int,
  scale: float,
  split: int | None = 0,
  tiles: gpu.Tiles | None = None,
  apart: bool | None = None,
  interpret: bool = False,
) -> jax.Array:
  """[N, Q, H, W]; the arguments are those of the package.

  Args:
    split: see the package.
    tiles: as in `attention`.
    apart: whether multiprocessors share the splits of a sequence; None: where
      there are not enough sequences for all. It changes no bit.
  """
  n, queries, h, key = q.shape
  block, g = k_pages.shape[1:3]
  shared, share = v_pages is None, h // g
  rows = queries * share
  unit = gpu.ROWS * (1 if shared or rows <= gpu.ROWS else 2)
  if tiles is not None:
    unit = gpu.ROWS * (1 if shared else tiles.consumers)
  high = -(-rows // unit) * unit
  idle = split != 0 and few(
    n * g * (high // unit),
    table.shape[1],
    (SPLIT if split is None else split) // block,
    (unit, width),
  )
  if split is None:
    split = SPLIT if idle and SPLIT % block == 0 else 0
  work = gpu.plan(
    *(key, width, block, scale, shared, True, tiles, interpret),
    split=split,
    long=table.shape[1] * block > split,
    apart=idle if apart is None else apart,
    log=False,
    few=rows <= gpu.ROWS,
  )
  pad = high - rows
  q = q.reshape(n, queries, g, share, key)
  q = jnp.swapaxes(q, 1, 2).reshape(n, g, rows, key)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
  last = jnp.repeat(positions.astype(jnp.int32), share, axis=1)
  last = jnp.pad(last, ((0, 0), (0, pad)), constant_values=-1)
  items = paged_items(last, g, unit, block, work.split)
  arguments = (
    table.astype(jnp.int32),
    jnp.zeros((n * high,), jnp.int32),
    last.reshape(-1),
    q.reshape(n * g * high, 1, key),
    k_pages,
    v_pages,
    0,
  )
  if work.apart:
    out = _by_splits(work, items, table.shape[1], rows, arguments)
    out = out.reshape(n, -1, g, *out.shape[1:])  # [N, tiles, G, rows, W]
    out = jnp.swapaxes(out, 1, 2).reshape(n, g, -1, width)
  else:
    items = work_lib.longest_first(items, work.sms)
    out = gpu_kernel.run(work, items, *arguments)[0].reshape(n, g, high, width)
  out = out[:, :, :rows].reshape(n, g, queries, share, width)
  return jnp.swapaxes(out, 1, 2).reshape(n, queries, h, width)


def in_place(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  first: int,
  width: int,
  scale: float,
  interpret: bool = False,
) -> jax.Array | None:
  """[R, H, W]; see the package. None where `forward` is to be used.

  A tile is loaded and stored token by token, the heads of each that share a head
  of keys: 8 at least, which is what the layout of shared memory has together.
  """
  h, key = q.shape[1:]
  block, g = k_pages.shape[1:3]
  n, share = len(table), h // g
  rows = (len(q) - first) // n * share
  unit = gpu.ROWS * (1 if rows <= gpu.ROWS else 2)
  if v_pages is None or share not in (8, 16, 32, 64) or rows % unit:
    return None
  work = gpu.plan(
    *(key, width, block, scale, False, True, None, interpret),
    log=False,
    few=rows <= gpu.ROWS,
  )
  last = jnp.repeat(positions.astype(jnp.int32).reshape(n, -1), share, axis=1)
  items = paged_items(last, g, unit, block, 0)
  items = items.at[:, 0].set(items[:, 2] + first * share)
  items = items.at[:, 1].set(items[:, 3])
  return gpu_kernel.run(
    dataclasses.replace(work, heads=share),
    work_lib.longest_first(items, work.sms),
    table.astype(jnp.int32),
    jnp.zeros((last.size,), jnp.int32),
    last.reshape(-1),
    *(q, k_pages, v_pages, 0),
  )[0]


def _by_splits(work: gpu.Work, items, pages: int, rows: int, arguments):
  """[I, rows of a tile, W] of items whose splits are summed apart, then merged."""
  splits = -(-pages // work.split)
  sums, weights = gpu_kernel.run(
    work, apart_items(items, splits, work.split), *arguments
  )
  return gpu_splits.merge(
    sums,
    weights,
    items[:, 8],
    splits=splits,
    rows=min(rows, sums.shape[1]),
    dtype=arguments[3].dtype,
    sms=work.sms,
    interpret=work.interpret,
  )


def leave_idle(items: int) -> bool:
  """Whether there are not items for most of the multiprocessors."""
  return 4 * items < 3 * mosaic.cores()


def few(items: int, pages: int, split: int, sums: tuple[int, int]) -> bool:
  """Whether items of so many pages leave multiprocessors idle.

  Where there are items for most of them, sums that are written and read again
  cost more than is won.

  Args:
    items: of all splits of a sequence.
    pages: that a sequence can have.
    split: pages of a split.
    sums: shape of the sums of an item.
  """
  rows, width = sums
  size = 4 * items * -(-pages // max(split, 1)) * rows * width
  return (
    pages > split > 0
    and width % gpu_splits.LANES == 0
    and leave_idle(items)
    and size <= MOST_SUMS
  )


def paged_items(
  last: jax.Array, kv_heads: int, rows: int, block: int, split: int
) -> jax.Array:
  """Items (see `work`) of N sequences, int32 [N * tiles * kv_heads, 9].

  Args:
    last: int32 [N, R], last token that each row sees, -1 for none.
    kv_heads: of keys; each has R rows of queries for itself.
    rows: of a tile.
    block: tokens of a page.
    split: pages of a split, or 0.
  """
  n, high = last.shape
  tiles, g = high // rows, kv_heads
  cut = last.reshape(n * tiles, rows)
  low = jnp.zeros_like(cut)
  first, middle, end = work_lib.blocks(low, cut, block)
  splits = work_lib.splits(low, cut, block, split)
  first, middle, end, splits = (
    x.reshape(n, tiles, 1) for x in (first, middle, end, splits)
  )
  sequence = jnp.arange(n, dtype=jnp.int32)[:, None, None]
  tile = jnp.arange(tiles, dtype=jnp.int32)[None, :, None] * rows
  head = jnp.arange(g, dtype=jnp.int32)[None, None, :]
  columns = (
    (sequence * g + head) * high + tile,
    jnp.zeros_like(head),
    sequence * high + tile,
    head,
    sequence,
    first,
    middle,
    end,
    splits,
  )
  spread = [jnp.broadcast_to(x, (n, tiles, g)) for x in columns]
  return jnp.stack(spread, axis=-1).reshape(-1, work_lib.COLUMNS)


def apart_items(items: jax.Array, splits: int, split: int) -> jax.Array:
  """Items of one split each, [splits * I, 9], empty where there is none.

  All first splits come first, then all second ones: most of them are whole, and
  those that are empty come last.
  """
  number = jnp.arange(splits, dtype=jnp.int32)[:, None]
  start, middle, whole = (items[None, :, i] for i in (5, 6, 7))
  first = jnp.minimum(start + number * split, whole)
  end = jnp.minimum(first + split, whole)
  own = jnp.arange(items.shape[0], dtype=jnp.int32)[None, :] * splits + number
  columns = [jnp.broadcast_to(items[None, :, i], own.shape) for i in range(5)]
  columns += [first, jnp.clip(middle, first, end), end, own]
  return jnp.stack(columns, axis=-1).reshape(-1, work_lib.COLUMNS)
