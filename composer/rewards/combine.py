"""One number from named parts: what a session earned, and what it cost.

  reward = tests_weight * tests - effort_weight * C(x) - kl_weight * k1

The rollout knows 'tests' and 'effort'; 'kl' joins at the trainer, which alone
has the reference. A part that is 0.0 is a value; a part that is absent is an
error, so that neither is ever taken for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math

from composer.config import RewardConfig

# Part -> its signed weight. A part that is not here cannot be rewarded.
WEIGHTS = {
  'tests': lambda config: config.tests_weight,
  'effort': lambda config: -config.effort_weight,
  'kl': lambda config: -config.kl_weight,
}
ROLLOUT_PARTS = ('tests', 'effort')
ALL_PARTS = tuple(WEIGHTS)


@dataclasses.dataclass(frozen=True)
class EffortCounts:
  """What a session spent: sampled tokens, tool calls, turns (broken included).

  Counted over the whole trajectory, all segments and summaries together.
  """

  tokens: int
  calls: int
  turns: int


def concave_cost(x: float, k: float, q: float) -> float:
  """The concave effort penalty of the Composer 2 report (arXiv 2603.24477).

    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   ln(1 + k x) / k at q = 1

  C(0) = 0 and C'(0) = 1 for every k and q; C increases, and is concave for
  q >= 0 (a straight line at q = 0 or k = 0). Written with log1p and expm1, so
  that it stays exact near q = 1 and for small k x.

  Raises:
    ValueError: for x, k or q below 0 or not finite.
  """
  for name, value in (('x', x), ('effort_k', k), ('effort_q', q)):
    if not (math.isfinite(value) and value >= 0):
      raise ValueError(
        f'effort penalty: {name}={value} must be finite and at least 0 (below'
        ' that the penalty is neither increasing nor concave)'
      )
  if k == 0:
    return float(x)
  growth = math.log1p(k * x)
  if q == 1:
    return growth / k
  return math.expm1((1 - q) * growth) / (k * (1 - q))


def effort(config: RewardConfig, counts: EffortCounts) -> float:
  """C(x) of a session; x weighs its turns, calls and tokens. Not negative."""
  x = (
    config.effort_per_turn * counts.turns
    + config.effort_per_call * counts.calls
    + config.effort_per_token * counts.tokens
  )
  return concave_cost(x, config.effort_k, config.effort_q)


def combine(
  config: RewardConfig,
  parts: Mapping[str, float],
  required: Sequence[str] = ROLLOUT_PARTS,
) -> float:
  """The reward of a session from its named parts.

  Args:
    config: the weights.
    parts: name -> value; 'effort' is C(x) and 'kl' is k1, both before weighing.
    required: parts that must be there. The rollout calls with the default; the
      trainer, once it has scored the reference, with `ALL_PARTS`.

  Raises:
    ValueError: for a missing part, a part that has no weight, or a value that
      is not finite.
  """
  missing = [name for name in required if parts.get(name) is None]
  if missing:
    raise ValueError(
      f'reward part {missing[0]!r} is missing (there: {sorted(parts)}); give'
      ' 0.0 if that is its value, and leave the rollout out of its group if it'
      ' could not be judged'
    )
  unknown = sorted(set(parts) - set(WEIGHTS))
  if unknown:
    raise ValueError(
      f'reward part {unknown[0]!r} has no weight and would be ignored; the'
      f' parts are {list(WEIGHTS)}'
    )
  for name, value in parts.items():
    if not math.isfinite(value):
      raise ValueError(
        f'reward part {name!r} is {value}; a part must be finite (an'
        ' infrastructure failure is not a reward)'
      )
  return math.fsum(WEIGHTS[name](config) * parts[name] for name in parts)
