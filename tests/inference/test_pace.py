"""When the next step is sent."""

import pytest

from composer.inference import pace


def test_an_accelerator_is_always_sent_a_step_ahead():
  one = pace.Pace(shared=False)
  one.took = 1.0
  for ended in (0, 3, 0):
    one.start()
    one.record(ended)
    assert (one.depth, one.wait_s(1)) == (pace.AHEAD, 0)


@pytest.mark.parametrize('event', ('start', 'end'))
def test_a_shared_one_only_once_nothing_starts_or_ends(event):
  one = pace.Pace(shared=True)
  for _ in range(2):
    for _ in range(pace.SETTLES):
      assert one.depth == 0
      one.record(0)
    assert one.depth == pace.AHEAD
    one.start() if event == 'start' else one.record(1)


def test_it_waits_for_those_who_are_away_while_they_are_more():
  one = pace.Pace(shared=True)
  one.took = pace.RETURN_S / 2
  for _ in range(5):
    one.start()
  one.record(3)
  assert one.wait_s(2) == one.took
  assert one.wait_s(3) == one.wait_s(0) == 0
  one.took = 1.0
  assert one.wait_s(2) == pace.RETURN_S
  one.start()  # one of them is back
  assert one.wait_s(2) == 0 < one.wait_s(1)
  for _ in range(pace.SETTLES):
    one.record(0)
  assert one.wait_s(1) == 0  # the others have gone for good
