"""Sampling: one seed per request and position, so that batches never matter.

A row's draw depends on its logits and on (seed, position) alone. A request is
therefore answered with the same tokens whatever else is in the batch, as long
as its logits have the same bits. The draw inverts the cumulative distribution
in two levels: two uniform numbers choose a block of the vocabulary and a token
of it, which needs no random number per token of the vocabulary.

The logprob has the bits of `transformer.row_logprobs`, the very function that the
trainer calls: it is taken by that function afterwards or, where the kernel gives
logits and logprobs at once, from the same pass that the draw reads. In `fast`,
where bits may differ, it comes from the sums that the draw has made. Where top-k,
top-p, min-p or a mask cut the distribution, the kept set is given back packed,
and the logprob is over it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer.model import layers
from composer.model import logprobs as logprobs_lib
from composer.model import operations
from composer.model import transformer
from composer.records import TOP_LOGPROBS
from pallas_kernels import token_logprob

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig

GREEDY = config_lib.GREEDY


class Draws(NamedTuple):
  """What decides the draws of S rows, beside their hidden states."""

  temperature: Array  # float32 [S]; 0 is greedy
  seeds: Array  # uint32 [S]
  positions: Array  # int32 [S], of the token that the row has read


class Cuts(NamedTuple):
  """What of its distribution each of S rows may draw from."""

  some: Array  # bool [S]; false where the row draws from all it has
  top_k: Array  # int32 [S]; 0 keeps all
  top_p: Array  # float32 [S]
  min_p: Array  # float32 [S]
  allowed: Array  # uint8 [S or 1, ceil(V / 8)], packed bits


class Answer(NamedTuple):
  """What S rows drew."""

  tokens: Array  # int32 [S]
  logprobs: Array  # float32 [S]
  kept: Array | None  # uint8 [S, ceil(V / 8)], packed bits; None: all
  # int32 and float32 [S, TOP_LOGPROBS]: the likeliest, where something is cut or
  # asked.
  top_ids: Array | None = None
  top_logprobs: Array | None = None


def _uniform(seeds: Array, positions: Array) -> Array:
  """float32 [R, 2] in [0, 1), of (seed, position) alone."""
  keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(
    seeds, positions
  )
  return jax.vmap(lambda k: jax.random.uniform(k, (2,)))(keys)


def draw(z: Array, draws: Draws) -> Array:
  """One token a row of logits z [R, V], already over the temperature.

  -inf marks what cannot be drawn; at least one logit of a row is finite.

  Returns:
    int32 [R].
  """
  return _draw(z, draws)[0]


def _draw(z: Array, draws: Draws) -> tuple[Array, Array]:
  """`draw`, and float32 [R]: the logarithm of the sum of exp(z)."""
  rows, vocab = z.shape
  block = 2 ** math.ceil(math.log2(vocab) / 2)
  top = jnp.max(z, axis=-1, keepdims=True)
  weights = jnp.exp(z - top)
  weights = jnp.pad(weights, ((0, 0), (0, -vocab % block)))
  weights = weights.reshape(rows, -1, block)
  u = _uniform(draws.seeds, draws.positions)
  sums = jnp.sum(weights, axis=-1)
  outer = _invert(sums, u[:, 0])
  inner = jnp.take_along_axis(weights, outer[:, None, None], axis=1)[:, 0]
  drawn = outer * block + _invert(inner, u[:, 1])
  greedy = draws.temperature < GREEDY
  token = jnp.where(greedy, jnp.argmax(z, axis=-1), drawn).astype(jnp.int32)
  # XLA would make one sum of these of sums, and go over all weights for it.
  total = jnp.sum(jax.lax.optimization_barrier(sums), axis=-1)
  return token, top[:, 0] + jnp.log(total)


def _invert(weights: Array, u: Array) -> Array:
  """The index at which u [R] of the weights [R, N] lies; never one of weight 0.

  Prefix sums that are added as a tree may shrink by a last bit where a weight
  is 0, so the weight itself is asked too.
  """
  sums = jnp.cumsum(weights, axis=-1)
  some = weights > 0
  beyond = some & (sums > (u * sums[:, -1])[:, None])
  last = weights.shape[1] - 1 - jnp.argmax(some[:, ::-1], axis=-1)
  first = jnp.argmax(beyond, axis=-1)
  return jnp.where(jnp.any(beyond, axis=-1), first, last)


def cut(z: Array, temperature: Array, cuts: Cuts) -> Array:
  """Which tokens each row may draw, bool [R, V], of logits z [R, V].

  In this order: what is allowed; the `top_k` likeliest of it; the fewest of
  those that hold `top_p` of what they hold together; those of at least `min_p`
  times the likeliest. Ties go to the lower id, and the likeliest always stays.
  Greedy rows are not cut, for they draw nothing.
  """
  return _cut(z, temperature, cuts)[0]


def _cut(z: Array, temperature: Array, cuts: Cuts) -> tuple[Array, Array]:
  """`cut`, and the ids of the `TOP_LOGPROBS` likeliest, which are kept first.

  Where no row has more than a mask, nothing is sorted: that takes a CPU longer
  than a small model's step. Such a row's bits are the same beside others.
  """
  vocab = z.shape[1]
  allowed = jnp.unpackbits(cuts.allowed, axis=-1, count=vocab).astype(bool)
  allowed = jnp.broadcast_to(allowed, z.shape)
  z = jnp.where(allowed, z, -jnp.inf)
  masked = (cuts.top_k <= 0) & (cuts.top_p >= 1) & (cuts.min_p <= 0)
  masked |= temperature < GREEDY
  kept, top = jax.lax.cond(
    jnp.all(masked),
    lambda: (allowed, jax.lax.top_k(z, min(TOP_LOGPROBS, vocab))[1]),
    lambda: _ranked(z, cuts),
  )
  return jnp.where(masked[:, None], allowed, kept), top


def _ranked(z: Array, cuts: Cuts) -> tuple[Array, Array]:
  """(what is kept of z [R, V], the ids of the likeliest), by sorting."""
  vocab = z.shape[1]
  numbers = jnp.broadcast_to(jnp.arange(vocab)[None, :], z.shape)
  down, order = jax.lax.sort((-z, numbers), num_keys=1, is_stable=True)
  weights = jnp.exp(down[:, :1] - down)  # 1 for the likeliest
  top_k = jnp.where(cuts.top_k > 0, cuts.top_k, vocab)
  weights = jnp.where(jnp.arange(vocab)[None, :] < top_k[:, None], weights, 0)
  sums = jnp.cumsum(weights, axis=-1)
  before = sums - weights
  enough = before >= (cuts.top_p * sums[:, -1])[:, None]
  enough &= (cuts.top_p < 1)[:, None]
  kept = (weights > 0) & ~enough & (weights >= cuts.min_p[:, None])
  kept = kept.at[:, 0].set(True)
  rows = jnp.arange(z.shape[0])[:, None]
  out = jnp.zeros(z.shape, bool).at[rows, order].set(kept)
  return out, order[:, :TOP_LOGPROBS]


def answer(
  config: ModelConfig,
  numerics: NumericsConfig,
  params: Any,
  hidden: Array,
  draws: Draws,
  cuts: Cuts | None = None,
  used: Array | None = None,
) -> Answer:
  """Draws one token a row of hidden [S, D], and gives its logprob.

  Args:
    config, numerics: static.
    params: as `transformer.step` takes them.
    hidden: [S, D]; in `bitwise`, S is a multiple of the block of rows.
    draws: of those rows.
    cuts: None where every row draws from all it has.
    used: see `layers.map_rows`.
  """
  norm, unembed = params['final_norm'], transformer.unembedding(params)
  safe = jnp.where(draws.temperature < GREEDY, 1.0, draws.temperature)
  model = config, numerics, norm, unembed
  if numerics.mode == 'fast':
    tokens, logprobs = scored_rows(*model, hidden, draws)
  else:
    scored = logprobs_lib.row_scores(*model, hidden, safe)
    if scored is not None:
      return _of_scored(numerics, scored, draws, cuts)
    tokens = sample_rows(*model, hidden, draws, used)
    logprobs, _ = transformer.row_logprobs(
      *model, hidden, tokens, safe, used=used
    )
  if cuts is None:
    return Answer(tokens, logprobs, None)

  def rows(x, t, draws, cuts):
    z = transformer.logits_rows(config, norm, unembed, x, t)  # [R, V]
    return _drawn_among(z, draws, cuts)

  cuts = _of_every_row(cuts, hidden.shape[0])
  few, kept, *top = layers.map_rows(
    rows, numerics, hidden, safe, draws, cuts, used=used
  )
  over, _ = transformer.row_logprobs(*model, hidden, few, safe, kept, used)
  # Rows that are not cut keep the very bits of a step without any that is.
  return Answer(
    jnp.where(cuts.some, few, tokens),
    jnp.where(cuts.some, over, logprobs),
    kept,
    *top,
  )


def _of_scored(
  numerics: NumericsConfig,
  scored: token_logprob.Scored,
  draws: Draws,
  cuts: Cuts | None,
) -> Answer:
  """`answer` of logits that are there; they are not multiplied again."""
  tokens = draw(scored.logits, draws)
  logprobs = scored.logprob(tokens)
  if cuts is None:
    return Answer(tokens, logprobs, None)
  cuts = _of_every_row(cuts, len(tokens))
  few, kept, *top = _drawn_among(scored.logits, draws, cuts)
  over = token_logprob.renormalised(
    scored, kept, implementation=operations.of(numerics).sparse
  )
  return Answer(
    jnp.where(cuts.some, few, tokens),
    jnp.where(cuts.some, over.logprob(few), logprobs),
    kept,
    *top,
  )


def _of_every_row(cuts: Cuts, rows: int) -> Cuts:
  """With a mask of its own for each of so many rows."""
  size = cuts.allowed.shape[1]
  return cuts._replace(allowed=jnp.broadcast_to(cuts.allowed, (rows, size)))


def _drawn_among(
  z: Array, draws: Draws, cuts: Cuts
) -> tuple[Array, Array, Array, Array]:
  """(token, what was kept, packed, the likeliest and their logprobs) of z [R, V]."""
  kept, top = _cut(z, draws.temperature, cuts)
  z = jnp.where(kept, z, -jnp.inf)
  total = jax.nn.logsumexp(z, axis=-1, keepdims=True)
  likely = jnp.take_along_axis(z, top, axis=-1) - total
  return draw(z, draws), jnp.packbits(kept, axis=-1), top, likely


def sample_rows(
  config: ModelConfig,
  numerics: NumericsConfig,
  norm: Array,
  unembed: Array,
  hidden: Array,
  draws: Draws,
  used: Array | None = None,
) -> Array:
  """Draws one token a row from its whole distribution.

  Args:
    config, numerics: static.
    norm: [D]; unembed: [D, V].
    hidden: [N, D].
    draws: of N rows.
    used: see `layers.map_rows`.

  Returns:
    int32 [N].
  """

  def rows(x: Array, draws: Draws) -> Array:
    safe = jnp.where(draws.temperature < GREEDY, 1.0, draws.temperature)
    z = transformer.logits_rows(config, norm, unembed, x, safe)  # [R, V]
    return draw(z, draws)

  return layers.map_rows(rows, numerics, hidden, draws, used=used)


def scored_rows(
  config: ModelConfig,
  numerics: NumericsConfig,
  norm: Array,
  unembed: Array,
  hidden: Array,
  draws: Draws,
) -> tuple[Array, Array]:
  """`sample_rows`, and the logprobs float32 [N] of what was drawn."""

  def rows(x: Array, draws: Draws) -> tuple[Array, Array]:
    safe = jnp.where(draws.temperature < GREEDY, 1.0, draws.temperature)
    z = transformer.logits_rows(config, norm, unembed, x, safe)  # [R, V]
    token, total = _draw(z, draws)
    return token, jnp.take_along_axis(z, token[:, None], axis=1)[:, 0] - total

  return layers.map_rows(rows, numerics, hidden, draws)
