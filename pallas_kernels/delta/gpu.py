"""GPU: what changed, compacted by warps; the arrays are read once.

  mark    a warp compares a tile of 4 KiB of each array, ranks what changed by a
          sum over its lanes, and keeps positions and words in slots of the tile
  sum     of the counts of groups of tiles, by XLA
  gather  a warp takes the slots of a group of tiles to their place in the result

A tile with more changes than slots is compared again by `gather`, so slots are
a matter of memory and speed only: a sixteenth of a tile is three times what an
update at a learning rate of 1e-5 changes.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import warp

VECTORS = 8  # of 16 bytes, that each lane compares at once
TILE_BYTES = 16 * VECTORS * warp.LANES
SLOTS = 16  # words of a tile for each slot
GROUP = 16  # tiles of which one warp gathers the slots; a power of two
AT_ONCE = 4  # slots that a lane of `gather` loads together
WARPGROUPS = 1


def unsupported(words: jax.Array) -> str | None:
  """Why these words cannot be compared here, or None."""
  return None if words.size else 'there are no elements'


def compact(
  base: jax.Array, new: jax.Array, capacity: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Count, positions and words of what changed, of unsigned [N]; see package."""
  size, each = base.size, base.dtype.itemsize
  tile = TILE_BYTES // each
  groups = -(-size // (tile * GROUP))
  tiles = groups * GROUP
  slots = tile // SLOTS
  warps = 4 * WARPGROUPS
  launch = functools.partial(
    warp.run, warpgroups=WARPGROUPS, interpret=interpret
  )
  counts, places, words = launch(
    mark,
    base,
    new,
    blocks=-(-tiles // warps),
    out=[
      jax.ShapeDtypeStruct((tiles,), jnp.int32),
      jax.ShapeDtypeStruct((tiles, slots), jnp.uint16),
      jax.ShapeDtypeStruct((tiles, slots), base.dtype),
    ],
  )
  sums = jnp.sum(counts.reshape(groups, GROUP), axis=1, dtype=jnp.int32)
  ends = jnp.cumsum(sums, dtype=jnp.int32)
  positions, found = launch(
    gather,
    base,
    new,
    counts,
    ends,
    places,
    words,
    blocks=-(-groups // warps),
    out=[
      jax.ShapeDtypeStruct((capacity,), jnp.int32),
      jax.ShapeDtypeStruct((capacity,), base.dtype),
    ],
  )
  return ends[-1], positions, found


def mark(w, base, new, counts, places, words) -> None:
  """Counts [tiles], local positions and words [tiles, slots] of each tile."""
  slots = places.size // counts.size

  def one_tile(tile):
    def keep(rank, local, word):
      def write():
        w.store(places, tile * slots + rank, local)
        w.store(words, tile * slots + rank, word)

      w.when(rank < slots, write)

    count = _changes(w, base, new, tile, keep)
    w.when(w.lane.equals(0), lambda: w.store(counts, tile, count))

  w.loop(w.warp, counts.size, w.warps, one_tile)


def gather(w, base, new, counts, ends, places, words, positions, found) -> None:
  """Positions and words [capacity], in order, and what fills the rest."""
  slots, capacity = places.size // counts.size, positions.size
  tile_words = TILE_BYTES // base.bytes

  def one_group(group):
    tile = group * GROUP + w.lane
    count = w.when(
      w.lane < GROUP, lambda _: [w.load(counts, tile)], [w.value(0)]
    )[0]
    until = _running_sum(w, count)
    total = w.shuffle(until, GROUP - 1)
    first = w.load(ends, group) - total

    def put(place, tile, local, word, here=None):
      def write():
        w.store(positions, place, tile * tile_words + local)
        w.store(found, place, word)

      inside = place < capacity
      w.when(inside if here is None else inside & here, write)

    def from_slots(start):
      loaded = []
      for i in range(AT_ONCE):
        rank = start + (w.lane + warp.LANES * i)
        own, before = _tile_of(w, until, rank)
        tile, within = group * GROUP + own, rank - before
        here = (rank < total) & (within < slots)
        slot = w.where(here, tile * slots + within, 0)
        local, word = w.load(places, slot), w.load(words, slot)
        loaded.append((first + rank, tile, local, word, here))
      for one in loaded:
        put(*one)

    def again(own):
      before = w.shuffle(until - count, own)
      tile = group * GROUP + own

      def keep(rank, local, word):
        put(first + before + rank, tile, local, word)

      w.when(
        w.shuffle(count, own) > slots,
        lambda: _changes(w, base, new, tile, keep) and None,
      )

    w.loop(0, total, AT_ONCE * warp.LANES, from_slots)
    w.when(
      w.ballot(count > slots).differs(0),
      lambda: w.loop(0, GROUP, 1, again) and None,
    )

  w.loop(w.warp, ends.size, w.warps, one_group)

  def fill(place):
    w.store(positions, place, base.size)
    w.store(found, place, 0)

  total = w.load(ends, ends.size - 1)
  first = total + w.warp * warp.LANES + w.lane
  w.loop(first, capacity, w.warps * warp.LANES, fill)


def _running_sum(w, value):
  """Of lanes up to and with this one."""
  for step in range(5):
    below = w.shuffle_up(value, 1 << step)
    value = value + w.where(w.lane >= 1 << step, below, 0)
  return value


def _tile_of(w, until, rank):
  """Which tile of the group has this rank, and the changes before that tile."""
  own = w.value(0)
  step = GROUP // 2
  while step:
    probe = w.shuffle(until, own + (step - 1))
    own = w.where(probe <= rank, own + step, own)
    step //= 2
  before = w.shuffle(until, (own - 1) & 31)
  return own, w.where(own.equals(0), 0, before)


def _changes(w, base, new, tile, keep: Callable[..., None]):
  """Calls keep(rank, local position, word) for what changed; the count.

  Every lane holds a bit for each of its words, vector after vector; a word's
  rank is the changes of vectors before, of lanes below and of its own lane.
  """
  each = 16 // base.bytes
  first = tile * (TILE_BYTES // base.bytes)
  local = [(w.lane + warp.LANES * i) * each for i in range(VECTORS)]
  masks = _masks(w, base, new, first, local, each)
  counts = [w.count_bits(mask) for mask in masks]
  total = w.value(0)
  for i in range(0, VECTORS, 2):
    both = counts[i] | counts[i + 1] << 16
    until = _running_sum(w, both)
    before, sums = until - both, w.shuffle(until, 31)
    for j, shift in enumerate((0, 16)):
      rank = total + ((before >> shift) & 0xFFFF)
      total = total + ((sums >> shift) & 0xFFFF)
      _each_bit(w, masks[i + j], rank, local[i + j], first, new, keep)
  return total


def _each_bit(w, mask, rank, local, first, new, keep) -> None:
  def one(mask, rank):
    place = local + w.lowest_bit(mask)
    keep(rank, place, w.load(new, first + place))
    return mask & (mask - 1), rank + 1

  w.repeat(lambda mask, rank: mask.differs(0), one, [mask, rank])


def _masks(w, base, new, first, local, each):
  """A b32 for each vector of a lane: which of its words differ, lowest first."""
  size, bits = base.size, 8 * base.bytes

  def whole(*_):
    pairs = [
      (
        w.load_words(base, first + one, 4, once=True),
        w.load_words(new, first + one, 4),
      )
      for one in local
    ]
    return [_differing(w, a, b, bits) for a, b in pairs]

  def ragged(*masks):
    found = []
    for one, mask in zip(local, masks, strict=True):

      def word(j, mask, one=one):
        place = first + one + j

        def compare(mask):
          changed = w.load(base, place).differs(w.load(new, place))
          return [mask | w.where(changed, w.value(1) << j, 0)]

        return w.when(place < size, compare, [mask])

      found += w.loop(0, each, 1, word, [mask])
    return found

  end = first + TILE_BYTES // base.bytes
  masks = w.when(end <= size, whole, [0] * VECTORS)
  return w.when(end > size, ragged, masks)


def _differing(w, a, b, bits: int):
  """Bits of the words that differ between 16 bytes and 16 bytes."""
  ones = (1 << bits) - 1
  mask = w.value(0)
  for i, (left, right) in enumerate(zip(a, b, strict=True)):
    apart = left ^ right
    for j in range(32 // bits):
      part = apart if bits == 32 else apart & (ones << (bits * j))
      bit = 1 << (i * (32 // bits) + j)
      mask = mask | w.where(part.differs(0), w.value(bit), 0)
  return mask
