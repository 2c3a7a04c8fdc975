"""GPU: the way of few rows to their experts, in one launch.

Apart, routing, the two halves of the counting sort, the plan of either product
and the gathering of rows are seven launches, none of which has work for longer
than a launch takes. Here a block of up to 32 warps does it all: a warp routes
some rows, and what the warps then have to know of each other goes through shared
memory. Every block does the same, and then something of its own: the first one
writes what is written once, the others copy rows of x, which they have asked for
before they know where to. All of it is integers in one order, and the gates are
those of `gpu`: no bit differs from theirs.
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
# Rows times experts up to which logits are added as they are read. Every block
# reads all of them: of 64 rows of 128 that took an H200 0.97 of the time with a
# launch before it that adds them, of 60 rows of 384 1.02.
MOST_ADDED = 128 * 128
WARPGROUPS = 8
BLOCKS = 132
TILES = 64, 128  # rows of a tile, of which products at such sizes have plans
WORDS = 4  # of 32 bits that a lane copies at once
TOGETHER = 4  # rows that a warp routes at once, at most
KEYS = 8  # that a lane holds of them
PIECES = 4  # that it copies of a row: a warp's share


def unsupported(x: jax.Array, logits: jax.Array, router: Router) -> str | None:
  """Why this is not for one launch, or None; logits [R, E]."""
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
  e: int,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, ...]:
  """See `route.send`: experts, gates, sorted rows, places, sizes, then plans.

  Of each of `TILES` a plan is two arrays, as `groups.row_tiles` has them. Logits
  are of e experts, or what makes them (`reference.added`).
  """
  rows = len(logits)
  slots = rows * router.k
  inputs = [one for one in (x, logits, bias, replay) if one is not None]
  # A warp routes a row or more, and sorts one slot a lane.
  warpgroups = min(WARPGROUPS, max(2, -(-rows // 4), -(-slots // 128)))
  whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
  plans = []
  for tile in TILES:
    most = groups.most_tiles(slots, e, tile, groups.ALIGN)
    plans += [whole(most, 4), whole(1)]
  sort = _Sort(slots, e, 4 * warpgroups)
  # Rows that a warp routes at once: as many as its registers hold.
  each = -(-rows // (4 * warpgroups))
  together = min(each, TOGETHER, max(1, KEYS // -(-e // warp.LANES)))

  def kernel(w, *refs):
    *refs, memory = refs
    refs = list(refs)
    x_ref, logits_ref = refs.pop(0), refs.pop(0)
    bias_ref = None if bias is None else refs.pop(0)
    replay_ref = None if replay is None else refs.pop(0)
    experts, gates, gathered, places, sizes, *plans = refs
    # What the blocks all write are the same gates; experts, each its own.
    gpu.route_rows(
      *(w, (w.own, w.warps_per_block), (logits_ref, bias_ref, replay_ref), e),
      *((memory, gates), router, False, together),
    )
    w.sync_block()
    copy = _Copy(x_ref, gathered, x.shape[1], router.k, slots)
    held = _load(w, copy, _first_share(w))
    own = _count(w, memory, sort)
    w.sync_block()
    _start(w, memory, sort, sizes)
    w.sync_block()
    _place(w, memory, sort, own, experts, places)
    for i, tile in enumerate(TILES):
      _plan(w, memory, sort, tile, i, *plans[2 * i : 2 * i + 2])
    w.sync_block()
    _store(w, memory, sort, copy, held)

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
      blocks=min(
        BLOCKS, 1 + -(-slots * _parts(x.shape[1]) // (4 * warpgroups))
      ),
      block_scratch=sort.words,
      interpret=interpret,
    )
  )


@dataclasses.dataclass(frozen=True)
class _Sort:
  """Sizes, and where in a block's memory its arrays begin.

  The experts of all slots are first; `place` is that of each slot, `totals` and
  `starts` are of each expert, `counters` of each in each chunk of 32 slots.
  """

  slots: int
  e: int
  warps: int

  @property
  def chunks(self) -> int:
    return -(-self.slots // warp.LANES)

  @property
  def place(self) -> int:
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


def _count(w, memory, sort: _Sort):
  """Totals of experts; and the slots of each before a chunk, from `counters`.

  Returns:
    Expert of the slot of this lane, and how many of its warp's lower lanes have
    that one.
  """
  e, own = sort.e, w.own * sort.e + sort.counters
  slot = w.own * warp.LANES + w.lane

  def count(*_):
    w.loop(w.lane, e, warp.LANES, lambda i: w.store(memory, own + i, 0))
    here = slot < sort.slots
    (expert,) = w.when(
      here, lambda _: [w.load(memory, slot)], [w.value(warp.ALL)]
    )
    same = w.match(expert)
    rank = w.count_bits(same & ((w.value(1) << w.lane) - 1))
    w.sync()
    w.when(
      here & rank.equals(0),
      lambda: w.store(memory, own + expert, w.count_bits(same)),
    )
    return [expert, rank]

  found = w.when(w.own < sort.chunks, count, [w.value(0)] * 2)
  w.sync_block()

  def total(expert):
    at = expert + sort.counters
    counts = [w.load(memory, at + i * e) for i in range(sort.chunks)]
    before = w.value(0)
    for i, one in enumerate(counts):
      w.store(memory, at + i * e, before)
      before = before + one
    w.store(memory, expert + sort.totals, before)

  w.loop(slot, e, sort.warps * warp.LANES, total)
  return found


def _running(w, sort: _Sort, value, then, turn: int = 0) -> None:
  """then(expert, sum before it, its own) of value(expert), for every expert.

  A warp does 32 of them; others do if `turn` is another, where there are more.
  """

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

  shares = -(-sort.e // warp.LANES)
  first = (w.own + (sort.warps - turn * shares % sort.warps)) % sort.warps
  w.loop(first, shares, sort.warps, some)


def _start(w, memory, sort: _Sort, sizes) -> None:
  def write(expert, before, own):
    w.store(memory, expert + sort.starts, before)
    _first_block(w, lambda: w.store(sizes, expert, own))

  _running(w, sort, lambda expert: w.load(memory, expert + sort.totals), write)


def _place(w, memory, sort: _Sort, own, experts, places) -> None:
  expert, rank = own
  slot = w.own * warp.LANES + w.lane

  def put():
    before = w.load(memory, w.own * sort.e + expert + sort.counters)
    place = before + w.load(memory, expert + sort.starts) + rank
    w.store(memory, slot + sort.place, place)

    def write():
      w.store(places, slot, place)
      w.store(experts, slot, expert)

    _first_block(w, write)

  w.when(slot < sort.slots, put)


def _plan(w, memory, sort: _Sort, tile: int, turn: int, table, count) -> None:
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

  value = lambda i: of(i)[3]  # noqa: E731
  _first_block(w, lambda: _running(w, sort, value, write, turn))


def _parts(width: int) -> int:
  """Warps that copy a row of so many numbers of 16 bits."""
  return -(-width // (2 * WORDS * PIECES * warp.LANES))


@dataclasses.dataclass(frozen=True)
class _Copy:
  """Rows of x to the places of their slots, by all blocks but the first.

  Share s is a part of the row of slot s / parts.
  """

  x: warp.Ref
  out: warp.Ref
  width: int
  k: int
  slots: int

  @property
  def parts(self) -> int:
    return _parts(self.width)

  @property
  def shares(self) -> int:
    return self.slots * self.parts


def _pieces(w, copy: _Copy, share) -> list:
  """Numbers of its row before each piece that a lane copies."""
  each = 2 * WORDS
  before = share % copy.parts * (each * PIECES * warp.LANES)
  return [
    before + (w.lane + piece * warp.LANES) * each for piece in range(PIECES)
  ]


def _load(w, copy: _Copy, share) -> list:
  """Words of a share; of what is not there some others, without a branch."""
  share = share.minimum(w.value(copy.shares - 1))
  row = share // (copy.parts * copy.k) * copy.width
  last = w.value(copy.width - 2 * WORDS)
  return [
    w.load_words(copy.x, row + at.minimum(last), WORDS)
    for at in _pieces(w, copy, share)
  ]


def _store(w, memory, sort: _Sort, copy: _Copy, held: list) -> None:
  """`held` is what `_load` has asked for of this warp's first share."""
  first, step = _first_share(w), w.warps - w.warps_per_block

  def store(share, words):
    place = w.load(memory, share // copy.parts + sort.place) * copy.width
    for at, own in zip(_pieces(w, copy, share), words, strict=True):
      write = lambda at=at, own=own: w.store_words(copy.out, place + at, own)  # noqa: E731
      w.when(at < copy.width, write)

  def shares():
    store(first, held)
    more = first + step, copy.shares, step
    w.loop(*more, lambda share: store(share, _load(w, copy, share)))

  w.when(first < copy.shares, shares)


def _first_share(w):
  """Of a warp; in the first block it is more than there are."""
  return w.warp - w.warps_per_block
