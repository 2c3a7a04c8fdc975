"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """Rows of a batch, T tokens of each, H heads over G, K and W numbers.

  Attributes:
    shared: whether values are the first W numbers of the keys.
  """

  name: str
  rows: int
  tokens: int
  heads: int
  groups: int
  key: int
  width: int
  block: int
  shared: bool = False

  @property
  def flops(self) -> int:
    """Of a causal forward pass; a backward pass is counted as 5/2 of it."""
    pairs = self.rows * self.tokens**2 // 2
    return 2 * pairs * self.heads * (self.key + self.width)


TRAINING = (
  Shape('gqa-4x4k', 4, 4096, 32, 8, 128, 128, 128),
  Shape('mha-16k', 1, 16384, 16, 16, 128, 128, 128),
  Shape('smollm2-4x4k', 4, 4096, 9, 3, 64, 64, 128),
  Shape('kimi-8k', 1, 8192, 64, 64, 192, 128, 128),
  Shape('kimi-absorbed-4k', 1, 4096, 64, 1, 576, 512, 64, shared=True),
  Shape('kimi-absorbed-8k', 1, 8192, 16, 1, 576, 512, 64, shared=True),
)
