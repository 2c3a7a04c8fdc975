"""The same of an unembedding in parts, none of which need be there at once.

Of columns S_i, log_i = log sum_(v in S_i) exp z_v. Over all of them,

  log = log sum_i exp log_i,  p_i = exp(log_i - log)
  entropy = sum_i p_i (entropy_i + log - log_i)

added up part after part, so the number of parts is a part of what is computed:
in other parts a token has other last bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import token_logprob


class Statistics(NamedTuple):
  """Of rows of z over some columns, float32 [T] each."""

  chosen: jax.Array  # z of the token; 0 where it is in no column
  log: jax.Array  # log-sum-exp
  entropy: jax.Array  # of the softmax over these columns


def statistics(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array,
  *,
  implementation: str | None = None,
) -> Statistics:
  """Of one part; not differentiable, see `gradients`.

  Args:
    hidden: [T, D].
    unembed: [D, V_i], of the same dtype.
    tokens: int32 [T], column of the part; any other number: in another part.
    temperatures: float32 [T].
    implementation: as in `token_logprob`.

  Raises:
    ValueError: shapes or dtypes that do not fit each other.
  """
  token_logprob.check_arrays(hidden, unembed, tokens, temperatures)
  chosen = token_logprob._choose(hidden, unembed, implementation)
  inside = (tokens >= 0) & (tokens < unembed.shape[1])
  tokens = jnp.where(inside, tokens, -1)  # no column, nor one of padding
  found = token_logprob._statistics(
    hidden, unembed, tokens, temperatures, None, chosen
  )
  return Statistics(*found)


def merge(parts: Statistics) -> Statistics:
  """Statistics of all parts, [I, T] each, in their order."""
  count = parts.log.shape[0]
  most = jnp.max(parts.log, axis=0)
  total, chosen = jnp.zeros_like(most), jnp.zeros_like(most)
  for i in range(count):
    total = total + jnp.exp(parts.log[i] - most)
    chosen = chosen + parts.chosen[i]
  log, entropy = most + jnp.log(total), jnp.zeros_like(most)
  for i in range(count):
    rest = log - parts.log[i]
    entropy = entropy + jnp.exp(-rest) * (parts.entropy[i] + rest)
  return Statistics(chosen, log, entropy)


def gradients(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array,
  whole: Statistics,
  cotangents: tuple[jax.Array, jax.Array],
  *,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """What one part adds to the gradients.

  Args:
    (others): as `statistics` got them.
    whole: of all parts.
    cotangents: of logprob and entropy, [T] each.

  Returns:
    (dhidden float32 [T, D], to be added up over parts, and dunembed [D, V_i]).
  """
  chosen = token_logprob._choose(hidden, unembed, implementation)
  inside = (tokens >= 0) & (tokens < unembed.shape[1])
  tokens = jnp.where(inside, tokens, -1)
  saved = (
    hidden,
    unembed,
    tokens,
    temperatures,
    None,
    whole.log,
    whole.entropy,
  )
  return token_logprob._gradients(chosen, saved, cotangents)
