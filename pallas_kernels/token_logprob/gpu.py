"""Mosaic GPU: logits a tile at a time, never in memory.

The matmul is that of grouped_matmul with one group; instead of a store, each
consumer reduces its 256 columns of logits to five numbers a row:

  m = max z,  s = sum exp(z - m),  u = sum exp(z - m) (z - m),  c = z[token]

A second kernel merges the blocks of 256 in their order. The block is part of
what is computed (another one would round elsewhere), so it is not tuned.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul import gpu as matmul
from pallas_kernels.grouped_matmul import groups

BLOCK = 256
TILES = matmul.Tiles(columns=BLOCK, panel=16)
# Of long rows, what all blocks read at a time must still fit into the L2 cache.
DEEP, DEEP_TILES = 4096, matmul.Tiles(columns=BLOCK, panel=4)
LANES = 128  # rows that one warpgroup of the merge takes
UNROLL = 8
LOWEST = -1e30  # instead of -inf, whose difference with itself is NaN


def unsupported(hidden: jax.Array, unembed: jax.Array) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  return matmul.unsupported(hidden, unembed, hidden.dtype)


def statistics(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array,
  *,
  tiles: matmul.Tiles | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chosen logit, log-sum-exp and entropy of z = hidden @ unembed / temperature.

  Args:
    hidden: bfloat16 [T, D].
    unembed: bfloat16 [D, V].
    tokens: int32 [T].
    temperatures: float32 [T].
    tiles: columns must be BLOCK; default by D.
    interpret: run on CPU.

  Returns:
    Three float32 [T].
  """
  t, d = hidden.shape
  v = unembed.shape[1]
  tiles = tiles or (DEEP_TILES if d > DEEP else TILES)
  if tiles.columns != BLOCK or tiles.rows != 64:
    raise ValueError(f'{tiles}: columns must be {BLOCK} and rows 64')
  high = -(-t // LANES) * LANES
  pad = (0, high - t)
  hidden = jnp.pad(hidden, (pad, (0, 0))) if high > t else hidden
  tokens = jnp.pad(tokens.astype(jnp.int32), pad)
  scale = jnp.pad(1.0 / temperatures.astype(jnp.float32), pad)
  table, count = groups.row_tiles(
    jnp.full((1,), high, jnp.int32), high, tiles.consumers * tiles.rows
  )
  sms = 2 if interpret else mosaic.cores()
  work = matmul.Work(tiles, d, v, sms)
  stages, used = matmul.ring(work, hidden.dtype)
  mosaic.check_shared(tiles, used + 1024)
  parts = mosaic.launch(
    mosaic.partial(_body, work=work),
    out=jax.ShapeDtypeStruct((4, -(-v // BLOCK), high), jnp.float32),
    scratch=[
      mosaic.linear((tiles.consumers, 4, tiles.rows), jnp.float32),
      *stages,
    ],
    grid=sms,
    warpgroups=tiles.consumers + 1,
    interpret=interpret,
  )(table, count, hidden, unembed[None], tokens, scale)
  out = mosaic.launch(
    mosaic.partial(_merge, sms=sms),
    out=jax.ShapeDtypeStruct((3, high), jnp.float32),
    scratch=[],
    grid=sms,
    warpgroups=1,
    interpret=interpret,
  )(parts)
  return tuple(out[:, :t])


def _body(table, count, x, w, tokens, scale, parts, small, *stages, work):
  rows = work.tiles.rows
  wg = lax.axis_index('wg')
  layout = plgpu.Layout.WGMMA

  def across(row):
    return lax.broadcast_in_dim(row, (rows, BLOCK), [0])

  def finish(total, own, column):
    first = pl.multiple_of(own[0], rows)
    here = pl.ds(first, rows)
    by_row = layout.reduce(1)
    token = mosaic.load(tokens.at[here], by_row)
    factor = mosaic.load(scale.at[here], by_row)
    number = column + plgpu.broadcasted_iota(
      jnp.int32, (rows, BLOCK), 1, layout=layout
    )
    z = jnp.where(number < work.n, total * across(factor), LOWEST)
    chosen = jnp.where(number == across(token), z, 0.0).sum(axis=1)
    most = z.max(axis=1)
    z = z - across(most)
    weight = jnp.exp(z)
    found = (
      most,
      weight.sum(axis=1),
      (weight * z).sum(axis=1),
      chosen,
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, value in enumerate(found):
      small[wg, i] = value
    plgpu.commit_smem()
    block = lax.div(column, jnp.int32(BLOCK))
    for i in range(4):
      plgpu.copy_smem_to_gmem(small.at[wg, i], parts.at[i, block, here])

  matmul.multiply_tiles(table, count, x, w, stages, finish, work)

  @pl.when(wg < work.tiles.consumers)
  def _():
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge(parts, out, *, sms: int):
  """Merges the blocks of 128 rows at a time, in order: two passes.

  With M the greatest maximum, s = sum_j s_j e^(m_j - M) and
  u = sum_j e^(m_j - M) (u_j + (m_j - M) s_j): the entropy is log s - u / s.
  """
  _, blocks, high = parts.shape
  sm = lax.axis_index('sm')
  trips = mosaic.cdiv(jnp.maximum(high // LANES - sm, 0), sms)
  zero = jnp.zeros((LANES,), jnp.float32)

  def loop(step, carry):
    """step(j, carry) for all blocks; some at once, so that loads overlap."""

    def some(i, carry):
      for j in range(UNROLL):
        carry = step(i * UNROLL + j, carry)
      return carry

    carry = lax.fori_loop(0, blocks // UNROLL, some, carry)
    for j in range(blocks // UNROLL * UNROLL, blocks):
      carry = step(j, carry)
    return carry

  @pl.loop(0, trips)
  def _(trip):
    here = pl.ds((trip * sms + sm) * LANES, LANES)
    most = loop(
      lambda j, most: jnp.maximum(most, parts[0, j, here]), zero + LOWEST
    )

    def add(j, carry):
      s, u, c = carry
      shift = parts[0, j, here] - most
      factor = jnp.exp(shift)
      own = parts[1, j, here]
      s = s + own * factor
      u = u + factor * (parts[2, j, here] + shift * own)
      return s, u, c + parts[3, j, here]

    s, u, c = loop(add, (zero, zero, zero))
    log = jnp.log(s)
    out[0, here] = c
    out[1, here] = most + log
    out[2, here] = log - u / s
