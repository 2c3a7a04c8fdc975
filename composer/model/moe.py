"""Sparse mixture of experts: route, dispatch, experts, combine.

The router is DeepSeek-V3's: s = sigmoid(x W); the experts are the top k of
s + b, where the bias b only selects; the gates are the chosen experts' own
scores, normalised. With replay the experts are given (those that inference
recorded) and the gates are still computed here from the full scores, so that
the router's gradient flows to replayed experts too.
"""

from __future__ import annotations

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer.model import layers

Array = jax.Array
ParamSpec = params_lib.ParamSpec


@struct.dataclass
class Routed:
  """Experts in use, their gates, and what the router would have chosen."""

  experts: Array  # int32 [R, K]
  gates: Array  # float32 [R, K]
  native: Array  # int32 [R, K]


def spec(config: config_lib.ModelConfig, stack: int) -> Any:
  """MoE parameters stacked over `stack` layers."""
  d, e, f = config.width, config.experts, config.expert_hidden
  s = config.shared_experts * f
  out = {
    'norm': ParamSpec((stack, d), ('layers', 'embed'), 'ones'),
    'router': ParamSpec(
      (stack, d, e),
      ('layers', 'embed', 'router'),
      fan_in=d,
      published=jnp.float32,
    ),
    'router_bias': ParamSpec(
      (stack, e),
      ('layers', 'router'),
      'zeros',
      published=jnp.float32,
      trained=False,
    ),
    'gate_up': ParamSpec(
      (stack, e, d, 2, f),
      ('layers', 'expert', 'embed', 'pair', 'mlp'),
      fan_in=d,
    ),
    'down': ParamSpec(
      (stack, e, f, d), ('layers', 'expert', 'mlp', 'embed'), fan_in=f
    ),
  }
  if s:
    out['shared_gate_up'] = ParamSpec(
      (stack, d, 2, s), ('layers', 'embed', 'pair', 'mlp'), fan_in=d
    )
    out['shared_down'] = ParamSpec(
      (stack, s, d), ('layers', 'mlp', 'embed'), fan_in=s
    )
  return out


def route(
  logits: Array,
  bias: Array,
  config: config_lib.ModelConfig,
  replay: Array | None = None,
  plausibility: float = 0.0,
) -> Routed:
  """Chooses experts and computes their gates.

  g_k = scale * s_k / sum_j s_j over the chosen experts, s = sigmoid(logits).

  Args:
    logits: float32 [R, E].
    bias: float32 [E]; enters the selection only.
    config: `experts_per_token`, `normalise_gates`, `router_scale`.
    replay: int [R, K] experts to use; a row with any -1 routes natively.
    plausibility: c; a replayed expert with s_e < c * min of the native top-k
      scores gives way to the best native candidate that is not in use.

  Returns:
    `Routed`; ties go to the lower expert index.
  """
  k = config.experts_per_token
  scores = jax.nn.sigmoid(logits.astype(jnp.float32))  # [R, E]
  selection = scores + jax.lax.stop_gradient(bias)[None, :]
  native = jax.lax.top_k(selection, k)[1].astype(jnp.int32)  # [R, K]
  experts = native
  if replay is not None:
    known = jnp.all(replay >= 0, axis=-1, keepdims=True)
    experts = jnp.where(known, replay.astype(jnp.int32), native)
    if plausibility > 0.0:
      experts = _plausible(scores, selection, native, experts, plausibility)
  chosen = jnp.take_along_axis(scores, experts, axis=-1)  # [R, K]
  if config.normalise_gates:
    total = chosen[:, 0]
    for slot in range(1, k):  # one order of addition
      total = total + chosen[:, slot]
    chosen = chosen / (total[:, None] + 1e-20)
  return Routed(experts, chosen * config.router_scale, native)


def _plausible(
  scores: Array, selection: Array, native: Array, experts: Array, c: float
) -> Array:
  """Replaces experts whose score is below c times the least native one."""
  least = jnp.min(jnp.take_along_axis(scores, native, axis=-1), axis=-1)
  e = scores.shape[-1]
  for slot in range(experts.shape[-1]):
    used = jnp.any(
      experts[..., None] == jnp.arange(e)[None, None], axis=-2
    )  # [R, E]
    best = jnp.argmax(jnp.where(used, -jnp.inf, selection), axis=-1)
    current = experts[:, slot]
    own = jnp.take_along_axis(scores, current[:, None], axis=-1)[:, 0]
    kept = jnp.where(own >= c * least, current, best.astype(jnp.int32))
    experts = experts.at[:, slot].set(kept)
  return experts


def experts_dense(p: Any, x: Array, routed: Routed) -> Array:
  """Every expert on every row, weighted by its gate or 0; x [R, D].

  The fast path on CPU at small widths, and independent of the other rows. The
  gate multiplies after the activation and before the (linear) down projection,
  so that experts and their sum are one product over (E, F) in one order.
  """
  e, d, _, f = p['gate_up'].shape
  rows = x.shape[0]
  into = jnp.transpose(p['gate_up'], (1, 2, 0, 3)).reshape(d, 2, e * f)
  hidden = layers.gated(x, into).reshape(rows, e, f)
  one_hot = routed.experts[..., None] == jnp.arange(e)[None, None]  # [R, K, E]
  gates = jnp.sum(jnp.where(one_hot, routed.gates[..., None], 0.0), axis=1)
  weighted = (hidden * gates[..., None]).reshape(rows, e * f)
  return weighted @ p['down'].reshape(e * f, d)


def experts_sorted(p: Any, x: Array, routed: Routed) -> Array:
  """Dropless dispatch: rows sorted by expert, one ragged product each.

  The combination gathers a row's K results and adds them in slot order, in
  float32; nothing is scattered, nothing is dropped.
  """
  e, d, _, f = p['gate_up'].shape
  rows, k = routed.experts.shape
  flat = routed.experts.reshape(-1)  # [R K]
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.bincount(flat, length=e).astype(jnp.int32)
  sorted_rows = x[order // k]  # [R K, D]
  into = p['gate_up'].reshape(e, d, 2 * f)
  both = jax.lax.ragged_dot(sorted_rows, into, sizes)
  hidden = jax.nn.silu(both[:, :f]) * both[:, f:]
  out = jax.lax.ragged_dot(hidden, p['down'], sizes)  # [R K, D]
  slots = out[jnp.argsort(order)].reshape(rows, k, d)
  total = jnp.zeros((rows, d), jnp.float32)
  for slot in range(k):
    total = total + routed.gates[:, slot, None] * slots[:, slot]
  return total


EXPERTS = {'dense': experts_dense, 'sorted': experts_sorted}


def moe(
  p: Any,
  config: config_lib.ModelConfig,
  implementation: str,
  x: Array,
  replay: Array | None,
  plausibility: float,
) -> tuple[Array, Array, Array]:
  """Residual MoE of one layer: x [R, D] -> (x', experts, native [R, K])."""
  if implementation not in EXPERTS:
    raise ValueError(
      f'unknown MoE implementation {implementation!r}; known: {sorted(EXPERTS)}'
    )
  h = layers.rms_norm(x, p['norm'], config.norm_eps)
  logits = h @ p['router']
  routed = route(logits, p['router_bias'], config, replay, plausibility)
  out = EXPERTS[implementation](p, h, routed)
  if config.shared_experts:
    out = out + layers.gated(h, p['shared_gate_up']) @ p['shared_down']
  return x + out, routed.experts, routed.native
