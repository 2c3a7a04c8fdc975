"""Multi-token prediction: a layer behind the last one that drafts tokens.

The model's hidden state at token t says what t + 1 is. One more layer, given
that state and the token t + 1 itself, says what t + 2 is; given its own output
and a token t + 2, what t + 3 is; and so on, the same layer each time:

    g_t^0 = final_norm(h_t)
    x_t^k = W [norm_e(embed(token_{t+k})); norm_h(g_t^{k-1})]     k = 1, 2, ...
    g^k   = layer(x^k), causal, within the segment
    q_t^k = softmax(unembed(norm(g_t^k)))        of the token t + 1 + k

This is the module of DeepSeek-V3 (arXiv 2412.19437, section 2.2), embedding and
unembedding shared with the model, and here with one set of parameters for
every k. It is trained on the distribution p of the model's own head rather than
on the tokens, as Composer 2's was: the mean of KL(p_{t+k} || q_t^k). Of a draft
drawn from q, rejection sampling would keep the share sum_v min(p_v, q_v).

With `detach` nothing flows into the model: its gradient is the one it has
without this layer.

The layer runs as a model of one layer whose embedding is x: row n is token n.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer.model import layers
from composer.model import logprobs
from composer.model import operations
from composer.model import transformer

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig


@struct.dataclass
class Distilled:
  """What one batch says of the drafts; float32."""

  loss: Array  # [], mean over depths of the mean KL over tokens, in nats
  kl: Array  # [depth], mean KL(p || q) over tokens
  accept: Array  # [depth], mean of sum_v min(p_v, q_v)
  load: (
    Array  # [1, E], tokens that each expert of the layer got; [0, E] if none
  )


class _Layer(NamedTuple):
  """The layer as a model of its own: what `transformer` computes with."""

  params: Any
  config: ModelConfig


def _as_model(params: Any, config: ModelConfig, x: Array) -> _Layer:
  """A model of one layer that reads rows x [N, D] as its embedding."""
  dense = config.dense_layers == config.layers
  own = params['mtp']
  stack = {'attention': own['attention']}
  kind = 'mlp' if dense else 'moe'
  stack[kind] = own[kind]
  shape = dataclasses.replace(
    config, layers=1, dense_layers=int(dense), mtp_layers=0
  )
  return _Layer({'embed': x, 'dense' if dense else 'layers': stack}, shape)


def first(params: Any, config: ModelConfig, hidden: Array) -> Array:
  """g^0 of the model's hidden states [..., D], as `transformer` gives them."""
  return layers.rms_norm(hidden, params['final_norm'], config.norm_eps)


def join(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  before: Array,
  tokens: Array,
) -> Array:
  """x^k of rows: g^{k-1} [N, D] and the tokens behind it, int32 [N]."""
  own, kind = params['mtp'], layers.dtype(numerics)
  embedded = params['embed'][tokens].astype(kind)
  parts = (
    layers.rms_norm(embedded, own['embed_norm'][0], config.norm_eps),
    layers.rms_norm(before, own['hidden_norm'][0], config.norm_eps),
  )
  d = config.width
  weights = own['join'][0].astype(kind).reshape(2 * d, d)
  return jnp.concatenate(parts, axis=-1) @ weights


# --- inference ----------------------------------------------------------------


def init_cache(
  config: ModelConfig, numerics: NumericsConfig, pages: int
) -> transformer.Cache:
  """Keys and values of the layer, in the same pages as those of the model.

  At position t stands what x^1 of t gave, which the token t + 1 is part of. Of
  two sequences that share a page and go on differently, one finds the other's
  at the last position of it: its drafts may be worse for that, nothing else.
  """
  return transformer.init_cache(
    dataclasses.replace(config, layers=1), numerics, pages
  )


def step(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  cache: transformer.Cache,
  before: Array,
  tokens: Array,
  *where: Any,
) -> tuple[Array, transformer.Cache]:
  """g^k of N loose rows.

  Args:
    params, config, numerics: as `transformer.step` takes them. Drafts need no
      fixed bits, and `numerics.mode` may be another than the model's.
    cache: from `init_cache`.
    before: [N, D], g^{k-1}.
    tokens: int32 [N], behind those.
    where: `positions`, `table`, `layout` and `turns` of `transformer.step`.

  Returns:
    (g^k [N, D], cache).
  """
  x = join(params, config, numerics, before, tokens)
  layer = _as_model(params, config, x)
  rows = jnp.arange(len(tokens), dtype=jnp.int32)
  hidden, _, cache = transformer.step(*layer, numerics, cache, rows, *where)
  return hidden, cache


def logits(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  g: Array,
  temperatures: Array,
) -> Array:
  """Logits of q over the temperature, float32 [N, V], of outputs g [N, D]."""
  return transformer.logits_rows(
    config,
    params['mtp']['norm'][0],
    transformer.unembedding(params),
    g,
    temperatures,
    operations.of(numerics),
  )


# --- training -----------------------------------------------------------------


def forward(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  hidden: Array,
  tokens: Array,
  segment_ids: Array,
  positions: Array,
  depth: int,
) -> tuple[list[Array], Array]:
  """g^1 ... g^depth over packed segments.

  Behind the last k tokens of a segment the outputs of depth k have no meaning;
  no other row of it sees them.

  Args:
    params, config, numerics, tokens, segment_ids, positions: as
      `transformer.forward` takes them.
    hidden: [B, T, D] that it gave.
    depth: static.

  Returns:
    (g of every depth, each [B, T, D]; load float32 [1 or 0, E], over all of
    them).
  """
  b, t, d = hidden.shape
  rows = jnp.arange(b * t, dtype=jnp.int32).reshape(b, t)
  g, found, load = first(params, config, hidden).reshape(-1, d), [], 0.0
  for k in range(1, depth + 1):
    ahead = _ahead(tokens, k).reshape(-1)
    x = join(params, config, numerics, g, ahead)
    layer = _as_model(params, config, x)
    out = transformer.forward(
      *layer, numerics, rows, segment_ids, positions, audit=False
    )
    found.append(out.hidden)
    g, load = out.hidden.reshape(-1, d), load + out.load
  return found, load


def _ahead(x: Array, k: int) -> Array:
  """x [B, T] k places further; 0 behind the end."""
  return jnp.pad(x[:, k:], ((0, 0), (0, k)))


def rows_distilled(
  config: ModelConfig,
  final_norm: Array,
  norm: Array,
  unembed: Array,
  teacher: Array,
  student: Array,
) -> tuple[Array, Array]:
  """(KL(p || q) [N], sum_v min(p_v, q_v) [N]) of N pairs of rows, float32.

  Logits exist for a block of rows at once, and again in the backward pass.

  Args:
    config: static.
    final_norm, norm: [D], before the logits of p and of q.
    unembed: [D, V].
    teacher: [N, D], hidden states of the model; p has no gradient.
    student: [N, D], outputs of the layer.
  """

  def rows(teacher: Array, student: Array) -> Array:
    one = jnp.ones(teacher.shape[:1], jnp.float32)
    z_p = logprobs.logits_rows(config, final_norm, unembed, teacher, one)
    z_q = logprobs.logits_rows(config, norm, unembed, student, one)
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(z_p), axis=-1)
    log_q = jax.nn.log_softmax(z_q, axis=-1)
    p, q = jnp.exp(log_p), jnp.exp(jax.lax.stop_gradient(log_q))
    kl = jnp.sum(p * (log_p - log_q), axis=-1)
    return jnp.stack([kl, jnp.sum(jnp.minimum(p, q), axis=-1)], axis=-1)

  block = max(logprobs.LOGITS // config.vocab_size // 256, 1) * 256
  both = layers.in_blocks(rows, min(block, len(teacher)), teacher, student)
  return both[:, 0], both[:, 1]


def distil(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  hidden: Array,
  batch: Any,
  depth: int,
  detach: bool = True,
) -> Distilled:
  """The loss of the layer on one batch, and what its drafts are worth.

  Counted are the tokens t + 1 + k of the loss mask that are of t's segment.

  Args:
    params, config, numerics: as `transformer.forward` takes them.
    hidden: [B, T, D] that it gave of the batch.
    batch: `tokens`, `segment_ids`, `positions`, `loss_mask`, [B, T].
    depth, detach: static; see the top of this file.
  """
  if detach:
    # Between the two a barrier: what is read here shall not change how the
    # model's own step is compiled.
    hidden = jax.lax.optimization_barrier(jax.lax.stop_gradient(hidden))
    params = {
      name: part if name == 'mtp' else jax.lax.stop_gradient(part)
      for name, part in params.items()
    }
  ids, mask = batch['segment_ids'], batch['loss_mask']
  found, load = forward(
    params,
    config,
    numerics,
    hidden,
    batch['tokens'],
    ids,
    batch['positions'],
    depth,
  )
  d = config.width
  kls, accepts = [], []
  for k, g in enumerate(found, 1):
    same = (_ahead(ids, k + 1) == ids) & (ids > 0)
    counted = (same & _ahead(mask, k + 1)).reshape(-1)
    teacher = jnp.pad(hidden[:, k:], ((0, 0), (0, k), (0, 0)))
    kl, accept = rows_distilled(
      config,
      params['final_norm'],
      params['mtp']['norm'][0],
      transformer.unembedding(params),
      jax.lax.stop_gradient(teacher).reshape(-1, d),
      g.reshape(-1, d),
    )
    count = jnp.maximum(jnp.sum(counted, dtype=jnp.float32), 1.0)
    kls.append(jnp.sum(jnp.where(counted, kl, 0.0)) / count)
    accepts.append(jnp.sum(jnp.where(counted, accept, 0.0)) / count)
  kl = jnp.stack(kls)
  return Distilled(
    loss=jnp.mean(kl), kl=kl, accept=jnp.stack(accepts), load=load
  )
