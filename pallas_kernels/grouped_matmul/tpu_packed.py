"""Pallas TPU: rows of each group times packed weights, unpacked in VMEM.

The tiles and the order are those of tpu.py. Numbers of four bits are not put side
by side again: K even and K odd are two products, of two halves of the rows that
XLA takes apart, and so a sum has another order than that of bfloat16 weights.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import groups
from pallas_kernels.grouped_matmul import tpu

BLOCK, SQUARE = 16, 128
ROWS, DEPTH, COLUMNS = 128, 512, 256


def unsupported(x: jax.Array, codes: jax.Array, k: int) -> str | None:
  """Why these cannot be multiplied here, or None."""
  if x.dtype != jnp.bfloat16:
    return f'x is {x.dtype}; with packed weights the TPU kernel takes bfloat16'
  if k % 256 or codes.shape[-1] % 128:
    return (
      f'K={k}, N={codes.shape[-1]}; the TPU kernel takes multiples of 256 and'
      ' 128'
    )
  return None


def _values(codes):
  """float32 of E2M1 in int32: arithmetic, where a table would be a gather."""
  size = codes & 7
  exponent, odd = size >> 1, (size & 1).astype(jnp.float32)
  power = jnp.where(exponent == 3, 4.0, jnp.where(exponent == 2, 2.0, 1.0))
  value = jnp.where(exponent == 0, 0.5 * odd, power * (1.0 + 0.5 * odd))
  return jnp.where(codes & 8, -value, value)


def _spread(scale, times: int):
  """Each row `times` times: [R, N] to [R times, N]."""
  rows, n = scale.shape
  wide = jnp.broadcast_to(scale[:, None, :], (rows, times, n))
  return wide.reshape(rows * times, n)


def _unpack_nvfp4(codes, scale):
  """Two bfloat16 [depth / 2, columns], K even and K odd."""
  codes = codes.astype(jnp.int32)
  wide = _spread(scale.astype(jnp.float32), BLOCK // 2)
  return [
    (_values(half) * wide).astype(jnp.bfloat16)
    for half in (codes & 15, codes >> 4)
  ]


def _unpack_fp8(codes, scale):
  return [(codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)]


@functools.partial(jax.jit, static_argnames=('interpret',))
def grouped_matmul(
  x: jax.Array,
  codes: jax.Array,
  scale: jax.Array,
  group_sizes: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """float32 [M, N] = x[m] @ unpacked w of the group, without outer scales.

  Args:
    x: bfloat16 [M, K].
    codes: uint8 [E, K / 2, N], else float8_e4m3fn [E, K, N].
    scale: float8_e4m3fn [E, K / 16, N], else float32 [E, K / 128, N / 128].
    group_sizes: int [E], summing to M.
    interpret: run on CPU.
  """
  m, k = x.shape
  n = codes.shape[-1]
  nvfp4 = codes.dtype == jnp.uint8
  parts = 2 if nvfp4 else 1
  depth, columns = tpu._block(k, DEPTH), tpu._block(n, COLUMNS)
  if not nvfp4:  # a scale for each row of a square, in the lanes of its columns
    scale = jnp.repeat(scale, SQUARE, axis=2)[:, :, None, :n]
    depth = SQUARE
  steps = k // depth
  table, count = groups.row_tiles(group_sizes, m, ROWS, ROWS)
  halves = [x[:, i::parts] for i in range(parts)]

  def kernel(table, count, *refs):
    *halves, codes, scale, y, total = refs
    t, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def _():
      total[...] = jnp.zeros_like(total)

    unpack = _unpack_nvfp4 if nvfp4 else _unpack_fp8
    for half, w in zip(halves, unpack(codes[...], scale[...]), strict=True):
      total[...] += jnp.dot(half[...], w, preferred_element_type=jnp.float32)

    @pl.when((i == steps - 1) & (t < groups.count_of(count)))
    def _():
      own = tpu._mask(table, t, ROWS)
      y[...] = jnp.where(own, total[...], y[...])

  def x_block(j, t, i, table, count):
    return lax.div(table[tpu._visit(t, table, count), 1], ROWS), i

  def w_block(j, t, i, table, count):
    return table[tpu._visit(t, table, count), 0], i, j

  def y_block(j, t, i, table, count):
    return lax.div(table[tpu._visit(t, table, count), 1], ROWS), j

  def square(j, t, i, table, count):
    return table[tpu._visit(t, table, count), 0], i, 0, j

  if nvfp4:
    scales = pl.BlockSpec((None, depth // BLOCK, columns), w_block)
  else:
    scales = pl.BlockSpec((None, None, 1, columns), square)
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(n // columns, table.shape[0], steps),
      in_specs=[
        *[pl.BlockSpec((ROWS, depth // parts), x_block)] * parts,
        pl.BlockSpec((None, depth // parts, columns), w_block),
        scales,
      ],
      out_specs=pl.BlockSpec((ROWS, columns), y_block),
      scratch_shapes=[pltpu.VMEM((ROWS, columns), jnp.float32)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary')
    ),
    interpret=interpret,
  )(table, count, *halves, codes, scale)
