"""Plain JAX: what changed between two arrays of words. The path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def compact(
  base: jax.Array, new: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Count, positions and words of what changed, of unsigned [N]; see package."""
  changed = base != new
  count = jnp.sum(changed, dtype=jnp.int32)
  size = base.shape[0]
  (positions,) = jnp.nonzero(changed, size=capacity, fill_value=size)
  words = jnp.take(new, positions, mode='fill', fill_value=0)
  return count, positions.astype(jnp.int32), words


def scatter(
  base: jax.Array, positions: jax.Array, words: jax.Array
) -> jax.Array:
  """base with the words at those positions, of unsigned [N]."""
  return base.at[positions].set(words, mode='drop', indices_are_sorted=True)
