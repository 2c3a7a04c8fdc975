"""Rows of matrices in the number formats that open checkpoints use.

Every function takes the bytes of whole rows and gives float32 values, exactly:
the products of these formats have few enough bits. Rounding to bfloat16 comes
after, once.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

BLOCK = 32  # values of a GGUF block


@functools.lru_cache(maxsize=1)
def _e4m3_values() -> np.ndarray:
  codes = np.arange(256, dtype=np.uint8)
  return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def fp8_blocks(
  codes: np.ndarray,
  scales: np.ndarray,
  first: int,
  block: tuple[int, int],
) -> np.ndarray:
  """DeepSeek-V3's FP8: w = code x the scale of its block.

  Args:
    codes: uint8 [r, n], E4M3, rows [first, first + r) of the matrix.
    scales: [R, C], one for each block, from the row of blocks that holds row
      `first` on (`weight_scale_inv`: what a code is multiplied by).
    first: see `codes`.
    block: rows and columns of a block.

  Returns:
    float32 [r, n].
  """
  rows, columns = codes.shape
  height, width = block
  out = _e4m3_values()[codes]
  wide = np.repeat(scales.astype(np.float32), width, axis=1)[:, :columns]
  skipped = first % height
  for i, scale in enumerate(wide):
    start = max(i * height - skipped, 0)
    out[start : (i + 1) * height - skipped] *= scale[None, :]
  return out


def int4_groups(
  packed: np.ndarray, scales: np.ndarray, columns: int, group: int
) -> np.ndarray:
  """Symmetric INT4 of compressed-tensors, 8 values in an int32.

  Value j of a row is bits [4 j, 4 j + 4) of it, plus 8; w = (bits - 8) x the
  scale of its group of columns.

  Args:
    packed: int32 [r, ceil(columns / 8)].
    scales: [r, ceil(columns / group)].
    columns: of the matrix.
    group: columns that share a scale.

  Returns:
    float32 [r, columns].
  """
  rows, groups = scales.shape
  words = np.ascontiguousarray(packed).astype('<i4').view(np.uint8)
  values = np.empty((rows, words.shape[1], 2), np.float32)
  np.subtract(words & 15, np.float32(8), out=values[..., 0])
  np.subtract(words >> 4, np.float32(8), out=values[..., 1])
  values = values.reshape(rows, -1)[:, :columns]
  if columns == groups * group:
    grouped = values.reshape(rows, groups, group)
    grouped = grouped * scales.astype(np.float32)[..., None]
    return grouped.reshape(rows, columns)
  wide = np.repeat(scales.astype(np.float32), group, axis=1)
  return values * wide[:, :columns]


def q8_0(blocks: np.ndarray) -> np.ndarray:
  """GGUF Q8_0: a float16 scale and 32 int8; uint8 [..., 34] -> [..., 32]."""
  scale = blocks[..., :2].copy().view('<f2').astype(np.float32)
  return blocks[..., 2:].view(np.int8).astype(np.float32) * scale


def q4_1(blocks: np.ndarray) -> np.ndarray:
  """GGUF Q4_1: w = code x scale + minimum; uint8 [..., 20] -> [..., 32].

  A block is a float16 scale, a float16 minimum and 16 bytes, whose low halves
  are values 0 to 15 and whose high halves are values 16 to 31.
  """
  scale = blocks[..., 0:2].copy().view('<f2').astype(np.float32)
  least = blocks[..., 2:4].copy().view('<f2').astype(np.float32)
  codes = blocks[..., 4:]
  values = np.concatenate([codes & 15, codes >> 4], axis=-1)
  return values.astype(np.float32) * scale + least


def non_finite(x: np.ndarray) -> tuple[bool, bool]:
  """Whether there is a NaN, and whether there is an infinity.

  Looks at the bits: several times faster than asking `isnan` of bfloat16.
  """
  bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
  info = ml_dtypes.finfo(x.dtype)
  infinity = ((1 << info.nexp) - 1) << info.nmant
  magnitude = x.view(bits) & bits((1 << (info.nexp + info.nmant)) - 1)
  if not magnitude.size or magnitude.max() < infinity:
    return False, False
  return bool((magnitude > infinity).any()), bool((magnitude == infinity).any())
