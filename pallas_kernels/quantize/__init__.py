"""Rounding to eight and four bits, the same bits on every device.

  nvfp4    E2M1, a scale in E4M3 for each 16 of K, and a float32 for each row or
           for all: t = amax (1 / 2688), s = e4m3(amax_16 / (6 t)),
           code = e2m1(x / (s t))
  mxfp8    E4M3, a power of two for each 32 of K: the least one that is at least
           amax_32 / 448
  fp8      E4M3, a float32 for each square of 128: s = amax / 448, x / s

All in float32, to nearest even; a block of zeros has zeros. Divisions are IEEE:
with approximate ones NVFP4 training diverges after about a hundred steps, as
Cursor's report on Composer 2 says. The outer scale of nvfp4 by row keeps what a
row becomes independent of the other rows, which by tensor it is not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.quantize import reference

NAME = 'quantize'
OUTER = ('row', 'all')


def nvfp4(
  x: jax.Array, *, outer: str = 'row', implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Four bits a number.

  Args:
    x: float32 or bfloat16 [R, K], K a multiple of 16.
    outer: 'row', a float32 scale for each row (token), or 'all', for all.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    codes: uint8 [R, K / 2], K even in the low bits.
    scale: float8_e4m3fn [R, K / 16].
    outer: float32 [R], or [] with 'all'.

  Raises:
    ValueError: K that is no multiple of 16, another dtype or outer.
  """
  if outer not in OUTER:
    raise ValueError(f'outer={outer!r}; known: {", ".join(OUTER)}')
  chosen = _choose(x, 16, 'nvfp4', implementation)
  by_row = outer == 'row'
  if chosen == 'reference':
    return reference.nvfp4(x, by_row)
  return _kernels(chosen).nvfp4(
    x, by_row, interpret=chosen.endswith('interpret')
  )


def mxfp8(
  x: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
  """Eight bits a number and a power of two for each 32.

  Args:
    x: float32 or bfloat16 [R, K], K a multiple of 32.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    values: float8_e4m3fn [R, K].
    exponents: uint8 [R, K / 32]; E8M0, the scale is 2^(exponent - 127).
  """
  chosen = _choose(x, 32, 'mxfp8', implementation)
  if chosen == 'reference':
    return reference.mxfp8(x)
  return _kernels(chosen).mxfp8(x, interpret=chosen.endswith('interpret'))


def fp8(
  x: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
  """Eight bits a number and a float32 for each square of 128.

  Args:
    x: float32 or bfloat16 [R, K].
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    values: float8_e4m3fn [R, K].
    scale: float32 [R / 128, K / 128], rounded up; 0 for a square of zeros.
  """
  chosen = _choose(x, 1, 'fp8', implementation)
  if chosen == 'reference':
    return reference.fp8_squares(x)
  return _kernels(chosen).fp8(x, interpret=chosen.endswith('interpret'))


def widen_nvfp4(
  codes: jax.Array, scale: jax.Array, outer: jax.Array
) -> jax.Array:
  """float32 [R, K]: number * (scale * outer), of what `nvfp4` gives.

  Raises:
    ValueError: shapes or dtypes that are not those.
  """
  _check_axes(codes=codes)
  checks.dtype(jnp.uint8, codes=codes)
  checks.dtype(jnp.float8_e4m3fn, scale=scale)
  checks.dtype(jnp.float32, outer=outer)
  rows, half = codes.shape
  _check_blocks(codes, 2 * half, 16, 'nvfp4')
  checks.shape('[R, K / 16]', (rows, half // 8), scale=scale)
  if outer.ndim:
    checks.shape('[R] or []', (rows,), outer=outer)
  both = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, -1)
  values = jnp.asarray(reference.GRID, jnp.float32)[both & 7]
  values = jnp.where(both & 8, -values, values)
  wide = outer[:, None] if outer.ndim else outer[None, None]
  return values * jnp.repeat(scale.astype(jnp.float32) * wide, 16, axis=1)


def widen_mxfp8(values: jax.Array, exponents: jax.Array) -> jax.Array:
  """float32 [R, K], of what `mxfp8` gives; errors as `widen_nvfp4`."""
  _check_axes(values=values)
  checks.dtype(jnp.float8_e4m3fn, values=values)
  checks.dtype(jnp.uint8, exponents=exponents)
  rows, k = values.shape
  _check_blocks(values, k, 32, 'mxfp8')
  checks.shape('[R, K / 32]', (rows, k // 32), exponents=exponents)
  scale = reference.power(exponents.astype(jnp.int32))
  return values.astype(jnp.float32) * jnp.repeat(scale, 32, axis=1)


def widen_fp8(values: jax.Array, scale: jax.Array) -> jax.Array:
  """float32 [R, K], of what `fp8` gives; errors as `widen_nvfp4`."""
  _check_axes(values=values)
  checks.dtype(jnp.float8_e4m3fn, values=values)
  checks.dtype(jnp.float32, scale=scale)
  rows, k = values.shape
  squares = -(-rows // 128), -(-k // 128)
  checks.shape('[R / 128, K / 128], rounded up', squares, scale=scale)
  wide = jnp.repeat(jnp.repeat(scale, 128, 0), 128, 1)[:rows, :k]
  return values.astype(jnp.float32) * wide


def _check_axes(**arrays) -> None:
  for name, array in arrays.items():
    if array.ndim != 2:
      raise ValueError(f'{name} {array.shape} must have two axes, [R, ...]')


def _check_blocks(array, k: int, multiple: int, form: str) -> None:
  if k % multiple:
    raise ValueError(
      f'{array.shape} holds K={k} numbers a row, which is not a multiple of'
      f' {multiple}, those that share a scale in {form}'
    )


def _kernels(chosen: str):
  if chosen.startswith('tpu'):
    from pallas_kernels.quantize import tpu

    return tpu
  from pallas_kernels.quantize import gpu

  return gpu


def _choose(x, multiple: int, form: str, implementation) -> str:
  if x.ndim != 2 or x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(
      f'x is {x.dtype}{x.shape}; {form} takes float32 or bfloat16 [R, K]'
    )
  if x.shape[1] % multiple:
    raise ValueError(
      f'K={x.shape[1]} is not a multiple of {multiple}, the numbers that share a'
      f' scale in {form}; pad it with zeros'
    )
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.quantize import gpu
    from pallas_kernels.quantize import tpu

    faults = dict(gpu=gpu.unsupported(x, form), tpu=tpu.unsupported(x, form))
  return dispatch.choose(f'{NAME} to {form}', implementation, **faults)
