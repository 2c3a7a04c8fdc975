"""Dense matmul whose rows have the same bits whatever the number of rows.

  y[m] = x[m] @ w

It is the grouped matmul of one group: the same kernels, gradients and order of
addition, so a dense layer and an expert with the same weights agree in every
bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels.matmul import reference

NAME = 'matmul'


def matmul(
  x: jax.Array,
  w: jax.Array,
  *,
  transpose: bool = False,
  implementation: str | None = None,
  tiles: Any = None,
) -> jax.Array:
  """y = x @ w, or x @ w^T with `transpose`, summed in float32.

  Args:
    x: [M, K].
    w: [K, N]; with `transpose` [N, K]. Of the same dtype.
    transpose: use w transposed.
    implementation: a name of `dispatch.NAMES`; None: the best there is.
    tiles: `grouped_matmul.gpu.Tiles` or `grouped_matmul.gpu_few.Few` instead of
      the tuned ones.

  Returns:
    [M, N] in x's dtype. Differentiable in both.

  Raises:
    ValueError: shapes or dtypes that do not fit each other.
  """
  if x.ndim != 2 or w.ndim != 2:
    raise ValueError(f'x {x.shape} and w {w.shape} must have two axes')
  if x.shape[1] != w.shape[1 if transpose else 0]:
    raise ValueError(
      f'x {x.shape} and w {w.shape} differ in K; with transpose={transpose} w'
      f' must be {"[N, K]" if transpose else "[K, N]"}'
    )
  checks.floats(x=x)
  if x.dtype != w.dtype:
    raise ValueError(f'x is {x.dtype} and w {w.dtype}; cast one')
  chosen = choose(x, w, transpose, implementation)
  if chosen == 'reference':
    return reference.matmul(x, w, transpose=transpose)
  return grouped_matmul.grouped_matmul(
    x,
    w[None],
    jnp.full((1,), x.shape[0], jnp.int32),
    transpose=transpose,
    implementation=chosen,
    tiles=tiles,
  )


def choose(
  x: jax.Array,
  w: jax.Array,
  transpose: bool = False,
  implementation: str | None = None,
) -> str:
  """The implementation that `matmul` would run with these arguments."""
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.grouped_matmul import gpu
    from pallas_kernels.grouped_matmul import tpu

    faults = dict(
      gpu=gpu.unsupported(x, w[None], x.dtype, transpose),
      tpu=tpu.unsupported(x, w),
    )
  return dispatch.choose(NAME, implementation, **faults)
