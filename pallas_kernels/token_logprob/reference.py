"""Plain JAX: blocks of the vocabulary one after another, merged online."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

CHUNK = 4096
LOWEST = -1e30  # instead of -inf, whose difference with itself is NaN


def logits(
  hidden: jax.Array, unembed: jax.Array, temperatures: jax.Array
) -> jax.Array:
  """z = hidden @ unembed / temperature, float32 [T, C]."""
  z = jnp.dot(hidden, unembed, preferred_element_type=jnp.float32)
  return z * (1.0 / temperatures.astype(jnp.float32))[:, None]


def is_kept(kept: jax.Array, first: jax.Array, size: int) -> jax.Array:
  """bool [T, size]: which of the tokens from `first` are among ids kept [T, J]."""
  place = kept - first
  place = jnp.where((place >= 0) & (place < size), place, size)
  rows = jnp.arange(kept.shape[0])[:, None]
  mask = jnp.zeros((kept.shape[0], size + 1), bool)
  return mask.at[rows, place].set(True)[:, :size]


def chunks(vocabulary: int) -> list[tuple[int, int, int]]:
  """(first token, size, how many of them): whole chunks, then the rest."""
  size = min(CHUNK, vocabulary)
  whole, rest = divmod(vocabulary, size)
  found = [(0, size, whole)]
  return found + ([(whole * size, rest, 1)] if rest else [])


def statistics(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array,
  kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chosen logit, log-sum-exp and entropy of z, each float32 [T]; see package."""
  t, v = hidden.shape[0], unembed.shape[1]

  def merge(carry, first, size):
    most, s, u, c = carry
    part = lax.dynamic_slice_in_dim(unembed, first, size, 1)
    z = logits(hidden, part, temperatures)
    place = tokens - first
    here = (place >= 0) & (place < size)
    own = jnp.take_along_axis(z, jnp.clip(place, 0, size - 1)[:, None], 1)[:, 0]
    if kept is not None:
      z = jnp.where(is_kept(kept, first, size), z, LOWEST)
    top = jnp.maximum(most, z.max(axis=1))
    weight = jnp.exp(z - top[:, None])
    if kept is not None:  # before any kept token the maximum is LOWEST itself
      weight = jnp.where(z > LOWEST, weight, 0.0)
    factor = jnp.exp(most - top)
    u = factor * (u + (most - top) * s)
    u = u + (weight * (z - top[:, None])).sum(axis=1)
    s = factor * s + weight.sum(axis=1)
    return top, s, u, jnp.where(here, own, c)

  zero = jnp.zeros((t,), jnp.float32)
  carry = (zero + LOWEST, zero, zero, zero)
  for first, size, count in chunks(v):

    def step(carry, i, first=first, size=size):
      return merge(carry, first + i * size, size), None

    carry, _ = lax.scan(step, carry, jnp.arange(count))
  most, s, u, c = carry
  log = jnp.log(s)
  return c, most + log, log - u / s
