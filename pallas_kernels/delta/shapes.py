"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """N words of a size, and the share of them that changed."""

  name: str
  words: int
  bits: int
  changed: float

  @property
  def capacity(self) -> int:
    return int(1.25 * self.words * self.changed) + 1024


TRAINING = (
  # 1 GiB of bf16, about a seventieth of a 30B model.
  Shape('bf16-1percent', 2**29, 16, 0.01),
  Shape('bf16-0.3percent', 2**29, 16, 0.003),
  Shape('nvfp4-1percent', 2**29, 8, 0.01),
)
