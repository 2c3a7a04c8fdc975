"""Rows sorted by group times one matrix a group: the experts' matmul of an MoE.

  y[m] = x[m] @ w[g(m)],  g(m) = the group whose rows m is among

Each y[m, n] is summed over K in one order that depends on nothing else: the
same row has the same bits whatever the number of rows, their order, the other
rows of its group and the tuning. The gradients are deterministic too: dx is
the same kernel with w transposed, dw sums each group's rows in their order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import packed
from pallas_kernels.grouped_matmul import reference

NAME = 'grouped_matmul'
MANY = 256  # rows a group from which reading w no longer bounds the time
SCARCE = 2  # rows a group up to which tiles are mostly of nobody's rows


def grouped_matmul(
  x: jax.Array,
  w: jax.Array | packed.Nvfp4 | packed.Fp8,
  group_sizes: jax.Array,
  *,
  transpose: bool = False,
  gated: bool = False,
  implementation: str | None = None,
  tiles: Any = None,
) -> jax.Array:
  """y[m] = x[m] @ w[group of m], or silu(x @ w_gate) * (x @ w_up).

  Args:
    x: [M, K], rows sorted by group.
    w: [E, K, N]; with `transpose` [E, N, K]; with `gated` [E, K, 2, N], the
      gate first. Or packed weights, which are not transposed.
    group_sizes: int [E], rows of each group, summing to M (checked where the
      values are known while tracing). Rows past the sum are undefined.
    transpose: use w transposed.
    gated: silu(gate) * up in float32 before the one rounding. For gradients the
      two products are computed again.
    implementation: a name of `dispatch.NAMES`; None: the best there is.
    tiles: `gpu.Tiles` for the forward kernel, instead of the tuned ones.

  Returns:
    [M, N] in x's dtype. Differentiable in x and in w that is not packed.

  Raises:
    ValueError: shapes, dtypes or group sizes that do not fit each other, or an
      implementation that cannot run.
  """
  if isinstance(w, packed.Nvfp4 | packed.Fp8):
    if transpose or tiles is not None:
      raise ValueError(
        f'transpose={transpose}, tiles={tiles}: packed weights take neither'
      )
    return packed.multiply(
      x, w, group_sizes, gated=gated, implementation=implementation
    )
  _check(x, w, group_sizes, transpose, gated)
  chosen = _choose(x, w, transpose, gated, implementation)
  return _grouped_matmul(x, w, group_sizes, transpose, gated, chosen, tiles)


def weight_gradient(
  x: jax.Array,
  dy: jax.Array,
  group_sizes: jax.Array,
  *,
  out_dtype: Any = None,
  implementation: str | None = None,
  tiles: Any = None,
) -> jax.Array:
  """dw[e] = x[rows of e]^T @ dy[rows of e]; zero for an empty group.

  Args:
    x: [M, K], rows sorted by group.
    dy: [M, N].
    group_sizes: int [E], summing to M.
    out_dtype: default x's.
    implementation: a name of `dispatch.NAMES`; None: the best there is.
    tiles: `gpu.Tiles` instead of the tuned ones.

  Returns:
    [E, K, N].
  """
  _check(x, dy, group_sizes)
  chosen = _choose(x, dy, False, False, implementation)
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  if chosen == 'reference':
    return reference.weight_gradient(x, dy, group_sizes, out_dtype=out_dtype)
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.grouped_matmul import tpu

    return tpu.weight_gradient(
      x, dy, group_sizes, out_dtype=out_dtype, interpret=interpret
    )
  from pallas_kernels.grouped_matmul import gpu_weights

  tiles = tiles or _tuned(
    'weights', x.shape[0], x.shape[1], dy.shape[1], group_sizes.shape[0]
  )
  return gpu_weights.weight_gradient(
    x, dy, group_sizes, tiles=tiles, out_dtype=out_dtype, interpret=interpret
  )


def product(
  x: jax.Array, w: jax.Array, chosen: str, transpose: bool = False
) -> jax.Array:
  """float32 [M, N] = x [M, K] @ w [K, N]: one group, by the kernel `chosen`."""
  rows = jnp.full((1,), x.shape[0], jnp.int32)
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.grouped_matmul import tpu

    run = tpu.grouped_matmul
    extra = {}
  else:
    from pallas_kernels.grouped_matmul import gpu

    run = gpu.grouped_matmul
    extra = {'tiles': gpu.Tiles(stages=3, slots=2)}
  return run(
    x,
    w[None],
    rows,
    transpose=transpose,
    out_dtype=jnp.float32,
    interpret=interpret,
    **extra,
  )


# --- Checks and choice -------------------------------------------------------


def _check(x, w, group_sizes, transpose=False, gated=False) -> None:
  """ValueError for arguments that do not fit each other."""
  gradient = w.ndim == 2
  if x.ndim != 2 or w.ndim not in (2, 4 if gated else 3):
    raise ValueError(
      f'x {x.shape} must be [M, K] and w {w.shape}'
      f' {"[E, K, 2, N]" if gated else "[E, K, N]"}'
    )
  if gated and (transpose or w.shape[2] != 2):
    raise ValueError(
      f'gated takes w [E, K, 2, N] not transposed, and not {w.shape} with'
      f' transpose={transpose}'
    )
  if not gradient and w.shape[2 if transpose else 1] != x.shape[1]:
    raise ValueError(
      f'x {x.shape} and w {w.shape} differ in K; with transpose={transpose} w'
      f' must be {"[E, N, K]" if transpose else "[E, K, N]"}'
    )
  if gradient and w.shape[0] != x.shape[0]:
    raise ValueError(f'x {x.shape} and dy {w.shape} differ in rows')
  if x.dtype != w.dtype:
    raise ValueError(
      f'x is {x.dtype} and w {w.dtype}; cast one, so that the rounding is seen'
    )
  groups = group_sizes.shape if gradient else (w.shape[0],)
  if group_sizes.shape != groups or group_sizes.ndim != 1:
    raise ValueError(
      f'group_sizes {group_sizes.shape} must have one size for each of the'
      f' {w.shape[0]} matrices'
    )
  if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
    raise ValueError(f'group_sizes are {group_sizes.dtype}; give integers')
  known = dispatch.concrete(group_sizes)
  if known is not None:
    sizes = np.asarray(known)
    if (sizes < 0).any() or sizes.sum() != x.shape[0]:
      raise ValueError(
        f'group sizes sum to {sizes.sum()} (least {sizes.min()}), and x has'
        f' {x.shape[0]} rows; every row must belong to one group'
      )


def _choose(x, w, transpose, gated, implementation) -> str:
  gpu_fault = tpu_fault = None
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.grouped_matmul import gpu
    from pallas_kernels.grouped_matmul import tpu

    gpu_fault = gpu.unsupported(x, w, x.dtype, transpose)
    tpu_fault = tpu.unsupported(x, w)
  return dispatch.choose(NAME, implementation, gpu_fault, tpu_fault)


def _tuned(
  pass_: str, m: int, k: int, n: int, groups: int, gated: bool = False
):
  """Tiles of the tunings, by the pass, rows a group, K and N.

  Rows a group are many, or few; of few a tuning may set scarce ones apart, but
  not for gated products: of narrow tiles they have no half.
  """
  from pallas_kernels import mosaic
  from pallas_kernels.grouped_matmul import gpu

  table = dispatch.tuning(NAME)
  amount = 'many' if m >= MANY * groups else 'few'
  keys = [f'{pass_} {amount} {k} {n}', f'{pass_} {amount}']
  if m <= SCARCE * groups and not gated:
    keys.insert(0, f'{pass_} scarce {k} {n}')
  for key in keys:
    if key in table:
      return gpu.Tiles(**table[key])
  tiles = gpu.Tiles()
  work = max(min(m, groups), m // 128) * -(-n // tiles.columns)
  if pass_ == 'rows' and 3 * work < mosaic.cores():
    # Most multiprocessors would have nothing to do.
    columns = 128 if gated else 64
    return gpu.Tiles(consumers=1, columns=columns, stages=6)
  return tiles


# --- Values and gradients ----------------------------------------------------


def _run(x, w, group_sizes, transpose, gated, chosen, tiles):
  if chosen == 'reference':
    return reference.grouped_matmul(
      x, w, group_sizes, transpose=transpose, gated=gated
    )
  interpret = chosen.endswith('interpret')
  if chosen.startswith('gpu'):
    from pallas_kernels.grouped_matmul import gpu

    n = w.shape[1] if transpose else w.shape[-1]
    tiles = tiles or _tuned('rows', *x.shape, n, w.shape[0], gated)
    return gpu.grouped_matmul(
      x,
      w,
      group_sizes,
      tiles=tiles,
      transpose=transpose,
      gated=gated,
      interpret=interpret,
    )
  from pallas_kernels.grouped_matmul import tpu

  run = functools.partial(
    tpu.grouped_matmul, transpose=transpose, interpret=interpret
  )
  if not gated:
    return run(x, w, group_sizes)
  both = run(x, _flat(w), group_sizes, out_dtype=jnp.float32)
  return _gate(both).astype(x.dtype)


def _flat(w: jax.Array) -> jax.Array:
  """[E, K, 2, N] -> [E, K, 2 N]."""
  return w.reshape(*w.shape[:2], -1)


def _gate(both: jax.Array) -> jax.Array:
  """silu(gate) * up in float32, of [M, 2 N]."""
  gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
  return jax.nn.silu(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _grouped_matmul(x, w, group_sizes, transpose, gated, chosen, tiles):
  return _run(x, w, group_sizes, transpose, gated, chosen, tiles)


def _forward(x, w, group_sizes, transpose, gated, chosen, tiles):
  y = _run(x, w, group_sizes, transpose, gated, chosen, tiles)
  return y, (x, w, group_sizes)


def _backward(transpose, gated, chosen, tiles, saved, dy):
  x, w, group_sizes = saved
  flat = _flat(w) if gated else w
  if gated:
    both = _run(x, flat, group_sizes, False, False, chosen, None)
    (dy,) = jax.vjp(lambda both: _gate(both).astype(dy.dtype), both)[1](dy)
  dx = _run(dy, flat, group_sizes, not transpose, False, chosen, None)
  left, right = (dy, x) if transpose else (x, dy)
  dw = weight_gradient(left, right, group_sizes, implementation=chosen)
  zero = np.zeros(group_sizes.shape, jax.dtypes.float0)
  return dx, dw.reshape(w.shape), zero


_grouped_matmul.defvjp(_forward, _backward)
