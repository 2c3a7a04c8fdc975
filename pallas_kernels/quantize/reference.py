"""Plain JAX: rounding to eight and four bits. The path on CPU.

What XLA does to such expressions, once they are compiled, and what keeps them:
- a division by a broadcast array or by a constant becomes a product with the
  inverse, which rounds elsewhere, and 6 * (x * c) becomes x * (6 c): barriers;
- on NVIDIA a float32 division is `div.full`, wrong by up to two units in the last
  place: there it is done in float64, see `quotient`;
- on GPUs a cast to float8 and back is dropped: what was rounded is read from its
  bits.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

E2M1_MAX, E4M3_MAX = 6.0, 448.0
MIDDLES = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)  # ties go down; up
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
  """a / b of float32 of one shape, rounded as IEEE 754 has it, on every device."""
  b = lax.optimization_barrier(b)
  return lax.platform_dependent(a, b, cuda=in_double, default=lax.div)


def in_double(a: jax.Array, b: jax.Array) -> jax.Array:
  """The same by float64, which NVIDIA divides as IEEE 754 has it.

  No quotient of two 24-bit numbers lies as near to the middle of two float32 as
  float64 rounds (2^-53), unless it is that middle, so that to round it again
  changes nothing. LLVM knows that too, and makes a float32 division of it, which
  is the wrong one again; it does not where both were multiplied by 3, which is
  exact.
  """
  with jax.enable_x64(True):
    wide = [lax.convert_element_type(x, jnp.float64) for x in (a, b)]
    three = lax.full_like(wide[0], 3)
    quotient_ = lax.div(wide[0] * three, wide[1] * three)
    return lax.convert_element_type(quotient_, jnp.float32)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
  """a / b rounded once, 0 where b is 0."""
  b = jnp.broadcast_to(b, a.shape)
  return jnp.where(b > 0, quotient(a, jnp.where(b > 0, b, 1.0)), 0.0)


def outer_of(largest: jax.Array) -> jax.Array:
  """The outer scale of nvfp4, rounded before anything is done with it."""
  inverse = jnp.float32(1 / (E2M1_MAX * E4M3_MAX))
  return lax.optimization_barrier(largest * inverse)


def e2m1(x: jax.Array) -> jax.Array:
  """uint8 codes of the nearest numbers of E2M1, ties to the even code."""
  size = jnp.abs(x)
  hits = [size > m for m in MIDDLES[0]] + [size >= m for m in MIDDLES[1]]
  code = sum(hit.astype(jnp.uint8) for hit in hits)
  return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def nvfp4(x: jax.Array, by_row: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Codes [R, K / 2], scale [R, K / 16] and outer [R] or [] of [R, K]."""
  x = x.astype(jnp.float32)
  rows, k = x.shape
  blocks = x.reshape(rows, k // 16, 16)
  most = jnp.max(jnp.abs(blocks), axis=-1)
  largest = jnp.max(most, axis=-1) if by_row else jnp.max(most)
  outer = outer_of(largest)
  wide = outer[:, None] if by_row else outer[None, None]
  scale = jnp.minimum(divide(most, E2M1_MAX * wide), E4M3_MAX)
  scale = scale.astype(jnp.float8_e4m3fn)
  step = from_e4m3(scale) * wide
  codes = e2m1(divide(blocks, step[:, :, None])).reshape(rows, k // 2, 2)
  return codes[..., 0] | (codes[..., 1] << 4), scale, outer


def mxfp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Values e4m3 [R, K] and biased exponents uint8 [R, K / 32] of [R, K]."""
  x = x.astype(jnp.float32)
  rows, k = x.shape
  blocks = x.reshape(rows, k // 32, 32)
  most = jnp.max(jnp.abs(blocks), axis=-1)
  ratio = quotient(most, jnp.full_like(most, E4M3_MAX))
  bits = lax.bitcast_convert_type(ratio, jnp.uint32)
  exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # rounded up
  values = blocks * power(254 - exponent.astype(jnp.int32))[:, :, None]
  return to_e4m3(values).reshape(rows, k), exponent.astype(jnp.uint8)


def power(biased: jax.Array) -> jax.Array:
  """float32 2^(biased - 127), of -23 to 254, denormals too."""
  normal = lax.bitcast_convert_type(
    jnp.maximum(biased, 1).astype(jnp.uint32) << 23, jnp.float32
  )
  low = jnp.uint32(1) << jnp.clip(22 + biased, 0, 22).astype(jnp.uint32)
  return jnp.where(
    biased >= 1, normal, lax.bitcast_convert_type(low, jnp.float32)
  )


def to_e4m3(x: jax.Array) -> jax.Array:
  """To nearest even, and to 448 where it is more."""
  return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def from_e4m3(x: jax.Array) -> jax.Array:
  """float32 of float8_e4m3fn that are not negative."""
  bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)
  exponent, mantissa = bits >> 3, bits & 7
  whole = jnp.where(exponent > 0, mantissa + 8, mantissa).astype(jnp.float32)
  return whole * power(jnp.maximum(exponent, 1) + (127 - 10))


def fp8_squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Values e4m3 [R, K] and scales float32 [R / 128, K / 128] of [R, K]."""
  rows, k = x.shape
  high, wide = -(-rows // 128), -(-k // 128)
  padded = jnp.pad(
    x.astype(jnp.float32), ((0, high * 128 - rows), (0, wide * 128 - k))
  )
  squares = padded.reshape(high, 128, wide, 128)
  most = jnp.max(jnp.abs(squares), axis=(1, 3))
  scale = quotient(most, jnp.full_like(most, E4M3_MAX))
  values = to_e4m3(divide(squares, scale[:, None, :, None]))
  return values.reshape(high * 128, wide * 128)[:rows, :k], scale
