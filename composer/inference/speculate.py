"""The program of an engine whose drafts a layer of the model makes.

One step, in three moves:

1. the model runs its rows and draws, exactly as in `programs.mixed`;
2. the layer runs the same rows, each with the hidden state that the model gave
   and the token behind it: its cache then is that of what the model has read;
3. from each sequence's last row that stands (up to the first draw that is not
   what a draft said) the layer drafts `most` tokens, one after the other.

The host gets the drafts with the draws, and hands them back as the proposed
rows of the sequence's next step; what they are worth is decided there, as of
any draft (`drafts`).

A draft is drawn from q with the very random numbers with which the model will
draw from p at that position. Where q is p, it is what the model draws. Where
the two differ, it is so less often than they overlap, which is what rejection
sampling would keep: that is the price of no draw depending on a draft. Where the
overlap is 1 - d, no way to draw the two apart is sure of more than
(1 - d) / (1 + d) for every p and q (Daliri, Musco and Suresh, 2024, "Coupling
without communication"), and this one, which inverts sums, not even of that: a
little more at the front shifts all behind it.

The layer computes in `fast`: no bit of an answer depends on it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer.inference import drafts
from composer.inference import programs
from composer.inference import sampling
from composer.model import logprobs
from composer.model import mtp
from composer.model import transformer

Array = jax.Array


@struct.dataclass
class Caches:
  """Pages of the model and of the layer that drafts, under one table."""

  model: transformer.Cache
  drafts: transformer.Cache


class Chains(NamedTuple):
  """Where drafts begin; Q sequences draw in a step."""

  after: Array  # int32 [N]: the token behind each row; -1: what it draws
  first: Array  # int32 [Q]: of the draws of a step, the first of each sequence
  count: Array  # int32 [Q]: how many it has; 0 where there is no sequence
  slots: Array  # int32 [Q]


def init_cache(
  config: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  pages: int,
  draft: str,
) -> transformer.Cache | Caches:
  """Pages of an engine: with those of the layer, where it drafts."""
  cache = transformer.init_cache(config, numerics, pages)
  if draft != drafts.ON_DEVICE:
    return cache
  return Caches(cache, mtp.init_cache(config, numerics, pages))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def mixed(
  config: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  most: int,
  params: Any,
  caches: Caches,
  last: Array,
  rows: programs.Rows,
  sampling_rows: Array,
  into: Array,
  draws: sampling.Draws,
  cuts: sampling.Cuts | None,
  chains: Chains,
) -> tuple[programs.Sampled, Caches, Array]:
  """`programs.mixed`, and `most` drafts of every sequence that draws.

  Args:
    most: static.
    caches: donated, as is `last`.
    chains: see there.
    (others): see `programs.mixed`.

  Returns:
    (what was sampled, with `proposed` int32 [1, Q, most]; caches; last).
  """
  sampled, cache, last, hidden = programs.run_mixed(
    config,
    numerics,
    params,
    caches.model,
    last,
    rows,
    sampling_rows,
    into,
    draws,
    cuts,
  )
  tokens = sampled.answer.tokens[0]  # [S]
  fast = logprobs.as_fast(numerics)
  nobody = len(rows.tables) - 1
  real = jnp.where(into == nobody, len(rows.tokens), sampling_rows)
  drawn = jnp.zeros_like(chains.after).at[real].set(tokens, mode='drop')
  g, own = mtp.step(
    params,
    config,
    fast,
    caches.drafts,
    mtp.first(params, config, hidden),
    jnp.where(chains.after < 0, drawn, chains.after),
    rows.positions,
    rows.tables[rows.slots],
    None,
    rows.turns,
  )
  at = chains.first + _standing(
    rows.tokens, sampling_rows, tokens, chains, most
  )
  draws = draws._replace(positions=rows.positions[sampling_rows])
  draws = jax.tree.map(lambda x: x[at], draws)
  proposed, own = _chain(
    config,
    fast,
    most,
    params,
    own,
    g[sampling_rows[at]],
    draws,
    rows,
    chains,
  )
  sampled = sampled._replace(proposed=proposed[None])
  return sampled, Caches(cache, own), last


def _standing(
  row_tokens: Array,
  sampling_rows: Array,
  drawn: Array,
  chains: Chains,
  most: int,
) -> Array:
  """How many drafts of each sequence are what was drawn, int32 [Q].

  Row n of a sequence draws what row n + 1 had for a token, if the draft stands.
  """
  n = jnp.arange(most)[None, :]
  behind = chains.first[:, None] + n  # [Q, most]
  end = len(drawn) - 1
  said = row_tokens[sampling_rows[jnp.minimum(behind + 1, end)]]
  equal = drawn[jnp.minimum(behind, end)] == said
  equal &= n + 1 < chains.count[:, None]
  return jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=1), axis=1)


def _chain(config, numerics, most, params, cache, g, draws, rows, chains):
  """(tokens int32 [Q, most], cache) that the layer drafts behind g [Q, D].

  `draws` are of the draws behind g. What a draft leaves in the cache is written
  again once the model has read the token, or another.
  """
  table = rows.tables[chains.slots]
  length = table.shape[1] * numerics.kv_block
  warm = jnp.where(draws.temperature < sampling.GREEDY, 1.0, draws.temperature)

  def draft(g: Array, n: int) -> Array:
    z = mtp.logits(params, config, numerics, g, warm)
    ahead = draws._replace(positions=draws.positions + 1 + n)
    return sampling.draw(z, ahead)

  tokens = [draft(g, 0)]
  for n in range(1, most):
    at = draws.positions + n
    some = (chains.count > 0) & (at < length)
    g, cache = mtp.step(
      params,
      config,
      numerics,
      cache,
      g,
      tokens[-1],
      jnp.where(some, at, 0),
      jnp.where(some[:, None], table, 0),
      None,
      rows.turns,
    )
    tokens.append(draft(g, n))
  return jnp.stack(tokens, axis=1), cache


def compiled() -> int:
  """How many shapes of the engine's programs this process has compiled."""
  return programs.compiled() + mixed._cache_size()
