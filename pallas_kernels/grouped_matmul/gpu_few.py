"""Mosaic GPU: few rows times one matrix, for the least latency.

A product of a decode step reads its matrix in less than a microsecond; what
remains is waiting. So here there is no plan of groups to read first and no
second warpgroup: a block has one narrow tile, asks at once for all of K that
fits into shared memory, multiplies what arrives, and goes. Narrow tiles keep
more multiprocessors reading.

Every element is summed as `gpu` sums it, 16 products a step of the tensor core
in the order of K, and has its bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul import gpu

ROWS = 64  # of a step of the tensor core, however few there are


@dataclasses.dataclass(frozen=True)
class Few:
  """How the work is cut; it changes the speed and no bit of the result.

  Attributes:
    columns: of the result in a block: 16, 32 or 64. Lines of shared memory are
      as long, which is why not others.
    depth: of K in a stage, a multiple of `columns`.
    stages: that are asked for ahead at most; fewer where K has no more, or
      shared memory no more room.
    most: rows up to which a tuning takes this kernel instead of `gpu`'s.
  """

  columns: int = 32
  depth: int = 64
  stages: int = 12
  most: int = 64

  def __post_init__(self):
    if self.columns not in (16, 32, 64):
      raise ValueError(f'columns={self.columns}; give 16, 32 or 64')
    if self.depth % self.columns or not 0 < self.depth <= 256:
      raise ValueError(
        f'depth={self.depth}; give a multiple of columns={self.columns}, up to'
        ' 256'
      )
    if self.stages < 2:
      raise ValueError(f'stages={self.stages}; at least 2')


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs."""

  tiles: Few
  rows: int  # a multiple of `gpu.ALIGN`
  k: int
  n: int
  gated: bool
  size: int = 2  # bytes of a number of the result

  @property
  def parts(self) -> int:
    """Matrices that a tile of x is multiplied with at once."""
    return 2 if self.gated else 1

  @property
  def steps(self) -> int:
    return -(-self.k // self.tiles.depth)

  @property
  def stages(self) -> int:
    t = self.tiles
    stage = 2 * t.depth * (self.box + self.parts * t.columns)
    rest = ROWS * t.columns * self.size + 2 * (ROWS - self.box) * t.depth
    room = mosaic.SHARED_BYTES - 4096 - rest  # for barriers and alignment
    return min(t.stages, self.steps, room // stage)

  @property
  def box(self) -> int:
    """Rows that are copied; the others of a tile are anything."""
    return min(self.rows, ROWS)

  @property
  def row_tiles(self) -> int:
    return -(-self.rows // ROWS)


def matmul(
  x: jax.Array,
  w: jax.Array,
  *,
  tiles: Few,
  transpose: bool = False,
  gated: bool = False,
  out_dtype: Any = None,
  interpret: bool = False,
) -> jax.Array:
  """y = x @ w, as `gpu.grouped_matmul` of one group.

  Args:
    x: [M, K].
    w: [1, K, N]; with `gated` [1, K, 2, N], gate first.
    tiles: how to cut.
    transpose: must be False.
    gated: whether y = silu(gate) * up, in float32, instead of the product.
    out_dtype: default x's.
    interpret: run on CPU.

  Returns:
    [M, N].
  """
  m, k = x.shape
  dtype = jnp.dtype(out_dtype or x.dtype)
  if reason := unsupported(x, w, dtype, transpose):
    raise ValueError(reason)
  if m % gpu.ALIGN:
    x = jnp.pad(x, ((0, -m % gpu.ALIGN), (0, 0)))
  work = Work(tiles, x.shape[0], k, w.shape[-1], gated, dtype.itemsize)
  kernel = mosaic.launch(
    mosaic.partial(_body, work=work),
    out=jax.ShapeDtypeStruct((work.rows, work.n), dtype),
    scratch=_scratch(work, x.dtype, dtype),
    grid=work.row_tiles * (work.n // tiles.columns),
    warpgroups=1,
    interpret=interpret,
  )
  y = kernel(x, w)
  return y if m == work.rows else y[:m]


def unsupported(x, w, out_dtype, transpose: bool = False) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  if w.shape[0] != 1 or transpose or not x.shape[0]:
    return (
      f'x {x.shape}, w {w.shape}, transpose={transpose}: the kernel of few rows'
      ' takes some rows and one group, not transposed; give `gpu.Tiles`'
    )
  return gpu.unsupported(x, w, out_dtype)


def _tiled(shape, dtype, line: int) -> Any:
  """Shared memory swizzled in lines of so many numbers: x must be as w is."""
  bits = jnp.dtype(dtype).itemsize * 8
  return plgpu.SMEM(
    shape,
    dtype,
    transforms=(
      plgpu.TilingTransform((8, line)),
      plgpu.SwizzleTransform(line * bits // 8),
    ),
  )


def _scratch(work: Work, dtype, out_dtype):
  """The result, stages of x and of w, and when they are full."""
  t = work.tiles
  out = (ROWS, t.columns)
  # A step of the tensor core reads ROWS rows; those after a stage's own are of
  # the next stages, and what becomes of them is not stored.
  x = ((work.stages - 1) * work.box + ROWS, t.depth)
  w = (work.stages, work.parts, t.depth, t.columns)
  mosaic.check_shared(
    t, mosaic.shared_bytes((out, out_dtype), (x, dtype), (w, dtype))
  )
  return (
    mosaic.tiled(out, out_dtype),
    _tiled(x, dtype, t.columns),
    _tiled(w, dtype, t.columns),
    plgpu.Barrier(num_arrivals=1 + work.parts, num_barriers=work.stages),
  )


def _body(x, w, y, waiting, x_stages, w_stages, full, *, work: Work):
  t = work.tiles
  sm = lax.axis_index('sm')
  # Blocks that read the same of w are neighbours.
  column = lax.div(sm, jnp.int32(work.row_tiles))
  first = pl.multiple_of((sm - column * work.row_tiles) * ROWS, ROWS)
  rows, wide = pl.ds(first, work.box), pl.ds(column * t.columns, t.columns)

  def load(step, slot):
    deep = pl.ds(step * t.depth, t.depth)
    for part in range(work.parts):
      source = w.at[0, deep, part, wide] if work.gated else w.at[0, deep, wide]
      plgpu.copy_gmem_to_smem(source, w_stages.at[slot, part], full.at[slot])
    plgpu.copy_gmem_to_smem(
      x.at[rows, deep], x_stages.at[_rows(slot, work.box, work)], full.at[slot]
    )

  for step in range(work.stages):
    load(step, step)
  total = pl.run_scoped(
    lambda *sums: _multiply(sums, load, x_stages, w_stages, full, work),
    *[plgpu.ACC((ROWS, t.columns), jnp.float32)] * work.parts,
  )
  waiting[...] = total.astype(y.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(waiting.at[pl.ds(0, work.box)], y.at[rows, wide])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _rows(slot, count: int, work: Work):
  """Rows of x in shared memory from this stage's first on."""
  first = slot * work.box
  if not isinstance(slot, int):
    first = pl.multiple_of(first, gpu.ALIGN)
  return pl.ds(first, count)


def _multiply(sums, load, x_stages, w_stages, full, work: Work):
  """float32 [ROWS, columns]; asks for what did not fit, as stages get free."""

  def one_step(slot):
    plgpu.barrier_wait(full.at[slot])
    left = x_stages.at[_rows(slot, ROWS, work)]
    for part, total in enumerate(sums):
      plgpu.wgmma(total, left, w_stages.at[slot, part])

  def one_step_and_load(step, _):
    one_step(lax.rem(step, jnp.int32(work.stages)))
    plgpu.wgmma_wait(work.parts)  # the step before this one is done
    after = step + (work.stages - 1)

    @pl.when((step > 0) & (after < work.steps))
    def _():
      load(after, lax.rem(after, jnp.int32(work.stages)))

    return ()

  if work.steps == work.stages:
    for slot in range(work.steps):
      one_step(slot)
  else:
    lax.fori_loop(0, work.steps, one_step_and_load, ())
  plgpu.wgmma_wait(0)
  if not work.gated:
    return sums[0][...]
  gate, up = sums[0][...], sums[1][...]
  return gate / (1.0 + jnp.exp(-gate)) * up
