"""GPU: the way of few rows to their experts, in one launch.

Apart, routing, the two halves of the counting sort, the plan of either product
and the gathering of rows are seven launches, none of which has work for longer
than a launch takes. Here a block of up to 32 warps does it all: a warp routes
some rows, and what the warps then have to know of each other goes through shared
memory. Every block does the same, but for the rows of x that it gathers, and the
first one writes what is written once. All of it is integers in one order, and
the gates are those of `gpu`: no bit differs from theirs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import warp
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.route import gpu
from pallas_kernels.route.reference import Router

MOST_SLOTS = 512  # from which on launches are no longer what takes the time
MOST_EXPERTS = 512  # that a lane's share of 64 registers can order
WARPGROUPS = 8
BLOCKS = 64
TILES = 64, 128  # rows of a tile, of which products at such sizes have plans
WORDS = 4  # of 32 bits that a lane copies at once


def unsupported(x: jax.Array, logits: jax.Array, router: Router) -> str | None:
  """Why this is not for one launch, or None."""
  rows, e = logits.shape
  if rows * router.k > MOST_SLOTS or e > MOST_EXPERTS:
    return (
      f'{rows} rows of {router.k} of {e} experts; at most {MOST_SLOTS} slots'
      f' and {MOST_EXPERTS} experts go in one launch'
    )
  if x.dtype.itemsize != 2 or x.shape[1] % (2 * WORDS):
    return f'{x.dtype} rows of {x.shape[1]}; 16 bits, and multiples of 8 only'
  return gpu.unsupported(logits, router)


def send(
  x: jax.Array,
  logits: jax.Array,
  bias: jax.Array | None,
  replay: jax.Array | None,
  router: Router,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, ...]:
  """See `route.send`: experts, gates, sorted rows, places, sizes, then plans.

  Of each of `TILES` a plan is two arrays, as `groups.row_tiles` has them.
  """
  rows, e = logits.shape
  slots = rows * router.k
  inputs = [one for one in (x, logits, bias, replay) if one is not None]
  warpgroups = min(WARPGROUPS, max(2, -(-rows // 4)))
  whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
  plans = []
  for tile in TILES:
    most = groups.most_tiles(slots, e, tile, groups.ALIGN)
    plans += [whole(most, 4), whole(1)]
  sort = _Sort(slots, e, 4 * warpgroups)

  def kernel(w, *refs):
    *refs, memory = refs
    refs = list(refs)
    x_ref, logits_ref = refs.pop(0), refs.pop(0)
    bias_ref = None if bias is None else refs.pop(0)
    replay_ref = None if replay is None else refs.pop(0)
    experts, gates, gathered, places, sizes, *plans = refs
    # What the blocks all write are the same gates; experts, each its own.
    gpu.route_rows(
      *(w, (w.own, w.warps_per_block), logits_ref, bias_ref, replay_ref),
      *((memory, gates), router, False),
    )
    w.sync_block()
    _count(w, memory, sort)
    w.sync_block()
    _start(w, memory, sort, sizes)
    w.sync_block()
    _place(w, memory, sort, experts, places)
    for i, tile in enumerate(TILES):
      _plan(w, memory, sort, tile, *plans[2 * i : 2 * i + 2])
    w.sync_block()
    _gather(w, memory, sort, x_ref, gathered, x.shape[1], router.k)

  return tuple(
    warp.run(
      kernel,
      *inputs,
      out=[
        whole(rows, router.k),
        jax.ShapeDtypeStruct((rows, router.k), jnp.float32),
        jax.ShapeDtypeStruct((slots, x.shape[1]), x.dtype),
        whole(slots),
        whole(e),
        *plans,
      ],
      warpgroups=warpgroups,
      blocks=min(BLOCKS, -(-slots // (4 * warpgroups))),
      block_scratch=sort.words,
      interpret=interpret,
    )
  )


@dataclasses.dataclass(frozen=True)
class _Sort:
  """Sizes, and where in a block's memory its arrays begin.

  The experts of all slots are first; `by_place` is the slot at each place,
  `totals` and `starts` are of each expert, `counters` of each in each chunk.
  """

  slots: int
  e: int
  warps: int

  @property
  def chunk(self) -> int:
    """Slots that a warp sorts."""
    return warp.LANES * -(-self.slots // (warp.LANES * self.warps))

  @property
  def chunks(self) -> int:
    return -(-self.slots // self.chunk)

  @property
  def by_place(self) -> int:
    return self.slots

  @property
  def totals(self) -> int:
    return 2 * self.slots

  @property
  def starts(self) -> int:
    return self.totals + self.e

  @property
  def counters(self) -> int:
    return self.starts + self.e

  @property
  def words(self) -> int:
    return self.counters + self.chunks * self.e


def _first_block(w, then) -> None:
  w.when(w.block.equals(0), then)


def _count(w, memory, sort: _Sort) -> None:
  """Totals of experts; and the slots of each before a chunk, from `counters`."""
  e, own = sort.e, w.own * sort.e + sort.counters
  chunk = w.own * sort.chunk, sort.chunk, sort.slots

  def count():
    w.loop(w.lane, e, warp.LANES, lambda i: w.store(memory, own + i, 0))
    w.sync()
    gpu.ranks(w, memory, memory, lambda *_: None, chunk, own)

  w.when(w.own < sort.chunks, count)
  w.sync_block()

  def total(expert):
    def before(chunk, sums):
      at = chunk * e + expert + sort.counters
      found = w.load(memory, at)
      w.store(memory, at, sums)
      return [sums + found]

    (sums,) = w.loop(0, sort.chunks, 1, before, [w.value(0)])
    w.store(memory, expert + sort.totals, sums)

  thread = w.own * warp.LANES + w.lane
  w.loop(thread, e, sort.warps * warp.LANES, total)


def _running(w, sort: _Sort, value, then) -> None:
  """then(expert, sum before it, its own) of value(expert), for every expert."""

  def some(number):
    """32 experts of a warp, after all that are before them."""

    def add(other, sums):
      return [sums + value(other * warp.LANES + w.lane)]

    (before,) = w.loop(0, number, 1, add, [w.value(0)])
    before = w.reduce('add', before)
    expert = number * warp.LANES + w.lane
    here = expert < sort.e
    own = w.when(here, lambda _: [value(expert)], [w.value(0)])[0]
    until = own
    for step in range(5):
      below = w.shuffle_up(until, 1 << step)
      until = until + w.where(w.lane >= (1 << step), below, 0)
    w.when(here, lambda: then(expert, before + until - own, own))

  w.loop(w.own, -(-sort.e // warp.LANES), sort.warps, some)


def _start(w, memory, sort: _Sort, sizes) -> None:
  def write(expert, before, own):
    w.store(memory, expert + sort.starts, before)
    _first_block(w, lambda: w.store(sizes, expert, own))

  _running(w, sort, lambda expert: w.load(memory, expert + sort.totals), write)


def _place(w, memory, sort: _Sort, experts, places) -> None:
  own = w.own * sort.e + sort.counters
  chunk = w.own * sort.chunk, sort.chunk, sort.slots

  def put(slot, rank, expert):
    place = rank + w.load(memory, expert + sort.starts)
    w.store(memory, place + sort.by_place, slot)

    def write():
      w.store(places, slot, place)
      w.store(experts, slot, expert)

    _first_block(w, write)

  w.when(
    w.own < sort.chunks,
    lambda: gpu.ranks(w, memory, memory, put, chunk, own),
  )


def _plan(w, memory, sort: _Sort, tile: int, table, count) -> None:
  """`groups.row_tiles`, by the first block."""

  def of(expert):
    """Start, end, first row of the first tile, and how many tiles."""
    start = w.load(memory, expert + sort.starts)
    end = start + w.load(memory, expert + sort.totals)
    first = start & (warp.ALL - (groups.ALIGN - 1))
    tiles = (end - first + (tile - 1)) // tile
    return start, end, first, w.where(end > start, tiles, 0)

  def write(expert, before, own):
    start, end, first, _ = of(expert)

    def one(i):
      row = [expert, first + i * tile, start, end]
      w.store_words(table, (before + i) * 4, row)

    w.loop(0, own, 1, one)
    w.when(expert.equals(sort.e - 1), lambda: w.store(count, 0, before + own))

  _first_block(w, lambda: _running(w, sort, lambda i: of(i)[3], write))


def _gather(w, memory, sort: _Sort, x, out, width: int, k: int) -> None:
  """Each row of x to the places of its slots, a warp a row."""
  each = 2 * WORDS  # numbers of 16 bits
  parts = width // each
  nothing = [w.value(0)] * WORDS

  def copy(place):
    row = w.load(memory, place + sort.by_place) // k
    # Some at once, so that the lanes wait for memory only once for all.
    for first in range(0, parts, 4 * warp.LANES):
      pending = []
      for part in range(first, min(first + 4 * warp.LANES, parts), warp.LANES):
        at = w.lane + part
        source = row * width + at * each
        read = lambda *_, s=source: w.load_words(x, s, WORDS)  # noqa: E731
        if part + warp.LANES <= parts:
          pending.append((at, read()))
        else:
          pending.append((at, w.when(at < parts, read, nothing)))
      for at, words in pending:
        to = place * width + at * each
        w.when(at < parts, lambda t=to, v=words: w.store_words(out, t, v))

  w.loop(w.warp, sort.slots, w.warps, copy)
