"""Mosaic GPU: RMSNorm, a warpgroup a row, so that no row sees another."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import mosaic

LANES = 128  # threads of a warpgroup; D is spread over them
MOST = 16384  # D that still fits into their registers
# Blocks a multiprocessor. Of one warpgroup each: those of one block share the
# scratch memory of reductions, and mix up their rows.
BLOCKS = 8


def unsupported(x: jax.Array) -> str | None:
  """Why this shape or type cannot be computed here, or None."""
  if x.shape[1] > MOST:
    return f'D={x.shape[1]}; the GPU kernel takes up to {MOST}'
  if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    return f'{x.dtype}; the GPU kernel takes bfloat16, float16 and float32'
  return None


def rms_norm(
  x: jax.Array, scale: jax.Array, epsilon: float, *, interpret: bool = False
) -> jax.Array:
  """y = x rsqrt(mean x^2 + epsilon) scale: x [T, D], scale [D]."""
  t, d = x.shape
  more = -d % LANES  # zeros add nothing to the sum
  x = jnp.pad(x, ((0, 0), (0, more)))
  scale = jnp.pad(scale, (0, more))
  blocks = 2 if interpret else min(t, BLOCKS * mosaic.cores())

  def body(x, scale, y):
    first = lax.axis_index('sm')
    weight = scale[...].astype(jnp.float32)

    @pl.loop(0, mosaic.cdiv(jnp.maximum(t - first, 0), blocks))
    def _(i):
      row = first + i * blocks
      wide = x[row].astype(jnp.float32)
      mean = jnp.sum(wide * wide) * (1.0 / d)
      y[row] = (wide * lax.rsqrt(mean + epsilon) * weight).astype(y.dtype)

  y = mosaic.launch(
    body,
    out=jax.ShapeDtypeStruct(x.shape, x.dtype),
    scratch=[],
    grid=blocks,
    warpgroups=1,
    interpret=interpret,
  )(x, scale)
  return y[:, :d]
