"""Plain JAX: a matmul summed in float32. The path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, *, transpose: bool = False) -> jax.Array:
  """y = x @ w, or x @ w^T, in x's dtype."""
  w = w.T if transpose else w
  return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
