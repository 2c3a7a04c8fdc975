"""Mosaic GPU: few rows times their group's matrix, for the least latency.

A product of a decode step reads its matrix in less than a microsecond; what
remains is waiting. So here there is no plan to be made first and no second
warpgroup: a block has one narrow tile, asks at once for all of K that fits into
shared memory, multiplies what arrives, and goes. Narrow tiles keep more
multiprocessors reading. Of many groups a block finds its own from the sizes of
all, or in a plan that is there; more blocks are started than there are tiles,
and those without one go at once.

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
from pallas_kernels import warp
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import gpu_find
from pallas_kernels.grouped_matmul import groups

ROWS = 64  # of a step of the tensor core, however few there are
BARRIERS = 32  # that there can be together: one a stage
MOST = 256  # rows, of `usual`
WAVES = 3  # blocks a multiprocessor, of `usual`


@dataclasses.dataclass(frozen=True)
class Few:
  """How the work is cut; it changes the speed and no bit of the result.

  Attributes:
    columns: of the result in a block: 16, 32 or 64. Lines of shared memory are
      as long, which is why not others.
    depth: of K in a stage, a multiple of `columns`.
    stages: that are asked for ahead at most; fewer where K has no more, or
      shared memory no more room.
    most: rows up to which a tuning takes this kernel instead of `gpu`'s. Of
      several groups also not more than a tile of each, however few there are.
    rows: of a tile that are copied: 8, 16, 32 or 64. Where a group has more, its
      matrix is read again.
  """

  columns: int = 32
  depth: int = 64
  stages: int = 12
  most: int = 64
  rows: int = ROWS

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
    if self.rows not in (8, 16, 32, ROWS):
      raise ValueError(f'rows={self.rows}; give 8, 16, 32 or {ROWS}')


def usual(rows: int, n: int) -> Few | None:
  """What one group takes of which the tunings say nothing, or None.

  Of 13 pairs of K and N, (1024, 64) to (8192, 7168), and of 3 that are gated, each
  with 16, 64 and 256 rows, an H200 took 0.51 to 0.89 of the time of `gpu`'s default
  for as many blocks as here, and up to 1.7 for more. Of several groups neither was
  always the faster.
  """
  tiles = Few(columns=64, depth=128, stages=6, most=MOST)
  blocks = -(-rows // ROWS) * (n // tiles.columns)
  few = rows <= MOST and blocks <= WAVES * mosaic.cores()
  return tiles if few else None


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs."""

  tiles: Few
  rows: int  # a multiple of `gpu.ALIGN`
  k: int
  n: int
  gated: bool
  size: int = 2  # bytes of a number of the result
  groups: int = 1
  interpret: bool = False

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
    rest = 2 * (ROWS - self.box) * t.depth
    rest += (ROWS + self.line) * t.columns * self.size
    room = mosaic.SHARED_BYTES - 4096 - rest  # for barriers and alignment
    return min(t.stages, self.steps, BARRIERS, room // stage)

  @property
  def box(self) -> int:
    """Rows that are copied; the others of a tile are anything.

    Of many groups a power of two, by which they are stored.
    """
    if self.groups > 1:
      return self.tiles.rows
    return min(self.rows, self.tiles.rows)

  @property
  def row_tiles(self) -> int:
    """Of many groups the most that there can be."""
    if self.groups == 1:
      return -(-self.rows // self.box)
    return groups.most_tiles(self.rows, self.groups, self.box, gpu.ALIGN)

  @property
  def line(self) -> int:
    """Rows of the result in 128 bytes, at which the copy engine starts."""
    return max(1, 128 // (self.tiles.columns * self.size))

  @property
  def wide(self) -> int:
    """Tiles of columns."""
    return self.n // self.tiles.columns


def grouped_matmul(
  x: jax.Array,
  w: jax.Array,
  group_sizes: jax.Array | groups.Planned | None = None,
  *,
  tiles: Few,
  transpose: bool = False,
  gated: bool = False,
  out_dtype: Any = None,
  interpret: bool = False,
) -> jax.Array:
  """y[m] = x[m] @ w[group of m], as `gpu.grouped_matmul`.

  Args:
    x: [M, K], rows sorted by group.
    w: [E, K, N]; with `gated` [E, K, 2, N], gate first.
    group_sizes: int [E], summing to M; of one group not read. A plan of tiles of
      `tiles.rows` is used where there is one.
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
  work = Work(
    *(tiles, x.shape[0], k, w.shape[-1], gated, dtype.itemsize, w.shape[0]),
    interpret=interpret,
  )
  if work.groups > 1 and work.line > 2:
    raise ValueError(
      f'columns={tiles.columns}: rows of some of many groups are stored by 64'
      ' bytes or more; give 32 or 64'
    )
  own = _who(group_sizes, work, interpret)
  found = [mosaic.linear((4,), jnp.uint32)] * (len(own) == 1)
  kernel = mosaic.launch(
    mosaic.partial(_body, known=len(own), work=work),
    out=jax.ShapeDtypeStruct((work.rows, work.n), dtype),
    scratch=(*found, *_scratch(work, x.dtype, dtype)),
    grid=work.row_tiles * work.wide,
    warpgroups=1,
    interpret=interpret,
  )
  y = kernel(*own, x, w)
  return y if m == work.rows else y[:m]


def _who(group_sizes, work: Work, interpret: bool) -> tuple[jax.Array, ...]:
  """What a block reads to know its tile: nothing, the sizes, or both of a plan.

  The interpreter has no lanes, and gets a plan.
  """
  if work.groups == 1:
    return ()
  planned = isinstance(group_sizes, groups.Planned)
  if interpret or planned and work.box in group_sizes.tables:
    return groups.row_tiles(group_sizes, work.rows, work.box, gpu.ALIGN)
  return (groups.sizes_of(group_sizes).astype(jnp.int32),)


def unsupported(x, w, out_dtype, transpose: bool = False) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  if transpose or not x.shape[0]:
    return (
      f'x {x.shape}, w {w.shape}, transpose={transpose}: the kernel of few rows'
      ' takes some rows, not transposed; give `gpu.Tiles`'
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
  out = (ROWS, t.columns) if work.groups == 1 else (ROWS + work.line, t.columns)
  # A step of the tensor core reads ROWS rows; those after a stage's own are of
  # the next stages, and what becomes of them is not stored.
  x = ((work.stages - 1) * work.box + ROWS, t.depth)
  w = (work.stages, work.parts, t.depth, t.columns)
  mosaic.check_shared(
    t, mosaic.shared_bytes((out, out_dtype), (x, dtype), (w, dtype))
  )
  # Of many groups some rows of a tile are stored, of one all that are there.
  waiting = mosaic.tiled if work.groups == 1 else mosaic.linear
  return (
    waiting(out, out_dtype),
    _tiled(x, dtype, t.columns),
    _tiled(w, dtype, t.columns),
    plgpu.Barrier(num_arrivals=1 + work.parts, num_barriers=work.stages),
  )


def _body(*refs, known: int, work: Work):
  sm = lax.axis_index('sm')
  if not known:
    # Blocks that read the same of w are neighbours.
    column = lax.div(sm, jnp.int32(work.row_tiles))
    first = (sm - column * work.row_tiles) * work.box
    return _tile(*refs, work=work, column=column, own=(0, first))
  number = lax.div(sm, jnp.int32(work.wide))  # of neighbours the same
  column = sm - number * work.wide
  if known == 2:
    (table, tiles), refs = refs[:2], refs[2:]
    here = number < groups.count_of(tiles)
    number = jnp.minimum(number, table.shape[0] - 1)
    group, first, start, end = (table[number, i] for i in range(4))
    low = jnp.maximum(first, start)
  else:
    sizes, x, w, y, memory, *refs = refs
    warp.inside(
      mosaic.partial(_find, work=work),
      *(sizes, memory),
      warpgroups=1,
      blocks=work.row_tiles * work.wide,
      block_scratch=4,
    )
    group, low, end = (memory[i].astype(jnp.int32) for i in range(3))
    here, refs = low < end, (x, w, y, *refs)

  @pl.when(here)
  def _():
    first = low // gpu.ALIGN * gpu.ALIGN
    high = jnp.minimum(first + work.box, end)
    own = group, first, low, high
    _tile(*refs, work=work, column=column, own=own)


def _find(w, sizes, memory, *, work: Work):
  """Lanes: `gpu_find.find` of a block's tile, for all of the block."""

  def tell():
    tile = w.block // work.wide
    found = gpu_find.find(w, sizes, tile, work.box, gpu.ALIGN)
    w.when(
      w.lane.equals(0),
      lambda: [w.store(memory, i, one) for i, one in enumerate(found)] and None,
    )

  w.when(w.own.equals(0), tell)
  w.sync_block()


def _tile(
  x, w, y, waiting, x_stages, w_stages, full, *, work: Work, column, own
):
  """One tile of the result.

  `own` is its group and first row; then, of many groups, the first row that is
  the group's, and the end of those.
  """
  t = work.tiles
  group, first, *some = own
  first = pl.multiple_of(first, gpu.ALIGN)
  rows, wide = pl.ds(first, work.box), pl.ds(column * t.columns, t.columns)

  def load_x(step, slot, count=work.box):
    plgpu.copy_gmem_to_smem(
      x.at[pl.ds(first, count), pl.ds(step * t.depth, t.depth)],
      x_stages.at[_rows(slot, count, work)],
      full.at[slot],
    )

  def load(step, slot):
    deep = pl.ds(step * t.depth, t.depth)
    for part in range(work.parts):
      at = (group, deep, part, wide) if work.gated else (group, deep, wide)
      plgpu.copy_gmem_to_smem(w.at[at], w_stages.at[slot, part], full.at[slot])
    if not some or work.box == gpu.ALIGN:
      load_x(step, slot)
      return
    small = some[1] - first <= gpu.ALIGN
    pl.when(small)(lambda: load_x(step, slot, gpu.ALIGN))
    pl.when(~small)(lambda: load_x(step, slot))

  for step in range(work.stages):  # a step may end past K, if it is not an int
    load(jnp.int32(step) if work.k % t.depth else step, step)
  total = pl.run_scoped(
    lambda *sums: _multiply(sums, load, x_stages, w_stages, full, work),
    *[plgpu.ACC((ROWS, t.columns), jnp.float32)] * work.parts,
  )
  total = total.astype(y.dtype)
  if not some:
    waiting[...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(waiting.at[pl.ds(0, work.box)], y.at[rows, wide])
  else:
    low, high = some
    # The first row that is stored stands at the start of a line, and so do all
    # pieces of a power of two.
    start = low - first
    down = lax.rem(work.line - lax.rem(start, work.line), work.line)
    mosaic.plain(waiting, work.interpret)
    waiting.at[pl.ds(down, ROWS)][...] = total
    plgpu.commit_smem()
    mosaic.store_rows(
      waiting,
      lambda done, size: y.at[pl.ds(low + done, size), wide],
      *(start + down, high - low, work.box),
    )
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
