"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """T rows of D."""

  name: str
  rows: int
  depth: int


TRAINING = (
  Shape('kimi-16k', 16384, 7168),
  Shape('qwen3-16k', 16384, 2048),
  Shape('smollm2-16k', 16384, 576),
)
