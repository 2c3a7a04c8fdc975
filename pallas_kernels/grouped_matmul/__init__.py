"""Rows sorted by group times one matrix a group: the experts' matmul of an MoE.

  y[m] = x[m] @ w[g(m)],  g(m) = the group whose rows m is among

Each y[m, n] is summed over K in one order that depends on nothing else: the
same row has the same bits whatever the number of rows, their order, the other
rows of its group and the tuning. The gradients are deterministic too: dx is
the same kernel with w transposed, dw sums each group's rows in their order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.grouped_matmul import packed
from pallas_kernels.grouped_matmul import reference

NAME = 'grouped_matmul'
ONE = 'matmul'  # the tunings of one group
MANY = 256  # rows a group from which reading w no longer bounds the time
SCARCE = 2  # rows a group up to which tiles are mostly of nobody's rows


def grouped_matmul(
  x: jax.Array,
  w: jax.Array | packed.Nvfp4 | packed.Fp8,
  group_sizes: jax.Array | groups.Planned,
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
      values are known while tracing). Rows past the sum are undefined. Or with
      their tiles, as `route.send` has them.
    transpose: use w transposed.
    gated: silu(gate) * up in float32 before the one rounding. For gradients the
      two products are computed again.
    implementation: a name of `dispatch.NAMES`; None: the best there is.
    tiles: `gpu.Tiles` or, for few rows, `gpu_few.Few` for the forward kernel,
      instead of the tuned ones.

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
      *(x, w, groups.sizes_of(group_sizes)),
      gated=gated,
      implementation=implementation,
    )
  _check(x, w, groups.sizes_of(group_sizes), transpose, gated)
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
  _check_gradient(x, dy, group_sizes)
  chosen = _choose(x, dy, False, False, implementation)
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  if not (x.size and dy.size and group_sizes.size):  # nothing to launch
    size = group_sizes.shape[0], x.shape[1], dy.shape[1]
    return jnp.zeros(size, out_dtype)
  if chosen == 'reference':
    return reference.weight_gradient(x, dy, group_sizes, out_dtype=out_dtype)
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.grouped_matmul import tpu

    return tpu.weight_gradient(
      x, dy, group_sizes, out_dtype=out_dtype, interpret=interpret
    )
  from pallas_kernels.grouped_matmul import gpu_weights

  if tiles is None:
    size = x.shape[0], x.shape[1], dy.shape[1], group_sizes.shape[0]
    tiles = _tuned('weights', *size)
    if out_dtype == jnp.float32:  # what waits takes twice the room
      less = dict(stages=min(tiles.stages, 3), slots=min(tiles.slots, 2))
      tiles = dataclasses.replace(tiles, **less)
  return gpu_weights.weight_gradient(
    x, dy, group_sizes, tiles=tiles, out_dtype=out_dtype, interpret=interpret
  )


def product(
  x: jax.Array, w: jax.Array, chosen: str, transpose: bool = False
) -> jax.Array:
  """float32 x [M, K] @ w [K, N], one group, by the kernel `chosen`.

  With `transpose` w is [N, K].
  """
  rows = jnp.full((1,), x.shape[0], jnp.int32)
  _check(x, w[None], rows, transpose)
  if not (x.size and w.size):  # nothing to launch
    return jnp.zeros((x.shape[0], w.shape[0 if transpose else 1]), jnp.float32)
  more = dict(
    transpose=transpose,
    out_dtype=jnp.float32,
    interpret=chosen.endswith('interpret'),
  )
  if chosen.startswith('tpu'):
    from pallas_kernels.grouped_matmul import tpu

    return tpu.grouped_matmul(x, w[None], rows, **more)
  from pallas_kernels.grouped_matmul import gpu

  tiles = _tuned_few(x, w[None], transpose, interpret=more['interpret'])
  tiles = tiles or gpu.Tiles(stages=3, slots=2)
  return _run_gpu(x, w[None], rows, tiles, **more)


# --- Checks and choice -------------------------------------------------------


def _check(x, w, group_sizes, transpose=False, gated=False) -> None:
  """ValueError for arguments that do not fit each other."""
  if x.ndim != 2 or w.ndim != (4 if gated else 3):
    raise ValueError(
      f'x {x.shape} must be [M, K] and w {w.shape}'
      f' {"[E, K, 2, N]" if gated else "[E, K, N]"}'
    )
  if gated and (transpose or w.shape[2] != 2):
    raise ValueError(
      f'gated takes w [E, K, 2, N] not transposed, and not {w.shape} with'
      f' transpose={transpose}'
    )
  if w.shape[2 if transpose else 1] != x.shape[1]:
    raise ValueError(
      f'x {x.shape} and w {w.shape} differ in K; with transpose={transpose} w'
      f' must be {"[E, N, K]" if transpose else "[E, K, N]"}'
    )
  checks.floats(x=x)
  if x.dtype != w.dtype:
    raise ValueError(
      f'x is {x.dtype} and w {w.dtype}; cast one, so that the rounding is seen'
    )
  groups.check_sizes(group_sizes, w.shape[0], x.shape[0])


def _check_gradient(x, dy, group_sizes) -> None:
  """The same of rows and the gradients of their products."""
  if x.ndim != 2 or dy.ndim != 2 or x.shape[0] != dy.shape[0]:
    raise ValueError(
      f'x {x.shape} must be [M, K] and dy {dy.shape} [M, N]; they differ in rows'
      ' or axes'
    )
  checks.floats(x=x)
  if x.dtype != dy.dtype:
    raise ValueError(
      f'x is {x.dtype} and dy {dy.dtype}; cast one, so that the rounding is seen'
    )
  if group_sizes.ndim != 1:
    raise ValueError(f'group_sizes {group_sizes.shape} must be [E]')
  groups.check_sizes(group_sizes, group_sizes.shape[0], x.shape[0])


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
  not for gated products. Nor is for them what has no half of its columns.
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
      tiles = gpu.Tiles(**table[key])
      if not gated or tiles.columns % (2 * gpu.STORE) == 0:
        return tiles
  tiles = gpu.Tiles()
  work = max(min(m, groups), m // 128) * -(-n // tiles.columns)
  if pass_ == 'rows' and 3 * work < mosaic.cores():
    # Most multiprocessors would have nothing to do.
    columns = 128 if gated else 64
    return gpu.Tiles(consumers=1, columns=columns, stages=6)
  return tiles


def _tuned_few(
  x, w, transpose: bool = False, gated: bool = False, interpret: bool = False
):
  """Tiles of the kernel of few rows, where it is to be taken here, or None.

  The first of these keys of the tunings that is there: K and N; any. Gated products
  have keys of their own, as what gains without gates need not gain with them, and
  those of one group a table. For more rows than the key is for (`gpu_few.Few`), and
  without one, a single group takes `gpu_few.usual`; but a key for no rows at all
  says that this is not to be. Nor does the interpreter: it adds up a stage at once,
  so that another depth has other bits there.
  """
  from pallas_kernels.grouped_matmul import gpu_few

  if gpu_few.unsupported(x, w, x.dtype, transpose):
    return None
  table = dispatch.tuning(ONE if w.shape[0] == 1 else NAME)
  kind = 'few gated' if gated else 'few'
  keys = f'{kind} {x.shape[1]} {w.shape[-1]}', kind
  tuned = next((table[key] for key in keys if key in table), None)
  one, refused = w.shape[0] == 1, False
  if tuned is not None:
    tiles = gpu_few.Few(**tuned)
    most = tiles.most if one else min(tiles.most, tiles.rows * w.shape[0])
    if x.shape[0] <= most:
      return tiles
    refused = not tiles.most
  if refused or interpret or not one:
    return None
  return gpu_few.usual(len(x), w.shape[-1])


# --- Values and gradients ----------------------------------------------------


def _run(x, w, group_sizes, transpose, gated, chosen, tiles):
  n = w.shape[1] if transpose else w.shape[-1]
  if not (x.size and w.size):  # nothing to launch
    return jnp.zeros((x.shape[0], n), x.dtype)
  if not chosen.startswith('gpu'):  # the others' tiles are not these
    group_sizes = groups.sizes_of(group_sizes)
  if chosen == 'reference':
    return reference.grouped_matmul(
      x, w, group_sizes, transpose=transpose, gated=gated
    )
  interpret = chosen.endswith('interpret')
  if chosen.startswith('gpu'):
    tiles = tiles or _tuned_few(x, w, transpose, gated, interpret)
    tiles = tiles or _tuned('rows', *x.shape, n, w.shape[0], gated)
    more = dict(transpose=transpose, gated=gated, interpret=interpret)
    return _run_gpu(x, w, group_sizes, tiles, **more)
  from pallas_kernels.grouped_matmul import tpu

  run = functools.partial(
    tpu.grouped_matmul, transpose=transpose, interpret=interpret
  )
  if not gated:
    return run(x, w, group_sizes)
  both = run(x, _flat(w), group_sizes, out_dtype=jnp.float32)
  return _gate(both).astype(x.dtype)


def _run_gpu(x, w, group_sizes, tiles, **more):
  """By the kernel that the tiles are of."""
  from pallas_kernels.grouped_matmul import gpu
  from pallas_kernels.grouped_matmul import gpu_few

  if isinstance(tiles, gpu_few.Few):
    return gpu_few.grouped_matmul(x, w, group_sizes, tiles=tiles, **more)
  return gpu.grouped_matmul(x, w, group_sizes, tiles=tiles, **more)


def _flat(w: jax.Array) -> jax.Array:
  """[E, K, 2, N] -> [E, K, 2 N]."""
  return w.reshape(*w.shape[:2], 2 * w.shape[3])


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
  sizes = groups.sizes_of(group_sizes)
  dw = weight_gradient(left, right, sizes, implementation=chosen)
  zeros = jax.tree.map(
    lambda a: np.zeros(a.shape, jax.dtypes.float0), group_sizes
  )
  return dx, dw.reshape(w.shape), zeros


_grouped_matmul.defvjp(_forward, _backward)
