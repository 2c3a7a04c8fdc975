"""The parts that every way through the model shares.

The declaration of all parameters, and the two row-wise halves of a layer:
`project` before attention, `finish` after it.
"""

from __future__ import annotations

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import attention
from composer.model import layers
from composer.model import moe
from composer.model import operations

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
ParamSpec = params_lib.ParamSpec


@struct.dataclass
class Output:
  """What a forward pass over packed segments gives."""

  hidden: Array  # [B, T, D], in `numerics.compute`
  experts: Array  # int16 [B, T, L, K], in use
  native: Array  # int16 [B, T, L, K], the router's own; see `moe.route`
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
  if config.mtp_layers:
    out['mtp'] = _mtp_spec(config)
  return out


def _mtp_spec(config: ModelConfig) -> Any:
  """The layer behind the last, of the last one's kind; see `model.mtp`."""
  d = config.width
  sparse = config.layers > config.dense_layers
  norm = ParamSpec((1, d), ('layers', 'embed'), 'ones')
  return {
    'embed_norm': norm,
    'hidden_norm': norm,
    'join': ParamSpec(
      (1, 2, d, d), ('layers', 'pair', 'embed', 'mlp'), fan_in=2 * d
    ),
    'attention': attention.spec(config, 1),
    **(
      {'moe': moe.spec(config, 1)}
      if sparse
      else {'mlp': layers.feed_forward_spec(config, 1)}
    ),
    'norm': norm,
  }


def moe_layers(config: ModelConfig) -> int:
  """L of every routing array."""
  return config.layers - config.dense_layers


def finish(
  p: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  form: str,
  plausibility: float,
  x: Array,
  heads: Array,
  replay: Array,
  layout: mesh_lib.Layout | None = None,
  audit: bool = True,
) -> tuple[Array, Array, Array]:
  """Attention's output to the layer's output; rows [R, ...]."""
  some = plausibility, x, heads, replay, layout, audit
  x, more, used, native = unadded(p, config, numerics, form, *some)
  return operations.add(operations.of(numerics), x, more), used, native


def unadded(
  p: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  form: str,
  plausibility: float,
  x: Array,
  heads: Array,
  replay: Array,
  layout: mesh_lib.Layout | None = None,
  audit: bool = True,
) -> tuple[Array, Array, Array, Array]:
  """`finish` short of its last sum: (x, more, experts, native), x' = x + more."""
  p, ops = layers.as_compute(numerics, p), operations.of(numerics)
  out = attention.of_heads(p['attention'], config, form, heads, ops)
  own = p['mlp'] if 'mlp' in p else p['moe']
  x, h = layers.add_norm(x, out, own['norm'], config.norm_eps, ops)
  if 'mlp' in p:
    none = jnp.zeros((x.shape[0], 0), jnp.int32)
    return x, layers.gated_rows(own, h, ops), none, none
  some = replay, plausibility, layout, ops, audit
  return x, *moe.mixture(own, config, numerics.moe, h, *some)


def project(
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
  ops = operations.of(numerics)
  return attention.project(p, config, form, x, cos, sin, ops)


def enter(
  p: Any,
  config: ModelConfig,
  numerics: NumericsConfig,
  form: str,
  x: Array,
  more: Array,
  cos: Array,
  sin: Array,
) -> tuple[Array, tuple[Array, Array, Array | None]]:
  """(x + more, `project` of it): what `unadded` left to add is added here."""
  p = layers.as_compute(numerics, p['attention'])
  ops = operations.of(numerics)
  x, y = layers.add_norm(x, more, p['norm'], config.norm_eps, ops)
  return x, attention.project_normed(p, config, form, y, cos, sin, ops)


def rope(
  config: ModelConfig,
  positions: Array,
  length: int,
  table: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
  """cos and sin [R, K / 2] of positions [R], all below `length`.

  `table` is `layers.rope_table` on the device. Without it that is a constant of
  the program, which a long context makes slow to compile.
  """
  cos, sin = layers.rope_table(config, length) if table is None else table
  return jnp.asarray(cos)[positions], jnp.asarray(sin)[positions]


def score_arguments(config: ModelConfig, form: str) -> dict[str, Any]:
  """What `attention.dense` and `attention.paged` take beside arrays."""
  return {
    'divisor': attention.divisor(config),
    'width': attention.width(config, form),
  }
