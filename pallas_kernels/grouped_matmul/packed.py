"""Weights of eight and four bits for `grouped_matmul`.

With the weights unpacked to bfloat16 as `unpack` says,

  y[m] = (x[m] @ unpack(w)[g(m)]) * outer[g(m)]

where the product is that of `grouped_matmul`, to the last bit, whether the
weights are unpacked in the kernel (few rows) or before it (many).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.grouped_matmul import reference

NAME = 'grouped_matmul of packed weights'
BLOCK, SQUARE = 16, 128
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MANY = 64  # rows a group from which unpacking once costs less than in each tile


class Nvfp4(NamedTuple):
  """Four bits a number; with `gated` each has an axis of 2 before N.

  Attributes:
    codes: uint8 [E, K / 2, N]; E2M1 of K even in the low bits, odd in the high.
    scale: float8_e4m3fn [E, K / 16, N].
    outer: float32 [E].
  """

  codes: jax.Array
  scale: jax.Array
  outer: jax.Array


class Fp8(NamedTuple):
  """Eight bits a number, and a scale for each square of 128.

  Attributes:
    codes: float8_e4m3fn [E, K, N].
    scale: float32 [E, K / 128, N / 128], rounded up.
  """

  codes: jax.Array
  scale: jax.Array


def unpack(w: Nvfp4 | Fp8) -> jax.Array:
  """bfloat16 [E, K, N]: number times scale, without the outer scale.

  Exact for NVFP4, whose product has six bits; rounded to nearest for FP8.
  """
  if isinstance(w, Fp8):
    e, k, n = w.codes.shape
    scale = jnp.repeat(jnp.repeat(w.scale, SQUARE, 1), SQUARE, 2)[:, :k, :n]
    return (w.codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)
  e, half, *rest = w.codes.shape
  both = jnp.stack([w.codes & 15, w.codes >> 4], axis=2)
  both = both.reshape(e, 2 * half, *rest)
  values = jnp.asarray(GRID, jnp.float32)[both & 7]
  values = jnp.where(both & 8, -values, values)
  scale = jnp.repeat(w.scale.astype(jnp.float32), BLOCK, 1)
  return (values * scale).astype(jnp.bfloat16)


def multiply(
  x: jax.Array,
  w: Nvfp4 | Fp8,
  group_sizes: jax.Array,
  *,
  gated: bool = False,
  implementation: str | None = None,
) -> jax.Array:
  """`grouped_matmul` with packed weights, differentiable in x.

  Raises:
    ValueError: shapes and dtypes that do not fit each other.
  """
  check(x, w, group_sizes, gated)
  flat = _flat(w) if gated else w
  chosen = _choose(x, flat, implementation)
  y = _multiply(x, flat, group_sizes, chosen, gated)
  if gated:
    gate, up = jnp.split(y, 2, axis=-1)
    y = (jax.nn.silu(gate) * up).astype(x.dtype)
  return y


def check(x, w, group_sizes, gated: bool = False) -> None:
  """ValueError for arrays that do not fit each other."""
  codes, scale = w.codes, w.scale
  axes = 4 if gated else 3
  nvfp4 = isinstance(w, Nvfp4)
  if gated and not nvfp4:
    raise ValueError('gated takes Nvfp4 weights; multiply twice with Fp8')
  eight = jnp.float8_e4m3fn
  want = (jnp.uint8, eight) if nvfp4 else (eight, jnp.float32)
  if (codes.dtype, scale.dtype) != tuple(jnp.dtype(x) for x in want):
    raise ValueError(
      f'codes are {codes.dtype} and scale {scale.dtype}; {type(w).__name__} has'
      f' {jnp.dtype(want[0])} and {jnp.dtype(want[1])}: pack the weights again'
    )
  checks.floats(x=x)
  if x.ndim != 2 or codes.ndim != axes or (gated and codes.shape[2] != 2):
    raise ValueError(
      f'x {x.shape} must be [M, K] and codes {codes.shape} have {axes} axes'
    )
  k = x.shape[1]
  if nvfp4:
    if k % BLOCK or codes.shape[1] * 2 != k:
      raise ValueError(
        f'x {x.shape} and codes {codes.shape}: two numbers a byte make'
        f' {2 * codes.shape[1]} of K={k}, which must be a multiple of {BLOCK}'
      )
    expected = (codes.shape[0], k // BLOCK, *codes.shape[2:])
    checks.shape('[E]', codes.shape[:1], outer=w.outer)
    checks.dtype(jnp.float32, outer=w.outer)
  else:
    if codes.shape[1] != k:
      raise ValueError(f'x {x.shape} and codes {codes.shape} differ in K')
    expected = (codes.shape[0], *(-(-s // SQUARE) for s in codes.shape[1:]))
  if scale.shape != expected:
    raise ValueError(f'scale {scale.shape} must be {expected}')
  groups.check_sizes(group_sizes, codes.shape[0], x.shape[0])


def _flat(w: Nvfp4) -> Nvfp4:
  e, half = w.codes.shape[:2]
  return Nvfp4(
    w.codes.reshape(e, half, -1),
    w.scale.reshape(e, 2 * half // BLOCK, -1),
    w.outer,
  )


def _choose(x, w, implementation) -> str:
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.grouped_matmul import gpu_packed
    from pallas_kernels.grouped_matmul import tpu_packed

    k = x.shape[1]
    faults = dict(
      gpu=gpu_packed.unsupported(x, w.codes, k),
      tpu=tpu_packed.unsupported(x, w.codes, k),
    )
  return dispatch.choose(NAME, implementation, **faults)


def _run(x, w, group_sizes, chosen: str, wide: bool) -> jax.Array:
  """x @ unpacked w * outer, of x's dtype or float32."""
  out_dtype = jnp.float32 if wide else x.dtype
  outer = w.outer if isinstance(w, Nvfp4) else None
  interpret = chosen.endswith('interpret')
  if chosen.startswith('gpu') and _few(x, w):
    from pallas_kernels.grouped_matmul import gpu_packed

    return gpu_packed.grouped_matmul(
      x,
      w.codes,
      w.scale,
      outer,
      group_sizes,
      out_dtype=out_dtype,
      rows=_rows(x.shape[0], w.codes.shape[0]),
      interpret=interpret,
    )
  if chosen.startswith('tpu'):
    from pallas_kernels.grouped_matmul import tpu_packed

    y = tpu_packed.grouped_matmul(
      x, w.codes, w.scale, group_sizes, interpret=interpret
    )
  else:
    y = _product(x, unpack(w), group_sizes, chosen)
  if outer is not None:
    y = y * jnp.repeat(outer, group_sizes, total_repeat_length=len(y))[:, None]
  return y.astype(out_dtype)


def _few(x, w) -> bool:
  """Whether the kernel that unpacks for itself is the one to take."""
  from pallas_kernels.grouped_matmul import gpu

  e, n = w.codes.shape[0], w.codes.shape[-1]
  whole = jax.ShapeDtypeStruct((e, x.shape[1], n), jnp.bfloat16)
  reason = gpu.unsupported(x, whole, jnp.dtype(jnp.float32))
  return x.shape[0] < MANY * e or reason is not None


def _rows(m: int, groups: int) -> int:
  """Rows of a tile of the kernel for few rows; no bit depends on it."""
  mean = m / groups
  return 8 if mean <= 8 else 16 if mean <= 16 else 32


def _product(x, w, group_sizes, chosen: str, transpose: bool = False):
  """float32 x @ w, of bfloat16."""
  if chosen == 'reference':
    return reference.grouped_matmul(
      x, w, group_sizes, transpose=transpose, out_dtype=jnp.float32
    )
  interpret = chosen.endswith('interpret')
  if chosen.startswith('gpu'):
    from pallas_kernels.grouped_matmul import gpu

    reason = gpu.unsupported(x, w, jnp.dtype(jnp.float32), transpose)
    if reason is not None:  # of a gradient: multiples that only the other takes
      dispatch.choose(f'the gradient of {NAME}', None, gpu=reason)  # warns
      return _product(x, w, group_sizes, 'reference', transpose)
  if chosen.startswith('tpu'):
    from pallas_kernels.grouped_matmul import tpu

    return tpu.grouped_matmul(
      x,
      w,
      group_sizes,
      transpose=transpose,
      out_dtype=jnp.float32,
      interpret=interpret,
    )
  return gpu.grouped_matmul(
    x,
    w,
    group_sizes,
    tiles=gpu.Tiles(stages=3),
    transpose=transpose,
    out_dtype=jnp.float32,
    interpret=interpret,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(x, w, group_sizes, chosen, wide):
  return _run(x, w, group_sizes, chosen, wide)


def _forward(x, w, group_sizes, chosen, wide):
  return _run(x, w, group_sizes, chosen, wide), (x[:0], w, group_sizes)


def _backward(chosen, wide, saved, dy) -> tuple[Any, ...]:
  """dx = (dy * outer) @ unpacked w^T; weights of so few bits have none."""
  empty, w, group_sizes = saved
  dy = dy.astype(jnp.float32)
  if isinstance(w, Nvfp4):
    outer = jnp.repeat(w.outer, group_sizes, total_repeat_length=len(dy))
    dy = dy * outer[:, None]
  dx = _product(
    dy.astype(empty.dtype), unpack(w), group_sizes, chosen, transpose=True
  )

  def none(array):
    if jnp.issubdtype(array.dtype, jnp.integer):
      return np.zeros(array.shape, jax.dtypes.float0)
    return jnp.zeros_like(array)

  return dx.astype(empty.dtype), jax.tree.map(none, w), none(group_sizes)


_multiply.defvjp(_forward, _backward)
