"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """R rows of K."""

  name: str
  rows: int
  k: int


TRAINING = (
  Shape('kimi-16k', 16384, 7168),
  Shape('qwen3-16k', 16384, 2048),
)
