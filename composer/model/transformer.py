"""The transformer: declaration, training forward, engine step, logprobs.

A layer is `project` (row-wise), attention, `finish` (row-wise). Training and
inference differ only in where keys and values live: `forward` packs segments
into [B, T] and attends within them, `step` takes loose rows and attends over
the pages of a cache. In `bitwise` both run the same loops over blocks of rows
and blocks of keys, so a token's logprob has the same bits on both sides.

The bitwise training forward is a function of its own with a derivative of its
own (`jax.custom_vjp`): what is differentiated is the fast form at the routes
that were taken. XLA can therefore not fuse the backward pass into the forward
one and change its bits, and the backward pass runs at full speed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer.model import attention
from composer.model import layers
from composer.model import moe

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
ParamSpec = params_lib.ParamSpec
CACHE_BATCH = 4  # rows of [B, T] that dense attention takes at once on a CPU


@struct.dataclass
class Output:
  """What a forward pass over packed segments gives."""

  hidden: Array  # float32 [B, T, D]
  experts: Array  # int16 [B, T, L, K], in use
  native: Array  # int16 [B, T, L, K], what the router alone would have chosen
  load: Array  # float32 [L, E], tokens that each expert got


def spec(config: ModelConfig) -> Any:
  """The declaration of every parameter."""
  v, d = config.vocab_size, config.width
  sparse = config.layers - config.dense_layers
  out = {
    'embed': ParamSpec((v, d), ('vocab', 'embed'), 'embedding'),
    'final_norm': ParamSpec((d,), ('embed',), 'ones'),
  }
  if not config.tie_embeddings:
    out['unembed'] = ParamSpec((d, v), ('embed', 'vocab'), fan_in=d)
  if config.dense_layers:
    out['dense'] = {
      'attention': attention.spec(config, config.dense_layers),
      'mlp': layers.feed_forward_spec(config, config.dense_layers),
    }
  if sparse:
    out['layers'] = {
      'attention': attention.spec(config, sparse),
      'moe': moe.spec(config, sparse),
    }
  return out


def moe_layers(config: ModelConfig) -> int:
  """L of every routing array."""
  return config.layers - config.dense_layers


def _finish(
  p: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  plausibility: float,
  x: Array,
  heads: Array,
  replay: Array,
) -> tuple[Array, Array, Array]:
  """Attention's output to the layer's output; rows [R, ...]."""
  x = attention.combine_heads(p['attention'], x, heads)
  if 'mlp' in p:
    none = jnp.zeros((x.shape[0], 0), jnp.int32)
    return layers.feed_forward(p['mlp'], config, x), none, none
  return moe.moe(p['moe'], config, numerics.moe, x, replay, plausibility)


def _rope(config: ModelConfig, positions: Array, length: int):
  cos, sin = layers.rope_table(config, length)
  return jnp.asarray(cos)[positions], jnp.asarray(sin)[positions]


# --- training -----------------------------------------------------------------


def _layer(
  config, numerics, plausibility, p, x, segment_ids, positions, replay
):
  """One layer over packed segments.

  Args:
    config, numerics, plausibility: static.
    p: the layer's parameters.
    x: [B, T, D].
    segment_ids, positions: int32 [B, T].
    replay: int [B, T, K]; -1 routes natively.

  Returns:
    (x' [B, T, D], experts int32 [B, T, K], native int32 [B, T, K]).
  """
  b, t, d = x.shape
  cos, sin = _rope(config, positions.reshape(-1), t)
  rows = x.reshape(b * t, d)
  q, k, v = layers.map_rows(
    functools.partial(attention.project, p['attention'], config),
    numerics,
    rows,
    cos,
    sin,
  )
  if numerics.mode == 'fast':
    packed = [a.reshape(b, t, *a.shape[1:]) for a in (q, k, v)]
    heads = layers.in_cache(
      attention.dense, CACHE_BATCH, *packed, segment_ids, positions
    )
    heads = heads.reshape(b * t, *heads.shape[2:])
  else:
    heads = _paged_heads(numerics, q, k, v, positions)
  x, experts, native = layers.map_rows(
    functools.partial(_finish, p, config, numerics, plausibility),
    numerics,
    rows,
    heads,
    replay.reshape(b * t, -1),
  )
  return (
    x.reshape(b, t, d),
    experts.reshape(b, t, -1),
    native.reshape(b, t, -1),
  )


def _paged_heads(numerics, q, k, v, positions):
  """Attention over packed rows in the paged form; segments start on pages."""
  b, t = positions.shape
  block = numerics.kv_block
  if t % block:
    raise ValueError(
      f'a row of {t} tokens is no multiple of numerics.kv_block={block}; choose'
      ' a sequence length that is'
    )
  pages = [a.reshape(-1, block, *a.shape[1:]) for a in (k, v)]
  flat = positions.reshape(-1)
  first = (jnp.arange(b * t) - flat) // block  # page of the segment's start
  table = first[:, None] + jnp.arange(t // block)[None, :]
  table = jnp.clip(table, 0, b * t // block - 1)
  return layers.map_rows(
    lambda *rows: attention.paged(*rows, *pages), numerics, q, flat, table
  )


def _layer_forward(config, numerics, plausibility, p, x, seg, pos, replay):
  out = _layer(config, numerics, plausibility, p, x, seg, pos, replay)
  return out, (p, x, seg, pos, out[1])


def _layer_backward(config, numerics, plausibility, residuals, cotangents):
  p, x, seg, pos, experts = residuals
  fast = numerics_fast(numerics)

  def again(p, x):  # the routes taken are replayed, whatever chose them
    return _layer(config, fast, 0.0, p, x, seg, pos, experts)[0]

  _, pull = jax.vjp(again, p, x)
  grad_p, grad_x = pull(cotangents[0])
  return grad_p, grad_x, None, None, None


_layer_fixed = jax.custom_vjp(_layer, nondiff_argnums=(0, 1, 2))
_layer_fixed.defvjp(_layer_forward, _layer_backward)


def numerics_fast(numerics: NumericsConfig) -> NumericsConfig:
  """The same numerics in mode `fast`."""
  return dataclasses.replace(numerics, mode='fast')


def forward(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  tokens: Array,
  segment_ids: Array,
  positions: Array,
  experts: Array | None = None,
  plausibility: float = 0.0,
) -> Output:
  """Hidden states of packed segments.

  Args:
    params: float32, nested as `spec` (see `params.as_computed`).
    config, numerics: static.
    tokens, segment_ids, positions: int32 [B, T]; segment 0 is padding. In
      `bitwise`, segments start at multiples of `numerics.kv_block`.
    experts: int16 [B, T, L, K] to replay; None or -1 routes natively.
    plausibility: see `moe.route`.

  Returns:
    `Output`; `load` counts real tokens only.
  """
  b, t = tokens.shape
  sparse, k = moe_layers(config), config.experts_per_token
  x = params['embed'][tokens]
  if experts is None:
    experts = jnp.full((b, t, sparse, k), -1, jnp.int16)

  layer = _layer if numerics.mode == 'fast' else _layer_fixed

  def body(x, inputs):
    p, replay = inputs
    x, used, native = layer(
      config, numerics, plausibility, p, x, segment_ids, positions, replay
    )
    return x, (used, native)

  if config.dense_layers:
    none = jnp.full((config.dense_layers, b, t, k), -1, jnp.int16)
    x, _ = jax.lax.scan(body, x, (params['dense'], none))
  if not sparse:
    empty = jnp.zeros((b, t, 0, k), jnp.int16)
    return Output(x, empty, empty, jnp.zeros((0, config.experts)))
  replay = jnp.moveaxis(experts, 2, 0)  # [L, B, T, K]
  x, (used, native) = jax.lax.scan(body, x, (params['layers'], replay))
  real = (segment_ids > 0).astype(jnp.float32)  # [B, T]
  one_hot = (
    used[..., None] == jnp.arange(config.experts)[None, None, None, None]
  )  # [L, B, T, K, E]
  load = jnp.einsum('lbtke,bt->le', one_hot.astype(jnp.float32), real)
  return Output(
    hidden=x,
    experts=jnp.moveaxis(used, 0, 2).astype(jnp.int16),
    native=jnp.moveaxis(native, 0, 2).astype(jnp.int16),
    load=jax.lax.stop_gradient(load),
  )


# --- logprobs -----------------------------------------------------------------


def unembedding(params: Any) -> Array:
  """[D, V]; the transposed embedding where they are tied."""
  return params['unembed'] if 'unembed' in params else params['embed'].T


def logits_rows(config, norm, unembed, x: Array, temperature: Array) -> Array:
  """Logits over the temperature, float32 [R, V], of rows x [R, D]."""
  h = layers.rms_norm(x, norm, config.norm_eps)
  return (h @ unembed) / temperature[:, None]


def _logprob_rows(config, norm, unembed, x, target, temperature):
  """(logprob [R], entropy [R]) of target [R] under softmax(logits / T)."""
  z = logits_rows(config, norm, unembed, x, temperature)
  shifted = z - jnp.max(z, axis=-1, keepdims=True)
  weights = jnp.exp(shifted)
  total = jnp.sum(weights, axis=-1)
  log_total = jnp.log(total)
  chosen = jnp.take_along_axis(shifted, target[:, None], axis=-1)[:, 0]
  entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
  return chosen - log_total, entropy


def row_logprobs(config, numerics, norm, unembed, x, target, temperature):
  """Logprob and entropy of one target a row, in the mode's numerics.

  Args:
    config, numerics: static.
    norm: [D]; unembed: [D, V].
    x: [N, D]; target: int32 [N]; temperature: float32 [N].

  Returns:
    (logprob [N], entropy [N]), float32.
  """

  def rows(*block):
    # One array: were they two, a caller that drops the entropy would get
    # another loop body compiled, and other last bits of the logprob.
    return jnp.stack(_logprob_rows(config, norm, unembed, *block), axis=-1)

  both = layers.map_rows(rows, numerics, x, target, temperature)
  return both[:, 0], both[:, 1]


def _row_logprobs_forward(config, numerics, *args):
  return row_logprobs(config, numerics, *args), args


def _row_logprobs_backward(config, numerics, args, cotangents):
  norm, unembed, x, target, temperature = args

  fast = numerics_fast(numerics)

  def again(norm, unembed, x):
    return row_logprobs(config, fast, norm, unembed, x, target, temperature)

  _, pull = jax.vjp(again, norm, unembed, x)
  return *pull(cotangents), None, None


_row_logprobs_fixed = jax.custom_vjp(row_logprobs, nondiff_argnums=(0, 1))
_row_logprobs_fixed.defvjp(_row_logprobs_forward, _row_logprobs_backward)


def token_logprob(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  hidden: Array,
  tokens: Array,
  temperatures: Array,
) -> tuple[Array, Array]:
  """Logprob of each token given those before it, and that step's entropy.

  Args:
    hidden: [B, T, D] from `forward`.
    tokens: int32 [B, T].
    temperatures: float32 [B, T], of the token's own sampling.

  Returns:
    two float32 [B, T]; entry t comes from the hidden state at t - 1. The first
    entry of every segment has no meaning.
  """
  b, t, d = hidden.shape
  before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  fixed = numerics.mode != 'fast'
  logprob, entropy = (_row_logprobs_fixed if fixed else row_logprobs)(
    config,
    numerics,
    params['final_norm'],
    unembedding(params),
    before.reshape(b * t, d),
    tokens.reshape(-1),
    temperatures.reshape(-1),
  )
  return logprob.reshape(b, t), entropy.reshape(b, t)


# --- inference ----------------------------------------------------------------


@struct.dataclass
class Cache:
  """Keys and values, [layers * P, S, G, K]; page 0 of a layer is scratch."""

  keys: Array
  values: Array


def init_cache(
  config: ModelConfig, numerics: NumericsConfig, pages: int
) -> Cache:
  """An empty cache of `pages` pages a layer."""
  shape = (
    config.layers * pages,
    numerics.kv_block,
    config.kv_heads,
    config.head_dim,
  )
  return Cache(jnp.zeros(shape), jnp.zeros(shape))


def step(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  cache: Cache,
  tokens: Array,
  positions: Array,
  table: Array,
) -> tuple[Array, Array, Cache]:
  """Runs N loose rows, prefill and decode alike, through the model.

  The keys and values of all rows are written before any row attends, so rows of
  one sequence may be in the same step.

  Args:
    tokens, positions: int32 [N].
    table: int32 [N, M]; pages of each row's sequence; row 0s are scratch.

  Returns:
    (hidden [N, D], experts int16 [N, L, K], cache).
  """
  n = tokens.shape[0]
  block = numerics.kv_block
  pages = cache.keys.shape[0] // config.layers
  cos, sin = _rope(config, positions, table.shape[1] * block)
  page = jnp.take_along_axis(table, positions[:, None] // block, axis=1)[:, 0]
  offset = positions % block
  replay = jnp.full((n, config.experts_per_token), -1, jnp.int32)

  def body(carry, p):
    x, index, keys, values = carry
    base = index * pages
    q, k, v = layers.map_rows(
      functools.partial(attention.project, p['attention'], config),
      numerics,
      x,
      cos,
      sin,
    )
    keys = keys.at[base + page, offset].set(k)
    values = values.at[base + page, offset].set(v)
    heads = layers.map_rows(
      lambda *rows: attention.paged(*rows, keys, values),
      numerics,
      q,
      positions,
      base + table,
    )
    x, used, _ = layers.map_rows(
      functools.partial(_finish, p, config, numerics, 0.0),
      numerics,
      x,
      heads,
      replay,
    )
    return (x, index + 1, keys, values), used

  carry = (params['embed'][tokens], jnp.int32(0), cache.keys, cache.values)
  used = jnp.zeros((0, n, config.experts_per_token), jnp.int32)
  if config.dense_layers:
    carry, _ = jax.lax.scan(body, carry, params['dense'])
  if moe_layers(config):
    carry, used = jax.lax.scan(body, carry, params['layers'])
  x, _, keys, values = carry
  return x, jnp.moveaxis(used, 0, 1).astype(jnp.int16), Cache(keys, values)
