"""Multi-head latent attention (DeepSeek-V2, 2024), expanded and absorbed.

A token keeps one latent c of `kv_lora` numbers and one rotary key r of
`rope_dim`, both shared by all heads. With W_k, W_v the two parts of `kv_up`,
head h sees the key [W_k c, r] and the value W_v c. The score of a query
[q_n, q_r] is then

    q_n . (W_k c) + q_r . r   (expanded)  =  (W_k^T q_n) . c + q_r . r  (absorbed)

and the output is W_v sum_t a_t c_t either way round. Expanded attention makes
keys and values of every head: less arithmetic a pair, H times the memory.
Absorbed attention runs over the latents themselves: one shared head of
`kv_lora + rope_dim` whose values are its first `kv_lora` numbers, which is what
a cache wants. The two are equal but for rounding.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer.model import layers
from composer.model import operations

Array = jax.Array
ModelConfig = config_lib.ModelConfig
ParamSpec = params_lib.ParamSpec
Operations = operations.Operations

FORMS = ('expanded', 'absorbed')
# Of the norms of the two latents: the published models of this family were
# trained with it there, and with `norm_eps` everywhere else.
LATENT_EPS = 1e-6


def spec(config: ModelConfig, stack: int) -> Any:
  """Attention parameters stacked over `stack` layers."""
  d, h, c, q = config.width, config.heads, config.kv_lora, config.q_lora
  rope, value = config.rope_dim, config.value_dim
  key = config.nope_dim + rope
  out = {'norm': ParamSpec((stack, d), ('layers', 'embed'), 'ones')}
  if q:
    out['q_down'] = ParamSpec(
      (stack, d, q), ('layers', 'embed', 'q_latent'), fan_in=d
    )
    out['q_down_norm'] = ParamSpec((stack, q), ('layers', 'q_latent'), 'ones')
    out['q_up'] = ParamSpec(
      (stack, q, h, key), ('layers', 'q_latent', 'heads', 'head_dim'), fan_in=q
    )
  else:
    out['q'] = ParamSpec(
      (stack, d, h, key), ('layers', 'embed', 'heads', 'head_dim'), fan_in=d
    )
  return out | {
    'kv_down': ParamSpec(
      (stack, d, c + rope), ('layers', 'embed', 'kv_latent'), fan_in=d
    ),
    'kv_norm': ParamSpec((stack, c), ('layers', 'kv_latent'), 'ones'),
    'kv_up': ParamSpec(
      (stack, c, h, config.nope_dim + value),
      ('layers', 'kv_latent', 'heads', 'head_dim'),
      fan_in=c,
    ),
    'out': ParamSpec(
      (stack, h, value, d),
      ('layers', 'heads', 'head_dim', 'embed'),
      fan_in=h * value,
    ),
  }


def form(numerics: config_lib.NumericsConfig, training: bool) -> str:
  """Which of `FORMS` the trainer, or the engine, computes."""
  if numerics.mla == 'split':
    return 'expanded' if training else 'absorbed'
  if numerics.mla not in FORMS:
    raise ValueError(
      f'numerics.mla={numerics.mla!r} is not known; choose one of'
      f' {", ".join(FORMS)}, split'
    )
  return numerics.mla


def divisor(config: ModelConfig) -> float:
  """What scores are divided by: sqrt(nope + rope) / m(mscale_all_dim)^2."""
  return math.sqrt(config.nope_dim + config.rope_dim) / (
    layers.yarn_scale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
  )


def queries(
  p: Any,
  config: ModelConfig,
  y: Array,
  cos: Array,
  sin: Array,
  ops: Operations = operations.PLAIN,
) -> Array:
  """[R, H, nope + rope] of normalised rows y [R, D], the rope part turned."""
  h, key = config.heads, config.nope_dim + config.rope_dim
  if config.q_lora:
    down = operations.matmul(ops, y, p['q_down'])
    y = layers.rms_norm(down, p['q_down_norm'], LATENT_EPS, ops)
    q = operations.matmul(ops, y, p['q_up'].reshape(-1, h * key))
  else:
    q = operations.matmul(ops, y, p['q'].reshape(-1, h * key))
  q = q.reshape(-1, h, key)
  turned = layers.rotate(q[..., config.nope_dim :], cos, sin, ops)
  return jnp.concatenate([q[..., : config.nope_dim], turned], axis=-1)


def latents(
  p: Any,
  config: ModelConfig,
  y: Array,
  cos: Array,
  sin: Array,
  ops: Operations = operations.PLAIN,
) -> Array:
  """[R, kv_lora + rope]: normed latent, then rotary key, of y [R, D]."""
  c = config.kv_lora
  down = operations.matmul(ops, y, p['kv_down'])
  latent = layers.rms_norm(down[:, :c], p['kv_norm'], LATENT_EPS, ops)
  turned = layers.rotate(down[:, None, c:], cos, sin, ops)[:, 0]
  return jnp.concatenate([latent, turned], axis=-1)


def expand(
  p: Any,
  config: ModelConfig,
  latent: Array,
  ops: Operations = operations.PLAIN,
) -> tuple[Array, Array]:
  """Keys [R, H, nope + rope] and values [R, H, value] of latents [R, C + rope].

  Row-wise: context parallelism gathers latents and expands where they arrive.
  """
  h, c, nope = config.heads, config.kv_lora, config.nope_dim
  up = operations.matmul(ops, latent[:, :c], p['kv_up'].reshape(c, -1))
  up = up.reshape(-1, h, nope + config.value_dim)
  shared = jnp.broadcast_to(
    latent[:, None, c:], (latent.shape[0], h, config.rope_dim)
  )
  return jnp.concatenate([up[..., :nope], shared], axis=-1), up[..., nope:]


def absorb(
  p: Any, config: ModelConfig, q: Array, ops: Operations = operations.PLAIN
) -> Array:
  """Queries over latents [R, H, C + rope] of queries q [R, H, nope + rope]."""
  nope = config.nope_dim
  over = operations.per_head(
    ops, q[..., :nope], jnp.transpose(p['kv_up'][..., :nope], (1, 2, 0))
  )
  return jnp.concatenate([over, q[..., nope:]], axis=-1)


def project_normed(
  p: Any,
  config: ModelConfig,
  form: str,
  y: Array,
  cos: Array,
  sin: Array,
  ops: Operations = operations.PLAIN,
) -> tuple[Array, Array, Array | None]:
  """Queries, keys and values of rows y [R, D] that are normed, in one of `FORMS`.

  Returns:
    expanded: [R, H, nope + rope] twice, and [R, H, value].
    absorbed: [R, H, C + rope], [R, 1, C + rope], and None: the values are the
      first C numbers of the keys.
  """
  q = queries(p, config, y, cos, sin, ops)
  latent = latents(p, config, y, cos, sin, ops)
  if form == 'absorbed':
    return absorb(p, config, q, ops), latent[:, None], None
  return q, *expand(p, config, latent, ops)


def unabsorb(
  p: Any, config: ModelConfig, heads: Array, ops: Operations = operations.PLAIN
) -> Array:
  """Values [R, H, value] of absorbed heads [R, H, C]."""
  up = p['kv_up'][..., config.nope_dim :]
  return operations.per_head(ops, heads, jnp.swapaxes(up, 0, 1))
