"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """M rows, K to N."""

  name: str
  rows: int
  k: int
  n: int

  @property
  def flops(self) -> int:
    return 2 * self.rows * self.k * self.n


TRAINING = (
  Shape('square-8192', 8192, 8192, 8192),
  Shape('kimi-q-up', 16384, 1536, 12288),
  Shape('qwen3-qkv', 16384, 2048, 5120),
  Shape('smollm2-qkv', 16384, 576, 960),
)
DECODING = (
  Shape('kimi-out-64', 64, 8192, 7168),
  # Of a small model: latency is all of it.
  Shape('smollm2-qkv-64', 64, 576, 960),
  Shape('smollm2-down-16', 16, 1536, 576),
)
