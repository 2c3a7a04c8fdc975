"""What a session spent: every token of one kind, and costs that only grow."""

import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from composer.config import RewardConfig
from composer.rewards import effort as e

WEIGHTS = (
  'effort_per_turn', 'effort_per_call', 'effort_per_token',
  'effort_per_thinking_token', 'effort_per_call_token',
  'effort_per_output_token', 'effort_per_message_token',
)  # fmt: skip


@st.composite
def counts(draw):
  thinking, call, message, rest = (
    draw(st.integers(0, 10_000)) for _ in range(4)
  )
  return e.EffortCounts(
    tokens=thinking + call + message + rest, thinking=thinking, call=call,
    message=message, output=draw(st.integers(0, 100_000)),
    calls=draw(st.integers(0, 400)), turns=draw(st.integers(0, 50)),
  )  # fmt: skip


@st.composite
def configs(draw):
  weights = {name: draw(st.floats(0, 2)) for name in WEIGHTS}
  return RewardConfig(
    **weights, effort_k=draw(st.floats(0, 5)), effort_q=draw(st.floats(0, 2))
  )


@settings(deadline=None, max_examples=60)
@given(configs(), counts())
def test_x_is_the_weighed_sum(config, spent):
  by_hand = 0.0
  for weight, count in zip(
    WEIGHTS,
    (
      spent.turns, spent.calls, spent.tokens, spent.thinking, spent.call,
      spent.output, spent.message,
    ),
    strict=True,
  ):  # fmt: skip
    by_hand += getattr(config, weight) * count
  assert e.weighed(config, spent) == pytest.approx(by_hand, rel=1e-12)
  want = e.concave_cost(by_hand, config.effort_k, config.effort_q)
  assert e.effort(config, spent) == pytest.approx(want, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(
  configs(), counts(), st.sampled_from(('turns', 'calls', 'tokens', 'output'))
)
def test_more_of_anything_never_costs_less(config, spent, name):
  more = dataclasses.replace(spent, **{name: getattr(spent, name) + 7})
  before, after = e.effort(config, spent), e.effort(config, more)
  assert after >= before - 1e-9 * (1 + before)


@settings(deadline=None, max_examples=60)
@given(configs(), counts(), st.integers(2, 9))
def test_the_same_again_costs_at_most_as_much_again(config, spent, times):
  """Concave and 0 at 0: long work is not made hopeless by what it costs."""
  much = e.EffortCounts(
    **{key: times * value for key, value in dataclasses.asdict(spent).items()}
  )
  once = e.effort(config, spent)
  assert e.effort(config, much) <= times * once * (1 + 1e-9) + 1e-9


@settings(deadline=None, max_examples=60)
@given(configs(), counts())
def test_calls_side_by_side_cost_no_more_than_turn_by_turn(config, spent):
  """What makes a model call its tools in parallel."""
  fewer = dataclasses.replace(spent, turns=spent.turns // 4)
  together, apart = e.effort(config, fewer), e.effort(config, spent)
  assert together <= apart + 1e-9 * (1 + apart)


def test_nothing_spent_costs_nothing():
  assert e.effort(RewardConfig(), e.EffortCounts(0, 0, 0)) == 0.0


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'calls': -1}, r'EffortCounts.calls=-1 is negative; count from 0'),
    ({'thinking': 3, 'call': 3, 'message': 3}, '9 of 8 sampled tokens'),
  ],
)
def test_counts_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    e.EffortCounts(**{'tokens': 8, 'calls': 0, 'turns': 0, **changes})
