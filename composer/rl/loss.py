"""Policy losses: functions of arrays [B, T], chosen by name.

Every loss has one signature:

  loss(logprobs, behaviour_logprobs, advantages, mask, weights, *,
       clip_low, clip_high, extra=NO_EXTRA) -> (loss [], sums)

l_t is the trainer's logprob of token t, b_t the recorded behaviour logprob,
both at the temperature that sampled it; A_t the advantage; `weights` is 1/N at
sampled tokens. Loss and sums are sums over tokens: adding them over shards and
micro-batches gives the global step's, and so do the gradients.

`sums` are over the tokens of the mask, taken before anything is clipped, with
their 'count'; `add_sums` joins those of two micro-batches, `means` ends them.

Nothing outside the mask is read: it is replaced before any arithmetic, so that
NaN or inf there reaches neither the loss nor its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
from flax import struct
import jax
import jax.numpy as jnp

Array = jax.Array
Sums = dict[str, Array]

# exp(20) is 5e8: far outside any clip range, yet finite in float32. A token
# beyond it has no gradient through its ratio.
LOG_RATIO_LIMIT = 20.0


@struct.dataclass
class Extra:
  """Arrays that only some losses or metrics need; all [B, T] or None.

  `segment_ids` (0 is padding) for 'gspo'; `proximal_logprobs` for 'decoupled';
  `entropy` of the trainer's distribution, for the metric alone.
  """

  segment_ids: Array | None = None
  proximal_logprobs: Array | None = None
  entropy: Array | None = None


NO_EXTRA = Extra()


class _Tokens(NamedTuple):
  """The inputs in float32, 0 wherever the mask is false."""

  logprobs: Array  # [B, T]
  behaviour: Array  # [B, T]
  advantages: Array  # [B, T]
  weights: Array  # [B, T]
  mask: Array  # bool [B, T]


def clip_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """PPO's clipped ratio with DAPO's two bounds (arXiv 1707.06347, 2503.14476).

  loss = -(1/N) sum_t min(w_t A_t, clip(w_t, 1 - e_lo, 1 + e_hi) A_t)
  w_t = exp(l_t - b_t)
  """
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  ratio = _ratio(tokens.logprobs, tokens.behaviour)
  objective = _pessimistic(ratio, tokens.advantages, clip_low, clip_high)
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


def plain_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """The importance-weighted policy gradient, not clipped.

    loss = -(1/N) sum_t w_t A_t,   gradient -(1/N) sum_t w_t A_t grad l_t

  The bounds only say what the clipped shares count.
  """
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  ratio = _ratio(tokens.logprobs, tokens.behaviour)
  objective = ratio * tokens.advantages
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


def tis_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """Truncated importance sampling (Yao et al., 'Off-policy RL', 2025).

    loss = -(1/N) sum_t sg(min(w_t, C)) A_t exp(l_t - sg(l_t)),   C = 1 + e_hi

  With one epoch the policy at the start of the step is the one being trained,
  so its own ratio is 1 in value. C = 2, the usual cap, is e_hi = 1.
  """
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  ratio = _ratio(tokens.logprobs, tokens.behaviour)
  weight = jnp.minimum(ratio, 1 + clip_high)
  objective = _reinforce(weight, tokens)
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


def icepop_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """IcePop: a token whose ratio leaves the band is left out altogether.

    loss = -(1/N) sum_t sg(M(w_t)) A_t exp(l_t - sg(l_t))
    M(w) = w if 1 - e_lo <= w <= 1 + e_hi else 0

  A band [1/c, c] is e_lo = 1 - 1/c, e_hi = c - 1.
  """
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  ratio = _ratio(tokens.logprobs, tokens.behaviour)
  inside = (ratio >= 1 - clip_low) & (ratio <= 1 + clip_high)
  objective = _reinforce(jnp.where(inside, ratio, 0.0), tokens)
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


def cispo_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """CISPO clips the weight and keeps every token's gradient (arXiv 2506.13585).

    loss = -(1/N) sum_t sg(clip(w_t, 1 - e_lo, 1 + e_hi)) A_t l_t

  Published without a lower bound, which is e_lo = 1.
  """
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  ratio = _ratio(tokens.logprobs, tokens.behaviour)
  weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
  objective = weight * tokens.advantages * tokens.logprobs
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


def gspo_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """GSPO: one ratio a sequence, its tokens' geometric mean (arXiv 2507.18071).

    loss = -(1/N) sum_t min(s_t A_t, clip(s_t, 1 - e_lo, 1 + e_hi) A_t)
    s_t = exp(mean of l - b over the sampled tokens of t's segment)

  A sequence is a segment here, as the segments of a trajectory lie in different
  rows. Each counts by its sampled tokens, so that on policy the gradient is
  that of `plain_loss`, without standardisation by length. The published bounds
  are 3e-4 and 4e-4: those of `clip_loss` never bind here.
  """
  if extra.segment_ids is None:
    raise ValueError(
      "loss 'gspo' needs Extra(segment_ids=...), which are None; pass those of"
      ' the batch'
    )
  chex.assert_equal_shape([logprobs, extra.segment_ids])
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  log_ratio = tokens.logprobs - tokens.behaviour
  mean = _segment_mean(log_ratio, tokens.mask, extra.segment_ids)
  ratio = _ratio(mean, jnp.zeros_like(mean))
  objective = _pessimistic(ratio, tokens.advantages, clip_low, clip_high)
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


def decoupled_loss(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
  *,
  clip_low: float,
  clip_high: float,
  extra: Extra = NO_EXTRA,
) -> tuple[Array, Sums]:
  """Decoupled PPO: trust around a proximal policy (arXiv 2505.24298).

    loss = -(1/N) sum_t v_t min(r_t A_t, clip(r_t, 1 - e_lo, 1 + e_hi) A_t)
    v_t = exp(p_t - b_t),   r_t = exp(l_t - p_t)

  p_t is the logprob under the policy at the start of the step, frozen. The
  clipped shares are of r, the KL estimates still between behaviour and trainer.
  """
  if extra.proximal_logprobs is None:
    raise ValueError(
      "loss 'decoupled' needs Extra(proximal_logprobs=...), which are None;"
      ' with one optimizer step a batch they are stop_gradient(logprobs)'
    )
  chex.assert_equal_shape([logprobs, extra.proximal_logprobs])
  tokens = _select(logprobs, behaviour_logprobs, advantages, mask, weights)
  proximal = jnp.where(tokens.mask, _wide(extra.proximal_logprobs), 0.0)
  proximal = jax.lax.stop_gradient(proximal)
  ratio = _ratio(tokens.logprobs, proximal)
  objective = _ratio(proximal, tokens.behaviour) * _pessimistic(
    ratio, tokens.advantages, clip_low, clip_high
  )
  return _finish(objective, ratio, tokens, clip_low, clip_high, extra)


LOSSES: dict[str, Callable[..., tuple[Array, Sums]]] = {
  'clip': clip_loss,
  'none': plain_loss,
  'tis': tis_loss,
  'icepop': icepop_loss,
  'cispo': cispo_loss,
  'gspo': gspo_loss,
  'decoupled': decoupled_loss,
}


def policy_loss(name: str) -> Callable[..., tuple[Array, Sums]]:
  """The loss of that name; ValueError, listing them, if there is none."""
  if name not in LOSSES:
    raise ValueError(
      f'rl.loss={name!r} is not a loss; choose one of {sorted(LOSSES)}'
    )
  return LOSSES[name]


def zero_sums() -> Sums:
  """The sums of no tokens, to which micro-batches are added."""
  names = ('count', 'ratio', 'clipped_high', 'clipped_low', 'k1', 'k3')
  names += ('entropy', 'max_abs_logprob')
  return {name: jnp.zeros((), jnp.float32) for name in names}


def add_sums(a: Mapping[str, Array], b: Mapping[str, Array]) -> Sums:
  """Joins the sums of two micro-batches; 'max_*' take the maximum."""
  assert set(a) == set(b), (sorted(a), sorted(b))
  return {
    name: jnp.maximum(a[name], b[name])
    if name.startswith('max_')
    else a[name] + b[name]
    for name in a
  }


def means(sums: Mapping[str, Array]) -> Sums:
  """Means over tokens, 'count' and 'max_*' as they are; 0 for no tokens."""
  count = jnp.maximum(sums['count'], 1.0)
  return {
    name: value if name == 'count' or name.startswith('max_') else value / count
    for name, value in sums.items()
  }


def _wide(x: Array) -> Array:
  """To float32; float64 stays, for tests against finite differences."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _select(
  logprobs: Array,
  behaviour_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights: Array,
) -> _Tokens:
  """Reads the masked tokens and nothing else.

  The select comes before any arithmetic: its cotangent is a select too, so what
  lies outside the mask gets a zero gradient, never 0 * inf.
  """
  arrays = (logprobs, behaviour_logprobs, advantages, weights)
  chex.assert_equal_shape([*arrays, mask])
  mask = mask.astype(bool)
  return _Tokens(*(jnp.where(mask, _wide(x), 0.0) for x in arrays), mask)


def _ratio(logprobs: Array, other: Array) -> Array:
  """exp(logprobs - other), its logarithm held within `LOG_RATIO_LIMIT`."""
  difference = logprobs - other
  return jnp.exp(jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _pessimistic(
  ratio: Array, advantages: Array, clip_low: float, clip_high: float
) -> Array:
  """min(w A, clip(w, 1 - e_lo, 1 + e_hi) A)."""
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return jnp.minimum(ratio * advantages, clipped * advantages)


def _reinforce(weight: Array, tokens: _Tokens) -> Array:
  """sg(weight) A exp(l - sg(l)): value weight A, gradient weight A grad l."""
  frozen = jax.lax.stop_gradient(tokens.logprobs)
  ratio = jnp.exp(tokens.logprobs - frozen)
  return jax.lax.stop_gradient(weight) * tokens.advantages * ratio


def _segment_mean(values: Array, mask: Array, segment_ids: Array) -> Array:
  """Mean over the masked tokens of each token's segment; [B, T]."""
  # A row of T tokens holds at most T segments; id 0 is its padding.
  size = values.shape[1] + 1

  def of_row(values, mask, ids):  # [T]
    total = jax.ops.segment_sum(values, ids, size)
    count = jax.ops.segment_sum(mask.astype(values.dtype), ids, size)
    return (total / jnp.maximum(count, 1.0))[ids]

  return jax.vmap(of_row)(values, mask, segment_ids)


def _finish(
  objective: Array,
  ratio: Array,
  tokens: _Tokens,
  clip_low: float,
  clip_high: float,
  extra: Extra,
) -> tuple[Array, Sums]:
  """The loss and its sums; no gradient flows through the sums."""
  loss = -jnp.sum(jnp.where(tokens.mask, tokens.weights * objective, 0.0))
  logprobs, ratio = jax.lax.stop_gradient((tokens.logprobs, ratio))
  log_ratio = logprobs - tokens.behaviour
  k3 = _ratio(logprobs, tokens.behaviour) - 1 - log_ratio

  def total(x):
    return jnp.sum(jnp.where(tokens.mask, x, 0.0))

  if extra.entropy is None:
    entropy = jnp.zeros_like(loss)
  else:
    chex.assert_equal_shape([logprobs, extra.entropy])
    entropy = total(_wide(jax.lax.stop_gradient(extra.entropy)))
  return loss, {
    'count': total(jnp.ones_like(ratio)),
    'ratio': total(ratio),
    'clipped_high': total(jnp.where(ratio > 1 + clip_high, 1.0, 0.0)),
    'clipped_low': total(jnp.where(ratio < 1 - clip_low, 1.0, 0.0)),
    'k1': total(-log_ratio),
    'k3': total(k3),
    'entropy': entropy,
    'max_abs_logprob': jnp.max(jnp.abs(log_ratio), initial=0.0),
  }
