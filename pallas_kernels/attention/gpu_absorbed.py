"""Mosaic GPU: gradients of absorbed latent attention, in one order.

All heads share one latent head, so a row is a head of a token, and rows of all
heads follow each other. As in `gpu_gradients` there are two passes,

  dq[r]  = sum_s ds[r, s] k[s]                 64 rows over blocks of keys
  dkv[s] = sum_r ds[r, s] q[r] + p[r, s] dout[r]    64 keys over blocks of rows

where the second product is of the first W columns only: values are part of the
keys. The sums of 64 rows are 64 x 576 numbers, more than one warpgroup holds.
Two consumers divide their columns (256 and 320) and the work on scores: one has
s = q k^T and p, the other dp = dout v^T and ds = p (dp - D) scale, and they give
each other p and ds through shared memory, so that no product is made twice.

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
HALF = 256  # columns: as many as one instruction of the tensor core takes
STAGES = 2
PARTS = 16  # most parts of the rows that see a tile of keys
ITEMS = 1024  # tiles times parts that are aimed at
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs.

  Attributes:
    keys: whether keys stay and rows are walked over, else the reverse.
    rest: numbers of a key past the width.
  """

  keys: bool
  rest: int
  scale: float
  sms: int
  interpret: bool

  @property
  def past(self) -> int:
    """Buffers of q or k: two halves of the width, and the rest."""
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
    interpret: run on CPU.
  """
  g = k.shape[1]
  share = q.shape[1] // g
  found = []
  for head in range(g):
    own = slice(head * share, (head + 1) * share)
    rows = (q[:, own], k[:, head], log[:, own], dots[:, own], dout[:, own])
    found.append(_one_head(*rows, starts, ends, scale, parts, interpret))
  dq, dk = zip(*found, strict=True)
  return jnp.concatenate(dq, axis=1), jnp.stack(dk, axis=1)


def _one_head(q, k, log, dots, dout, starts, ends, scale, parts, interpret):
  t, h, key = q.shape
  sms = 2 if interpret else mosaic.cores()
  parts = parts or max(min(ITEMS * ROWS // t, PARTS), 1)
  flat = lambda x: x.reshape(t * h, *x.shape[2:])  # noqa: E731
  low, high = jnp.repeat(starts, h), jnp.repeat(ends, h)
  logs = flat(log.astype(jnp.float32)) * LOG2E
  dots = flat(dots.astype(jnp.float32))
  arrays = low, high, flat(q), k, flat(dout), logs, dots
  work = Work(False, key - 2 * HALF, scale, sms, interpret)
  dq = _launch(
    work,
    work_lib.longest_first(row_items(low, high), sms),
    arrays,
    jax.ShapeDtypeStruct((t * h, key), q.dtype),
  )
  sums = _launch(
    dataclasses.replace(work, keys=True),
    work_lib.longest_first(key_items(starts, ends, h, parts), sms),
    arrays,
    jax.ShapeDtypeStruct((parts, t, key), jnp.float32),
  )
  total = sums[0]
  for part in range(1, parts):
    total = total + sums[part]
  return dq.reshape(q.shape), total.astype(k.dtype)


def row_items(low: jax.Array, high: jax.Array) -> jax.Array:
  """Tiles of 64 rows and the blocks of keys that they see.

  Args:
    low, high: int32 [R], first and last key that a row sees.

  Returns:
    int32 [R / 64, 6]: first row, 0, first block, end of blocks, and the first
    and the end of those which all rows see whole.
  """
  tiles = low.shape[0] // ROWS
  first, middle, end = work_lib.blocks(
    low.reshape(tiles, ROWS), high.reshape(tiles, ROWS), BLOCK
  )
  row = jnp.arange(tiles, dtype=jnp.int32) * ROWS
  columns = row, jnp.zeros_like(row), first, end, first, middle
  return jnp.stack(columns, axis=-1)


def key_items(
  starts: jax.Array, ends: jax.Array, heads: int, parts: int
) -> jax.Array:
  """Tiles of 64 keys and the blocks of rows that see them, part by part.

  Multiprocessors that work at the same time mostly walk over the same rows,
  which then come from the cache: tiles of a part follow each other.

  Args:
    starts, ends: int32 [T], of `attention.bounds`, T a multiple of 64.
    heads: of a token: its rows.
    parts: into which all rows are cut.

  Returns:
    int32 [parts * T / 64, 6]: first key, part, first block, end of blocks, and
    the first and the end of those in which every row sees every key.
  """
  tokens = work_lib.key_items(starts, ends, ROWS, 1, 1).T
  tile, _, first, end, middle, after = tokens[:, None, :]
  blocks = -(-starts.shape[0] * heads // BLOCK)
  each = -(-blocks // parts)
  part = jnp.arange(parts, dtype=jnp.int32)[:, None]
  inside = lambda x: jnp.clip(x, part * each, (part + 1) * each)  # noqa: E731
  up = lambda x: -(-x * heads // BLOCK)  # noqa: E731
  middle, end = up(middle), up(end)
  after = jnp.clip(after * heads // BLOCK, middle, end)
  columns = (tile, part) + tuple(
    inside(x) for x in (first * heads // BLOCK, end, middle, after)
  )
  columns = [jnp.broadcast_to(x, (parts, tile.shape[1])) for x in columns]
  return jnp.stack(columns, axis=-1).reshape(-1, 6)


# --- The kernel --------------------------------------------------------------


def _launch(work: Work, items, arrays, out):
  """One of the two passes over its items (first row, part, blocks)."""
  dtype = arrays[2].dtype
  key = [HALF, HALF, work.rest][: work.past]
  both = key + [HALF, HALF]  # dout lies with q
  stay, walk = (key, both) if work.keys else (both, key)
  stay = [(ROWS, n) for n in stay]
  walk = [(STAGES, BLOCK, n) for n in walk]
  logs = [(STAGES, BLOCK)] * 2 if work.keys else []
  pair = ROWS, BLOCK
  tiled = gpu_gradients.tiled
  shapes = *stay, *walk, pair
  mosaic.check_shared(
    work,
    mosaic.shared_bytes(
      *((shape, dtype) for shape in shapes),
      (pair, jnp.float32),
      *((shape, jnp.float32) for shape in logs),
    ),
  )
  scratch = [
    tuple(tiled(shape, dtype, BLOCK) for shape in stay),
    tuple(tiled(shape, dtype, BLOCK) for shape in walk),
    tuple(mosaic.linear(shape, jnp.float32) for shape in logs),
    (mosaic.tiled(pair, jnp.float32), tiled(pair, dtype, BLOCK)),
    (
      plgpu.Barrier(num_arrivals=len(stay)),
      plgpu.Barrier(num_arrivals=2),
    ),
    (
      plgpu.Barrier(num_arrivals=len(walk + logs), num_barriers=STAGES),
      plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    ),
    (plgpu.Barrier(num_arrivals=1), plgpu.Barrier(num_arrivals=1)),
  ]
  return mosaic.launch(
    mosaic.partial(_body, work=work),
    out=out,
    scratch=scratch,
    grid=min(work.sms, items.shape[0]),
    warpgroups=3,
    interpret=work.interpret,
    approximate=True,
  )(items, *arrays)


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
  out: Any
  stay: Any  # columns of what stays: two halves, the rest, halves of dout
  walk: Any  # of what is walked over
  rows: Any  # logs and dots of rows that are walked over
  given: Any  # p and ds, from one consumer to the other
  stay_barriers: Any  # full, empty, as the next
  walk_barriers: Any
  given_barriers: Any


def _body(*refs, work: Work):
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


def _produce(r: _Refs, item, trips, work: Work):
  moving = (r.q, r.dout), (r.k,)
  stay, walk = moving[::-1] if work.keys else moving

  def load(sources, rows, buffers, full):
    """Columns of the first source, then of the second, if there is one."""
    for i, buffer in enumerate(buffers):
      columns = pl.ds(i % work.past * HALF, buffer.shape[-1])
      source = sources[i // work.past].at[rows, columns]
      plgpu.copy_gmem_to_smem(source, buffer, full)

  def one_item(trip, step):
    row, _, first, end, _, _ = item(trip)
    plgpu.barrier_wait(r.stay_barriers[1])
    rows = pl.ds(pl.multiple_of(row, ROWS), ROWS)
    load(stay, rows, r.stay, r.stay_barriers[0])

    def one_block(j, step):
      stage = lax.rem(step, jnp.int32(STAGES))
      full = r.walk_barriers[0].at[stage]
      plgpu.barrier_wait(r.walk_barriers[1].at[stage])
      rows = pl.ds(pl.multiple_of(j * BLOCK, BLOCK), BLOCK)
      load(walk, rows, [x.at[stage] for x in r.walk], full)
      for source, target in zip((r.logs, r.dots), r.rows, strict=False):
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
  columns = [HALF] + ([work.rest] if consumer and work.rest else [])

  def one_item(trip, step):
    row, part, first, end, *whole = item(trip)
    rows = pl.ds(pl.multiple_of(row, ROWS), ROWS)
    plgpu.barrier_wait(r.stay_barriers[0])
    walk = mosaic.partial(
      _walk, r, rows, (first, end, *whole), step, consumer, work
    )
    if work.interpret:  # which takes no operand from registers
      found = walk([_zeros((ROWS, n)) for n in columns])
    else:
      sums = [plgpu.ACC((ROWS, n), jnp.float32) for n in columns]
      found = pl.run_scoped(lambda *sums: walk(sums), *sums)
    _write(r, rows, part, found, consumer, work)
    plgpu.barrier_arrive(r.stay_barriers[1])
    return step + end - first

  lax.fori_loop(0, trips, one_item, jnp.int32(0))


def _write(r: _Refs, rows, part, found, consumer: int, work: Work):
  """This consumer's columns of the sums, to their place in the result."""
  for i, value in enumerate(found):
    at = consumer + i
    columns = pl.ds(at * HALF, value.shape[1])
    if work.keys:
      r.out.at[part, rows, columns][...] = value
    else:
      # Nobody reads q any more: all scores were made before the last ds.
      r.stay[at][...] = value.astype(r.out.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(r.stay[at], r.out.at[rows, columns])
  if not work.keys:
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _zeros(shape):
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _walk(r: _Refs, rows, cut, step, consumer: int, work: Work, sums):
  """All blocks of an item: this consumer's columns of the sums, float32.

  Args:
    rows: what stays.
    cut: first block, end, first that is seen whole, end of those.
    step: blocks before this item.
    consumer: 0 makes s and p, 1 makes dp and ds.
    sums: accumulators; while interpreting, their values.
  """
  first, end, whole, after = cut
  along = plgpu.Layout.WGMMA.reduce(0 if work.keys else 1)
  stays = None if work.keys else (r.logs, r.dots)[consumer].at[rows]
  row = None if work.keys else mosaic.load(stays, along)

  def block(j, totals):
    stage = lax.rem(step + j - first, jnp.int32(STAGES))
    plgpu.barrier_wait(r.walk_barriers[0].at[stage])
    own = row
    if work.keys:
      own = mosaic.load(r.rows[consumer].at[stage], along)
    own = lax.broadcast_in_dim(own, (ROWS, BLOCK), [int(work.keys)])

    def add(left, index):
      """left times columns of what is walked over, to sums at `index`."""
      nonlocal totals
      for i, at in enumerate(index):
        right = r.walk[at].at[stage]
        if work.interpret:
          new = gpu_kernel.accumulate(totals[i], left, right, True)
          totals = *totals[:i], new, *totals[i + 1 :]
        else:
          plgpu.wgmma(sums[i], left, right)

    made = _scores(r, stage, consumer, work)
    if not consumer:
      mask = lambda s: jnp.where(_seen(r, rows, j, work), s, -jnp.inf)  # noqa: E731
      edge = (j < whole) | (j >= after)
      made = lax.cond(edge, mask, lambda s: s, made)
      p = jnp.exp2(made * (work.scale * LOG2E) - own)
      _give(r, 0, p)
    else:
      p = _take(r, 0)
    if work.keys:
      add(p.astype(r.q.dtype), [work.past + consumer])
    if not consumer:
      ds = _take(r, 1)
    else:
      ds = (p * (made - own) * work.scale).astype(r.q.dtype)
      _give(r, 1, ds)
    add(ds, [consumer, 2][: len(sums)])
    if not work.interpret:
      plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(r.walk_barriers[1].at[stage])
    return totals

  totals = tuple(sums) if work.interpret else ()
  totals = lax.fori_loop(first, end, block, totals)
  return totals if work.interpret else [x[...] for x in sums]


def _scores(r: _Refs, stage, consumer: int, work: Work) -> jax.Array:
  """s, or dp: of what stays with what is walked over, float32 [64, 32]."""
  left, right = r.stay[: work.past], r.walk[: work.past]
  if consumer:  # dout has the place of q, and values are a part of k
    left, right = left[:2], right[:2]
    if work.keys:
      right = r.walk[work.past :]
    else:
      left = r.stay[work.past :]

  def products(sums):
    for a, b in zip(left, right, strict=True):
      plgpu.wgmma(sums, a, b.at[stage].transpose((1, 0)))
    return sums[...]

  return pl.run_scoped(products, plgpu.ACC((ROWS, BLOCK), jnp.float32))


def _seen(r: _Refs, rows, j, work: Work) -> jax.Array:
  """Whether a row sees a key, of what stays and of block j, bool [64, 32]."""
  shape, block = (ROWS, BLOCK), pl.multiple_of(j * BLOCK, BLOCK)
  if work.keys:
    first, rows, keys_along = rows.start, pl.ds(block, BLOCK), 0
  else:
    first, keys_along = block, 1
  place = first + plgpu.broadcasted_iota(
    jnp.int32, shape, keys_along, layout=plgpu.Layout.WGMMA
  )
  along = plgpu.Layout.WGMMA.reduce(keys_along)
  low, high = (
    lax.broadcast_in_dim(
      mosaic.load(x.at[rows], along), shape, [1 - keys_along]
    )
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
