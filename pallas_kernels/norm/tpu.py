"""Pallas TPU: RMSNorm, blocks of rows, each row reduced by itself."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

ROWS = 128


def unsupported(x: jax.Array) -> str | None:
  """Why this type cannot be computed here, or None."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f'{x.dtype}; the TPU kernel takes bfloat16 and float32'
  return None


def _kernel(x, scale, y, *, epsilon):
  wide = x[...].astype(jnp.float32)
  mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
  weight = scale[...].astype(jnp.float32)
  y[...] = (wide * lax.rsqrt(mean + epsilon) * weight).astype(y.dtype)


@functools.partial(jax.jit, static_argnames=('epsilon', 'interpret'))
def rms_norm(
  x: jax.Array, scale: jax.Array, epsilon: float, *, interpret: bool = False
) -> jax.Array:
  """y = x rsqrt(mean x^2 + epsilon) scale: x [T, D], scale [D]."""
  t, d = x.shape
  return pl.pallas_call(
    functools.partial(_kernel, epsilon=epsilon),
    out_shape=jax.ShapeDtypeStruct((t, d), x.dtype),
    grid=(pl.cdiv(t, ROWS),),
    in_specs=[
      pl.BlockSpec((ROWS, d), lambda i: (i, 0)),
      pl.BlockSpec((1, d), lambda i: (0, 0)),
    ],
    out_specs=pl.BlockSpec((ROWS, d), lambda i: (i, 0)),
    interpret=interpret,
  )(x, scale[None])
