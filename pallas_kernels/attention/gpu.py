"""Mosaic GPU: packed attention through the kernel that paged attention has too.

Lists of work are made here, what a block of threads does with them is in
`gpu_kernel`, and gradients are in `gpu_gradients` and `gpu_absorbed`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels import mosaic
from pallas_kernels.attention import gpu_absorbed
from pallas_kernels.attention import gpu_gradients
from pallas_kernels.attention import gpu_kernel
from pallas_kernels.attention import gpu_tiles
from pallas_kernels.attention import work as work_lib

LANE = 64  # 16-bit words of a line of the 128-byte swizzle
WIDE = 256  # columns of output that a consumer can hold
DEEP = 192  # numbers of a key of which two stages fit into shared memory
ROWS = gpu_tiles.ROWS
LOG2E = math.log2(math.e)
Tiles, Work, fitting = gpu_tiles.Tiles, gpu_tiles.Work, gpu_tiles.fitting


def unsupported(q, k, v, block: int, width: int) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  for name, array in (('q', q), ('k', k), ('v', v)):
    if array is not None and array.dtype not in (jnp.bfloat16, jnp.float16):
      return (
        f'{name} is {array.dtype}; the GPU kernel takes bfloat16 and float16'
      )
  key = q.shape[-1]
  if key % LANE or width % LANE:
    return (
      f'K={key}, W={width}; the GPU kernel takes multiples of {LANE}: pad with'
      ' zeros'
    )
  if v is None:
    if block != 64 or width != 2 * WIDE or key > width + LANE:
      return (
        f'K={key}, width={width}, block={block}; where values are part of the'
        ' keys the GPU kernel takes width 512, K to 576 and block 64'
      )
    return None
  if block not in (64, 128):
    return f'block={block}; the GPU kernel takes 64 and 128'
  if key > DEEP or width > min(key, 128):
    return (
      f'K={key}, W={width}; the GPU kernel takes K to {DEEP} and W to 128, not'
      ' above K'
    )
  return None


def forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  *,
  block: int,
  width: int,
  scale: float,
  split: int = 0,
  tiles: Tiles | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Packed attention: out [T, H, W] and log-sum-exp float32 [T, H].

  The arguments are those of `reference.forward`, and `split` of the package.
  """
  t, h, key = q.shape
  g = k.shape[1]
  work = plan(
    *(key, width, block, scale, v is None, False, tiles, interpret),
    split=split,
    long=t > split,
    log=True,
  )
  high = -(-t // (ROWS * work.units)) * ROWS * work.units
  starts = jnp.pad(starts, (0, high - t))
  ends = jnp.pad(ends, (0, high - t), constant_values=-1)
  items = work_lib.packed_items(
    starts, ends, ROWS * work.units, block, h, g, work.split
  )
  items = work_lib.longest_first(items, work.sms)
  pages = lambda x: x.reshape(t // block, block, *x.shape[1:])  # noqa: E731
  out, log, *_ = gpu_kernel.run(
    work,
    items,
    jnp.zeros((1, 1), jnp.int32),
    starts,
    ends,
    q,
    pages(k),
    None if v is None else pages(v),
    high,
  )
  return out, log.T[:t]


def tuned(key: int, width: int, block: int, shared: bool, length: int) -> Tiles:
  """`fitting`, but for what the tunings of the device say of such shapes."""
  tiles = fitting(key, width, block, shared, False, length)
  kind = 'long' if length >= gpu_tiles.LONG else 'short'
  name = f'forward {key} {width} {block} {kind}'
  more = dispatch.tuning('attention').get(name, {})
  return dataclasses.replace(tiles, **more)


def backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  log: jax.Array,
  dots: jax.Array,
  dout: jax.Array,
  *,
  block: int,
  width: int,
  scale: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Gradients to q, k and v; the arguments are those of `reference.backward`.

  The absorbed form has kernels of its own: see `gpu_absorbed`.
  """
  del (
    block,
    width,
  )  # The sums do not depend on the one, and shapes say the other.
  rows = starts, ends, log, dots, dout
  more = dict(scale=scale, interpret=interpret)
  if v is None:
    return *gpu_absorbed.backward(q, k, *rows, **more), None
  return gpu_gradients.backward(q, k, v, *rows, **more)


def plan(
  key: int,
  width: int,
  block: int,
  scale: float,
  shared: bool,
  paged: bool,
  tiles: Tiles | None,
  interpret: bool,
  *,
  log: bool,
  few: bool = False,
  split: int = 0,
  long: bool = False,
  apart: bool = False,
) -> Work:
  """The constants of a kernel; without tiles, those that fit best.

  Args:
    few: whether an item has at most 64 rows.
    split: tokens of a split.
    (others): see `Work`.
  """
  if tiles is None:
    tiles = fitting(key, width, block, shared, few, 0)
  if shared and tiles.consumers != 2:
    raise ValueError(
      f'{tiles}: where values are part of the keys there must be 2 consumers'
    )
  return Work(
    tiles,
    key,
    width,
    block,
    factor=scale * LOG2E,
    sms=2 if interpret else mosaic.cores(),
    shared=shared,
    paged=paged,
    log=log,
    split=split // block,
    long=split > 0 and long,
    apart=apart and split > 0 and long,
    interpret=interpret,
  )
