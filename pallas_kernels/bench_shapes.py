"""Shapes of the benchmark that belong to no one operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.matmul import shapes as matmul_shapes
from pallas_kernels.norm import shapes as norm_shapes
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.route import shapes as route_shapes
from pallas_kernels.route.reference import Router
from pallas_kernels.token_logprob import shapes as logprob_shapes


@dataclasses.dataclass(frozen=True)
class Attention:
  """A shape of attention, each row of the batch cut into segments.

  Segments are uneven and start at multiples of the block.
  """

  shape: attention_shapes.Shape
  segments: int = 1

  @property
  def name(self) -> str:
    if self.segments == 1:
      return self.shape.name
    return f'{self.shape.name}/{self.segments}'

  def ends(self) -> np.ndarray:
    """int [segments]: token after the last one of each."""
    blocks = -(-self.shape.tokens // self.shape.block)
    count = min(self.segments, blocks)
    share = np.random.default_rng(0).dirichlet(np.full(count, 3.0))
    sizes = 1 + np.floor(share * (blocks - count)).astype(int)
    sizes[-1] += blocks - sizes.sum()
    return np.minimum(np.cumsum(sizes) * self.shape.block, self.shape.tokens)

  def segment_ids(self) -> np.ndarray:
    """int32 [T], from 1."""
    sizes = np.diff(self.ends(), prepend=0)
    return np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)

  def starts(self) -> np.ndarray:
    """int32 [T]: the first token of the segment of each."""
    ends = self.ends()
    sizes = np.diff(ends, prepend=0)
    return np.repeat((ends - sizes).astype(np.int32), sizes)

  @property
  def flops(self) -> int:
    """Of a forward pass: of each segment, as `attention.shapes` counts."""
    own = self.shape
    pairs = int((np.diff(self.ends(), prepend=0) ** 2).sum()) // 2
    return 2 * own.rows * pairs * own.heads * (own.key + own.width)


# Training packs many trajectories into a row.
ATTENTION = (
  *(Attention(shape) for shape in attention_shapes.TRAINING),
  Attention(attention_shapes.TRAINING[1], 12),
)


@dataclasses.dataclass(frozen=True)
class Layer:
  """T rows of D, E experts of F, K of them a row."""

  name: str
  rows: int
  width: int
  hidden: int
  experts: int
  router: Router

  @property
  def flops(self) -> int:
    return 2 * 3 * self.rows * self.router.k * self.width * self.hidden


# Decoding of short contexts: half of their pages and more hold tokens.
STEPS = (
  paged_shapes.Shape('smollm2-256', 256, 1, 192, 9, 3, 64, 64, 64),
  paged_shapes.Shape('qwen3-64', 64, 1, 1152, 32, 4, 128, 128, 64),
)


KIMI, QWEN3 = Router(8, scale=2.827), Router(8, kind='softmax')
LAYERS = (
  # Of Kimi K2.5 what one of eight chips holds, and routes among.
  Layer('kimi-shard-8k', 8192, 7168, 2048, 48, KIMI),
  Layer('qwen3-8k', 8192, 2048, 768, 128, QWEN3),
  Layer('kimi-shard-64', 64, 7168, 2048, 48, KIMI),
  Layer('qwen3-64', 64, 2048, 768, 128, QWEN3),
)


@dataclasses.dataclass(frozen=True)
class Invariance:
  """A shape of another operation's benchmark."""

  operation: str
  shape: Any

  @property
  def name(self) -> str:
    return self.shape.name


INVARIANCE = (
  Invariance('grouped_matmul', grouped_shapes.TRAINING[0]),
  Invariance('grouped_matmul', grouped_shapes.DECODING[1]),
  Invariance('matmul', matmul_shapes.TRAINING[0]),
  Invariance('matmul', matmul_shapes.DECODING[0]),
  Invariance('attention', attention_shapes.TRAINING[0]),
  Invariance('paged_attention', paged_shapes.DECODING[1]),
  Invariance('paged_attention', paged_shapes.DECODING[2]),
  Invariance('token_logprob', logprob_shapes.TRAINING[0]),
  Invariance('norm', norm_shapes.TRAINING[0]),
  Invariance('norm', norm_shapes.TRAINING[2]),
  Invariance('route', route_shapes.TRAINING[0]),
)
