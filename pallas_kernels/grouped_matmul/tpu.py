"""Pallas TPU: rows of each group times that group's matrix.

Tiles of rows start at multiples of their size. A tile that holds rows of
several groups is visited once for each, and each visit writes only its own
rows. K runs innermost and in order, in blocks of one size for each (K, N).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import groups

ROWS, DEPTH, COLUMNS = 128, 512, 512


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
  """Why these types cannot be computed here, or None."""
  for name, array in (('x', x), ('w', w)):
    if array.dtype not in (jnp.bfloat16, jnp.float32):
      return f'{name} is {array.dtype}; the TPU kernel takes bfloat16, float32'
  return None


def _block(size: int, most: int) -> int:
  """The largest divisor of `size` that is a multiple of 128, or all of it."""
  for block in range(min(most, size) // 128 * 128, 0, -128):
    if size % block == 0:
      return block
  return size


# Index maps divide with lax.div: `//` asks for the sign, and that for the kind of
# the default device, which is none when compiling without a TPU.
def _visit(t, table, count):
  """Row of the table for the t-th visit; the last one from the count on."""
  return jnp.minimum(t, groups.count_of(count) - 1)


def _mask(table, visit, rows: int):
  """[rows, 1]: which rows of the tile belong to the group of this visit."""
  first, start, end = (table[visit, i] for i in (1, 2, 3))
  row = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
  return (row >= start) & (row < end)


@functools.partial(
  jax.jit, static_argnames=('transpose', 'out_dtype', 'interpret')
)
def grouped_matmul(
  x: jax.Array,
  w: jax.Array,
  group_sizes: jax.Array,
  *,
  transpose: bool = False,
  out_dtype: Any = None,
  interpret: bool = False,
) -> jax.Array:
  """y[m] = x[m] @ w[group of m]: x [M, K], w [E, K, N] or [E, N, K] transposed.

  Returns:
    [M, N] of `out_dtype` (default x's).
  """
  m, k = x.shape
  n = w.shape[1] if transpose else w.shape[2]
  rows, depth, columns = ROWS, _block(k, DEPTH), _block(n, COLUMNS)
  table, count = groups.row_tiles(group_sizes, m, rows, rows)
  steps = k // depth

  def kernel(table, count, x, w, y, total):
    t, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def _():
      total[...] = jnp.zeros_like(total)

    dims = (((1,), (1 if transpose else 0,)), ((), ()))
    total[...] += lax.dot_general(
      x[...], w[...], dims, preferred_element_type=jnp.float32
    )

    @pl.when((i == steps - 1) & (t < groups.count_of(count)))
    def _():
      own = _mask(table, t, rows)
      y[...] = jnp.where(own, total[...].astype(y.dtype), y[...])

  def x_block(j, t, i, table, count):
    return lax.div(table[_visit(t, table, count), 1], rows), i

  def w_block(j, t, i, table, count):
    group = table[_visit(t, table, count), 0]
    return (group, j, i) if transpose else (group, i, j)

  def y_block(j, t, i, table, count):
    return lax.div(table[_visit(t, table, count), 1], rows), j

  w_shape = (columns, depth) if transpose else (depth, columns)
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((m, n), out_dtype or x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(n // columns, table.shape[0], steps),
      in_specs=[
        pl.BlockSpec((rows, depth), x_block),
        pl.BlockSpec((None, *w_shape), w_block),
      ],
      out_specs=pl.BlockSpec((rows, columns), y_block),
      scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary')
    ),
    name='grouped_matmul' if w.shape[0] > 1 else 'matmul',
    cost_estimate=_cost(m, k, n, x, w),
    interpret=interpret,
  )(table, count, x, w)


def _cost(m: int, k: int, n: int, *operands: jax.Array) -> pl.CostEstimate:
  """Of all rows, as if each belonged to a group."""
  read = sum(a.size * a.dtype.itemsize for a in operands)
  return pl.CostEstimate(
    flops=2 * m * k * n,
    bytes_accessed=read + m * n * operands[0].dtype.itemsize,
    transcendentals=0,
  )


@functools.partial(jax.jit, static_argnames=('out_dtype', 'interpret'))
def weight_gradient(
  x: jax.Array,
  dy: jax.Array,
  group_sizes: jax.Array,
  *,
  out_dtype: Any = None,
  interpret: bool = False,
) -> jax.Array:
  """dw[e] = x[rows of e]^T @ dy[rows of e]: x [M, K], dy [M, N].

  Returns:
    [E, K, N] of `out_dtype` (default x's); zero for an empty group.
  """
  m, k = x.shape
  n = dy.shape[1]
  rows, depth, columns = ROWS, _block(k, DEPTH), _block(n, COLUMNS)
  table, count = groups.row_tiles(group_sizes, m, rows, rows, empty=True)
  visits = table.shape[0]

  def kernel(table, count, x, dy, dw, total):
    t = pl.program_id(2)
    group = table[t, 0]

    @pl.when((t == 0) | (group != table[jnp.maximum(t - 1, 0), 0]))
    def _():
      total[...] = jnp.zeros_like(total)

    @pl.when(t < groups.count_of(count))
    def _():
      own = _mask(table, t, rows)
      # Both: past the end of the rows there may be anything, also NaN.
      left = jnp.where(own, x[...], jnp.zeros_like(x[...]))
      right = jnp.where(own, dy[...], jnp.zeros_like(dy[...]))
      total[...] += lax.dot_general(
        left,
        right,
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
      )
      dw[...] = total[...].astype(dw.dtype)

  def row_block(t, table, count):
    first = table[_visit(t, table, count), 1]
    return lax.div(jnp.minimum(first, m - 1), rows)

  def x_block(i, j, t, table, count):
    return row_block(t, table, count), i

  def dy_block(i, j, t, table, count):
    return row_block(t, table, count), j

  def dw_block(i, j, t, table, count):
    return table[_visit(t, table, count), 0], i, j

  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(
      (group_sizes.shape[0], k, n), out_dtype or x.dtype
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(k // depth, n // columns, visits),
      in_specs=[
        pl.BlockSpec((rows, depth), x_block),
        pl.BlockSpec((rows, columns), dy_block),
      ],
      out_specs=pl.BlockSpec((None, depth, columns), dw_block),
      scratch_shapes=[pltpu.VMEM((depth, columns), jnp.float32)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    name='grouped_weights' if group_sizes.shape[0] > 1 else 'matmul_weights',
    cost_estimate=_cost(m, k, n, x, dy),
    interpret=interpret,
  )(table, count, x, dy)
