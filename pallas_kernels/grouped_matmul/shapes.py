"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
  """Rows sorted by E groups, K to N; `spread` is how uneven groups are."""

  name: str
  rows: int
  k: int
  n: int
  groups: int
  active: int | None = None  # groups that have rows at all; None: as drawn

  def sizes(self, seed: int = 0) -> np.ndarray:
    """int32 [E]: uneven group sizes that sum to `rows`."""
    rng = np.random.default_rng(seed)
    if self.active is not None:
      chosen = rng.choice(self.groups, self.active, replace=False)
      share = np.zeros(self.groups)
      share[chosen] = 1 / self.active
      sizes = np.zeros(self.groups, np.int64)
      sizes[chosen] = 1
      return (sizes + rng.multinomial(self.rows - self.active, share)).astype(
        np.int32
      )
    share = rng.dirichlet(np.full(self.groups, 8.0))
    return rng.multinomial(self.rows, share).astype(np.int32)

  @property
  def flops(self) -> int:
    return 2 * self.rows * self.k * self.n


TRAINING = (
  # Kimi K2.5, 384 experts over 8 chips: up to 65,536 rows reach one of them.
  Shape('kimi-train', 65536, 7168, 2048, 48),
  Shape('small-train', 32768, 2048, 1024, 64),
  Shape('qwen3-train', 65536, 2048, 768, 128),
  Shape('smollm2-moe-train', 32768, 576, 1536, 16),
)
DECODING = (
  Shape('kimi-2048', 2048, 7168, 2048, 48),
  Shape('kimi-64', 64, 7168, 2048, 48),
  Shape('kimi-8', 8, 7168, 2048, 48, active=8),
  Shape('8-of-384', 8, 7168, 512, 384, active=8),
)
