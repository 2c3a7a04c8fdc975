"""The transformer: declaration, training forward, engine step, logprobs.

A layer is `project` (row-wise), attention, `finish` (row-wise). Training and
inference differ only in where keys and values live: `forward` packs segments
into [B, T] and attends within them, `step` takes loose rows and attends over
the pages of a cache. In `bitwise` both run the same loops over blocks of rows
and blocks of keys, so a token's logprob has the same bits on both sides.

Without kernels the bitwise training forward is a function of its own with a
derivative of its own (`jax.custom_vjp`): what is differentiated is the fast form
at the routes that were taken. XLA can therefore not fuse the backward pass into
the forward one and change its bits. Where kernels run, no fusion changes a bit
(`model.operations`), and the backward pass reads what the forward one has made.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer.model import attention
from composer.model import layers
from composer.model import logprobs
from composer.model import mla
from composer.model import operations
from composer.model import sharded
from composer.model import trunk

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
# What callers of a model need besides, wherever it is written.
Output, spec, moe_layers = trunk.Output, trunk.spec, trunk.moe_layers
unembedding, logits_rows = logprobs.unembedding, logprobs.logits_rows
row_logprobs = logprobs.row_logprobs

CACHE_BATCH = 4  # rows of [B, T] that dense attention takes at once on a CPU
# Rows of one sequence that a step attends with at once. Times the heads that
# share keys (8 of most, 64 where latent) they fill a kernel's 128 rows; more
# would leave more of them empty behind the end of a prompt.
TILE = 16
KEPT = 2**34  # bytes of all layers that `bitwise` keeps for the backward pass


# --- training -----------------------------------------------------------------


def _layer(
  config, numerics, plausibility, audit, p, x, segment_ids, positions, replay
):
  """One layer over packed segments.

  Args:
    config, numerics, plausibility, audit: static; see `moe.route`.
    p: the layer's parameters.
    x: [B, T, D].
    segment_ids, positions: int32 [B, T].
    replay: int [B, T, K]; -1 routes natively.

  Returns:
    (x' [B, T, D], experts int32 [B, T, K], native int32 [B, T, K]).
  """
  b, t, d = x.shape
  form = mla.form(numerics, training=True)
  cos, sin = trunk.rope(config, positions.reshape(-1), t)
  rows = x.reshape(b * t, d)
  qkv = layers.map_rows(
    functools.partial(trunk.project, p, config, numerics, form),
    numerics,
    rows,
    cos,
    sin,
  )
  scores, ops = trunk.score_arguments(config, form), operations.of(numerics)
  packed = jax.tree.map(lambda a: a.reshape(b, t, *a.shape[1:]), qkv)
  if ops.sparse != operations.XLA:
    heads = operations.attention(
      ops, *packed, segment_ids, block=numerics.kv_block, **scores
    )
    heads = heads.reshape(b * t, *heads.shape[2:])
  elif numerics.mode == 'fast':
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
    functools.partial(
      trunk.finish, p, config, numerics, form, plausibility, audit=audit
    ),
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


def _paged(numerics, scores, q, positions, table, *pages, used=None):
  """`attention.paged` over blocks of rows."""
  return layers.map_rows(
    lambda *rows: attention.paged(*rows, *pages, **scores),
    numerics,
    q,
    positions,
    table,
    used=used,
  )


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
  return _paged(numerics, scores, q, flat, table, *pages)


def _layer_forward(
  config, numerics, plausibility, audit, p, x, seg, pos, replay
):
  out = _layer(config, numerics, plausibility, audit, p, x, seg, pos, replay)
  return out, (p, x, seg, pos, out[1])


def _layer_backward(
  config, numerics, plausibility, audit, residuals, cotangents
):
  p, x, seg, pos, experts = residuals
  # Either form of latent attention has these derivatives; this one is cheaper.
  fast = dataclasses.replace(logprobs.as_fast(numerics), mla='expanded')

  def again(p, x):  # the routes taken are replayed, whatever chose them
    return _layer(config, fast, 0.0, False, p, x, seg, pos, experts)[0]

  _, pull = jax.vjp(again, p, x)
  grad_p, grad_x = pull(cotangents[0])
  return grad_p, grad_x, None, None, None


_layer_fixed = jax.custom_vjp(_layer, nondiff_argnums=(0, 1, 2, 3))
_layer_fixed.defvjp(_layer_forward, _layer_backward)


def _keeps(config: ModelConfig, numerics: NumericsConfig, rows: int) -> bool:
  """Whether the backward pass reads what the forward one has made.

  Else it computes every layer again, in the fast form: without kernels, so that
  no bit of the forward pass changes; of absorbed attention, whose other form has
  the cheaper derivative; and where more than `KEPT` bytes would have to be kept.
  """
  if numerics.mode == 'fast':
    return True
  latent = config.kv_lora and mla.form(numerics, training=True) == 'absorbed'
  if latent or not operations.of(numerics).fixed:
    return False
  d, f = config.width, config.expert_hidden
  # About, of a token: four states, queries, keys and values before and after
  # they are turned, heads, and what goes in and out of a feed-forward.
  keys, k = config.kv_heads, config.head_dim
  if config.kv_lora:
    keys, k = config.heads, config.nope_dim + config.rope_dim
  states = 4 * d + (3 * config.heads + 4 * keys) * k
  dense = config.dense_layers * (states + config.dense_hidden)
  sparse = config.experts_per_token * (3 * d + f)
  if numerics.moe == 'dense':  # of every expert, and again by its gate
    sparse = 2 * config.experts * f
  sparse += config.shared_experts * f
  numbers = dense + moe_layers(config) * (states + sparse)
  return rows * numbers * jnp.dtype(layers.dtype(numerics)).itemsize <= KEPT


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
  audit: bool = True,
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
    layout: static; see `sharded.forward`.
    audit: static; whether `Output.native` is read (`moe.route`).

  Returns:
    `Output`; `load` counts real tokens only.
  """
  if layout is not None:
    return sharded.forward(
      params,
      config,
      numerics,
      tokens,
      segment_ids,
      positions,
      experts,
      plausibility,
      layout,
      audit,
    )
  b, t = tokens.shape
  sparse, k = moe_layers(config), config.experts_per_token
  x = params['embed'][tokens].astype(layers.dtype(numerics))
  if experts is None:
    experts = jnp.full((b, t, sparse, k), -1, jnp.int16)

  layer = functools.partial(
    _layer if _keeps(config, numerics, b * t) else _layer_fixed,
    config,
    numerics,
    plausibility,
    audit,
  )

  def body(x, inputs):
    p, replay = inputs
    x, used, native = layer(p, x, segment_ids, positions, replay)
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


def token_logprob(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  hidden: Array,
  tokens: Array,
  temperatures: Array,
  layout: mesh_lib.Layout | None = None,
  kept: Array | None = None,
) -> tuple[Array, Array]:
  """Logprob of each token given those before it, and that step's entropy.

  Args:
    hidden: [B, T, D] from `forward`.
    tokens: int32 [B, T].
    temperatures: float32 [B, T], of the token's own sampling.
    layout: static; `hidden` then is of the device's own tokens, all else of
      whole rows, and so is the result.
    kept: int32 [B, T, J], see `records.Batch`.

  Returns:
    two float32 [B, T]; entry t comes from the hidden state at t - 1. The first
    entry of every segment has no meaning.
  """
  if layout is not None:
    return sharded.token_logprob(
      params, config, numerics, layout, hidden, tokens, temperatures, kept
    )
  b, t, d = hidden.shape
  before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  fixed = numerics.mode != 'fast' and not operations.of(numerics).fixed
  logprob, entropy = (logprobs.row_logprobs_fixed if fixed else row_logprobs)(
    config,
    numerics,
    params['final_norm'],
    unembedding(params),
    before.reshape(b * t, d),
    tokens.reshape(-1),
    temperatures.reshape(-1),
    None if kept is None else kept.reshape(b * t, -1),
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


def split_layers(params: Any) -> Any:
  """Stacked layers as a tuple of layers, which `step` runs without a loop.

  A loop cuts every layer's parameters out of the stack before it multiplies;
  where a step is short, that and the loop itself are much of its time.
  """

  def split(stack: Any) -> tuple[Any, ...]:
    count = jax.tree.leaves(stack)[0].shape[0]
    return tuple(
      jax.tree.map(operator.itemgetter(i), stack) for i in range(count)
    )

  stacks = {n: split(params[n]) for n in ('dense', 'layers') if n in params}
  return {**params, **stacks}


def _over_layers(body: Any, carry: Any, stack: Any) -> tuple[Any, Any]:
  """`scan`, or the same of a tuple of layers."""
  if not isinstance(stack, tuple):
    return jax.lax.scan(body, carry, stack)
  results, once = [], jax.jit(body)  # traced, and its kernels made, once
  for layer in stack:
    carry, result = once(carry, layer)
    results.append(result)
  return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)


def sequences_of(rows: int, sequences: int) -> np.ndarray | None:
  """Which sequence each row of a step is of, int32 [rows].

  A step has R1 rows that are of a sequence each, and then T tiles of `TILE`
  rows that are: rows = R1 + TILE T and sequences = R1 + T. None where there are
  no tiles: row n is of sequence n.

  Raises:
    ValueError: no whole number of tiles makes up the difference.
  """
  tiles, rest = divmod(rows - sequences, TILE - 1)
  if rest or not 0 <= tiles <= sequences:
    raise ValueError(
      f'{rows} rows of {sequences} sequences; a step takes R1 + {TILE} T rows'
      ' of R1 + T'
    )
  if not tiles:
    return None
  alone = sequences - tiles
  in_tiles = np.repeat(np.arange(alone, sequences, dtype=np.int32), TILE)
  return np.concatenate([np.arange(alone, dtype=np.int32), in_tiles])


def _places(positions, table, of, block):
  """(positions, pages) of rows, int32 [N]; nobody's are at 0, on scratch."""
  if of is None:
    page = jnp.take_along_axis(table, positions[:, None] // block, axis=1)
    return positions, page[:, 0]
  at = jnp.maximum(positions, 0)
  return at, jnp.where(positions < 0, 0, table[of, at // block])


class _Places(NamedTuple):
  """Where the rows of a step are; see `step`."""

  positions: Array  # int32 [N]
  at: Array  # the same, 0 for nobody's
  page: Array  # int32 [N], of a layer's own, 0 for nobody's
  table: Array  # int32 [S, M]
  of: np.ndarray | None  # see `sequences_of`
  turns: tuple[Array, Array] | None  # cos, sin, where attention turns
  used: Array | None  # see `step`


def _attended(numerics, scores, alone, places, base, q, k, v, keys, values):
  """(heads, keys, values) of a layer whose pages are from `base` on."""
  positions, at, page, table, of, turns, used = places
  ops, block = operations.of(numerics), numerics.kv_block
  kernels = ops.sparse != operations.XLA
  if kernels and alone:
    real = jnp.where(page == 0, -1, at)
    if turns is not None:
      return operations.decode_turning(
        ops, q, *turns, real, base + table, keys, values, **scores
      )
    return operations.decode(
      ops, q, k, v, real, base + table, keys, values, **scores
    )
  place, offset = base + page, at % block
  if kernels:
    # Nobody's rows write nowhere: on a GPU hundreds of rows at one address
    # wait for each other, longer than all else in the step takes.
    place = jnp.where(page == 0, len(keys), place)
  keys = keys.at[place, offset].set(k, unique_indices=kernels)
  if v is not None:
    values = values.at[place, offset].set(v, unique_indices=kernels)
  if kernels:
    heads = operations.paged_attention(
      ops, q, positions, base + table, keys, values, tile=TILE, **scores
    )
  else:
    own = base + (table if of is None else table[of])
    heads = _paged(numerics, scores, q, at, own, keys, values, used=used)
  return heads, keys, values


def _step_layer(config, numerics, layout, alone, places, turns, carry, p):
  """One layer of `step`: (carry, experts used [N, K]).

  The carry is x [N, D], what is to be added to it yet (or None), the number of
  the layer, keys and values.
  """
  x, more, index, keys, values = carry
  form = mla.form(numerics, training=False)
  base = index * (keys.shape[0] // config.layers)
  some = p, config, numerics, form
  if more is None:
    project = functools.partial(trunk.project, *some)
    q, k, v = layers.map_rows(project, numerics, x, *turns, used=places.used)
  else:
    enter = functools.partial(trunk.enter, *some)
    x, (q, k, v) = layers.map_rows(enter, numerics, x, more, *turns)
  scores = trunk.score_arguments(config, form)
  heads, keys, values = _attended(
    numerics, scores, alone, places, base, q, k, v, keys, values
  )
  finish = functools.partial(
    trunk.finish if more is None else trunk.unadded,
    *(*some, 0.0),
    layout=layout,
    audit=False,
  )
  replay = jnp.full((len(x), config.experts_per_token), -1, jnp.int32)
  if layout is None:
    x, *rest = layers.map_rows(
      finish, numerics, x, heads, replay, used=places.used
    )
  else:  # rows meet those of other devices, all at once
    x, *rest = finish(x, heads, replay)
  if more is not None:
    more = rest.pop(0)
  return (x, more, index + 1, keys, values), rest[0]


def step(
  params: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  cache: Cache,
  tokens: Array,
  positions: Array,
  table: Array,
  layout: mesh_lib.Layout | None = None,
  turns: tuple[Array, Array] | None = None,
  alone: bool = False,
  used: Array | None = None,
) -> tuple[Array, Array, Cache]:
  """Runs N loose rows, prefill and decode alike, through the model.

  The keys and values of all rows are written before any row attends, so rows of
  one sequence may be in the same step. Where they stand in it, alone or in a
  tile, changes no bit of theirs; but in `fast` by kernels, where a few that stand
  alone may attend in splits.

  Args:
    params: as `forward` takes them, or `split_layers` of it.
    tokens: int32 [N].
    positions: int32 [N]; negative where a row of a tile is nobody's.
    table: int32 [S, M]; pages of each row's sequence; row 0s are scratch. S is
      N, or less where rows lie in tiles (`sequences_of`): then a kernel reads
      the pages of a tile's sequence once for all of them.
    layout: static; rows, cache and experts are this device's, inside of
      `shard_map`, and all other parameters whole.
    turns: see `trunk.rope`.
    alone: static; whether every row is the only one of its sequence.
    used: int32; those behind the first so many rows are nobody's, and need not
      be computed. None: all may be somebody's.

  Returns:
    (hidden [N, D], experts int16 [N, L, K], cache).
  """
  n = tokens.shape[0]
  ops, block = operations.of(numerics), numerics.kv_block
  of = sequences_of(n, table.shape[0])
  at, page = _places(positions, table, of, block)
  turns = trunk.rope(config, at, table.shape[1] * block, turns)
  kept = table, cache.keys, cache.values
  inside = alone and operations.turns_itself(ops, config, *kept)
  places = _Places(
    positions, at, page, table, of, turns if inside else None, used
  )
  turns = (None, None) if inside else turns
  some = config, numerics, layout, alone, places, turns
  body = functools.partial(_step_layer, *some)
  x = params['embed'][tokens].astype(layers.dtype(numerics))
  # What a layer adds last is added by the kernel that norms for the next one;
  # x - 0 is x, of whatever sign.
  late = ops.dense != operations.XLA
  more = jnp.full_like(x, -0.0) if late else None
  carry = (x, more, jnp.int32(0), cache.keys, cache.values)
  used = jnp.zeros((0, n, config.experts_per_token), jnp.int32)
  if config.dense_layers:
    carry, _ = _over_layers(body, carry, params['dense'])
  if moe_layers(config):
    carry, used = _over_layers(body, carry, params['layers'])
  x, more, _, keys, values = carry
  if late:
    x = operations.add(ops, x, more)
  return x, jnp.moveaxis(used, 0, 1).astype(jnp.int16), Cache(keys, values)
