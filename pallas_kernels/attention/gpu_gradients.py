"""Mosaic GPU: gradients of attention, without atomics and in one order.

With p = exp(s - log) and D = sum_w out dout there are two passes over pairs of
tiles, each with all its sums in registers:

  dq[t] = sum_s ds[t, s] k[s]             a tile of queries over blocks of keys
  dk[s] = sum_t ds[t, s] q[t]             a tile of keys over all heads of
  dv[s] = sum_t p[t, s] dout[t]           queries that read it, and their blocks
  ds = p (dout v^T - D) scale

The scores are computed in each pass: seven products where a single pass with
atomic additions has five, whose order would change from run to run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.attention import gpu_kernel
from pallas_kernels.attention import work as work_lib

ROWS = gpu_kernel.ROWS
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiles:
  """How the work is cut.

  Attributes:
    block: rows of a block that is walked over, 64 or 32.
    stages: such blocks in shared memory.
    consumers: warpgroups that compute, of 64 rows each of what stays.
  """

  block: int = 64
  stages: int = 2
  consumers: int = 2

  def __post_init__(self):
    if self.block not in (32, 64) or self.stages < 2:
      raise ValueError(
        f'block={self.block}, stages={self.stages}; a block has 32 or 64 rows,'
        ' and there are at least 2 stages'
      )


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs; see `gpu_tiles.Work`."""

  tiles: Tiles
  key: int
  width: int
  scale: float
  share: int  # heads of queries to a head of keys
  sms: int
  interpret: bool

  @property
  def rows(self) -> int:
    return ROWS * self.tiles.consumers


def fitting(key: int, width: int, sums: int) -> Tiles:
  """As many stages as there is room for beside what stays, at most four.

  Args:
    key, width: see `Work`.
    sums: numbers that are summed for a row that stays. A thread has half as
      many registers of them; above 256 too few are left for scores of 64 rows,
      which would go through memory.
  """
  block = 64 if sums <= 256 else 32
  row = 2 * (key + width)  # bytes
  room = mosaic.SHARED_BYTES - 4096 - 2 * ROWS * row
  return Tiles(block, min(room // (block * row), 4))


def backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  starts: jax.Array,
  ends: jax.Array,
  log: jax.Array,
  dots: jax.Array,
  dout: jax.Array,
  *,
  scale: float,
  query_tiles: Tiles | None = None,
  key_tiles: Tiles | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """dq, dk and dv; the arguments are those of `reference.backward`."""
  t, h, key = q.shape
  g, width = k.shape[1], v.shape[-1]
  sms = 2 if interpret else mosaic.cores()
  query_tiles = query_tiles or fitting(key, width, key)
  key_tiles = key_tiles or fitting(key, width, key + width)
  high = -(-t // 128) * 128  # rows of tiles, whatever the tiles
  logs, dots = (
    jnp.pad(x.astype(jnp.float32).T, ((0, 0), (0, high - t)))
    for x in (log * LOG2E, dots)
  )
  starts = jnp.pad(starts, (0, high - t))
  ends = jnp.pad(ends, (0, high - t), constant_values=-1)
  work = Work(query_tiles, key, width, scale, h // g, sms, interpret)
  items = work_lib.packed_items(starts, ends, work.rows, work.tiles.block, h, g)
  dq = _launch(
    _query_body,
    work,
    work_lib.longest_first(items, sms),
    (starts, ends, q, k, v, dout, logs, dots),
    (jax.ShapeDtypeStruct(q.shape, q.dtype),),
    logs=False,
  )[0]
  work = dataclasses.replace(work, tiles=key_tiles)
  items = work_lib.key_items(starts, ends, work.rows, work.tiles.block, g)
  dk, dv = _launch(
    _key_body,
    work,
    work_lib.longest_first(items, sms),
    (starts, ends, q, k, v, dout, logs, dots),
    (
      jax.ShapeDtypeStruct(k.shape, k.dtype),
      jax.ShapeDtypeStruct(v.shape, v.dtype),
    ),
    logs=True,
  )
  return dq, dk, dv


# --- What `gpu_absorbed` has too ----------------------------------------------


def tiled(shape, dtype, block: int):
  """Shared memory of 16-bit numbers for products over `block` rows.

  A product is over a multiple of a line's numbers; lines are 128 bytes at most.
  """
  line = min(block, 64)
  return plgpu.SMEM(
    tuple(shape),
    dtype,
    transforms=(
      plgpu.TilingTransform((8, line)),
      plgpu.SwizzleTransform(2 * line),
    ),
  )


def barriers(copies: int, consumers: int, stages: int = 1):
  """Of full buffers, which copies make them, and of empty ones."""
  return (
    plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
  )


def summed(loop, columns, interpret: bool) -> tuple[jax.Array, ...]:
  """What `loop(sums, totals)` adds up, float32 [64, n] for each of `columns`.

  It passes both on to `add`, and returns the totals: the sums are accumulators
  of the tensor core, but interpreting there are none, and loops carry values.
  """
  if interpret:
    zeros = [jnp.zeros((ROWS, n), jnp.float32) for n in columns]
    cast = plgpu.layout_cast
    return loop(None, tuple(cast(x, plgpu.Layout.WGMMA) for x in zeros))

  def run(*sums):
    loop(sums, ())
    return tuple(x[...] for x in sums)

  return pl.run_scoped(
    run, *(plgpu.ACC((ROWS, n), jnp.float32) for n in columns)
  )


def add(sums, totals, index: int, left, right) -> tuple[jax.Array, ...]:
  """Starts adding left @ right to the sum at `index`; returns the totals."""
  if sums is None:
    new = gpu_kernel.accumulate(totals[index], left, right, True)
    return *totals[:index], new, *totals[index + 1 :]
  plgpu.wgmma(sums[index], left, right)
  return totals


def wait(sums) -> None:
  """Until all that was added is there, and what it was made of is free."""
  if sums is not None:
    plgpu.wgmma_wait(0)


# --- The kernels ---------------------------------------------------------------


def _launch(body, work: Work, items, arrays, out, logs: bool):
  """A pass; `logs`: whether logs and dots are of rows that are walked over."""
  t, dtype = work.tiles, arrays[2].dtype
  stay = [(t.consumers, ROWS, n) for n in (work.key, work.width)]
  walk = [(t.stages, t.block, n) for n in (work.key, work.width)]
  mosaic.check_shared(
    t, mosaic.shared_bytes(*((shape, dtype) for shape in stay + walk)) + 2048
  )
  logs = [mosaic.linear((t.stages, t.block), jnp.float32)] * 2 if logs else []
  scratch = [
    tuple(tiled(shape, dtype, t.block) for shape in stay + walk),
    tuple(logs),
    barriers(2 * t.consumers, t.consumers),
    barriers(2 + len(logs), t.consumers, t.stages),
  ]
  return mosaic.launch(
    mosaic.partial(_body, body=body, work=work, outs=len(out)),
    out=out,
    scratch=scratch,
    grid=min(work.sms, items.shape[0]),
    warpgroups=t.consumers + 1,
    interpret=work.interpret,
    approximate=True,
  )(items, *arrays)


@dataclasses.dataclass(frozen=True)
class _Refs:
  """References of a running kernel."""

  items: Any
  starts: Any
  ends: Any
  q: Any
  k: Any
  v: Any
  dout: Any
  logs: Any
  dots: Any
  out: Any  # a tuple
  buffers: Any  # two that stay, two that are walked over
  rows: Any  # logs and dots of queries that are walked over
  stay: Any  # barriers (full, empty), as the next
  walk: Any


def _body(*refs, body, work: Work, outs: int):
  r = _Refs(*refs[:9], refs[9 : 9 + outs], *refs[9 + outs :])
  item, trips = gpu_kernel.items_of_block(r.items, work.sms)
  consumers = work.tiles.consumers
  wg = lax.axis_index('wg')

  @pl.when(wg == consumers)
  def _():
    plgpu.set_max_registers(24, action='decrease')
    body(r, item, trips, work, True)
    plgpu.barrier_wait(r.stay[1])
    for stage in range(work.tiles.stages):
      plgpu.barrier_wait(r.walk[1].at[stage])

  @pl.when(wg < consumers)
  def _():
    plgpu.set_max_registers(240, action='increase')
    plgpu.barrier_arrive(r.stay[1])
    for stage in range(work.tiles.stages):
      plgpu.barrier_arrive(r.walk[1].at[stage])
    body(r, item, trips, work, False)


def _rows(first, count: int):
  return pl.ds(pl.multiple_of(first, 8), count)


def _load(r: _Refs, sources, rows, head, into: int, index, barrier) -> None:
  """Rows of a head of two arrays into buffers `into` and the one after."""
  for i, source in enumerate(sources):
    plgpu.copy_gmem_to_smem(
      source.at[rows, head], r.buffers[into + i].at[index], barrier
    )


def _stage(step, work: Work):
  return lax.rem(step, jnp.int32(work.tiles.stages))


# --- dq ----------------------------------------------------------------------


def _query_body(r: _Refs, item, trips, work: Work, producer: bool):
  t = work.tiles

  def one_item(trip, step):
    row, head, _, kv_head, _, first, middle, end, _ = item(trip)
    if producer:
      plgpu.barrier_wait(r.stay[1])
      for unit in range(t.consumers):
        rows = _rows(row + unit * ROWS, ROWS)
        _load(r, (r.q, r.dout), rows, head, 0, unit, r.stay[0])

      def load(j, step):
        stage = _stage(step, work)
        plgpu.barrier_wait(r.walk[1].at[stage])
        rows = _rows(j * t.block, t.block)
        _load(r, (r.k, r.v), rows, kv_head, 2, stage, r.walk[0].at[stage])
        return step + 1

      return lax.fori_loop(first, end, load, step)
    wg = lax.axis_index('wg')
    rows = _rows(row + wg * ROWS, ROWS)
    plgpu.barrier_wait(r.stay[0])
    total = _query_item(r, rows, head, (first, middle, end), step, work)
    waiting = r.buffers[0].at[wg]
    waiting[...] = total.astype(r.q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(waiting, r.out[0].at[rows, head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(r.stay[1])
    return step + end - first

  lax.fori_loop(0, trips, one_item, jnp.int32(0))


def _query_item(r: _Refs, rows, head, cut, step, work: Work):
  """dq of this consumer's 64 rows, float32 [64, K]."""
  first, middle, end = cut
  wg, shape = lax.axis_index('wg'), (ROWS, work.tiles.block)
  by_row = plgpu.Layout.WGMMA.reduce(1)
  log = mosaic.load(r.logs.at[head, rows], by_row)
  dots = mosaic.load(r.dots.at[head, rows], by_row)
  across = lambda x: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731

  def loop(sums, totals):
    def pair(j, totals, masked):
      stage = _stage(step + j - first, work)
      k, v = r.buffers[2].at[stage], r.buffers[3].at[stage]
      plgpu.barrier_wait(r.walk[0].at[stage])

      def products(s, dp):
        plgpu.wgmma(s, r.buffers[0].at[wg], k.transpose((1, 0)))
        plgpu.wgmma(dp, r.buffers[1].at[wg], v.transpose((1, 0)))
        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
        if masked:
          place = j * work.tiles.block + plgpu.broadcasted_iota(
            jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA
          )
          low, high = (
            across(mosaic.load(x.at[rows], by_row)) for x in (r.starts, r.ends)
          )
          scores = jnp.where((place >= low) & (place <= high), scores, -jnp.inf)
        p = jnp.exp2(scores * (work.scale * LOG2E) - across(log))
        return p * (dp[...] - across(dots)) * work.scale

      acc = plgpu.ACC(shape, jnp.float32)
      ds = pl.run_scoped(products, acc, acc).astype(r.q.dtype)
      totals = add(sums, totals, 0, ds, k)
      wait(sums)
      plgpu.barrier_arrive(r.walk[1].at[stage])
      return totals

    for low, high, masked in ((first, middle, False), (middle, end, True)):
      totals = lax.fori_loop(
        low, high, mosaic.partial(pair, masked=masked), totals
      )
    return totals

  return summed(loop, (work.key,), work.interpret)[0]


# --- dk and dv ---------------------------------------------------------------


def _key_body(r: _Refs, item, trips, work: Work, producer: bool):
  t = work.tiles

  def one_item(trip, step):
    row, kv_head, first, end, middle, after = item(trip)[:6]
    if producer:
      plgpu.barrier_wait(r.stay[1])
      for unit in range(t.consumers):
        rows = _rows(row + unit * ROWS, ROWS)
        _load(r, (r.k, r.v), rows, kv_head, 0, unit, r.stay[0])

      def head_of(n, step):
        head = kv_head * work.share + n

        def load(j, step):
          stage = _stage(step, work)
          full = r.walk[0].at[stage]
          plgpu.barrier_wait(r.walk[1].at[stage])
          rows = _rows(j * t.block, t.block)
          _load(r, (r.q, r.dout), rows, head, 2, stage, full)
          for source, target in zip((r.logs, r.dots), r.rows, strict=True):
            plgpu.copy_gmem_to_smem(
              source.at[head, rows], target.at[stage], full
            )
          return step + 1

        return lax.fori_loop(first, end, load, step)

      return lax.fori_loop(0, work.share, head_of, step)
    wg = lax.axis_index('wg')
    own = row + wg * ROWS
    plgpu.barrier_wait(r.stay[0])
    found = _key_item(r, own, (first, middle, after, end), step, work)
    for i, total in enumerate(found):
      waiting = r.buffers[i].at[wg]
      waiting[...] = total.astype(r.q.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(waiting, r.out[i].at[_rows(own, ROWS), kv_head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(r.stay[1])
    return step + work.share * (end - first)

  lax.fori_loop(0, trips, one_item, jnp.int32(0))


def _key_item(r: _Refs, own, cut, step, work: Work):
  """dk and dv of this consumer's 64 rows, float32 [64, K] and [64, W]."""
  first, middle, after, end = cut
  wg, shape = lax.axis_index('wg'), (ROWS, work.tiles.block)
  by_column = plgpu.Layout.WGMMA.reduce(0)
  down = lambda x: lax.broadcast_in_dim(x, shape, [1])  # noqa: E731

  def loop(sums, totals):
    def pair(j, carry):
      step, totals = carry
      stage = _stage(step, work)
      q, dout = r.buffers[2].at[stage], r.buffers[3].at[stage]
      plgpu.barrier_wait(r.walk[0].at[stage])

      def mask(scores):
        place = own + plgpu.broadcasted_iota(
          jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA
        )
        rows = _rows(j * work.tiles.block, work.tiles.block)
        low, high = (
          down(mosaic.load(x.at[rows], by_column)) for x in (r.starts, r.ends)
        )
        return jnp.where((place >= low) & (place <= high), scores, -jnp.inf)

      def products(s, dp):
        plgpu.wgmma(s, r.buffers[0].at[wg], q.transpose((1, 0)))
        plgpu.wgmma(dp, r.buffers[1].at[wg], dout.transpose((1, 0)))
        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
        edge = (j < middle) | (j >= after)
        scores = lax.cond(edge, mask, lambda scores: scores, scores)
        # Each is loaded where it is used: there is no register to spare.
        log = down(mosaic.load(r.rows[0].at[stage], by_column))
        p = jnp.exp2(scores * (work.scale * LOG2E) - log)
        small = p.astype(r.q.dtype)
        dp = dp[...]
        dots = down(mosaic.load(r.rows[1].at[stage], by_column))
        return small, (p * (dp - dots) * work.scale).astype(r.q.dtype)

      acc = plgpu.ACC(shape, jnp.float32)
      p, ds = pl.run_scoped(products, acc, acc)
      totals = add(sums, totals, 1, p, dout)
      totals = add(sums, totals, 0, ds, q)
      wait(sums)
      plgpu.barrier_arrive(r.walk[1].at[stage])
      return step + 1, totals

    def head(_, carry):
      return lax.fori_loop(first, end, pair, carry)

    return lax.fori_loop(0, work.share, head, (step, totals))[1]

  return summed(loop, (work.key, work.width), work.interpret)
