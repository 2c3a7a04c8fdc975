"""The effort penalty: what a session spent, as one concave cost.

    x = per_turn * turns + per_call * calls + per_token * sampled tokens
        + per_thinking_token * thinking tokens + per_call_token * call tokens
        + per_output_token * output tokens + per_message_token * message tokens
    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   ln(1 + k x) / k at q = 1

The form is that of the Composer 2 report (arXiv 2603.24477), which weighs
tokens of thinking, of tool calls, of tool outputs and of the final message, the
number of tool calls and the number of turns. It publishes neither the weights
nor k and q. Concave: a task that needs much is not made hopeless by its cost,
and an easy one is made cheap. That turns cost apart from calls is what makes a
model call tools in parallel.
"""

from __future__ import annotations

import dataclasses
import math

from composer.config import RewardConfig


@dataclasses.dataclass(frozen=True)
class EffortCounts:
  """What a session spent, all segments together; each token is counted once.

  Attributes:
    tokens: sampled, of every kind, those of summaries included.
    calls: tool calls, broken ones included.
    turns: sampled turns, broken ones included.
    thinking: of `tokens`, those of thinking.
    call: of `tokens`, those of tool calls and of what frames them.
    message: of `tokens`, those of text to whoever reads it.
    output: tokens of tool outputs in the context; not sampled.
  """

  tokens: int
  calls: int
  turns: int
  thinking: int = 0
  call: int = 0
  message: int = 0
  output: int = 0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 0:
        raise ValueError(
          f'EffortCounts.{field.name}={value} is negative; count from 0'
        )
    parts = self.thinking + self.call + self.message
    if parts > self.tokens:
      raise ValueError(
        f'EffortCounts: thinking, call and message are {parts} of'
        f' {self.tokens} sampled tokens; count each token once'
      )


def concave_cost(x: float, k: float, q: float) -> float:
  """C(x), see the module's docstring.

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
  if k < 1e-100:  # a straight line, where a quotient of subnormals is none
    return float(x)
  growth = math.log1p(k * x)
  if q == 1:
    return growth / k
  return math.expm1((1 - q) * growth) / (k * (1 - q))


def weighed(config: RewardConfig, counts: EffortCounts) -> float:
  """x of a session: what it spent, before the cost is taken."""
  return (
    config.effort_per_turn * counts.turns
    + config.effort_per_call * counts.calls
    + config.effort_per_token * counts.tokens
    + config.effort_per_thinking_token * counts.thinking
    + config.effort_per_call_token * counts.call
    + config.effort_per_output_token * counts.output
    + config.effort_per_message_token * counts.message
  )


def effort(config: RewardConfig, counts: EffortCounts) -> float:
  """The reward part 'effort': C(x), not negative; its weight makes it a cost."""
  return concave_cost(weighed(config, counts), config.effort_k, config.effort_q)
