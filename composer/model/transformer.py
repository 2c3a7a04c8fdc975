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
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import attention
from composer.model import blockwise
from composer.model import layers
from composer.model import mla
from composer.model import moe
from composer.model import parallel

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
ParamSpec = params_lib.ParamSpec
LOGITS = 2**27  # elements of [R, V] that `fast` holds at once: half a gigabyte
CACHE_BATCH = 4  # rows of [B, T] that dense attention takes at once on a CPU


@struct.dataclass
class Output:
  """What a forward pass over packed segments gives."""

  hidden: Array  # [B, T, D], in `numerics.compute`
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
  form: str,
  plausibility: float,
  x: Array,
  heads: Array,
  replay: Array,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Array, Array, Array]:
  """Attention's output to the layer's output; rows [R, ...]."""
  p = layers.as_compute(numerics, p)
  x = attention.combine_heads(p['attention'], config, form, x, heads)
  if 'mlp' in p:
    none = jnp.zeros((x.shape[0], 0), jnp.int32)
    return layers.feed_forward(p['mlp'], config, x), none, none
  return moe.moe(
    p['moe'], config, numerics.moe, x, replay, plausibility, layout
  )


def _project(
  p: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  form: str,
  x: Array,
  cos: Array,
  sin: Array,
) -> tuple[Array, Array, Array | None]:
  """The layer's input to queries, keys and values; rows [R, ...]."""
  p = layers.as_compute(numerics, p['attention'])
  return attention.project(p, config, form, x, cos, sin)


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
  form = mla.form(numerics, training=True)
  cos, sin = _rope(config, positions.reshape(-1), t)
  rows = x.reshape(b * t, d)
  qkv = layers.map_rows(
    functools.partial(_project, p, config, numerics, form),
    numerics,
    rows,
    cos,
    sin,
  )
  scores = _score_arguments(config, form)
  if numerics.mode == 'fast':
    packed = jax.tree.map(lambda a: a.reshape(b, t, *a.shape[1:]), qkv)
    heads = layers.in_cache(
      functools.partial(attention.dense, **scores),
      CACHE_BATCH,
      *packed,
      segment_ids,
      positions,
    )
    heads = heads.reshape(b * t, *heads.shape[2:])
  else:
    heads = _paged_heads(numerics, scores, *qkv, positions)
  x, experts, native = layers.map_rows(
    functools.partial(_finish, p, config, numerics, form, plausibility),
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


def _score_arguments(config, form):
  return {
    'divisor': attention.divisor(config),
    'width': attention.width(config, form),
  }


def _paged_heads(numerics, scores, q, k, v, positions):
  """Attention over packed rows in the paged form; segments start on pages."""
  b, t = positions.shape
  block = numerics.kv_block
  if t % block:
    raise ValueError(
      f'a row of {t} tokens is no multiple of numerics.kv_block={block}; choose'
      ' a sequence length that is'
    )
  pages = jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), (k, v))
  flat = positions.reshape(-1)
  first = (jnp.arange(b * t) - flat) // block  # page of the segment's start
  table = first[:, None] + jnp.arange(t // block)[None, :]
  table = jnp.clip(table, 0, b * t // block - 1)
  return layers.map_rows(
    lambda *rows: attention.paged(*rows, *pages, **scores),
    numerics,
    q,
    flat,
    table,
  )


def _layer_forward(config, numerics, plausibility, p, x, seg, pos, replay):
  out = _layer(config, numerics, plausibility, p, x, seg, pos, replay)
  return out, (p, x, seg, pos, out[1])


def _layer_backward(config, numerics, plausibility, residuals, cotangents):
  p, x, seg, pos, experts = residuals
  # Either form of latent attention has these derivatives; this one is cheaper.
  fast = dataclasses.replace(numerics_fast(numerics), mla='expanded')

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
  layout: mesh_lib.Layout | None = None,
) -> Output:
  """Hidden states of packed segments.

  Args:
    params: float32, nested as `spec` (see `params.as_computed`); they are cast
      to `numerics.compute` where they multiply.
    config, numerics: static.
    tokens, segment_ids, positions: int32 [B, T]; segment 0 is padding. In
      `bitwise`, segments start at multiples of `numerics.kv_block`.
    experts: int16 [B, T, L, K] to replay; None or -1 routes natively.
    plausibility: see `moe.route`.
    layout: static; see `_forward_parallel`.

  Returns:
    `Output`; `load` counts real tokens only.
  """
  if layout is not None:
    return _forward_parallel(
      params,
      config,
      numerics,
      tokens,
      segment_ids,
      positions,
      experts,
      plausibility,
      layout,
    )
  b, t = tokens.shape
  sparse, k = moe_layers(config), config.experts_per_token
  x = params['embed'][tokens].astype(layers.dtype(numerics))
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


# --- training on many devices ---------------------------------------------------


def _attend_parallel(p, config, form, layout, x, cos, sin, ids):
  """Heads [R, H, W] of x [B, T / CP, D]; keys come from all of `context`."""
  b, t, d = x.shape
  rows = x.reshape(b * t, d)

  def packed(a):
    return a.reshape(b, t, *a.shape[1:])

  if config.kv_lora:
    y = layers.rms_norm(rows, p['norm'], config.norm_eps)
    q = mla.queries(p, config, y, cos, sin)
    if form == 'absorbed':
      q = mla.absorb(p, config, q)
    latents = packed(mla.latents(p, config, y, cos, sin))
    source = parallel.spread(layout, latents)
  else:
    q, k, v = attention.project(p, config, form, rows, cos, sin)
    source = tuple(parallel.spread(layout, packed(a)) for a in (k, v))
  heads = blockwise.attend(
    config, form, layout.size('context'), p, packed(q), source, *ids
  )
  return heads.reshape(b * t, *heads.shape[2:])


def _layer_parallel(
  config, numerics, plausibility, layout, specs, ids, shards, x, replay
):
  """One layer on one device: gathers its parameters, computes its tokens.

  Args:
    config, numerics, plausibility, layout: static.
    specs: declarations of one layer.
    ids: segment ids and positions, int32 [B, T]; whole rows.
    shards: the device's part of the layer's parameters.
    x: [B, T / CP, D]; replay: int [B, T / CP, K].

  Returns:
    (x', (experts, native int16 [B, T / CP, K], load float32 [E])).
  """
  b, t, d = x.shape
  p = parallel.gather(layout, specs, numerics, shards)
  form = mla.form(numerics, training=True)
  own = parallel.own(layout, ids[1]).reshape(-1)
  cos, sin = _rope(config, own, ids[1].shape[1])
  heads = _attend_parallel(
    p['attention'], config, form, layout, x, cos, sin, ids
  )
  x, used, native = _finish(
    p,
    config,
    numerics,
    form,
    plausibility,
    x.reshape(b * t, d),
    heads,
    replay.reshape(b * t, -1),
    layout,
  )
  real = parallel.own(layout, ids[0]).reshape(-1) > 0
  hits = used[..., None] == jnp.arange(config.experts)[None, None]  # [R, K, E]
  load = jnp.sum(hits & real[:, None, None], axis=(0, 1), dtype=jnp.float32)
  routes = [a.reshape(b, t, -1).astype(jnp.int16) for a in (used, native)]
  return x.reshape(b, t, d), (*routes, load)


def _forward_parallel(
  params,
  config,
  numerics,
  tokens,
  segment_ids,
  positions,
  experts,
  plausibility,
  layout,
) -> Output:
  """`forward` on one device of a mesh, inside of `shard_map` over its axes.

  In mode `fast`, whatever `numerics` says. The layers are computed again in the
  backward pass, from nothing but their input.

  Args:
    params: the device's parts, by `layout.rules`; masters, not rounded yet.
    tokens, segment_ids, positions, experts: the device's rows, [B, T, ...],
      each of which all devices of `context` hold whole.

  Returns:
    `Output` of the device's own tokens (`parallel.own`), [B, T / CP, ...];
    `load` is that of all devices.
  """
  sparse, k = moe_layers(config), config.experts_per_token
  specs, ids = spec(config), (segment_ids, positions)
  if sparse:
    mesh_lib.check_experts(layout, config.experts)
  own = parallel.own(layout, tokens)
  x = parallel.embed(layout, specs['embed'], params['embed'], own)
  x = x.astype(layers.dtype(numerics))
  b, t = own.shape

  def run(name, x, replay):
    layer = functools.partial(
      _layer_parallel,
      config,
      numerics,
      plausibility,
      layout,
      parallel.one_layer(specs[name]),
      ids,
    )

    def body(x, inputs):
      return jax.checkpoint(layer, prevent_cse=False)(inputs[0], x, inputs[1])

    return jax.lax.scan(body, x, (params[name], replay))

  def unknown(count):
    return jnp.full((count, b, t, k), -1, jnp.int16)

  if config.dense_layers:
    x, _ = run('dense', x, unknown(config.dense_layers))
  if not sparse:
    empty = jnp.zeros((b, t, 0, k), jnp.int16)
    return Output(x, empty, empty, jnp.zeros((0, config.experts)))
  if experts is None:
    replay = unknown(sparse)
  else:
    replay = jnp.moveaxis(parallel.own(layout, experts), 2, 0)
  x, (used, native, load) = run('layers', x, replay)
  return Output(
    hidden=x,
    experts=jnp.moveaxis(used, 0, 2),
    native=jnp.moveaxis(native, 0, 2),
    load=parallel.sum_tokens(layout, jax.lax.stop_gradient(load)),
  )


def _token_logprob_parallel(
  params, config, numerics, layout, hidden, tokens, temperatures
):
  """`token_logprob` of whole rows, on every device of `context`, from its own
  hidden states [B, T / CP, D]: each scores the tokens that follow its own."""
  b, t, d = hidden.shape
  specs = spec(config)
  names = ['final_norm', 'embed' if config.tie_embeddings else 'unembed']
  p = parallel.gather(
    layout,
    {name: specs[name] for name in names},
    numerics,
    {name: params[name] for name in names},
  )

  def following(x):
    return parallel.own(layout, jnp.roll(x, -1, axis=1)).reshape(-1)

  # In float32, so that the gradients of all blocks are added up in it.
  unembed = unembedding(p).astype(jnp.float32)

  def rows(*block):
    both = _logprob_rows(config, p['final_norm'], unembed, *block)
    return jnp.stack(both, axis=-1)

  most = max(LOGITS // config.vocab_size // 256, 1) * 256
  both = layers.in_blocks(
    rows,
    min(most, b * t),
    hidden.reshape(b * t, d),
    following(tokens),
    following(temperatures),
  )
  both = parallel.whole(layout, both.reshape(b, t, 2))
  both = jnp.roll(both, 1, axis=1)
  return both[..., 0], both[..., 1]


# --- logprobs -----------------------------------------------------------------


def unembedding(params: Any) -> Array:
  """[D, V]; the transposed embedding where they are tied."""
  return params['unembed'] if 'unembed' in params else params['embed'].T


def logits_rows(config, norm, unembed, x: Array, temperature: Array) -> Array:
  """Logits over the temperature, float32 [R, V], of rows x [R, D]."""
  h = layers.rms_norm(x, norm, config.norm_eps)
  z = jnp.matmul(h, unembed.astype(h.dtype), preferred_element_type=jnp.float32)
  return z / temperature[:, None]


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

  The logits of all rows are never held at once: they go through in blocks, and
  the backward pass computes a block's again.

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

  block = max(LOGITS // config.vocab_size // 256, 1) * 256
  if numerics.mode == 'fast' and x.shape[0] > block:
    both = layers.in_blocks(rows, block, x, target, temperature)
  else:
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
  layout: mesh_lib.Layout | None = None,
) -> tuple[Array, Array]:
  """Logprob of each token given those before it, and that step's entropy.

  Args:
    hidden: [B, T, D] from `forward`.
    tokens: int32 [B, T].
    temperatures: float32 [B, T], of the token's own sampling.
    layout: static; `hidden` then is of the device's own tokens, all else of
      whole rows, and so is the result.

  Returns:
    two float32 [B, T]; entry t comes from the hidden state at t - 1. The first
    entry of every segment has no meaning.
  """
  if layout is not None:
    return _token_logprob_parallel(
      params, config, numerics, layout, hidden, tokens, temperatures
    )
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
  """Pages of all layers, [layers * P, S, heads, numbers]; page 0 is scratch.

  Keys and values may differ in heads and numbers (`attention.cache_shapes`);
  `values` is None where they are part of the keys (absorbed latent attention).
  """

  keys: Array
  values: Array | None


def init_cache(
  config: ModelConfig, numerics: NumericsConfig, pages: int
) -> Cache:
  """An empty cache of `pages` pages a layer."""
  form, kind = mla.form(numerics, training=False), layers.dtype(numerics)
  page = (config.layers * pages, numerics.kv_block)
  empty = [
    None if shape is None else jnp.zeros(page + shape, kind)
    for shape in attention.cache_shapes(config, form)
  ]
  return Cache(*empty)


def step(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  cache: Cache,
  tokens: Array,
  positions: Array,
  table: Array,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Array, Array, Cache]:
  """Runs N loose rows, prefill and decode alike, through the model.

  The keys and values of all rows are written before any row attends, so rows of
  one sequence may be in the same step.

  Args:
    tokens, positions: int32 [N].
    table: int32 [N, M]; pages of each row's sequence; row 0s are scratch.
    layout: static; rows, cache and experts are this device's, inside of
      `shard_map`, and all other parameters whole.

  Returns:
    (hidden [N, D], experts int16 [N, L, K], cache).
  """
  n = tokens.shape[0]
  block, form = numerics.kv_block, mla.form(numerics, training=False)
  scores = _score_arguments(config, form)
  pages = cache.keys.shape[0] // config.layers
  cos, sin = _rope(config, positions, table.shape[1] * block)
  page = jnp.take_along_axis(table, positions[:, None] // block, axis=1)[:, 0]
  offset = positions % block
  replay = jnp.full((n, config.experts_per_token), -1, jnp.int32)

  def body(carry, p):
    x, index, keys, values = carry
    base = index * pages
    q, k, v = layers.map_rows(
      functools.partial(_project, p, config, numerics, form),
      numerics,
      x,
      cos,
      sin,
    )
    keys = keys.at[base + page, offset].set(k)
    if v is not None:
      values = values.at[base + page, offset].set(v)
    heads = layers.map_rows(
      lambda *rows: attention.paged(*rows, keys, values, **scores),
      numerics,
      q,
      positions,
      base + table,
    )
    finish = functools.partial(
      _finish, p, config, numerics, form, 0.0, layout=layout
    )
    if layout is None:
      x, used, _ = layers.map_rows(finish, numerics, x, heads, replay)
    else:  # rows meet those of other devices, all at once
      x, used, _ = finish(x, heads, replay)
    return (x, index + 1, keys, values), used

  x = params['embed'][tokens].astype(layers.dtype(numerics))
  carry = (x, jnp.int32(0), cache.keys, cache.values)
  used = jnp.zeros((0, n, config.experts_per_token), jnp.int32)
  if config.dense_layers:
    carry, _ = jax.lax.scan(body, carry, params['dense'])
  if moe_layers(config):
    carry, used = jax.lax.scan(body, carry, params['layers'])
  x, _, keys, values = carry
  return x, jnp.moveaxis(used, 0, 1).astype(jnp.int16), Cache(keys, values)
