"""Mosaic GPU: gradients of absorbed latent attention, in one order.

All heads share one latent head, so a row is a head of a token, and rows of all
heads follow each other. There are two kernels,

  dkv[s] = sum_r ds[r, s] q[r] + p[r, s] dout[r]    64 keys over blocks of rows
  dq[r]  = sum_s ds[r, s] k[s]                      64 rows over blocks of keys

where the second product is of the first W columns only: values are part of the
keys. The first writes ds, and the second is a plain product of it: five products
instead of the seven of `gpu_gradients`, since numbers this wide cost more to
multiply again than to write and read. Memory is bounded: where ds of all rows
would take more than KEPT bytes, some rows are worked off after the others.

The sums of 64 keys are 64 x 576 numbers, more than one warpgroup holds. Two
consumers divide their columns (256 and 320) and the work on scores: one has
s = q k^T and p, the other dp = dout v^T and ds = p (dp - D) scale, and they give
each other p and ds through shared memory.

There are few tiles of keys, and each is seen by all later rows: the rows are cut
in parts, whose sums are written in float32 and added in their order.
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
from pallas_kernels.attention import gpu_gradients
from pallas_kernels.attention import gpu_kernel
from pallas_kernels.attention import work as work_lib

ROWS = gpu_kernel.ROWS
BLOCK = 32  # rows that are walked over: of 64 there is no room for two stages
KEYS = 64  # keys that are walked over
HALF = 256  # columns: as many as one instruction of the tensor core takes
STAGES = 2
PARTS = 16  # most parts of the rows that see a tile of keys
ITEMS = 1024  # tiles times parts that are aimed at
KEPT = 2**30  # bytes of ds
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs.

  Attributes:
    rest: numbers of a key past the width.
  """

  rest: int
  scale: float
  sms: int
  interpret: bool

  @property
  def key(self) -> list[int]:
    """Columns of the buffers of q or k: two halves of the width, the rest."""
    return [HALF, HALF, self.rest][: self.past]

  @property
  def past(self) -> int:
    return 3 if self.rest else 2


def backward(
  q: jax.Array,
  k: jax.Array,
  starts: jax.Array,
  ends: jax.Array,
  log: jax.Array,
  dots: jax.Array,
  dout: jax.Array,
  *,
  scale: float,
  parts: int = 0,
  rows: int = 0,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """dq and dk, with the gradient of the values in its first 512 columns.

  Args:
    q: [T, H, K], T a multiple of 64.
    k: [T, G, K], K 512 or 576. More than one head is worked off one by one.
    starts, ends, log, dots, dout: see `reference.backward`.
    scale: of the scores.
    parts: of the rows that see a tile of keys; 0: as many as keep a large GPU
      busy. Part of what is computed: sums of parts are added in their order.
    rows: a multiple of 64 that is worked off at a time; 0: as many as KEPT lets.
      Part of what is computed too.
    interpret: run on CPU.

  Beside the results this takes memory for ds, 2 T rows bytes, at most KEPT or
  that of 64 rows, and for float32 sums of keys, 4 T K bytes for each part.
  """
  t, g = k.shape[:2]
  share = q.shape[1] // g
  work = Work(
    k.shape[-1] - 2 * HALF,
    scale,
    2 if interpret else mosaic.cores(),
    interpret,
  )
  parts = parts or max(min(ITEMS * ROWS // t, PARTS), 1)
  rows = rows or max(KEPT // (2 * t * ROWS) * ROWS, ROWS)
  rows = min(rows, t * share)
  found = []
  for head in range(g):
    own = slice(head * share, (head + 1) * share)
    one = (q[:, own], k[:, head], log[:, own], dots[:, own], dout[:, own])
    found.append(_one_head(*one, starts, ends, parts, rows, work))
  dq, dk = zip(*found, strict=True)
  return jnp.concatenate(dq, axis=1), jnp.stack(dk, axis=1)


def _one_head(q, k, log, dots, dout, starts, ends, parts, rows, work: Work):
  t, h, key = q.shape
  flat = lambda x: x.reshape(t * h, *x.shape[2:])  # noqa: E731
  arrays = (
    *(jnp.repeat(starts, h), jnp.repeat(ends, h), flat(q), k, flat(dout)),
    flat(log.astype(jnp.float32)) * LOG2E,
    flat(dots.astype(jnp.float32)),
  )

  def slice_of(total, first):
    """Rows first to first + rows: adds to dkv, and gives dq."""
    items, ranges = plan(starts, ends, h, parts, rows, first)
    sums, ds = _keys(work, items, arrays, parts, rows)
    some = (items[:, 3] > items[:, 2]).reshape(parts, -1)
    some = jnp.repeat(some, ROWS, axis=1)[:, :, None]
    for part in range(parts):  # where there are no rows, nothing was written
      total = total + jnp.where(some[part], sums[part], 0.0)
    return total, _queries(work, ranges, ds, k)

  total = jnp.zeros((t, key), jnp.float32)
  trips = -(-t * h // rows)
  if trips == 1:
    total, dq = slice_of(total, jnp.int32(0))
  else:
    firsts = jnp.arange(trips, dtype=jnp.int32) * rows
    total, dq = lax.scan(slice_of, total, firsts)
    dq = dq.reshape(trips * rows, key)[: t * h]
  return dq.reshape(q.shape), total.astype(k.dtype)


def plan(
  starts: jax.Array,
  ends: jax.Array,
  heads: int,
  parts: int,
  rows: int,
  first_row: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """What rows first_row to first_row + rows have to do with which keys.

  Multiprocessors that work at the same time mostly walk over the same rows,
  which then come from the cache: tiles of a part follow each other. All blocks
  of rows that read a tile's ds are among those that write it, seen or not.

  Args:
    starts, ends: int32 [T], of `attention.bounds`, T a multiple of 64.
    heads: of a token: its rows.
    parts: into which rows are cut.
    rows: a multiple of 64.
    first_row: a multiple of 64, traced.

  Returns:
    Tiles of 64 keys, int32 [parts * T / 64, 7]: first key, part, first block of
    rows, end of blocks, the first and the end of those in which every row sees
    every key, and the first block of all.
    Tiles of 64 rows, int32 [rows / 64, 4]: row less first_row, 0, first tile of
    keys, end of tiles.
  """
  tokens = work_lib.key_items(starts, ends, ROWS, 1, 1).T
  tile, _, first, end, middle, after = tokens[:, None, :]
  two = ROWS // BLOCK
  up = lambda x, n: -(-x // n)  # noqa: E731
  first = first * heads // BLOCK
  end = up(lax.cummax(end, axis=1) * heads, ROWS) * two
  middle = jnp.minimum(up(middle * heads, BLOCK), end)
  after = jnp.clip(after * heads // BLOCK, middle, end)
  each = up(rows, ROWS * parts) * two
  begin = first_row // BLOCK
  part = jnp.arange(parts, dtype=jnp.int32)[:, None]
  low = begin + jnp.minimum(part * each, rows // BLOCK)
  high = begin + jnp.minimum((part + 1) * each, rows // BLOCK)
  inside = (jnp.clip(x, low, high) for x in (first, end, middle, after))
  columns = (tile, part, *inside, begin)
  columns = [jnp.broadcast_to(x, (parts, tile.shape[1])) for x in columns]
  items = jnp.stack(columns, axis=-1).reshape(-1, 7)
  own = jnp.arange(rows // ROWS, dtype=jnp.int32)
  at = own + first_row // ROWS
  low = jnp.searchsorted(end[0], two * at, side='right').astype(jnp.int32)
  high = jnp.maximum(jnp.minimum(at // heads + 1, tile.shape[1]), low)
  columns = own * ROWS, jnp.zeros_like(own), low, high
  return items, jnp.stack(columns, axis=-1)


# --- dkv, and ds -------------------------------------------------------------


def _keys(work: Work, items, arrays, parts: int, rows: int):
  """Sums of parts float32 [parts, T, K], and ds^T [T, rows]."""
  t, dtype = arrays[3].shape[0], arrays[2].dtype
  tiled, pair = gpu_gradients.tiled, (ROWS, BLOCK)
  stay = [(ROWS, n) for n in work.key]
  walk = [(STAGES, BLOCK, n) for n in work.key + [HALF, HALF]]
  logs = [(STAGES, BLOCK)] * 2
  scratch = [
    tuple(tiled(shape, dtype, BLOCK) for shape in stay),
    tuple(tiled(shape, dtype, BLOCK) for shape in walk),
    tuple(mosaic.linear(shape, jnp.float32) for shape in logs),
    (mosaic.tiled(pair, jnp.float32), tiled(pair, dtype, BLOCK)),
    gpu_gradients.barriers(len(stay), 2),
    gpu_gradients.barriers(len(walk + logs), 2, STAGES),
    gpu_gradients.barriers(1, 1),
  ]
  return mosaic.launch(
    mosaic.partial(_keys_body, work=work),
    out=(
      jax.ShapeDtypeStruct((parts, t, arrays[3].shape[1]), jnp.float32),
      jax.ShapeDtypeStruct((t, rows), dtype),
    ),
    scratch=scratch,
    grid=min(work.sms, items.shape[0]),
    warpgroups=3,
    interpret=work.interpret,
    approximate=True,
  )(work_lib.longest_first(items, work.sms), *arrays)


@dataclasses.dataclass(frozen=True)
class _Refs:
  """References of a running kernel."""

  items: Any
  low: Any
  high: Any
  q: Any
  k: Any
  dout: Any
  logs: Any
  dots: Any
  sums: Any
  ds: Any
  stay: Any  # columns of keys: two halves, the rest
  walk: Any  # columns of q, then halves of dout
  rows: Any  # logs and dots
  given: Any  # p and ds, from one consumer to the other
  stay_barriers: Any  # full, empty, as the next
  walk_barriers: Any
  given_barriers: Any  # p, ds


def _keys_body(*refs, work: Work):
  r = _Refs(*refs)
  item, trips = gpu_kernel.items_of_block(r.items, work.sms)
  wg = lax.axis_index('wg')

  @pl.when(wg == 2)
  def _():
    plgpu.set_max_registers(24, action='decrease')
    _produce(r, item, trips, work)

  for consumer in (0, 1):

    @pl.when(wg == consumer)
    def _(consumer=consumer):
      plgpu.set_max_registers(240, action='increase')
      _consume(r, item, trips, consumer, work)


def _columns(consumer: int, work: Work) -> list[int]:
  """Buffers of columns that a consumer sums up."""
  return [consumer, 2] if consumer and work.rest else [consumer]


def _load(source, rows, buffers, full):
  for i, buffer in enumerate(buffers):
    columns = pl.ds(i * HALF, buffer.shape[-1])
    plgpu.copy_gmem_to_smem(source.at[rows, columns], buffer, full)


def _rows(first, count: int):
  return pl.ds(pl.multiple_of(first, count), count)


def _produce(r: _Refs, item, trips, work: Work):
  def one_item(trip, step):
    row, _, first, end = item(trip)[:4]
    plgpu.barrier_wait(r.stay_barriers[1])
    _load(r.k, _rows(row, ROWS), r.stay, r.stay_barriers[0])

    def one_block(j, step):
      stage = lax.rem(step, jnp.int32(STAGES))
      full = r.walk_barriers[0].at[stage]
      plgpu.barrier_wait(r.walk_barriers[1].at[stage])
      rows, buffers = _rows(j * BLOCK, BLOCK), [x.at[stage] for x in r.walk]
      _load(r.q, rows, buffers[: work.past], full)
      _load(r.dout, rows, buffers[work.past :], full)
      for source, target in zip((r.logs, r.dots), r.rows, strict=True):
        plgpu.copy_gmem_to_smem(source.at[rows], target.at[stage], full)
      return step + 1

    return lax.fori_loop(first, end, one_block, step)

  lax.fori_loop(0, trips, one_item, jnp.int32(0))
  # Leaves the barriers as they were.
  plgpu.barrier_wait(r.stay_barriers[1])
  for stage in range(STAGES):
    plgpu.barrier_wait(r.walk_barriers[1].at[stage])


def _consume(r: _Refs, item, trips, consumer: int, work: Work):
  plgpu.barrier_arrive(r.stay_barriers[1])
  for stage in range(STAGES):
    plgpu.barrier_arrive(r.walk_barriers[1].at[stage])
  index = _columns(consumer, work)

  def one_item(trip, step):
    row, part, first, end, *cut = item(trip)
    rows = _rows(row, ROWS)
    plgpu.barrier_wait(r.stay_barriers[0])
    walk = mosaic.partial(
      _walk, r, row, (first, end, *cut), step, consumer, work
    )
    columns = [work.key[at] for at in index]
    found = gpu_gradients.summed(walk, columns, work.interpret)

    @pl.when(end > first)
    def _():
      for at, value in zip(index, found, strict=True):
        columns = pl.ds(at * HALF, value.shape[1])
        r.sums.at[part, rows, columns][...] = value

    plgpu.barrier_arrive(r.stay_barriers[1])
    return step + end - first

  lax.fori_loop(0, trips, one_item, jnp.int32(0))
  if consumer:
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _walk(r: _Refs, row, cut, step, consumer: int, work: Work, sums, totals):
  """All blocks of an item, into this consumer's columns of the sums.

  Args:
    row: first key.
    cut: first block, end, first that is seen whole, end of those, first of all.
    step: blocks before this item.
    consumer: 0 makes s and p, 1 makes dp and ds.
    sums, totals: see `gpu_gradients.summed`.
  """
  first, end, whole, after, begin = cut
  index = _columns(consumer, work)
  by_column = plgpu.Layout.WGMMA.reduce(0)

  def block(j, totals):
    stage = lax.rem(step + j - first, jnp.int32(STAGES))
    plgpu.barrier_wait(r.walk_barriers[0].at[stage])
    own = mosaic.load(r.rows[consumer].at[stage], by_column)
    own = lax.broadcast_in_dim(own, (ROWS, BLOCK), [1])

    def add(totals, left, *index):
      """left times columns of what is walked over, at `index`."""
      for i, at in enumerate(index):
        right = r.walk[at].at[stage]
        totals = gpu_gradients.add(sums, totals, i, left, right)
      return totals

    made = _scores(r, stage, consumer, work)
    if not consumer:
      mask = lambda s: jnp.where(_seen(r, row, j), s, -jnp.inf)  # noqa: E731
      edge = (j < whole) | (j >= after)
      made = lax.cond(edge, mask, lambda s: s, made)
      p = jnp.exp2(made * (work.scale * LOG2E) - own)
      _give(r, 0, p)
    else:
      p = _take(r, 0)
    totals = add(totals, p.astype(r.q.dtype), work.past + consumer)
    if not consumer:
      ds = _take(r, 1)
    else:
      ds = (p * (made - own) * work.scale).astype(r.q.dtype)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      _give(r, 1, ds)
      columns = _rows((j - begin) * BLOCK, BLOCK)
      plgpu.copy_smem_to_gmem(r.given[1], r.ds.at[_rows(row, ROWS), columns])
    totals = add(totals, ds, *index)
    gpu_gradients.wait(sums)
    plgpu.barrier_arrive(r.walk_barriers[1].at[stage])
    return totals

  return lax.fori_loop(first, end, block, totals)


def _scores(r: _Refs, stage, consumer: int, work: Work) -> jax.Array:
  """s, or dp: of keys, or values, with rows, float32 [64, 32]."""
  left, right = r.stay, r.walk[: work.past]
  if consumer:  # values are a part of keys
    left, right = left[:2], r.walk[work.past :]

  def products(sums):
    for a, b in zip(left, right, strict=True):
      plgpu.wgmma(sums, a, b.at[stage].transpose((1, 0)))
    return sums[...]

  return pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), jnp.float32))


def _seen(r: _Refs, first_key, j) -> jax.Array:
  """Whether a row of block j sees a key, bool [64, 32]."""
  shape = ROWS, BLOCK
  place = first_key + plgpu.broadcasted_iota(
    jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA
  )
  by_column, rows = plgpu.Layout.WGMMA.reduce(0), _rows(j * BLOCK, BLOCK)
  low, high = (
    lax.broadcast_in_dim(mosaic.load(x.at[rows], by_column), shape, [1])
    for x in (r.low, r.high)
  )
  return (place >= low) & (place <= high)


def _give(r: _Refs, index: int, value: jax.Array) -> None:
  """p or ds, to the other consumer.

  The memory is free: the consumer who gives has waited for what the other made
  of the value before, or is waited for by it.
  """
  r.given[index][...] = value
  plgpu.commit_smem()
  plgpu.barrier_arrive(r.given_barriers[index])


def _take(r: _Refs, index: int) -> jax.Array:
  plgpu.barrier_wait(r.given_barriers[index])
  return mosaic.load(r.given[index], plgpu.Layout.WGMMA)


# --- dq ----------------------------------------------------------------------


def _queries(work: Work, items, ds, k):
  """dq [rows, K] = ds k, of ds^T [T, rows]."""
  dtype = ds.dtype
  scratch = [
    tuple(mosaic.tiled((STAGES, KEYS, n), dtype) for n in work.key),
    mosaic.tiled((STAGES, KEYS, ROWS), dtype),
    *gpu_gradients.barriers(work.past + 1, 2, STAGES),
  ]
  return mosaic.launch(
    mosaic.partial(_queries_body, work=work),
    out=jax.ShapeDtypeStruct((ds.shape[1], k.shape[1]), dtype),
    scratch=scratch,
    grid=min(work.sms, items.shape[0]),
    warpgroups=3,
    interpret=work.interpret,
  )(work_lib.longest_first(items, work.sms), ds, k)


def _queries_body(items, ds, k, out, keys, given, full, empty, *, work: Work):
  item, trips = gpu_kernel.items_of_block(items, work.sms)
  wg = lax.axis_index('wg')

  @pl.when(wg == 2)
  def _():
    plgpu.set_max_registers(24, action='decrease')

    def one_item(trip, step):
      row, _, first, end = item(trip)

      def one_block(j, step):
        stage = lax.rem(step, jnp.int32(STAGES))
        plgpu.barrier_wait(empty.at[stage])
        own = _rows(j * KEYS, KEYS)
        _load(k, own, [x.at[stage] for x in keys], full.at[stage])
        plgpu.copy_gmem_to_smem(
          ds.at[own, _rows(row, ROWS)], given.at[stage], full.at[stage]
        )
        return step + 1

      return lax.fori_loop(first, end, one_block, step)

    lax.fori_loop(0, trips, one_item, jnp.int32(0))
    for stage in range(STAGES):
      plgpu.barrier_wait(empty.at[stage])

  for consumer in (0, 1):

    @pl.when(wg == consumer)
    def _(consumer=consumer):
      plgpu.set_max_registers(240, action='increase')
      _multiply(item, trips, out, keys, given, full, empty, consumer, work)


def _multiply(item, trips, out, keys, given, full, empty, consumer, work: Work):
  """This consumer's columns of dq."""
  for stage in range(STAGES):
    plgpu.barrier_arrive(empty.at[stage])
  index = _columns(consumer, work)

  def one_item(trip, step):
    row, _, first, end = item(trip)

    def walk(sums, totals):
      def one_block(j, totals):
        stage = lax.rem(step + j - first, jnp.int32(STAGES))
        plgpu.barrier_wait(full.at[stage])
        left = given.at[stage]
        left = left[...].T if work.interpret else left.transpose((1, 0))
        for i, at in enumerate(index):
          right = keys[at].at[stage]
          totals = gpu_gradients.add(sums, totals, i, left, right)
        gpu_gradients.wait(sums)
        plgpu.barrier_arrive(empty.at[stage])
        return totals

      return lax.fori_loop(first, end, one_block, totals)

    columns = [work.key[at] for at in index]
    found = gpu_gradients.summed(walk, columns, work.interpret)
    for at, value in zip(index, found, strict=True):
      columns = pl.ds(at * HALF, value.shape[1])
      out.at[_rows(row, ROWS), columns][...] = value.astype(out.dtype)
    return step + end - first

  lax.fori_loop(0, trips, one_item, jnp.int32(0))
