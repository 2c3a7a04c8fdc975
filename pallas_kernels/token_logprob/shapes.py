"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """T tokens, D of the hidden state, V of the vocabulary."""

  name: str
  tokens: int
  depth: int
  vocabulary: int

  @property
  def flops(self) -> int:
    return 2 * self.tokens * self.depth * self.vocabulary


TRAINING = (
  Shape('kimi-16k', 16384, 7168, 163840),
  Shape('qwen3-16k', 16384, 2048, 151936),
  Shape('smollm2-16k', 16384, 576, 49152),
)
DECODING = (Shape('kimi-64', 64, 7168, 163840),)
