"""Advantages of a group, and the KL estimate that its rewards may carry.

Host-side numpy: a group is a handful of numbers. Inside, float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EQUAL_TOLERANCE = 1e-6


def group_advantages(rewards: Sequence[float] | np.ndarray) -> np.ndarray:
  """Centres the rewards of one group.

    A_i = r_i - mean(r)

  No division by the standard deviation, which magnifies tiny differences when
  all rollouts are equally right, and none by length (Dr. GRPO, arXiv
  2503.20783; Composer 2 report, section 4). A rollout of several segments is
  one entry.

  A reward that is not finite takes no part in the mean and gets advantage 0, so
  one finite reward among NaNs gives zeros. Equal rewards give exact zeros.

  Args:
    rewards: [G], any G of at least 1.

  Returns:
    float32 [G].

  Raises:
    ValueError: if there are no rewards or they are not a vector.
  """
  rewards = np.asarray(rewards, np.float64)  # [G]
  if rewards.ndim != 1 or rewards.size == 0:
    raise ValueError(
      f'rewards have shape {rewards.shape}; group_advantages takes the rewards'
      ' of one group, [G] with G of at least 1'
    )
  finite = np.isfinite(rewards)
  if not finite.any():
    return np.zeros(rewards.shape, np.float32)
  # Shifted by one of the rewards first: then equal rewards cancel exactly.
  shifted = np.where(finite, rewards, 0.0) - rewards[finite][0]
  centred = shifted - shifted[finite].mean()
  return np.where(finite, centred, 0.0).astype(np.float32)


def is_equal(
  verifiable: Sequence[float] | np.ndarray, tolerance: float = EQUAL_TOLERANCE
) -> bool:
  """Whether a group has nothing to teach.

  Judged on the verifiable parts [G] alone: when they all agree within
  `tolerance`, what is left to tell the rollouts apart is effort or KL, and a
  step on that alone would train brevity in place of the task. Values that are
  not finite are not compared; fewer than two finite ones are equal.
  """
  values = np.asarray(verifiable, np.float64)  # [G]
  values = values[np.isfinite(values)]
  return values.size < 2 or float(np.ptp(values)) <= tolerance


def k1_kl(
  logprobs: np.ndarray,
  reference_logprobs: np.ndarray,
  sampled: np.ndarray,
  reduction: str = 'sum',
) -> float:
  """The k1 estimate of KL(policy || reference), for use in the reward.

    KL(q || p) = E_q[-log(p / q)],   k1_t = log q(x_t) - log p(x_t)

  Unbiased, may be negative, and of far smaller variance than k3 = (r - 1) -
  log r once q and p are apart (Schulman, 'Approximating KL divergence'). As a
  loss on policy its gradient is zero in the mean; so it goes into the reward.

  Args:
    logprobs: [T], of the policy that sampled the tokens.
    reference_logprobs: [T], of the frozen reference at the same temperature.
    sampled: bool [T]; nothing else is read, whatever stands there.
    reduction: 'sum' estimates the KL of the whole trajectory, the quantity that
      KL-regularised RL subtracts from its return; 'mean' divides by the number
      of sampled tokens.

  Returns:
    The estimate; 0.0 if nothing was sampled.

  Raises:
    ValueError: if shapes differ, the reduction is unknown, or a sampled token's
      value is not finite.
  """
  arrays = [np.asarray(a) for a in (logprobs, reference_logprobs, sampled)]
  if len({a.shape for a in arrays}) != 1:
    raise ValueError(
      'logprobs, reference_logprobs and sampled have shapes'
      f' {[a.shape for a in arrays]}; they must be aligned'
    )
  if reduction not in ('sum', 'mean'):
    raise ValueError(f"reduction={reduction!r} is unknown; use 'sum' or 'mean'")
  mask = arrays[2].astype(bool)
  k1 = arrays[0][mask].astype(np.float64) - arrays[1][mask]
  if not np.isfinite(k1).all():
    raise ValueError(
      f'{np.count_nonzero(~np.isfinite(k1))} sampled tokens have a logprob that'
      ' is not finite; the reference must give every sampled token some mass'
    )
  if k1.size == 0:
    return 0.0
  return float(k1.sum() if reduction == 'sum' else k1.mean())
