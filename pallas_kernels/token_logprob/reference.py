"""Plain JAX: blocks of the vocabulary one after another, merged online."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

CHUNK = 4096  # a multiple of 32
LOWEST = -1e30  # instead of -inf, whose difference with itself is NaN


def logits(
  hidden: jax.Array, unembed: jax.Array, temperatures: jax.Array
) -> jax.Array:
  """z = hidden @ unembed / temperature, float32 [T, C]."""
  z = jnp.dot(hidden, unembed, preferred_element_type=jnp.float32)
  return z * (1.0 / temperatures.astype(jnp.float32))[:, None]


def kept_words(kept: jax.Array, vocabulary: int) -> jax.Array:
  """What is kept as bits, uint32 [T, ceil(V / 32)]; bit i of a word is id 32 w + i.

  Args:
    kept: int [T, J], ids, or uint8 [T, ceil(V / 8)], bits; see the package.
    vocabulary: V.
  """
  t, words = kept.shape[0], -(-vocabulary // 32)
  if kept.dtype == jnp.uint8:
    # `numpy.packbits` has the first id in the highest bit of a byte.
    for shift, low in ((1, 0x55), (2, 0x33), (4, 0x0F)):
      low = jnp.uint8(low)
      kept = ((kept & low) << shift) | ((kept >> shift) & low)
    kept = jnp.pad(kept, ((0, 0), (0, 4 * words - kept.shape[1])))
    return lax.bitcast_convert_type(kept.reshape(t, words, 4), jnp.uint32)
  ids = jnp.sort(kept.astype(jnp.int32), axis=1)
  before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  once = (ids >= 0) & (ids != before)  # so that a sum of bits is their union
  rows = jnp.arange(t)[:, None]
  place = jnp.where(once, ids // 32, words)
  bit = jnp.uint32(1) << (ids % 32).astype(jnp.uint32)
  found = jnp.zeros((t, words), jnp.uint32)
  found = found.at[rows, place].add(bit, mode='drop')
  every = jnp.all(kept < 0, axis=1, keepdims=True)
  return jnp.where(every, jnp.uint32(0xFFFFFFFF), found)


def is_kept(words: jax.Array, first: jax.Array, size: int) -> jax.Array:
  """bool [T, size] of the ids from `first`, a multiple of 32; see `kept_words`."""
  count = -(-size // 32)
  part = lax.dynamic_slice_in_dim(words, first // 32, count, 1)
  place = jnp.arange(32, dtype=jnp.uint32)[None, None, :]
  bits = (part[:, :, None] >> place) & jnp.uint32(1)
  return bits.reshape(words.shape[0], count * 32)[:, :size].astype(bool)


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
  words: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chosen logit, log-sum-exp and entropy of z, each float32 [T].

  The arguments are those of the package, with `kept_words` for what was kept.
  """
  t, v = hidden.shape[0], unembed.shape[1]

  def merge(carry, first, size):
    most, s, u, c = carry
    part = lax.dynamic_slice_in_dim(unembed, first, size, 1)
    z = logits(hidden, part, temperatures)
    place = tokens - first
    here = (place >= 0) & (place < size)
    own = jnp.take_along_axis(z, jnp.clip(place, 0, size - 1)[:, None], 1)[:, 0]
    if words is not None:
      z = jnp.where(is_kept(words, first, size), z, LOWEST)
    top = jnp.maximum(most, z.max(axis=1))
    weight = jnp.exp(z - top[:, None])
    if words is not None:  # before any kept token the maximum is LOWEST itself
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


def renormalised(z: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Log-sum-exp and entropy of z [T, V] over what is kept, each float32 [T]."""
  z = jnp.where(is_kept(words, jnp.int32(0), z.shape[1]), z, -jnp.inf)
  most = z.max(axis=1)
  z = z - most[:, None]
  weight = jnp.exp(z)
  s = weight.sum(axis=1)
  u = jnp.where(weight > 0, weight * z, 0.0).sum(axis=1)
  log = jnp.log(s)
  return most + log, log - u / s
