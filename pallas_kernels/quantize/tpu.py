"""Pallas TPU: rounding to eight and four bits; K lies in the sublanes.

There a block of 16 or 32 is a whole number of registers, so XLA turns the array
round before and after. E4M3 is rounded by adding and taking away a number in
whose last place its last place is. The divisions are the chip's own: equal bits
are shown in interpret mode, and on a chip as far as it divides as IEEE says.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.quantize.reference import E2M1_MAX
from pallas_kernels.quantize.reference import E4M3_MAX
from pallas_kernels.quantize.reference import MIDDLES
from pallas_kernels.quantize.reference import outer_of

LANES, SQUARE = 128, 128
DEPTH = (
  1024  # of K in a block: 32 rows of scales of mxfp8, which a tile of bytes has
)


def unsupported(x: jax.Array, form: str) -> str | None:
  """Why this cannot be rounded here, or None."""
  del form
  return None if x.size else 'there are no numbers'


def _by_largest(x):
  """x / 448 of x >= 0; interpreted, XLA multiplies by a constant's inverse."""
  return x / jnp.where(x >= 0, E4M3_MAX, x)


def _divide(a, b):
  """a / b, 0 where b is 0. Not by a broadcast, which XLA would invert first."""
  b = jnp.where(a == a, b, a)  # all but NaN
  return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)


def _e4m3(x):
  """int32 bits of the nearest float8_e4m3fn, at most 448 in size."""
  size = jnp.minimum(jnp.abs(x), E4M3_MAX)
  bits = lax.bitcast_convert_type(size, jnp.int32)
  power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
  magic = jnp.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
  size = (size + magic) - magic
  bits = lax.bitcast_convert_type(size, jnp.int32)
  normal = (bits >> 20) - (120 << 3)
  low = (size * 512.0).astype(jnp.int32)
  sign = lax.shift_right_logical(
    lax.bitcast_convert_type(x, jnp.int32), jnp.int32(31)
  )
  return jnp.where(size < 2.0**-6, low, normal) | (sign << 7)


def _from_e4m3(bits):
  """float32 of positive ones."""
  size = lax.bitcast_convert_type(bits << 20, jnp.float32)
  low = bits.astype(jnp.float32) * 2.0**-9
  return jnp.where(bits < 8, low, size * 2.0**120)


def _e2m1(x):
  """int32 codes of the nearest of E2M1, ties to even."""
  size = jnp.abs(x)
  hits = [size > m for m in MIDDLES[0]] + [size >= m for m in MIDDLES[1]]
  code = functools.reduce(
    lambda a, b: a + b, [hit.astype(jnp.int32) for hit in hits]
  )
  sign = lax.shift_right_logical(
    lax.bitcast_convert_type(x, jnp.int32), jnp.int32(31)
  )
  return code | (sign << 3)


def _blocks(x, each: int):
  """float32 [K / each, each, lanes] and the greatest size of each block."""
  x = x.astype(jnp.float32)
  x = x.reshape(x.shape[0] // each, each, x.shape[1])
  return x, jnp.max(jnp.abs(x), axis=1)


def _call(kernel, inputs, rows: int, k: int, divisors, scratch, interpret):
  """Runs over blocks of K by 128 columns; outputs of bytes [K / divisor, R]."""
  column = pl.BlockSpec((DEPTH, LANES), lambda i, j: (i, j))
  outer = pl.BlockSpec((1, LANES), lambda i, j: (0, j))
  return pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct((-(-k // d), rows), jnp.uint8) for d in divisors
    ],
    grid=(-(-k // DEPTH), -(-rows // LANES)),
    in_specs=[column, outer][: len(inputs)],
    out_specs=[
      pl.BlockSpec((DEPTH // d, LANES), lambda i, j: (i, j)) for d in divisors
    ],
    scratch_shapes=scratch,
    interpret=interpret,
  )(*inputs)


@functools.partial(jax.jit, static_argnames=('by_row', 'interpret'))
def nvfp4(
  x: jax.Array, by_row: bool, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Codes, scale and outer; see the package."""
  rows, k = x.shape
  size = jnp.abs(x.astype(jnp.float32))
  largest = jnp.max(size, axis=1) if by_row else jnp.max(size)
  outer = outer_of(largest)
  wide = jnp.broadcast_to(outer, (rows,))[None]
  codes, scale = _call(
    _nvfp4,
    (x.T, wide),
    rows,
    k,
    (2, 16),
    [pltpu.VMEM((DEPTH, LANES), jnp.int32)],
    interpret,
  )
  scale = lax.bitcast_convert_type(scale.T, jnp.float8_e4m3fn)
  return codes.T, scale, outer


def _nvfp4(x, outer, codes, scales, digits) -> None:
  blocks, most = _blocks(x[...], 16)
  scale = _e4m3(_divide(most, E2M1_MAX * outer[...]))
  scales[...] = scale.astype(jnp.uint8)
  step = _from_e4m3(scale) * outer[...]
  step = jnp.broadcast_to(step[:, None, :], blocks.shape)
  digits[...] = _e2m1(_divide(blocks, step)).reshape(digits.shape)
  half = DEPTH // 2
  even = digits[pl.ds(0, half, 2), :]
  odd = digits[pl.ds(1, half, 2), :]
  codes[...] = (even | (odd << 4)).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames=('interpret',))
def mxfp8(
  x: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Values and exponents; see the package."""
  rows, k = x.shape
  values, exponents = _call(_mxfp8, (x.T,), rows, k, (1, 32), [], interpret)
  return lax.bitcast_convert_type(values.T, jnp.float8_e4m3fn), exponents.T


def _mxfp8(x, values, exponents) -> None:
  blocks, most = _blocks(x[...], 32)
  bits = lax.bitcast_convert_type(_by_largest(most), jnp.int32)
  exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
  exponents[...] = exponent.astype(jnp.uint8)
  factor = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
  wide = blocks * jnp.broadcast_to(factor[:, None, :], blocks.shape)
  values[...] = _e4m3(wide).reshape(values.shape).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames=('interpret',))
def fp8(
  x: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Values and scales; see the package."""
  rows, k = x.shape
  high, wide = -(-rows // SQUARE), -(-k // SQUARE)
  padded = jnp.pad(x, ((0, high * SQUARE - rows), (0, wide * SQUARE - k)))
  square = pl.BlockSpec((SQUARE, SQUARE), lambda i, j: (i, j))
  values, scale = pl.pallas_call(
    _fp8,
    out_shape=[
      jax.ShapeDtypeStruct(padded.shape, jnp.uint8),
      jax.ShapeDtypeStruct((8 * high, SQUARE * wide), jnp.float32),
    ],
    grid=(high, wide),
    in_specs=[square],
    out_specs=[square, pl.BlockSpec((8, SQUARE), lambda i, j: (i, j))],
    interpret=interpret,
  )(padded)
  values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)[:rows, :k]
  return values, scale[::8, ::SQUARE]


def _fp8(x, values, scales) -> None:
  x = x[...].astype(jnp.float32)
  most = jnp.max(jnp.max(jnp.abs(x), axis=1, keepdims=True), axis=0)[:, None]
  scale = _by_largest(jnp.broadcast_to(most, x.shape))
  values[...] = _e4m3(_divide(x, scale)).astype(jnp.uint8)
  scales[...] = scale[:8]
