"""Mosaic GPU: the keys of a row in splits, each summed from nothing.

The blocks of a row are cut into splits of a fixed number, counted from the block
in which its segment begins. A split starts with an empty sum, so that it can be
computed without those before it, and sums are merged in the order of splits:

  m' = max(m, m_s),  a = 2^(m - m'),  b = 2^(m_s - m')
  l' = l a + l_s b,  o' = o a + o_s b

(flash decoding, Dao et al. 2023, with splits that depend on the position alone).
A block of threads takes all splits of its rows, with the merged sums in device
memory; or, where there are few sequences, multiprocessors share the splits of
each, and the kernel of this file merges what they wrote.

Both have the same bits although they are compiled apart: with splits a maximum m
is a whole number (that of a block, rounded toward 0), a and b are powers of two,
and their products are exact, whether or not they are fused with the sum.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import mosaic

LEAST = -(2.0**30)
LANES = 128  # threads of a warpgroup: numbers of a row are a multiple
WARPGROUPS = 4  # of a block of the merge, a row each
UNROLL = 4  # splits whose sums are loaded at once


def whole(top: jax.Array) -> jax.Array:
  """Maxima as whole numbers, within 1; where nothing is seen LEAST."""
  top = jnp.minimum(jnp.maximum(top, LEAST), -LEAST)
  return top.astype(jnp.int32).astype(jnp.float32)


def factors(top: jax.Array, more: jax.Array):
  """Maximum of both, and what the sums of each are scaled by.

  Powers of two, down to 2^-126, from their bits: the processor's own exponential
  is exact to some bits only.
  """
  new = jnp.maximum(top, more)

  def power(below):
    number = jnp.maximum(below, -126.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(number << 23, jnp.float32)

  return new, power(top - new), power(more - new)


def merged(total, more, a, b):
  """l' or o': one expression, so that all who merge round alike."""
  return total * a + more * b


def merge(
  sums: jax.Array,
  weights: jax.Array,
  counts: jax.Array,
  *,
  splits: int,
  rows: int,
  dtype: jnp.dtype,
  sms: int,
  interpret: bool,
) -> jax.Array:
  """Rows [N, rows, W] of sums that `gpu_kernel` wrote apart.

  Args:
    sums: float32 [N * splits, R, W], of each split.
    weights: float32 [N * splits, 2, R], their maximum and sum.
    counts: int32 [N], splits that each has; of the others nothing is read.
    splits: most splits.
    rows: of R, those that are wanted.
    dtype: of the result.
    sms: multiprocessors.
    interpret: run on CPU.
  """
  n, width = counts.shape[0], sums.shape[-1]
  return mosaic.launch(
    mosaic.partial(_body, splits=splits, rows=rows, grid=min(sms, n * rows)),
    out=jax.ShapeDtypeStruct((n * rows, width), dtype),
    scratch=[],
    grid=min(sms, n * rows),
    warpgroups=WARPGROUPS,
    interpret=interpret,
    approximate=True,
  )(sums, weights, counts).reshape(n, rows, width)


def _body(sums, weights, counts, out, *, splits: int, rows: int, grid: int):
  worker = lax.axis_index('wg') * grid + lax.axis_index('sm')
  total = out.shape[0]
  trips = mosaic.cdiv(jnp.maximum(total - worker, 0), grid * WARPGROUPS)

  def one_row(trip, _):
    place = trip * (grid * WARPGROUPS) + worker
    tile = lax.div(place, jnp.int32(rows))
    row, first = lax.rem(place, jnp.int32(rows)), tile * splits

    def load(split):
      at = first + split
      return weights[at, 0, row], weights[at, 1, row], sums[at, row]

    def add(some, carry):
      top, total, value = carry
      for more, weight, part in some:
        top, a, b = factors(top, more)
        total = merged(total, weight, a, b)
        value = merged(value, part, a, b)
      return top, total, value

    def several(i, carry):
      return add([load(1 + i * UNROLL + j) for j in range(UNROLL)], carry)

    top, total, value = load(0)
    zero = jnp.zeros_like(value)
    count = counts[tile] - 1
    rounds = lax.div(count, jnp.int32(UNROLL))
    carry = lax.fori_loop(0, rounds, several, (zero + top, zero + total, value))
    _, total, value = lax.fori_loop(
      rounds * UNROLL, count, lambda i, carry: add([load(1 + i)], carry), carry
    )
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    value = jnp.where(inverse > 0, value * inverse, 0.0)
    out[place] = value.astype(out.dtype)

  lax.fori_loop(0, trips, one_row, None)
