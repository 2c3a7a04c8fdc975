"""Mosaic GPU: a tile of queries over blocks of keys, for packed and paged both.

One block of threads stays on each multiprocessor and takes items of a list: a
tile of queries and the blocks of keys that it sees. A producer warpgroup loads
queries, keys and values and runs ahead over the ends of items. A consumer holds
64 rows of queries: scores, running maximum and sum, and the output. Two
consumers take turns, one in the tensor core while the other is in the softmax.

In the absorbed form of latent attention the output of 64 rows is too wide for
the registers of one warpgroup. There both consumers compute the scores of the
same rows, and each its part of the columns of the output.

What a row is merged with, in what order and by what expression depends on
nothing but its position; within a split the expression is that of `reference`,
and `gpu_splits` has that of merging splits.
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
from pallas_kernels.attention import gpu_splits
from pallas_kernels.attention import gpu_tiles

ROWS = gpu_tiles.ROWS
LOWEST = -1e30  # where the maximum starts; finite, so that no inf - inf arises
LOG2E = math.log2(math.e)
Work = gpu_tiles.Work


def run(
  work: Work,
  items: jax.Array,
  pages: jax.Array,
  low: jax.Array,
  high: jax.Array,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  log_rows: int,
) -> Any:
  """The kernel over items (see `work`).

  Returns:
    out [R, H, W], and with `work.log` the logs [H, R]. With `work.apart` the sums
    float32 [I, 64 units, W] and [I, 2, 64 units], maximum and sum of weights.
    What comes after that is memory that the kernel used.

  Args:
    work: constants.
    items: int32 [I, 9].
    pages: int32 [N, M]; not read where `work.paged` is false.
    low, high: int32, keys that a row sees; indexed as items say.
    q: [R, H, K].
    k: [P, S, G, K].
    v: [P, S, G, W] or None.
    log_rows: rows of the logs, to the end of the last tile.
  """
  grid = min(work.sms, items.shape[0])
  whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
  out = [jax.ShapeDtypeStruct((*q.shape[:2], work.width), q.dtype)]
  if work.apart:
    rows = items.shape[0], work.units * ROWS
    out = [whole(*rows, work.width), whole(rows[0], 2, rows[1])]
  elif work.log:
    out.append(whole(q.shape[1], log_rows))
  if work.merges:
    out.append(whole(grid * work.tiles.consumers, ROWS, work.columns))
  arrays = [items, pages, low, high, q, k] + ([] if v is None else [v])
  return mosaic.launch(
    mosaic.partial(_body, work=work),
    out=tuple(out),
    scratch=_scratch(work, q.dtype),
    grid=grid,
    warpgroups=work.tiles.consumers + 1,
    interpret=work.interpret,
    approximate=True,
  )(*arrays)


def _scratch(work: Work, dtype) -> list[Any]:
  """Buffers of queries, keys, values and logs, then barriers.

  Queries and keys lie apart by columns: the output is as wide as a value, and
  leaves through the memory of the queries.
  """
  t = work.tiles
  buffers = [
    (t.slots, work.units * work.parts, ROWS, work.columns),
    (t.stages, work.parts, work.block, work.columns),
  ]
  if work.rest:
    buffers.append((t.slots, work.units, ROWS, work.rest))
    buffers.append((t.stages, work.block, work.rest))
  if not work.shared:
    buffers.append((t.stages, work.block, work.width))
  mosaic.check_shared(
    t, mosaic.shared_bytes(*((shape, dtype) for shape in buffers)) + 1024
  )
  more = 1 if work.rest else 0
  queries = work.units * work.pieces * (work.parts + more)

  def pair(arrivals, count):
    """Barriers of full and of empty buffers."""
    return (
      plgpu.Barrier(num_arrivals=arrivals, num_barriers=count),
      plgpu.Barrier(num_arrivals=t.consumers, num_barriers=count),
    )

  return [
    tuple(mosaic.tiled(shape, dtype) for shape in buffers),
    mosaic.linear((t.consumers, 2, ROWS), jnp.float32),
    pair(queries, t.slots),
    pair(work.parts + more, t.stages),
    pair(1, t.stages),
    plgpu.Barrier(num_arrivals=t.consumers),
  ]


@dataclasses.dataclass(frozen=True)
class _Refs:
  """References of a running kernel, by what they hold."""

  items: Any
  pages: Any
  low: Any
  high: Any
  q: Any
  k: Any
  v: Any
  out: Any
  logs: Any  # with `work.apart` maximum and sum of weights
  kept: Any  # merged sums of the splits before
  buffers: Any
  log: Any
  queries: Any  # barriers (full, empty), as the next two
  keys: Any
  values: Any
  turn: Any


def _body(*refs, work: Work):
  refs = list(refs)
  if work.shared:
    refs.insert(6, None)
  if not work.log and not work.apart:
    refs.insert(8, None)
  if not work.merges:
    refs.insert(9, None)
  r = _Refs(*refs)
  item, trips = items_of_block(r.items, work.sms)
  wg = lax.axis_index('wg')

  @pl.when(wg == work.tiles.consumers)
  def _():
    plgpu.set_max_registers(40, action='decrease')
    _produce(r, item, trips, work)

  @pl.when(wg < work.tiles.consumers)
  def _():
    plgpu.set_max_registers(232, action='increase')
    _consume(r, item, trips, work)


def items_of_block(items, sms: int):
  """How this block gets its items: `item(trip)` of so many trips.

  Blocks take one each of the longest, then the other way round, and so on.
  """
  sm, count = lax.axis_index('sm'), items.shape[0]
  blocks = min(sms, count)
  full, rest = divmod(count, blocks)
  place = (blocks - 1 - sm) if full % 2 else sm
  trips = full + jnp.where(place < rest, 1, 0)

  def item(trip):
    odd = lax.rem(trip, jnp.int32(2)) == 1
    number = trip * blocks + jnp.where(odd, blocks - 1 - sm, sm)
    return [items[number, i] for i in range(items.shape[1])]

  return item, trips


# --- The producer ------------------------------------------------------------


def _produce(r: _Refs, item, trips, work: Work):
  t = work.tiles

  def one_item(trip, carry):
    step, done = carry
    row, head, _, kv_head, sequence, first, _, end, _ = item(trip)
    slot = lax.rem(done, jnp.int32(t.slots))

    @_where_some(first, end, work)
    def _():
      plgpu.barrier_wait(r.queries[1].at[slot])
      _load_queries(r, row, head, slot, work)

    def one_block(j, step):
      stage = lax.rem(step, jnp.int32(t.stages))
      page = r.pages[sequence, j] if work.paged else j
      _load_block(r, page, kv_head, stage, work)
      return step + 1

    step = lax.fori_loop(first, end, one_block, step)
    return step, done + jnp.minimum(end - first, 1)

  lax.fori_loop(0, trips, one_item, (jnp.int32(0), jnp.int32(0)))
  # Leaves the barriers as they were.
  for slot in range(t.slots):
    plgpu.barrier_wait(r.queries[1].at[slot])
  for stage in range(t.stages):
    plgpu.barrier_wait(r.keys[1].at[stage])
    if not work.shared:
      plgpu.barrier_wait(r.values[1].at[stage])


def _where_some(first, end, work: Work):
  """Runs a function at once, where an item can be empty only if it is not."""
  return pl.when(end > first) if work.apart else lambda function: function()


def _load_queries(r: _Refs, row, head, slot, work: Work):
  full = r.queries[0].at[slot]
  for unit in range(work.units):
    for rows, heads, own in _pieces(row + unit * ROWS, head, work):
      for part in range(work.parts):
        columns = pl.ds(part * work.columns, work.columns)
        plgpu.copy_gmem_to_smem(
          r.q.at[rows, heads, columns],
          r.buffers[0].at[slot, unit * work.parts + part, *own],
          full,
        )
      if work.rest:
        columns = pl.ds(work.width, work.rest)
        plgpu.copy_gmem_to_smem(
          r.q.at[rows, heads, columns],
          r.buffers[2].at[slot, unit, *own],
          full,
        )


def _pieces(row, head, work: Work):
  """Where 64 rows lie: (rows, heads) in memory, and which of the 64 they are.

  Nothing stands for all of the 64.
  """
  if work.heads == 1:
    yield pl.ds(pl.multiple_of(row, ROWS), ROWS), head, ()
    return
  heads = pl.ds(pl.multiple_of(head * work.heads, work.heads), work.heads)
  for i in range(work.pieces):
    token = lax.div(row, jnp.int32(work.heads)) + i
    yield token, heads, (pl.ds(i * work.heads, work.heads),)


def _load_block(r: _Refs, page, head, stage, work: Work):
  plgpu.barrier_wait(r.keys[1].at[stage])
  full = r.keys[0].at[stage]
  for part in range(work.parts):
    columns = pl.ds(part * work.columns, work.columns)
    plgpu.copy_gmem_to_smem(
      r.k.at[page, :, head, columns], r.buffers[1].at[stage, part], full
    )
  if work.rest:
    columns = pl.ds(work.width, work.rest)
    plgpu.copy_gmem_to_smem(
      r.k.at[page, :, head, columns], r.buffers[3].at[stage], full
    )
  if not work.shared:
    plgpu.barrier_wait(r.values[1].at[stage])
    plgpu.copy_gmem_to_smem(
      r.v.at[page, :, head], r.buffers[-1].at[stage], r.values[0].at[stage]
    )


# --- The consumers -----------------------------------------------------------


def _consume(r: _Refs, item, trips, work: Work):
  t = work.tiles
  wg = lax.axis_index('wg')
  turns = t.turns and work.units == 2
  for slot in range(t.slots):
    plgpu.barrier_arrive(r.queries[1].at[slot])
  for stage in range(t.stages):
    plgpu.barrier_arrive(r.keys[1].at[stage])
    if not work.shared:
      plgpu.barrier_arrive(r.values[1].at[stage])
  # The second consumer is half a step behind the first: through all items, or
  # where there is only room for the queries of one, through each of them.
  behind = 'all' if turns and t.slots > 1 else 'each' if turns else ''
  later, sooner = wg == 1, wg == 0
  if behind == 'all':
    pl.when(later)(lambda: _turn(r))

  def one_item(trip, carry):
    step, done = carry
    whole = item(trip)
    _where_some(whole[5], whole[7], work)(
      lambda: _consume_item(r, whole, step, done, behind, work)
    )
    some = whole[7] - whole[5]
    return step + some, done + jnp.minimum(some, 1)

  zero = jnp.int32(0)
  _, done = lax.fori_loop(0, trips, one_item, (zero, zero))
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  if t.slots > 1:
    last = lax.rem(jnp.maximum(done - 1, 0), jnp.int32(2))
    pl.when(done > 0)(lambda: plgpu.barrier_arrive(r.queries[1].at[last]))
  if behind == 'all':
    pl.when(sooner)(lambda: _turn(r))


def _consume_item(r: _Refs, item, step, done, behind: str, work: Work):
  """`step` blocks and `done` items were before this one."""
  t = work.tiles
  row, head, bounds, _, _, first, middle, end, splits = item
  wg = lax.axis_index('wg')
  unit = 0 if work.shared else wg
  slot = lax.rem(done, jnp.int32(t.slots))
  plgpu.barrier_wait(r.queries[0].at[slot])
  if t.slots > 1:
    # The output of the item before has left its slot by now.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(done > 0)(lambda: plgpu.barrier_arrive(r.queries[1].at[1 - slot]))
  by_row = plgpu.Layout.WGMMA.reduce(1)
  here = pl.ds(pl.multiple_of(bounds + unit * ROWS, ROWS), ROWS)

  def sees(masked):
    if not masked:
      return None
    loads = (mosaic.load(x.at[here], by_row) for x in (r.low, r.high))
    return tuple(loads)

  if behind == 'each':
    pl.when(wg == 1)(lambda: _turn(r))
  run = _overlapped if t.overlap and not work.shared else _plain
  turns = t.turns and work.units == 2

  def finish(carry):
    if behind == 'each':
      pl.when(wg == 0)(lambda: _turn(r))
    if work.apart:
      _write_sums(r, splits, unit, carry, work)
    else:
      _finish(r, row + unit * ROWS, head, slot, carry, work)

  if work.merges:
    part = lambda low, cut: run(  # noqa: E731
      r, step + low - first, slot, cut, sees, turns, work
    )
    _merge_splits(r, part, (first, middle, end), splits, finish, work)
  else:
    finish(run(r, step, slot, (first, middle, end), sees, turns, work))
  if t.slots == 1:
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(r.queries[1].at[0])


def _merge_splits(r: _Refs, part, cut, splits, finish, work: Work):
  """The splits of an item in their order; `finish` has the merged sums."""
  first, middle, end = cut
  own = lax.axis_index('sm') * work.tiles.consumers + lax.axis_index('wg')
  kept = r.kept.at[own]

  def one(number, carry):
    top, total = carry
    low, last = first + number * work.split, number + 1 == splits
    high = jnp.where(last, end, low + work.split)
    cut = low, jnp.clip(middle, low, high), high
    out, more, weight = part(low, cut)
    top, a, b = gpu_splits.factors(top, more)
    total = gpu_splits.merged(total, weight, a, b)

    def add(_, out):
      wide = [across(x, out.shape) for x in (a, b)]
      before = mosaic.load(kept, plgpu.Layout.WGMMA)
      return gpu_splits.merged(before, out, *wide)

    # There is nothing before the first split.
    out = lax.fori_loop(0, jnp.minimum(number, 1), add, out)

    @pl.when(jnp.logical_not(last))
    def _():
      kept[...] = out

    pl.when(last)(lambda: finish((out, top, total)))
    return top, total

  lax.fori_loop(0, splits, one, start(work.columns)[1:])


def _turn(r: _Refs):
  plgpu.barrier_arrive(r.turn)
  plgpu.barrier_wait(r.turn)


def across(row: jax.Array, shape: tuple[int, int]) -> jax.Array:
  return lax.broadcast_in_dim(row, shape, [0])


def start(columns: int):
  """Output, maximum and sum before the first block."""
  full = lambda shape, value: jnp.full(shape, value, jnp.float32)  # noqa: E731
  by_row = plgpu.Layout.WGMMA.reduce(1)
  return (
    plgpu.layout_cast(full((ROWS, columns), 0), plgpu.Layout.WGMMA),
    plgpu.layout_cast(full((ROWS,), LOWEST), by_row),
    plgpu.layout_cast(full((ROWS,), 0), by_row),
  )


def _scores(r: _Refs, s, slot, stage, work: Work) -> None:
  """Starts s = q k^T of this consumer's rows, the numbers of a key in order."""
  unit = 0 if work.shared else lax.axis_index('wg')
  for part in range(work.parts):
    left = r.buffers[0].at[slot, unit + part]
    plgpu.wgmma(s, left, r.buffers[1].at[stage, part].transpose((1, 0)))
  if work.rest:
    right = r.buffers[3].at[stage].transpose((1, 0))
    plgpu.wgmma(s, r.buffers[2].at[slot, unit], right)


def softmax(s, top, total, j, sees, work: Work):
  """Weights of a block, maximum and sum with it, and what to scale by."""
  shape = ROWS, work.block
  if sees is not None:
    place = j * work.block + plgpu.broadcasted_iota(
      jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA
    )
    seen = (place >= across(sees[0], shape)) & (place <= across(sees[1], shape))
    s = jnp.where(seen, s, -jnp.inf)
  most = s.max(axis=1) * work.factor
  if work.split:  # so that merging multiplies by powers of two
    most = gpu_splits.whole(most)
  new = jnp.maximum(top, most)
  decay = jnp.exp2(top - new)
  p = jnp.exp2(s * work.factor - across(new, shape))
  return p, new, total * decay + p.sum(axis=1), decay


def _plain(r: _Refs, step, slot, cut, sees, turns, work: Work):
  """All blocks of an item into (output, maximum, sum): see `reference`."""
  first, middle, end = cut
  shape = ROWS, work.block
  wg = lax.axis_index('wg')

  def merge(j, carry, masked):
    out, top, total = carry
    stage = lax.rem(step + j - first, jnp.int32(work.tiles.stages))
    plgpu.barrier_wait(r.keys[0].at[stage])

    def scores(s):
      _scores(r, s, slot, stage, work)
      if turns:
        _turn(r)
      return s[...]

    s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
    if not work.shared:
      plgpu.barrier_arrive(r.keys[1].at[stage])
    p, top, total, decay = softmax(s, top, total, j, sees(masked), work)
    out = out * across(decay, out.shape)
    small = p.astype(r.q.dtype)
    if turns:
      out, total, top, small = lax.optimization_barrier(
        (out, total, top, small)
      )
      plgpu.barrier_arrive(r.turn)
    if not work.shared:
      plgpu.barrier_wait(r.values[0].at[stage])
    if turns:
      plgpu.barrier_wait(r.turn)
    shared = r.buffers[1].at[stage, wg] if work.shared else None
    values = shared if work.shared else r.buffers[-1].at[stage]
    out = accumulate(out, small, values, work.interpret)
    done = r.keys if work.shared else r.values
    plgpu.barrier_arrive(done[1].at[stage])
    return out, top, total

  carry = start(work.columns)
  carry = lax.fori_loop(
    first, middle, mosaic.partial(merge, masked=False), carry
  )
  return lax.fori_loop(middle, end, mosaic.partial(merge, masked=True), carry)


def _overlapped(r: _Refs, step, slot, cut, sees, turns, work: Work):
  """As `_plain`; the values of a block are multiplied during the next one."""
  first, middle, end = cut
  stages, shape = jnp.int32(work.tiles.stages), (ROWS, work.block)

  def item(sums):
    """`sums` holds the output; while interpreting it is carried along."""

    def values(out, small, j):
      stage = lax.rem(step + j - first, stages)
      plgpu.barrier_wait(r.values[0].at[stage])
      right = r.buffers[-1].at[stage]
      if work.interpret:
        return accumulate(out, small, right, True)
      plgpu.wgmma(sums, small, right)
      return out

    def merge(j, carry, masked, behind=True):
      out, top, total, small = carry
      stage = lax.rem(step + j - first, stages)
      plgpu.barrier_wait(r.keys[0].at[stage])

      def scores(s):
        _scores(r, s, slot, stage, work)
        if behind and not work.interpret:
          values(out, small, j - 1)
        if turns:
          _turn(r)
        return plgpu.wgmma_accumulator_load(s, wait_n=1 if behind else 0)

      s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
      if behind and work.interpret:
        out = values(out, small, j - 1)
      plgpu.barrier_arrive(r.keys[1].at[stage])
      p, top, total, decay = softmax(s, top, total, j, sees(masked), work)
      if behind:
        if work.interpret:
          out = out * across(decay, out.shape)
        else:
          scaled = sums[...]
          sums[...] = scaled * across(decay, scaled.shape)
        before = lax.rem(step + j - 1 - first, stages)
        plgpu.barrier_arrive(r.values[1].at[before])
      small = p.astype(r.q.dtype)
      if turns:
        total, top, small = lax.optimization_barrier((total, top, small))
        _turn(r)
      return out, top, total, small

    begin = start(work.columns)
    out = begin[0] if work.interpret else ()
    small = plgpu.layout_cast(jnp.zeros(shape, r.q.dtype), plgpu.Layout.WGMMA)
    carry = merge(first, (out, *begin[1:], small), True, behind=False)
    carry = lax.fori_loop(
      first + 1, middle, mosaic.partial(merge, masked=False), carry
    )
    carry = lax.fori_loop(
      jnp.maximum(middle, first + 1),
      end,
      mosaic.partial(merge, masked=True),
      carry,
    )
    out = values(carry[0], carry[3], end - 1)
    out = out if work.interpret else sums[...]
    plgpu.barrier_arrive(
      r.values[1].at[lax.rem(step + end - 1 - first, stages)]
    )
    return out, carry[1], carry[2]

  if work.interpret:
    return item(None)
  return pl.run_scoped(item, plgpu.ACC((ROWS, work.columns), jnp.float32))


def accumulate(total, left, right, interpret: bool) -> jax.Array:
  """total + left @ right: `left` in registers, `right` in shared memory."""
  if interpret:  # The interpreter takes no operand from registers.
    return total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)

  def multiply(sums):
    plgpu.wgmma(sums, left, right)

  return pl.run_state(multiply)(plgpu.ACC.init(total))


def _finish(r: _Refs, row, head, slot, carry, work: Work):
  """Writes out = sum / total of this consumer's rows, and their logs."""
  out, top, total = carry
  wg = lax.axis_index('wg')
  any_ = total > 0
  inverse = jnp.where(any_, 1.0 / total, 0.0)
  inverse = across(inverse, out.shape)
  out = jnp.where(inverse > 0, out * inverse, 0.0).astype(r.out.dtype)
  rows = pl.ds(pl.multiple_of(row, ROWS), ROWS)
  if work.shared:
    _turn(r)  # The other consumer has used these queries for the last time.
  waiting = r.buffers[0].at[slot, wg]
  columns = pl.ds(wg * work.columns if work.shared else 0, work.columns)
  waiting[...] = out
  if work.log:
    log = (top + jnp.log2(total)) * (1 / LOG2E)
    r.log[wg, 0] = jnp.where(any_, log, LOWEST)
  plgpu.commit_smem()
  for some, heads, own in _pieces(row, head, work):
    source = r.buffers[0].at[slot, wg, *own]
    target = r.out.at[some, heads, columns]
    plgpu.copy_smem_to_gmem(source, target, commit_group=False)
  plgpu.commit_smem_to_gmem_group()
  if work.log:

    def write():
      plgpu.copy_smem_to_gmem(r.log.at[wg, 0], r.logs.at[head, rows])

    if work.shared:
      pl.when(wg == 0)(write)
    else:
      write()


def _write_sums(r: _Refs, number, unit, carry, work: Work):
  """Writes the sums of a split as they are; `gpu_splits` merges them."""
  out, *row = carry
  wg = lax.axis_index('wg')
  rows = pl.ds(unit * ROWS, ROWS)
  columns = pl.ds(wg * work.columns if work.shared else 0, work.columns)
  r.out.at[number, rows, columns][...] = out
  for i, value in enumerate(row):
    r.log[wg, i] = value
  plgpu.commit_smem()

  def write():
    for i in range(2):
      plgpu.copy_smem_to_gmem(r.log.at[wg, i], r.logs.at[number, i, rows])

  if work.shared:
    pl.when(wg == 0)(write)
  else:
    write()
