"""Advantages of a group and the KL estimate of the reward."""

import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from composer.rl import advantage

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=40)


def test_by_hand():
  np.testing.assert_allclose(
    advantage.group_advantages([1.0, 0.0, 0.0, 1.0]), [0.5, -0.5, -0.5, 0.5]
  )
  # Neither scaled by the deviation nor by anything else.
  np.testing.assert_allclose(
    advantage.group_advantages([10.0, 0.0]), [5.0, -5.0]
  )


@given(rewards, st.floats(-50, 50))
def test_centred_and_blind_to_a_shift(values, shift):
  got = advantage.group_advantages(values)
  assert got.shape == (len(values),) and got.dtype == np.float32
  assert abs(got.sum()) < 1e-3
  shifted = advantage.group_advantages([v + shift for v in values])
  np.testing.assert_allclose(got, shifted, atol=1e-4)
  for i, value in enumerate(values):  # the naive twin
    want = value - math.fsum(values) / len(values)
    assert got[i] == pytest.approx(want, rel=1e-5, abs=1e-5)


@given(st.floats(-1e3, 1e3), st.integers(1, 50))
def test_equal_rewards_give_exact_zeros(value, size):
  assert not advantage.group_advantages([value] * size).any()


@given(rewards, st.randoms(use_true_random=False))
def test_rewards_that_are_not_finite_take_no_part(values, random):
  bad = [random.choice([math.nan, math.inf, -math.inf]) for _ in range(3)]
  mixed = values + bad
  order = list(range(len(mixed)))
  random.shuffle(order)
  got = advantage.group_advantages([mixed[i] for i in order])
  want = np.concatenate([advantage.group_advantages(values), np.zeros(3)])
  np.testing.assert_allclose(got, want[order], atol=1e-4)


def test_one_finite_reward_among_nans_is_zero():
  got = advantage.group_advantages([math.nan, 1.0, math.nan])
  np.testing.assert_array_equal(got, np.zeros(3, np.float32))
  got = advantage.group_advantages([math.nan] * 2)
  np.testing.assert_array_equal(got, np.zeros(2, np.float32))


@pytest.mark.parametrize('bad', [[], [[1.0, 2.0]], 3.0])
def test_shape_is_refused(bad):
  with pytest.raises(ValueError, match='one group'):
    advantage.group_advantages(bad)


def test_is_equal():
  assert advantage.is_equal([1.0, 1.0 + 9e-7, 1.0])
  assert not advantage.is_equal([1.0, 1.0 + 2e-6])
  # Pairwise neighbours agree, the ends do not.
  assert not advantage.is_equal([0.0, 6e-7, 1.2e-6])
  assert advantage.is_equal([0.0, math.nan])
  assert not advantage.is_equal([0.0, math.nan, 1.0])
  assert advantage.is_equal([0.5])


def test_k1_reads_only_sampled_tokens():
  logprobs = np.array([-1.0, math.nan, -2.0, math.inf], np.float32)
  reference = np.array([-1.5, -math.inf, -1.0, math.nan], np.float32)
  sampled = np.array([True, False, True, False])
  assert advantage.k1_kl(logprobs, reference, sampled) == pytest.approx(-0.5)
  assert advantage.k1_kl(logprobs, reference, sampled, 'mean') == pytest.approx(
    -0.25
  )
  assert advantage.k1_kl(logprobs, reference, np.zeros(4, bool)) == 0.0


def test_k1_is_unbiased():
  rng = np.random.default_rng(0)
  q, p = rng.dirichlet(np.ones(6), 2)
  exact = float(np.sum(q * np.log(q / p)))
  x = rng.choice(6, 200_000, p=q)
  got = advantage.k1_kl(
    np.log(q[x]), np.log(p[x]), np.ones(len(x), bool), 'mean'
  )
  error = np.std(np.log(q[x] / p[x])) / math.sqrt(len(x))
  assert abs(got - exact) < 4 * error


def test_k1_refuses():
  one = np.zeros(1)
  with pytest.raises(ValueError, match='aligned'):
    advantage.k1_kl(one, np.zeros(2), np.ones(1, bool))
  with pytest.raises(ValueError, match='not finite'):
    advantage.k1_kl(one, np.array([-math.inf]), np.ones(1, bool))
  with pytest.raises(ValueError, match='reduction'):
    advantage.k1_kl(one, one, np.ones(1, bool), 'max')
