"""Attention: projections of either kind, the dense form and the paged form.

Grouped-query attention is written here, multi-head latent attention in `mla`;
both give queries, keys and values, over which the forms below attend. In the
absorbed form of latent attention the values are part of the keys (`width`).

The paged form is the one with fixed numerics. A query's keys lie in blocks of
`kv_block` tokens that are anchored at absolute positions and visited in order;
each is merged into a running (maximum, sum, value) triple (online softmax,
Milakov and Gimelshein, 2018). Blocks beyond a query's position change no bit:
their weights are exp(-inf) = 0 and the running maximum stays. Training runs the
same loop over packed segments that start at multiples of the block, so both
sides compute the very same expression.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer.model import layers
from composer.model import mla
from composer.model import operations

Array = jax.Array
ModelConfig = config_lib.ModelConfig
ParamSpec = params_lib.ParamSpec
Operations = operations.Operations

NEGATIVE = -1e30  # below any score; finite, so that no inf - inf arises


def spec(config: ModelConfig, stack: int) -> Any:
  """Attention parameters stacked over `stack` layers."""
  if config.kv_lora:
    return mla.spec(config, stack)
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  out = {
    'norm': ParamSpec((stack, d), ('layers', 'embed'), 'ones'),
    'qkv': ParamSpec(
      (stack, d, h + 2 * g, k),
      ('layers', 'embed', 'heads', 'head_dim'),
      fan_in=d,
    ),
    'out': ParamSpec(
      (stack, h, k, d), ('layers', 'heads', 'head_dim', 'embed'), fan_in=h * k
    ),
  }
  if config.qk_norm:
    for name in ('q_norm', 'k_norm'):
      out[name] = ParamSpec((stack, k), ('layers', 'head_dim'), 'ones')
  return out


def project(
  p: Any,
  config: ModelConfig,
  form: str,
  x: Array,
  cos: Array,
  sin: Array,
  ops: Operations = operations.PLAIN,
) -> tuple[Array, Array, Array | None]:
  """Queries [R, H, K] and keys, values [R, G, K] of rows x [R, D].

  cos, sin [R, K / 2] are the rotary factors of the rows' positions. `form` is
  that of latent attention, whose shapes `mla.project_normed` gives.
  """
  y = layers.rms_norm(x, p['norm'], config.norm_eps, ops)
  return project_normed(p, config, form, y, cos, sin, ops)


def project_normed(
  p: Any,
  config: ModelConfig,
  form: str,
  y: Array,
  cos: Array | None,
  sin: Array | None,
  ops: Operations = operations.PLAIN,
) -> tuple[Array, Array | None, Array | None]:
  """`project` of rows y [R, D] that have been through the layer's norm.

  Without cos and sin nothing is turned: ([R, H + 2 G, K] of all three, None,
  None), of grouped queries alone.
  """
  if config.kv_lora:
    return mla.project_normed(p, config, form, y, cos, sin, ops)
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  qkv = operations.matmul(ops, y, p['qkv'].reshape(d, (h + 2 * g) * k))
  qkv = qkv.reshape(-1, h + 2 * g, k)
  if config.qk_norm:
    scales = p['q_norm'], p['k_norm']
    qkv = layers.norm_heads(qkv, scales, (h, g), config.norm_eps, ops)
  if cos is None:
    return qkv, None, None
  rotated = layers.rotate(qkv[:, : h + g], cos, sin, ops)
  return rotated[:, :h], rotated[:, h:], qkv[:, h + g :]


def combine_heads(
  p: Any,
  config: ModelConfig,
  form: str,
  x: Array,
  heads: Array,
  ops: Operations = operations.PLAIN,
) -> Array:
  """x + heads W_o; x [R, D], heads [R, H, K] as the forms below give them."""
  return operations.add(ops, x, of_heads(p, config, form, heads, ops))


def of_heads(
  p: Any,
  config: ModelConfig,
  form: str,
  heads: Array,
  ops: Operations = operations.PLAIN,
) -> Array:
  """What `combine_heads` adds, [R, D]."""
  if config.kv_lora and form == 'absorbed':
    heads = mla.unabsorb(p, config, heads, ops)
  d = p['out'].shape[-1]
  flat = heads.reshape(heads.shape[0], -1)
  return operations.matmul(ops, flat, p['out'].reshape(-1, d))


def divisor(config: ModelConfig) -> float:
  """What the scores q . k are divided by."""
  return mla.divisor(config) if config.kv_lora else math.sqrt(config.head_dim)


def width(config: ModelConfig, form: str) -> int:
  """How many numbers of a key are its value; 0 where values are their own."""
  return config.kv_lora if form == 'absorbed' else 0


def cache_shapes(
  config: ModelConfig, form: str
) -> tuple[tuple[int, int], tuple[int, int] | None]:
  """(heads, numbers) that a cache keeps of a token: its keys, its values."""
  if not config.kv_lora:
    shape = (config.kv_heads, config.head_dim)
    return shape, shape
  if form == 'absorbed':
    return (1, config.kv_lora + config.rope_dim), None
  key = config.nope_dim + config.rope_dim
  return (config.heads, key), (config.heads, config.value_dim)


def dense(
  q: Array,
  k: Array,
  v: Array | None,
  segment_ids: Array,
  positions: Array,
  *,
  divisor: float,
  width: int = 0,
) -> Array:
  """Causal attention within segments; the fast form of training.

  Args:
    q: [B, T, H, K]; k: [B, T, G, K].
    v: [B, T, G, W], or None: the first `width` numbers of the keys.
    segment_ids, positions: int32 [B, T].
    divisor: of the scores.
    width: see `v`.

  Returns:
    [B, T, H, W].
  """
  b, t, h, d = q.shape
  g = k.shape[2]
  v = k[..., :width] if v is None else v
  grouped = q.reshape(b, t, g, h // g, d)
  scores = _product('btgnd,bsgd->bgnts', grouped, k) / divisor
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  visible = same & (positions[:, :, None] >= positions[:, None, :])
  scores = jnp.where(visible[:, None, None], scores, NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = _product('bgnts,bsgd->btgnd', weights, v)
  return out.reshape(b, t, h, v.shape[-1]).astype(q.dtype)


def paged(
  q: Array,
  positions: Array,
  table: Array,
  k_pages: Array,
  v_pages: Array | None,
  *,
  divisor: float,
  width: int = 0,
) -> Array:
  """Attention of each row over its own pages, in order (one row block).

  Args:
    q: [R, H, K].
    positions: int32 [R]; row r sees keys at 0 ... positions[r].
    table: int32 [R, M]; page that holds the row's m-th KV block.
    k_pages: [P, S, G, K]; S tokens a block.
    v_pages: [P, S, G, W], or None: the first `width` numbers of the keys.
    divisor: of the scores.
    width: see `v_pages`.

  Returns:
    [R, H, W].
  """
  r, h, d = q.shape
  block, g = k_pages.shape[1], k_pages.shape[2]
  w = width if v_pages is None else v_pages.shape[-1]
  grouped = q.reshape(r, g, h // g, d)
  scale = 1.0 / divisor
  count = jnp.max(positions) // block + 1

  def merge(j: Array, carry: tuple[Array, Array, Array]):
    top, total, value = carry  # [R, G, N], [R, G, N], [R, G, N, W]
    pages = jax.lax.dynamic_index_in_dim(table, j, axis=1, keepdims=False)
    keys = k_pages[pages]  # [R, S, G, K]
    values = keys[..., :w] if v_pages is None else v_pages[pages]
    scores = _product('rgnd,rsgd->rgns', grouped, keys) * scale
    seen = j * block + jnp.arange(block)[None, :] <= positions[:, None]
    scores = jnp.where(seen[:, None, None, :], scores, NEGATIVE)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    total = total * decay + jnp.sum(weights, axis=-1)
    update = _product('rgns,rsgd->rgnd', weights.astype(values.dtype), values)
    return new_top, total, value * decay[..., None] + update

  start = (
    jnp.full((r, g, h // g), NEGATIVE),
    jnp.zeros((r, g, h // g)),
    jnp.zeros((r, g, h // g, w)),
  )
  _, total, value = jax.lax.fori_loop(0, count, merge, start)
  # Every row sees at least itself, so the sum is at least one exponential.
  return (value / total[..., None]).reshape(r, h, w).astype(q.dtype)


def _product(letters: str, a: Array, b: Array) -> Array:
  """An einsum that adds in float32, whatever it multiplies."""
  return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)
