"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sequences of up to T tokens, with some queries each.

  H heads over G, K and W numbers, S tokens a page.

  Attributes:
    shared: whether values are the first W numbers of the keys.
  """

  name: str
  sequences: int
  queries: int
  tokens: int
  heads: int
  groups: int
  key: int
  width: int
  block: int
  shared: bool = False

  @property
  def token_bytes(self) -> int:
    """Of a token's keys and values."""
    return 2 * self.groups * (self.key + (0 if self.shared else self.width))


DECODING = (
  Shape('kimi-264x8k', 264, 1, 8192, 64, 1, 576, 512, 64, shared=True),
  Shape('kimi-132x8k', 132, 1, 8192, 64, 1, 576, 512, 64, shared=True),
  Shape('qwen3-66x8k', 66, 1, 8192, 32, 4, 128, 128, 128),
)
PREFILLING = (Shape('qwen3-4x2k', 4, 2048, 8192, 32, 4, 128, 128, 128),)
# Too few sequences for the multiprocessors of a GPU, unless cut into splits.
FEW = (
  Shape('kimi-4x32k', 4, 1, 32768, 64, 1, 576, 512, 64, shared=True),
  Shape('qwen3-4x32k', 4, 1, 32768, 32, 4, 128, 128, 128),
)
