"""Real shapes, named, for tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses

from pallas_kernels.route.reference import Router


@dataclasses.dataclass(frozen=True)
class Shape:
  """R rows over E experts, K of them each."""

  name: str
  rows: int
  experts: int
  k: int
  kind: str = 'sigmoid'
  groups: int = 1
  top_groups: int = 1
  scale: float = 1.0

  @property
  def router(self) -> Router:
    return Router(
      self.k,
      self.kind,
      self.groups,
      self.top_groups,
      scale=self.scale,
    )


TRAINING = (
  Shape('kimi-16k', 16384, 384, 8, scale=2.827),
  Shape('qwen3-16k', 16384, 128, 8, kind='softmax'),
  Shape('deepseek-16k', 16384, 256, 8, groups=8, top_groups=4, scale=2.5),
)
DECODING = (Shape('kimi-64', 64, 384, 8, scale=2.827),)
