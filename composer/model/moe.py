"""Sparse mixture of experts: route, dispatch, experts, combine.

The router is DeepSeek-V3's: s = sigmoid(x W); the experts are the top k of
s + b, of the best groups where there are groups, and the bias b only selects;
the gates are the chosen experts' own scores, normalised or not. Or it is
Qwen3-MoE's: s = softmax(x W) without a bias. With replay the experts are given
(those that inference recorded) and the gates are still computed here from the
full scores, so that the router's gradient flows to replayed experts too.
"""

from __future__ import annotations

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import exchange
from composer.model import layers
from composer.model import operations

Array = jax.Array
ModelConfig = config_lib.ModelConfig
ParamSpec = params_lib.ParamSpec

SCORES = {
  'sigmoid': jax.nn.sigmoid,
  'softmax': lambda logits: jax.nn.softmax(logits, axis=-1),
}


@struct.dataclass
class Routed:
  """Experts in use, their gates, and what the router would have chosen."""

  experts: Array  # int32 [R, K]
  gates: Array  # float32 [R, K]
  native: Array  # int32 [R, K]; see `audit` of `route`


def spec(config: ModelConfig, stack: int) -> Any:
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
    'gate_up': ParamSpec(
      (stack, e, d, 2, f),
      ('layers', 'expert', 'embed', 'pair', 'mlp'),
      fan_in=d,
    ),
    'down': ParamSpec(
      (stack, e, f, d), ('layers', 'expert', 'mlp', 'embed'), fan_in=f
    ),
  }
  if config.router == 'sigmoid':
    out['router_bias'] = ParamSpec(
      (stack, e),
      ('layers', 'router'),
      'zeros',
      published=jnp.float32,
      trained=False,
    )
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
  bias: Array | None,
  config: ModelConfig,
  replay: Array | None = None,
  plausibility: float = 0.0,
  audit: bool = True,
  ops: operations.Operations = operations.PLAIN,
) -> Routed:
  """Chooses experts and computes their gates.

  g_k = scale * s_k / sum_j s_j over the chosen experts, s = sigmoid(logits) or
  softmax(logits) over all experts (`config.router`).

  Args:
    logits: float32 [R, E].
    bias: float32 [E], enters the selection only; None for no bias.
    config: `router`, `router_groups`, `router_top_groups`, `experts_per_token`,
      `normalise_gates`, `router_scale`.
    replay: int [R, K] experts to use; a row with any -1 routes natively.
    plausibility: c; a replayed expert with s_e < c * min of the native top-k
      scores gives way to the best native candidate that is not in use.
    audit: whether `native` is read where experts are replayed. A kernel that
      need not find it is cheaper, and gives the experts in use instead.
    ops: by which kernel, if any.

  Returns:
    `Routed`; ties go to the lower expert index.
  """
  if ops.sparse != operations.XLA:
    found = operations.route(
      ops, logits, bias, config, replay, plausibility, audit
    )
    native = found.experts if found.native is None else found.native
    return Routed(found.experts, found.gates, native)
  k = config.experts_per_token
  scores = SCORES[config.router](logits.astype(jnp.float32))  # [R, E]
  selection = scores
  if bias is not None:
    selection = scores + jax.lax.stop_gradient(bias)[None, :]
  if config.router_groups > 1:
    selection = _within_groups(selection, config)
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


def _within_groups(selection: Array, config: ModelConfig) -> Array:
  """`selection` [R, E], -inf outside each row's best groups (DeepSeek-V3).

  Experts lie in `router_groups` runs of equal size; a group's score is the sum
  of its two highest, ties go to the lower group.
  """
  rows, e = selection.shape
  groups, size = config.router_groups, e // config.router_groups
  best = jax.lax.top_k(selection.reshape(rows, groups, size), 2)[0]
  group_scores = best[..., 0] + best[..., 1]  # [R, groups]
  top = jax.lax.top_k(group_scores, config.router_top_groups)[1]
  own = jnp.arange(e) // size
  kept = jnp.any(top[:, :, None] == own[None, None, :], axis=1)  # [R, E]
  return jnp.where(kept, selection, -jnp.inf)


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


def experts_dense(
  p: Any, x: Array, routed: Routed, ops: operations.Operations
) -> Array:
  """Every expert on every row, weighted by its gate or 0; x [R, D].

  The fast path on CPU at small widths, and independent of the other rows. The
  gate multiplies after the activation and before the (linear) down projection,
  so that experts and their sum are one product over (E, F) in one order.
  """
  e, d, _, f = p['gate_up'].shape
  rows = x.shape[0]
  into = jnp.transpose(p['gate_up'], (1, 2, 0, 3)).reshape(d, 2, e * f)
  hidden = operations.gated(ops, x, into).reshape(rows, e, f)
  one_hot = routed.experts[..., None] == jnp.arange(e)[None, None]  # [R, K, E]
  gates = jnp.sum(jnp.where(one_hot, routed.gates[..., None], 0.0), axis=1)
  weighted = (hidden * gates[..., None]).reshape(rows, e * f)
  return operations.matmul(
    ops,
    operations.narrow(ops, weighted, x.dtype),
    p['down'].reshape(e * f, d),
  )


def experts_sorted(
  p: Any, x: Array, routed: Routed, ops: operations.Operations
) -> Array:
  """Dropless dispatch: rows sorted by expert, one ragged product each.

  The combination gathers a row's K results and adds them in slot order, in
  float32; nothing is scattered, nothing is dropped.
  """
  order = operations.order(ops, routed.experts, p['gate_up'].shape[0])
  k = routed.experts.shape[1]
  sorted_rows = x[order.slots // k]  # [R K, D]
  return _combined(p, sorted_rows, order.sizes, order.places, routed.gates, ops)


def _combined(
  p: Any,
  sorted_rows: Array,
  sizes: Any,
  places: Array,
  gates: Array,
  ops: operations.Operations,
) -> Array:
  """Experts of rows [R K, D] sorted by expert, and each row's sum [R, D]."""
  rows, k = gates.shape
  d, kind = sorted_rows.shape[1], sorted_rows.dtype
  out = operations.experts(
    ops, sorted_rows, p['gate_up'], p['down'], sizes
  )  # [R K, D]
  slots = out[places].reshape(rows, k, d)
  gates = operations.factor(ops, gates, kind)
  total = jnp.zeros((rows, d), jnp.float32)
  for slot in range(k):
    total = total + gates[:, slot, None] * slots[:, slot]
  return operations.narrow(ops, total, kind)


EXPERTS = {'dense': experts_dense, 'sorted': experts_sorted}


def moe(
  p: Any,
  config: ModelConfig,
  implementation: str,
  x: Array,
  replay: Array | None,
  plausibility: float,
  layout: mesh_lib.Layout | None = None,
  ops: operations.Operations = operations.PLAIN,
  audit: bool = True,
) -> tuple[Array, Array, Array]:
  """Residual MoE of one layer: x [R, D] -> (x', experts, native [R, K]).

  With a layout, `p` holds this device's experts only, and rows go to theirs.
  `replay`, `plausibility` and `audit` are those of `route`.
  """
  h = layers.rms_norm(x, p['norm'], config.norm_eps, ops)
  more = layout, ops, audit
  out, used, native = mixture(
    p, config, implementation, h, replay, plausibility, *more
  )
  return operations.add(ops, x, out), used, native


def mixture(
  p: Any,
  config: ModelConfig,
  implementation: str,
  h: Array,
  replay: Array | None,
  plausibility: float,
  layout: mesh_lib.Layout | None = None,
  ops: operations.Operations = operations.PLAIN,
  audit: bool = True,
) -> tuple[Array, Array, Array]:
  """What `moe` adds to rows of which h [R, D] are normed, and the routes."""
  if layout is None and implementation not in EXPERTS:
    raise ValueError(
      f'unknown MoE implementation {implementation!r}; known: {sorted(EXPERTS)}'
    )
  router = p['router'], p.get('router_parts')
  bias, sent = p.get('router_bias'), None
  compared = replay is not None and (audit or plausibility > 0)
  if layout is None and implementation == 'sorted' and not compared:
    sent = operations.send(ops, h, *router, bias, config, replay)
  if sent is not None:
    routed = Routed(sent.experts, sent.gates, sent.experts)
    out = _combined(p, sent.rows, sent.groups, sent.places, sent.gates, ops)
  else:
    logits = operations.wide_matmul(ops, h, *router)
    routed = route(logits, bias, config, replay, plausibility, audit, ops)
    if layout is None:
      out = EXPERTS[implementation](p, h, routed, ops)
    else:
      both = routed.experts, routed.gates
      out = exchange.experts_exchanged(layout, p, h, *both)
  if config.shared_experts:
    hidden = operations.gated(ops, h, p['shared_gate_up'])
    shared = operations.matmul(ops, hidden, p['shared_down'])
    out = operations.add(ops, out, shared)
  return out, routed.experts, routed.native
