"""Pallas TPU: the kernel of attention, with keys looked up in a table of pages.

The rows of a tile are all queries of a sequence times all heads of queries that
share a head of keys, so that a page is read once for all of them.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.attention import tpu
from pallas_kernels.attention import work as work_lib


def unsupported(q, k_pages, v_pages, width: int) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  reason = tpu.unsupported(q, k_pages, v_pages, k_pages.shape[1], width)
  if reason or k_pages.shape[2] == 1:
    return reason
  for name, size in (('K', k_pages.shape[-1]), ('W', width)):
    if size % 128:
      return (
        f'{name}={size}; of pages with several heads the TPU kernel takes'
        ' multiples of 128'
      )
  return None


@functools.partial(jax.jit, static_argnames=('width', 'scale', 'interpret'))
def forward(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  width: int,
  scale: float,
  interpret: bool = False,
) -> jax.Array:
  """[N, Q, H, W]; the arguments are those of the package."""
  n, queries, h, key = q.shape
  pages, block, g, _ = k_pages.shape
  share = h // g
  rows = queries * share
  high = -(-rows // tpu.ROWS) * tpu.ROWS
  tiles = high // tpu.ROWS
  q = jnp.swapaxes(q.reshape(n, queries, g, share, key), 1, 2)
  q = jnp.pad(q.reshape(n * g, rows, key), ((0, 0), (0, high - rows), (0, 0)))
  last = jnp.repeat(positions.astype(jnp.int32), share, axis=1)
  last = jnp.pad(last, ((0, 0), (0, high - rows)), constant_values=-1)
  low = jnp.zeros_like(last)
  cut = work_lib.blocks(
    low.reshape(-1, tpu.ROWS), last.reshape(-1, tpu.ROWS), block
  )

  def tile(i, t):
    return lax.div(i, g) * tiles + t

  def at(i, t, j, first, end, table):
    j = jnp.minimum(first[tile(i, t)] + j, end[tile(i, t)] - 1)
    return table[lax.div(i, g), j], 0, lax.rem(i, g)

  keys = [x for x in (k_pages, v_pages) if x is not None]
  out, _ = tpu.run(
    q,
    low[:, None],
    last[:, None],
    [x.reshape(pages, block, -1) for x in keys],
    [pl.BlockSpec((None, block, x.shape[-1]), at) for x in keys],
    (cut[0], cut[2]),
    table.astype(jnp.int32),
    steps=table.shape[1],
    tile=tile,
    bounds_of=lambda i: lax.div(i, g),
    width=width,
    scale=scale,
    interpret=interpret,
  )
  out = out[:, :rows].reshape(n, g, queries, share, width)
  return jnp.swapaxes(out, 1, 2).reshape(n, queries, h, width)
