"""Mosaic GPU: rows of each group times that group's matrix, K in one order.

One block stays on each multiprocessor. A producer warpgroup fills a ring of
stages in shared memory and runs ahead over the ends of tiles; the consumers
hold 64 rows each in registers and multiply. Every element is
((0 + k-block 0) + k-block 1) + ..., 16 products a step of the tensor core,
whatever the tile, the group or the number of rows.

Tiles start where their group starts, less up to seven rows: the copy engine
wants a multiple of eight. Rows of another group that share a tile are computed
and not stored; only the first and the last tile of a group are stored by pieces.
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
from pallas_kernels.grouped_matmul import groups

# Columns of a store: one line of the 128-byte swizzle in 16-bit words.
STORE = 64
# Rows of a swizzled tile, at which copies have to start.
ALIGN = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
  """How the work is cut; it changes the speed and no bit of the result.

  Attributes:
    consumers: warpgroups that multiply.
    rows: rows of each of them, 64 or 128; a block has consumers * rows.
    columns: columns of a block, a multiple of 64, at most 256.
    depth: of K in a stage.
    stages: of the ring.
    slots: blocks of 64 columns of the result that wait to be stored.
    panel: columns of tiles that are worked through for all rows, then the next.
  """

  consumers: int = 2
  rows: int = 64
  columns: int = 256
  depth: int = 64
  stages: int = 4
  slots: int = 2
  panel: int = 8

  def __post_init__(self):
    if self.rows not in (64, 128) or self.consumers not in (1, 2, 3):
      raise ValueError(
        f'rows={self.rows}, consumers={self.consumers}; rows must be 64 or 128,'
        ' consumers 1 to 3'
      )
    if self.columns % STORE or not STORE <= self.columns <= 256:
      raise ValueError(f'columns={self.columns}; give 64, 128, 192 or 256')
    if self.depth % 16 or self.stages < 2:
      raise ValueError(
        f'depth={self.depth}, stages={self.stages}; depth must be a multiple'
        ' of 16, and at least 2 stages'
      )


def grouped_matmul(
  x: jax.Array,
  w: jax.Array,
  group_sizes: jax.Array | groups.Planned,
  *,
  tiles: Tiles,
  transpose: bool = False,
  gated: bool = False,
  out_dtype: Any = None,
  interpret: bool = False,
) -> jax.Array:
  """y[m] = x[m] @ w[group of m].

  Args:
    x: [M, K], rows sorted by group.
    w: [E, K, N]; with `transpose` [E, N, K]; with `gated` [E, K, 2, N], gate
      first.
    group_sizes: int [E], summing to M, with their tiles where these are at hand.
    tiles: how to cut.
    transpose: whether w is used transposed.
    gated: whether y = silu(gate) * up, in float32, instead of the product.
    out_dtype: default x's.
    interpret: run on CPU.

  Returns:
    [M, N].
  """
  m, k = x.shape
  n = w.shape[1] if transpose else w.shape[-1]
  dtype = jnp.dtype(out_dtype or x.dtype)
  if reason := unsupported(x, w, dtype, transpose):
    raise ValueError(reason)
  if gated and tiles.columns % (2 * STORE):
    raise ValueError(
      f'columns={tiles.columns}; gated takes 128 or 256, half of them of each'
    )
  if m % ALIGN:
    x = jnp.pad(x, ((0, -m % ALIGN), (0, 0)))
  table, count = groups.row_tiles(
    group_sizes, m, tiles.consumers * tiles.rows, ALIGN
  )
  sms = 2 if interpret else mosaic.cores()
  work = Work(tiles, k, n, sms, transpose, gated)
  kernel = mosaic.launch(
    mosaic.partial(_body, work=work),
    out=jax.ShapeDtypeStruct((x.shape[0], n), dtype),
    scratch=_scratch(work, x.dtype, dtype),
    grid=sms,
    warpgroups=tiles.consumers + 1,
    interpret=interpret,
  )
  y = kernel(table, count, x, w)
  return y if m == x.shape[0] else y[:m]


def unsupported(x, w, out_dtype, transpose: bool = False) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  n = w.shape[1] if transpose else w.shape[-1]
  for name, size in (('K', x.shape[1]), ('N', n)):
    if size % STORE:
      return (
        f'{name}={size} is not a multiple of {STORE}, which the GPU kernel'
        ' needs; pad it with zeros'
      )
  for name, dtype in (('x', x.dtype), ('w', w.dtype), ('result', out_dtype)):
    half = dtype in (jnp.bfloat16, jnp.float16)
    if not half and not (name == 'result' and dtype == jnp.float32):
      return (
        f'{name} is {jnp.dtype(dtype).name}; the GPU kernel takes bfloat16 or'
        ' float16, and gives float32 too: cast it'
      )
  return None


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs."""

  tiles: Tiles
  k: int
  n: int
  sms: int
  transpose: bool = False
  gated: bool = False

  @property
  def parts(self) -> int:
    """Matrices that a tile of x is multiplied with at once."""
    return 2 if self.gated else 1

  @property
  def width(self) -> int:
    """Columns of the result of a block."""
    return self.tiles.columns // self.parts

  @property
  def steps(self) -> int:
    return -(-self.k // self.tiles.depth)


def ring(work: Work, dtype: Any) -> tuple[tuple[Any, ...], int]:
  """Stages of x and w with their barriers, and the bytes that they take."""
  t = work.tiles
  x = (t.stages, t.consumers, t.rows, t.depth)
  w = (t.depth, work.width)
  w = (t.stages, work.parts, *(w[::-1] if work.transpose else w))
  return (
    mosaic.tiled(x, dtype),
    mosaic.tiled(w, dtype),
    plgpu.Barrier(num_arrivals=t.consumers + work.parts, num_barriers=t.stages),
    plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
  ), mosaic.shared_bytes((x, dtype), (w, dtype))


def _scratch(work: Work, dtype, out_dtype):
  """The ring, and results that wait; checked against the limit."""
  t = work.tiles
  out = (t.consumers, t.slots, t.rows, STORE)
  stages, used = ring(work, dtype)
  mosaic.check_shared(t, used + mosaic.shared_bytes((out, out_dtype)))
  waiting = plgpu.RefUnion(
    mosaic.tiled(out, out_dtype), mosaic.linear(out, out_dtype)
  )
  return waiting, *stages


def _body(table, count, x, w, y, waiting, *stages, work: Work):
  def finish(total, own, column):
    store(total.astype(y.dtype), y, waiting, own, column, work.tiles)

  multiply_tiles(table, count, x, w, stages, finish, work)

  @pl.when(lax.axis_index('wg') < work.tiles.consumers)
  def _():
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def multiply_tiles(
  table, count, x, w, stages, finish, work: Work, part: Any = None
) -> None:
  """All tiles of this block: the last warpgroup loads, the others multiply.

  Args:
    table: references to `groups.row_tiles`, of tiles of all consumers' rows.
    count: its second result, of which `groups.count_of` is the count.
    x: reference [M, K].
    w: reference [E, K, N], or as `work` says.
    stages: references to `ring`.
    finish: `finish(total, own, column)` takes what a consumer has summed:
      float32 [rows, width], `_unit` of its rows, the first column.
    work: sizes.
    part: first column and count of tiles of columns, traced, of what this launch
      multiplies; None: all.
  """
  t = work.tiles
  before, wide = part or (0, -(-work.n // work.width))
  sm, wg = lax.axis_index('sm'), lax.axis_index('wg')
  trips = mosaic.cdiv(
    jnp.maximum(groups.count_of(count) * wide - sm, 0), work.sms
  )

  def tile(trip):
    """Group, rows and first column of this block's tile number `trip`."""
    number, column = order(
      trip * work.sms + sm, groups.count_of(count), wide, t.panel
    )
    column = before + column * work.width
    return [table[number, i] for i in range(4)], column

  @pl.when(wg == t.consumers)
  def _():
    plgpu.set_max_registers(40, action='decrease')
    _produce(x, w, stages, tile, trips, work)

  @pl.when(wg < t.consumers)
  def _():
    plgpu.set_max_registers(registers(t.consumers), action='increase')
    _consume(stages, finish, tile, trips, work)


def registers(consumers: int) -> int:
  return min(240, (512 - 40) // consumers // 8 * 8)


def order(index, count, wide, panel: int):
  """Number of the row tile and of the column tile, panels of columns first."""
  size = count * panel
  number = lax.div(index, size)
  within = index - number * size
  width = jnp.minimum(panel, wide - number * panel)
  row = lax.div(within, width)
  return row, number * panel + within - row * width


def _unit(group, i, rows: int):
  """Rows of consumer i of a tile: first computed, first and end of its own."""
  _, tile, start, end = group
  first = tile + i * rows
  low = jnp.maximum(first, start)
  return first, low, jnp.maximum(jnp.minimum(first + rows, end), low)


def _produce(x, w, stages, tile, trips, work: Work):
  t = work.tiles
  x_ring, w_ring, full, empty = stages

  def load_x(group, i, deep, slot):
    first, low, high = _unit(group, i, t.rows)
    first = pl.multiple_of(first, ALIGN)
    # Few rows: a small box. What stays of the stage is multiplied and dropped.
    small = high - first <= ALIGN

    @pl.when((low < high) & small)
    def _():
      plgpu.copy_gmem_to_smem(
        x.at[pl.ds(first, ALIGN), deep],
        x_ring.at[slot, i, pl.ds(0, ALIGN)],
        full.at[slot],
      )

    @pl.when((low < high) & ~small)
    def _():
      plgpu.copy_gmem_to_smem(
        x.at[pl.ds(first, t.rows), deep], x_ring.at[slot, i], full.at[slot]
      )

    @pl.when(low >= high)
    def _():
      plgpu.barrier_arrive(full.at[slot])

  def one_tile(trip, step):
    group, column = tile(trip)
    wide = pl.ds(column, work.width)

    def one_step(i, step):
      slot = lax.rem(step, jnp.int32(t.stages))
      deep = pl.ds(i * t.depth, t.depth)
      plgpu.barrier_wait(empty.at[slot])
      for part in range(work.parts):
        if work.gated:
          source = w.at[group[0], deep, part, wide]
        elif work.transpose:
          source = w.at[group[0], wide, deep]
        else:
          source = w.at[group[0], deep, wide]
        plgpu.copy_gmem_to_smem(source, w_ring.at[slot, part], full.at[slot])
      for consumer in range(t.consumers):
        load_x(group, consumer, deep, slot)
      return step + 1

    return lax.fori_loop(0, work.steps, one_step, step)

  lax.fori_loop(0, trips, one_tile, jnp.int32(0))
  for slot in range(t.stages):  # leaves the barriers as they were
    plgpu.barrier_wait(empty.at[slot])


def _consume(stages, finish, tile, trips, work: Work):
  t, steps, parts = work.tiles, work.steps, work.parts
  x_ring, w_ring, full, empty = stages
  wg = lax.axis_index('wg')
  for slot in range(t.stages):
    plgpu.barrier_arrive(empty.at[slot])

  def multiply(step, *sums):
    def one_step(i, _):
      slot = lax.rem(step + i, jnp.int32(t.stages))
      plgpu.barrier_wait(full.at[slot])
      for part, total in enumerate(sums):
        right = w_ring.at[slot, part]
        right = right.transpose((1, 0)) if work.transpose else right
        plgpu.wgmma(total, x_ring.at[slot, wg], right)
      plgpu.wgmma_wait(parts)  # the step before this one is done

      @pl.when(i > 0)
      def _():
        before = lax.rem(step + i - 1, jnp.int32(t.stages))
        plgpu.barrier_arrive(empty.at[before])

      return ()

    lax.fori_loop(0, steps, one_step, ())
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(empty.at[lax.rem(step + steps - 1, t.stages)])
    if len(sums) == 1:
      return sums[0][...]
    gate, up = sums[0][...], sums[1][...]
    return gate / (1.0 + jnp.exp(-gate)) * up

  def pass_by(step):
    def one_step(i, _):
      slot = lax.rem(step + i, jnp.int32(t.stages))
      plgpu.barrier_wait(full.at[slot])
      plgpu.barrier_arrive(empty.at[slot])
      return ()

    lax.fori_loop(0, steps, one_step, ())

  def one_tile(trip, step):
    group, column = tile(trip)
    own = _unit(group, wg, t.rows)
    any_rows = own[1] < own[2]

    @pl.when(any_rows)
    def _():
      total = pl.run_scoped(
        lambda *sums: multiply(step, *sums),
        *[plgpu.ACC((t.rows, work.width), jnp.float32)] * parts,
      )
      finish(total, own, column)

    @pl.when(~any_rows)
    def _():
      pass_by(step)

    return step + steps

  lax.fori_loop(0, trips, one_tile, jnp.int32(0))


def unread(i: int, blocks: int, slots: int) -> int:
  """Stores that may still be under way when block i of a tile gets its slot.

  Those after the last one from that slot: of this tile, or of the one before,
  whose last blocks need not have taken all slots in turn.
  """
  if i >= slots:
    return slots - 1
  last = i + (blocks - 1 - i) // slots * slots  # of the tile before
  return min(slots, blocks - last + i) - 1


def store(total, y, waiting, own, column, t: Tiles):
  """Writes a consumer's rows [rows, n] of its group, through shared memory."""
  whole, ragged = waiting
  first, low, high = own
  wg = lax.axis_index('wg')
  blocks = total.shape[1] // STORE

  def columns(i):
    return pl.ds(column + i * STORE, STORE)

  @pl.when(high - low == t.rows)
  def _():
    rows = pl.ds(pl.multiple_of(first, ALIGN), t.rows)
    for i in range(blocks):
      part = whole.at[wg, i % t.slots]
      before = unread(i, blocks, t.slots)
      plgpu.wait_smem_to_gmem(before, wait_read_only=True)
      part[...] = total[:, i * STORE : (i + 1) * STORE]
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(part, y.at[rows, columns(i)])

  @pl.when(high - low < t.rows)
  def _():
    for i in range(blocks):
      part = ragged.at[wg, i % t.slots]
      before = unread(i, blocks, t.slots)
      plgpu.wait_smem_to_gmem(before, wait_read_only=True)
      part[...] = total[:, i * STORE : (i + 1) * STORE]
      plgpu.commit_smem()
      mosaic.store_rows(
        part,
        lambda done, size, i=i: y.at[pl.ds(low + done, size), columns(i)],
        low - first,
        high - low,
        t.rows,
      )
