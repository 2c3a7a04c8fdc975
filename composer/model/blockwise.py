"""Causal attention block by block, over a sequence spread over devices.

Scores of a whole row would be [T, T]. Here a block of queries meets one block
of keys after another, and only a running (maximum, sum, value) triple is kept
(online softmax, Milakov and Gimelshein, 2018; its backward pass, Dao et al.,
2022). Pairs of blocks in which every key lies after every query are left out.

A device holds the queries of two chunks, i and 2 CP - 1 - i of 2 CP, and the
source of all keys: latents, or the keys and values of grouped-query attention.
Latents are expanded a block at a time, so keys and values of all heads never
exist for the whole row. The list of pairs has one length on every device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer.model import attention
from composer.model import mla

Array = jax.Array

QUERIES = 4096  # of a block, at most
KEYS = 512


@dataclasses.dataclass(frozen=True)
class Shape:
  """Static facts of one attention."""

  config: config_lib.ModelConfig
  form: str
  context: int  # CP
  queries: int  # of a block
  keys: int


def attend(
  config: config_lib.ModelConfig,
  form: str,
  context: int,
  p: Any,
  q: Array,
  source: Any,
  segment_ids: Array,
  positions: Array,
) -> Array:
  """Attention of this device's queries; inside of `shard_map`.

  Args:
    config, form, context: static; the form is that of latent attention.
    p: the layer's attention parameters; latent attention reads `kv_up`.
    q: [B, T / CP, H, K], of chunks i and 2 CP - 1 - i.
    source: of keys and values, [B, T, ...] and in order: latents [B, T, C +
      rope], or (keys, values) [B, T, G, K].
    segment_ids, positions: int32 [B, T].

  Returns:
    [B, T / CP, H, W] in q's dtype.
  """
  size = q.shape[1] // 2
  shape = Shape(
    config, form, context, _divisor(size, QUERIES), _divisor(size, KEYS)
  )
  up = p.get('kv_up') if config.kv_lora and form != 'absorbed' else None
  return _attend(shape, up, q, source, segment_ids, positions)


def _divisor(size: int, most: int) -> int:
  return next(n for n in range(min(size, most), 0, -1) if size % n == 0)


def pairs(shape: Shape, size: int) -> np.ndarray:
  """(query block of the device, key block) to visit, int32 [CP, N, 2].

  `size` is that of a chunk. Devices have different pairs, and as many.
  """
  chunk_blocks = size // shape.queries
  table = []
  for device in range(shape.context):
    own = []
    for block in range(2 * chunk_blocks):
      half, inside = divmod(block, chunk_blocks)
      chunk = 2 * shape.context - 1 - device if half else device
      last = chunk * size + (inside + 1) * shape.queries - 1
      own += [(block, key) for key in range(last // shape.keys + 1)]
    table.append(own)
  return np.asarray(table, np.int32)


def _expand(shape: Shape, up: Array | None, block: Any) -> tuple[Array, Array]:
  """A block of the source to keys [B, S, G, K] and values [B, S, G, W]."""
  config = shape.config
  if not config.kv_lora:
    return block
  if shape.form == 'absorbed':
    return block[:, :, None], block[:, :, None, : config.kv_lora]
  b, s, _ = block.shape
  k, v = mla.expand({'kv_up': up}, config, block.reshape(b * s, -1))
  return k.reshape(b, s, *k.shape[1:]), v.reshape(b, s, *v.shape[1:])


# --- blocks -------------------------------------------------------------------


def _cut(x: Array, block: int) -> Array:
  """[B, T, ...] -> [T / block, B, block, ...]."""
  b, t = x.shape[:2]
  return jnp.moveaxis(x.reshape(b, t // block, block, *x.shape[2:]), 1, 0)


def _join(x: Array) -> Array:
  """Inverse of `_cut`."""
  n, b, block = x.shape[:3]
  return jnp.moveaxis(x, 0, 1).reshape(b, n * block, *x.shape[3:])


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """The device's arrays, cut, and how a pair of blocks is looked up."""

  shape: Shape
  up: Array | None
  q: Array  # [nq, B, Q, G, N, K]
  source: Any  # [nk, B, S, ...]
  q_ids: tuple[Array, Array]  # segment ids and positions, [nq, B, Q]
  k_ids: tuple[Array, Array]  # [nk, B, S]
  table: Array  # int32 [N, 2]


def _blocks(shape: Shape, up, q, source, segment_ids, positions) -> _Blocks:
  # Else `jax.checkpoint` makes and keeps the masks of all pairs, for they depend
  # on nothing that is differentiated.
  q, segment_ids, positions = jax.lax.optimization_barrier(
    (q, segment_ids, positions)
  )
  b, t, h, _ = q.shape
  config, size = shape.config, t // 2
  g = config.kv_heads
  if config.kv_lora:
    g = 1 if shape.form == 'absorbed' else h
  device = jax.lax.axis_index('context') if shape.context > 1 else 0
  table = jnp.asarray(pairs(shape, size))[device]
  halves = (device, 2 * shape.context - 1 - device)

  def mine(x):
    cut = x.reshape(b, 2 * shape.context, size)
    part = jnp.stack([cut[:, half] for half in halves], axis=1)
    return _cut(part.reshape(b, t), shape.queries)

  return _Blocks(
    shape,
    up,
    _cut(q.reshape(b, t, g, h // g, -1), shape.queries),
    jax.tree.map(lambda x: _cut(x, shape.keys), source),
    (mine(segment_ids), mine(positions)),
    (_cut(segment_ids, shape.keys), _cut(positions, shape.keys)),
    table,
  )


def _at(x: Any, index: Array) -> Any:
  return jax.tree.map(
    lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), x
  )


def _put(x: Any, part: Any, index: Array) -> Any:
  return jax.tree.map(
    lambda a, p: jax.lax.dynamic_update_index_in_dim(a, p, index, 0), x, part
  )


def _scores(blocks: _Blocks, q: Array, k: Array, pair: Array) -> Array:
  """Masked scores float32 [B, G, N, Q, S] of one pair of blocks."""
  scores = _product('bqgnd,bsgd->bgnqs', q, k)
  scores = scores / attention.divisor(blocks.shape.config)
  q_seg, q_pos = _at(blocks.q_ids, pair[0])
  k_seg, k_pos = _at(blocks.k_ids, pair[1])
  visible = (q_seg[:, :, None] == k_seg[:, None, :]) & (
    q_pos[:, :, None] >= k_pos[:, None, :]
  )
  return jnp.where(visible[:, None, None], scores, attention.NEGATIVE)


def _product(letters: str, a: Array, b: Array) -> Array:
  return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)


# --- values and gradients -----------------------------------------------------


def _forward(shape, up, q, source, segment_ids, positions):
  """(output [B, T, H, W], log of the sum of exponentials [nq, B, G, N, Q])."""
  blocks = _blocks(shape, up, q, source, segment_ids, positions)
  n, b, block, g, heads, _ = blocks.q.shape
  values = jax.eval_shape(
    lambda s: _expand(shape, up, s)[1], _at(blocks.source, 0)
  )
  width = values.shape[-1]

  def merge(carry, pair):
    k, v = _expand(shape, up, _at(blocks.source, pair[1]))
    top, total, value = _at(carry, pair[0])
    scores = _scores(blocks, _at(blocks.q, pair[0]), k, pair)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    total = total * decay + jnp.sum(weights, axis=-1)
    update = _product('bgnqs,bsgd->bgnqd', weights.astype(v.dtype), v)
    part = (new_top, total, value * decay[..., None] + update)
    return _put(carry, part, pair[0]), None

  # Where no key of the first blocks is seen, their weights are exp(0); the
  # first key that is seen, at the latest the row itself, takes them to 0.
  start = (
    jnp.full((n, b, g, heads, block), attention.NEGATIVE, jnp.float32),
    jnp.zeros((n, b, g, heads, block), jnp.float32),
    jnp.zeros((n, b, g, heads, block, width), jnp.float32),
  )
  (top, total, value), _ = jax.lax.scan(merge, start, blocks.table)
  out = jnp.moveaxis(value / total[..., None], 4, 2)  # [n, B, Q, G, N, W]
  out = _join(out).reshape(*q.shape[:3], width).astype(q.dtype)
  return out, top + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape, up, q, source, segment_ids, positions):
  return _forward(shape, up, q, source, segment_ids, positions)[0]


def _attend_forward(shape, up, q, source, segment_ids, positions):
  out, log_total = _forward(shape, up, q, source, segment_ids, positions)
  return out, (up, q, source, segment_ids, positions, out, log_total)


def _attend_backward(shape, residuals, gradient):
  up, q, source, segment_ids, positions, out, log_total = residuals
  blocks = _blocks(shape, up, q, source, segment_ids, positions)
  n, b, block, g, heads, _ = blocks.q.shape
  divisor = attention.divisor(shape.config)
  dots = jnp.sum(
    out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1
  )
  dots = _cut(dots.reshape(*dots.shape[:2], g, heads), block)
  dots = jnp.moveaxis(dots, 2, 4)  # [n, B, G, N, Q]
  douts = _cut(
    gradient.reshape(*gradient.shape[:2], g, heads, -1), block
  )  # [n, B, Q, G, N, W]

  def step(carry, pair):
    dq, dsource, dup = carry
    part = _at(blocks.source, pair[1])
    (k, v), pull = jax.vjp(functools.partial(_expand, shape), up, part)
    query, dout = _at(blocks.q, pair[0]), _at(douts, pair[0])
    scores = _scores(blocks, query, k, pair)
    weights = jnp.exp(scores - _at(log_total, pair[0])[..., None])
    dv = _product('bgnqs,bqgnd->bsgd', weights.astype(v.dtype), dout)
    dweights = _product('bqgnd,bsgd->bgnqs', dout, v)
    dscores = weights * (dweights - _at(dots, pair[0])[..., None]) / divisor
    dscores = dscores.astype(k.dtype)
    more = _product('bgnqs,bsgd->bqgnd', dscores, k)
    dk = _product('bgnqs,bqgnd->bsgd', dscores, query)
    up_more, source_more = pull((dk.astype(k.dtype), dv.astype(v.dtype)))
    dq = _put(dq, _at(dq, pair[0]) + more, pair[0])
    dsource = _put(dsource, _add(_at(dsource, pair[1]), source_more), pair[1])
    return (dq, dsource, _add(dup, up_more)), None

  start = _zeros((blocks.q, blocks.source, up))
  (dq, dsource, dup), _ = jax.lax.scan(step, start, blocks.table)
  dq = _join(dq).reshape(q.shape).astype(q.dtype)
  dsource = jax.tree.map(lambda d, s: _join(d).astype(s.dtype), dsource, source)
  dup = jax.tree.map(lambda d, u: d.astype(u.dtype), dup, up)
  return dup, dq, dsource, None, None


def _zeros(tree: Any) -> Any:
  """Sums of gradients start here, in float32."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _add(a: Any, b: Any) -> Any:
  return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)


_attend.defvjp(_attend_forward, _attend_backward)
