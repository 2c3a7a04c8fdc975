"""A short soak; `engine_soak.py` runs the long one."""

import engine_soak


def test_a_short_soak():
  counts = engine_soak.run(480)
  assert counts.answered > 300 and counts.compared > 50
  assert counts.refused > 10 and counts.cancelled > 5
  assert counts.refused_prompts > 5 and counts.swaps > 10
