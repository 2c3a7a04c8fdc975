"""Plain JAX: RMSNorm and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  """y = x rsqrt(mean x^2 + epsilon) scale, in float32, rounded once."""
  wide = x.astype(jnp.float32)
  mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
  y = wide * lax.rsqrt(mean + epsilon)
  return (y * scale.astype(jnp.float32)[None, :]).astype(x.dtype)


def by_heads(
  x: jax.Array,
  scales: Sequence[jax.Array],
  counts: Sequence[int],
  one: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """one(heads, scale) of each count of heads of x [N, H, K], and the others."""
  *parts, rest = jnp.split(x, np.cumsum(counts), axis=1)
  normed = [one(*both) for both in zip(parts, scales, strict=True)]
  return jnp.concatenate([*normed, rest], axis=1)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
  """x + y in float32, rounded to their type, whatever reads it.

  Compilers take a rounding to 16 bits and back for nothing; `reduce_precision`
  they keep.
  """
  total = x.astype(jnp.float32) + y.astype(jnp.float32)
  kind = jnp.finfo(x.dtype)
  if kind.bits < 32:
    total = lax.reduce_precision(total, kind.nexp, kind.nmant)
  return total.astype(x.dtype)


def gradients(
  x: jax.Array, scale: jax.Array, epsilon: float, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """dx [T, D] and dscale [D].

  With r = rsqrt(mean x^2 + epsilon) and g = dy scale:
  dx = r (g - x r^2 mean(g x)), dscale = sum over rows of dy x r.
  """
  wide, g = x.astype(jnp.float32), dy.astype(jnp.float32)
  r = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
  dscale = jnp.sum(g * wide * r, axis=0)
  g = g * scale.astype(jnp.float32)[None, :]
  mean = jnp.mean(g * wide, axis=-1, keepdims=True)
  dx = r * (g - wide * (r * r) * mean)
  return dx.astype(x.dtype), dscale.astype(scale.dtype)
