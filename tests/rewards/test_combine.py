"""The effort penalty and the combination of reward parts."""

from fractions import Fraction
import math
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer.config import RewardConfig
from composer.rewards import combine as c
from composer.rewards import effort as e

xs = st.floats(0, 1e4)
ks = st.floats(1e-3, 10)
qs = st.floats(0, 3)


@given(xs, ks, qs)
def test_cost_is_the_integral_of_its_slope(x, k, q):
  # C'(u) = (1 + k u)^-q, integrated by Simpson's rule over ln(1 + k u).
  steps = 1000
  top = math.log1p(k * x)
  total = 0.0
  for i in range(steps + 1):
    weight = 1 if i in (0, steps) else 4 if i % 2 else 2
    total += weight * math.exp((1 - q) * top * i / steps) / k
  area = total * top / steps / 3
  assert e.concave_cost(x, k, q) == pytest.approx(area, rel=1e-6, abs=1e-12)


@given(ks, qs, xs, xs)
def test_cost_increases_and_is_concave(k, q, a, b):
  low, high = sorted((a, b))
  middle = (low + high) / 2
  at = [e.concave_cost(x, k, q) for x in (low, middle, high)]
  slack = 1e-9 * (1 + abs(at[2]))
  assert at[0] <= at[1] + slack and at[1] <= at[2] + slack
  assert at[1] >= (at[0] + at[2]) / 2 - slack
  if high > low + 1e-3 and q < 1.5 and k < 1:
    assert at[2] > at[0]


def test_cost_starts_at_zero_with_slope_one():
  for k in (0.0, 0.1, 3.0):
    for q in (0.0, 0.5, 1.0, 2.0):
      assert e.concave_cost(0.0, k, q) == 0.0
      assert e.concave_cost(1e-7, k, q) == pytest.approx(1e-7, rel=1e-5)


@given(xs, ks, st.floats(-1e-6, 1e-6))
def test_cost_is_continuous_at_q_one(x, k, off):
  want = math.log1p(k * x) / k
  assert e.concave_cost(x, k, 1.0) == want
  assert e.concave_cost(x, k, 1.0 + off) == pytest.approx(want, rel=1e-4)


def test_cost_by_hand():
  # k = 1/2, q = 1/2, x = 6: (4^(1/2) - 1) / (1/4) = 4.
  assert e.concave_cost(6.0, 0.5, 0.5) == pytest.approx(4.0, rel=1e-14)
  # q = 2: (1/(1 + kx) - 1) / -k = x / (1 + kx).
  assert e.concave_cost(3.0, 2.0, 2.0) == pytest.approx(
    float(Fraction(3, 7)), rel=1e-14
  )


@pytest.mark.parametrize(
  'x, k, q',
  [
    (-1.0, 1.0, 1.0),
    (1.0, -1.0, 1.0),
    (1.0, 1.0, -0.1),
    (math.nan, 1.0, 1.0),
    (1.0, 1.0, math.inf),
  ],
)
def test_cost_refuses_what_is_not_concave(x, k, q):
  with pytest.raises(ValueError, match='finite and at least 0'):
    e.concave_cost(x, k, q)


def test_effort_weighs_counts():
  config = RewardConfig(
    effort_per_token=0.5,
    effort_per_call=1.0,
    effort_per_turn=0.25,
    effort_q=0.0,
  )
  counts = e.EffortCounts(tokens=4, calls=3, turns=8)
  assert e.effort(config, counts) == pytest.approx(2.0 + 3.0 + 2.0)


def test_combine_by_hand():
  config = RewardConfig(tests_weight=2.0, effort_weight=0.1, kl_weight=0.01)
  parts = {'tests': 1.0, 'effort': 3.0}
  assert c.combine(config, parts) == pytest.approx(1.7)
  assert c.combine(config, {**parts, 'kl': -5.0}, c.ALL_PARTS) == pytest.approx(
    1.75
  )


def test_zero_is_a_value_and_absence_is_an_error():
  config = RewardConfig()
  assert c.combine(config, {'tests': 0.0, 'effort': 0.0}) == 0.0
  for parts in ({'effort': 0.0}, {'tests': None, 'effort': 0.0}, {}):
    with pytest.raises(ValueError, match="'tests' is missing"):
      c.combine(config, parts)
  with pytest.raises(ValueError, match="'kl' is missing"):
    c.combine(config, {'tests': 0.0, 'effort': 0.0}, c.ALL_PARTS)


def test_part_without_weight_or_not_finite_is_refused():
  parts = {'tests': 1.0, 'effort': 0.0}
  with pytest.raises(ValueError, match="'style' has no weight"):
    c.combine(RewardConfig(), {**parts, 'style': 1.0})
  with pytest.raises(ValueError, match="'effort' is nan"):
    c.combine(RewardConfig(), {**parts, 'effort': math.nan})


def test_rewards_do_not_import_jax():
  code = (
    'import sys, composer.rewards.combine;'
    "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
  )
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0
