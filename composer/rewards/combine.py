"""One number from named parts: what a session earned, and what it cost.

  reward = tests_weight * (tests - monitors) + judge_weight * judge
           - effort_weight * C(x) - kl_weight * k1

The rollout knows 'tests' and 'effort', and 'monitors' where a session is watched
for cheating: what of the tests' reward that takes away; 'judge' where there is a
rubric. 'kl' joins at the trainer, which alone has the reference. A part that is
0.0 is a value; a part that is absent is an error, so that neither is ever taken
for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math

from composer.config import RewardConfig

# Part -> its signed weight. A part that is not here cannot be rewarded.
WEIGHTS = {
  'tests': lambda config: config.tests_weight,
  'monitors': lambda config: -config.tests_weight,
  'effort': lambda config: -config.effort_weight,
  'kl': lambda config: -config.kl_weight,
  'judge': lambda config: config.judge_weight,
}
ROLLOUT_PARTS = ('tests', 'effort')
ALL_PARTS = (*ROLLOUT_PARTS, 'kl')
RECORDED = 'judge/'  # one criterion each: in 'judge' already, kept to be read


def taken(parts: Mapping[str, float], share: float) -> float:
  """The part 'monitors': `share` of what the tests have earned."""
  return share * parts['tests']


def earned(parts: Mapping[str, float]) -> float:
  """What the tests have earned and the monitors have left, 1 for a solution."""
  return parts['tests'] - parts.get('monitors', 0.0)


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
  counted = {
    name: value
    for name, value in parts.items()
    if not name.startswith(RECORDED)
  }
  unknown = sorted(set(counted) - set(WEIGHTS))
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
  return math.fsum(WEIGHTS[name](config) * counted[name] for name in counted)
