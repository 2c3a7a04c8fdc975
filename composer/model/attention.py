"""Grouped-query attention: projections, the dense form and the paged form.

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

Array = jax.Array
ParamSpec = params_lib.ParamSpec

NEGATIVE = -1e30  # below any score; finite, so that no inf - inf arises


def spec(config: config_lib.ModelConfig, stack: int) -> Any:
  """Attention parameters stacked over `stack` layers."""
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  return {
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


def project(
  p: Any, config: config_lib.ModelConfig, x: Array, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
  """Queries [R, H, K] and keys, values [R, G, K] of rows x [R, D].

  cos, sin [R, K / 2] are the rotary factors of the rows' positions.
  """
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  y = layers.rms_norm(x, p['norm'], config.norm_eps)
  qkv = (y @ p['qkv'].reshape(d, (h + 2 * g) * k)).reshape(-1, h + 2 * g, k)
  rotated = layers.rotate(qkv[:, : h + g], cos, sin)
  return rotated[:, :h], rotated[:, h:], qkv[:, h + g :]


def combine_heads(p: Any, x: Array, heads: Array) -> Array:
  """x + heads W_o; x [R, D], heads [R, H, K]."""
  rows, d = x.shape
  return x + heads.reshape(rows, -1) @ p['out'].reshape(-1, d)


def dense(
  q: Array, k: Array, v: Array, segment_ids: Array, positions: Array
) -> Array:
  """Causal attention within segments; the fast form of training.

  Args:
    q: [B, T, H, K]; k, v: [B, T, G, K].
    segment_ids, positions: int32 [B, T].

  Returns:
    [B, T, H, K].
  """
  b, t, h, d = q.shape
  g = k.shape[2]
  grouped = q.reshape(b, t, g, h // g, d)
  scores = jnp.einsum('btgnd,bsgd->bgnts', grouped, k) / math.sqrt(d)
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  visible = same & (positions[:, :, None] >= positions[:, None, :])
  scores = jnp.where(visible[:, None, None], scores, NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1)
  return jnp.einsum('bgnts,bsgd->btgnd', weights, v).reshape(b, t, h, d)


def paged(
  q: Array, positions: Array, table: Array, k_pages: Array, v_pages: Array
) -> Array:
  """Attention of each row over its own pages, in order (one row block).

  Args:
    q: [R, H, K].
    positions: int32 [R]; row r sees keys at 0 ... positions[r].
    table: int32 [R, M]; page that holds the row's m-th KV block.
    k_pages, v_pages: [P, S, G, K]; S tokens a block.

  Returns:
    [R, H, K].
  """
  r, h, d = q.shape
  block, g = k_pages.shape[1], k_pages.shape[2]
  grouped = q.reshape(r, g, h // g, d)
  scale = 1.0 / math.sqrt(d)
  count = jnp.max(positions) // block + 1

  def merge(j: Array, carry: tuple[Array, Array, Array]):
    top, total, value = carry  # [R, G, N], [R, G, N], [R, G, N, K]
    pages = jax.lax.dynamic_index_in_dim(table, j, axis=1, keepdims=False)
    keys, values = k_pages[pages], v_pages[pages]  # [R, S, G, K]
    scores = jnp.einsum('rgnd,rsgd->rgns', grouped, keys) * scale
    seen = j * block + jnp.arange(block)[None, :] <= positions[:, None]
    scores = jnp.where(seen[:, None, None, :], scores, NEGATIVE)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    total = total * decay + jnp.sum(weights, axis=-1)
    update = jnp.einsum('rgns,rsgd->rgnd', weights, values)
    return new_top, total, value * decay[..., None] + update

  start = (
    jnp.full((r, g, h // g), NEGATIVE),
    jnp.zeros((r, g, h // g)),
    jnp.zeros((r, g, h // g, d)),
  )
  _, total, value = jax.lax.fori_loop(0, count, merge, start)
  # Every row sees at least itself, so the sum is at least one exponential.
  return (value / total[..., None]).reshape(r, h, d)
