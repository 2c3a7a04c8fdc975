"""Mosaic GPU: the kernel of attention, with keys looked up in a table of pages.

The rows of an item are all queries of a sequence times all heads of queries
that share a head of keys, so that a page is read once for all of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention import gpu
from pallas_kernels.attention import gpu_kernel
from pallas_kernels.attention import work as work_lib


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
  tiles: gpu.Tiles | None = None,
  interpret: bool = False,
) -> jax.Array:
  """[N, Q, H, W]; the arguments are those of the package."""
  n, queries, h, key = q.shape
  block, g = k_pages.shape[1:3]
  shared, share = v_pages is None, h // g
  work = gpu.plan(
    key,
    width,
    block,
    scale,
    shared,
    True,
    tiles,
    interpret,
    log=False,
    few=queries * share <= gpu.ROWS,
  )
  unit = gpu.ROWS * work.units
  rows = queries * share
  high = -(-rows // unit) * unit
  pad = high - rows
  q = q.reshape(n, queries, g, share, key)
  q = jnp.swapaxes(q, 1, 2).reshape(n, g, rows, key)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
  last = jnp.repeat(positions.astype(jnp.int32), share, axis=1)
  last = jnp.pad(last, ((0, 0), (0, pad)), constant_values=-1)
  items = paged_items(last, g, unit, block)
  items = work_lib.longest_first(items, work.sms)
  (out,) = gpu_kernel.run(
    work,
    items,
    table.astype(jnp.int32),
    jnp.zeros((n * high,), jnp.int32),
    last.reshape(-1),
    q.reshape(n * g * high, 1, key),
    k_pages,
    v_pages,
    0,
  )
  out = out.reshape(n, g, high, width)[:, :, :rows]
  out = jnp.swapaxes(out.reshape(n, g, queries, share, width), 1, 2)
  return out.reshape(n, queries, h, width)


def paged_items(
  last: jax.Array, kv_heads: int, rows: int, block: int
) -> jax.Array:
  """Items (see `work`) of N sequences, int32 [N * tiles * kv_heads, 8].

  Args:
    last: int32 [N, R], last token that each row sees, -1 for none.
    kv_heads: of keys; each has R rows of queries for itself.
    rows: of a tile.
    block: tokens of a page.
  """
  n, high = last.shape
  tiles, g = high // rows, kv_heads
  cut = last.reshape(n * tiles, rows)
  first, middle, end = (
    x.reshape(n, tiles, 1)
    for x in work_lib.blocks(jnp.zeros_like(cut), cut, block)
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
  )
  spread = [jnp.broadcast_to(x, (n, tiles, g)) for x in columns]
  return jnp.stack(spread, axis=-1).reshape(-1, work_lib.COLUMNS)
