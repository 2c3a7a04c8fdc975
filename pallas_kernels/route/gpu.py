"""GPU: routing, a warp a row; and the order of dispatch, a stable counting sort.

A lane holds experts lane, lane + 32, ... of its row. The best expert is found by
one reduction over the warp of numbers that are ordered as the floats are, and
one of the lowest place that has it; K times.

The sort: warps count the experts of 512 slots each, XLA adds the counts up, and
the same warps give every slot its place. Equal experts of 32 slots are ranked
by which lanes hold the same.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import warp
from pallas_kernels.route import several
from pallas_kernels.route.reference import LEAST
from pallas_kernels.route.reference import Router

MOST = 1024  # experts: 32 registers of a lane for each of what it holds
WARPGROUPS = 1
CHUNK = 512  # slots that one warp sorts
LOWEST = 0x007FFFFF  # -inf, as `_ordered` writes it


def unsupported(logits: jax.Array, router: Router) -> str | None:
  """Why this router cannot be computed here, or None."""
  e = logits.shape[1]
  if e > MOST or router.k > warp.LANES:
    return (
      f'{e} experts, k={router.k}; the GPU kernel takes up to {MOST} experts'
      f' and k up to {warp.LANES}'
    )
  if router.groups > 1 and (e // router.groups) % warp.LANES:
    return (
      f'groups of {e // router.groups} experts; the GPU kernel takes multiples'
      f' of {warp.LANES}'
    )
  return None if logits.shape[0] else 'there are no rows'


def unsupported_order(experts: jax.Array, count: int) -> str | None:
  """Why these experts cannot be sorted here, or None."""
  if count > MOST:
    return f'{count} experts; the GPU kernel takes up to {MOST}'
  return None if experts.size else 'there are no rows'


def route(
  logits: jax.Array,
  bias: jax.Array | None,
  replay: jax.Array | None,
  router: Router,
  whole: bool,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Experts, gates and native experts [R, K]; native is unset without `whole`."""
  rows, e = logits.shape
  inputs = [array for array in (logits, bias, replay) if array is not None]
  shape = (rows, router.k)
  experts = jax.ShapeDtypeStruct(shape, jnp.int32)
  gates = jax.ShapeDtypeStruct(shape, jnp.float32)

  def kernel(w, *refs):
    refs = list(refs)
    logits = refs.pop(0)
    bias_ref = None if bias is None else refs.pop(0)
    replay_ref = None if replay is None else refs.pop(0)
    inputs = logits, bias_ref, replay_ref
    route_rows(w, (w.warp, w.warps), inputs, e, refs, router, whole)

  found = warp.run(
    kernel,
    *inputs,
    out=[experts, gates] + [experts] * whole,
    warpgroups=WARPGROUPS,
    blocks=-(-rows // (4 * WARPGROUPS)),
    interpret=interpret,
  )
  return found[0], found[1], found[2] if whole else found[0]


def order(
  experts: jax.Array, count: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Slots by expert, the inverse, and sizes; see the package."""
  flat = experts.reshape(-1)
  size = flat.shape[0]
  chunks = -(-size // CHUNK)
  launch = functools.partial(
    warp.run,
    warpgroups=WARPGROUPS,
    blocks=-(-chunks // (4 * WARPGROUPS)),
    scratch=count,
    interpret=interpret,
  )
  (table,) = launch(
    functools.partial(_count, chunks=chunks),
    flat,
    out=[jax.ShapeDtypeStruct((chunks, count), jnp.int32)],
  )
  until = jnp.cumsum(table, axis=0, dtype=jnp.int32)
  sizes = until[-1]
  number = jnp.arange(count)
  before = number[None, :] < number[:, None]
  starts = jnp.sum(
    jnp.where(before, sizes[None, :], 0), axis=1, dtype=jnp.int32
  )
  slot = jax.ShapeDtypeStruct((size,), jnp.int32)
  slots, places = launch(
    functools.partial(_place, chunks=chunks),
    flat,
    until - table + starts[None, :],
    out=[slot, slot],
  )
  return slots, places, sizes


# --- Routing -----------------------------------------------------------------


def route_rows(
  w,
  share,
  refs,
  e: int,
  out,
  router: Router,
  whole: bool,
  together: int = 1,
) -> None:
  """Experts, gates and native experts, to `out`; native ones only if `whole`.

  `share` is a warp's first row, and how many rows further its next one is; it
  does so many of them at once as `together` says, which must be 1 if `whole`.
  `refs` are logits, bias and replay; logits of `e` experts, or what makes them
  (`reference.added`).
  """
  rows = out[1].size // router.k
  wide = refs[0].size // rows
  firsts = (0,) if wide == e else (0, e, 2 * e)

  def loads(row):
    return _Row(refs[0], [row * wide + first for first in firsts], e, router)

  def step(row):
    if together == 1:
      return _route_row(w, row, loads(row), refs, out, router, whole)
    rows_of = several.Several(w, together)
    own = rows_of.of([row + i * share[1] for i in range(together)])
    # Past the last row it is the last once more, and not stored.
    last, here = own.minimum(w.value(rows - 1)), own < rows
    more = refs, out, router, whole, here
    return _route_row(rows_of, last, loads(last), *more)

  w.loop(share[0], rows, share[1] * together, step)


def _route_row(w, row, loads, refs, out, router, whole, here=None) -> None:
  """A row, or of several those that are `here`; `loads` are its logits."""
  _, bias, replay = refs
  e, slot = loads.e, row * router.k + w.lane

  def write(experts, sums):
    chosen = _scores_of(w, loads, experts, sums)
    _write(w, slot, experts, chosen, out, router, here)

  if replay is None:
    own, _, sums = _native(w, loads, bias, router)
    write(own, sums)
    if whole:
      w.when(w.lane < router.k, lambda: w.store(out[2], slot, own))
    return
  (given,) = w.when(
    w.lane < router.k, lambda _: [w.load(replay, slot)], [w.value(0)]
  )
  known = w.ballot(given < e).equals(warp.ALL)
  if whole:
    _audited(w, loads, bias, given, known, slot, out, router)
    return

  def native():
    own, _, sums = _native(w, loads, bias, router)
    write(own if here is None else w.where(known, given, own), sums)

  every = known if here is None else w.every(known)
  w.when(every, lambda: write(given, _all_sums(w, loads)))
  w.when(w.negate(every), native)


def _audited(w, loads, bias, given, known, slot, out, router) -> None:
  """Native experts are found too, and implausible ones replaced by them."""
  own, keys, sums = _native(w, loads, bias, router)
  scores = functools.partial(_scores_of, w, loads, sums=sums)
  used = w.where(known, given, own)
  if router.plausibility > 0:
    low = w.where(
      w.lane < router.k, _ordered(w, scores(own)), w.value(warp.ALL)
    )
    least = _float(w, w.reduce('min', low))
    used = _plausible(w, scores(used), keys, used, least, router)
  _write(w, slot, used, scores(used), out, router)
  w.when(w.lane < router.k, lambda: w.store(out[2], slot, own))


def _zero(w):
  return w.value(0.0, 'f32')


@dataclasses.dataclass(frozen=True)
class _Row:
  """A row of logits in memory, or of three that are yet to be added.

  `firsts` are where they begin; each is of e.
  """

  logits: warp.Ref
  firsts: list[warp.Value]
  e: int
  router: Router


def _added(summands):
  """A logit, once all that it is the sum of has been asked for."""
  a, *more = summands
  return a + (more[0] + more[1]) if more else a


def _scores_of(w, row: _Row, experts, sums):
  """Lane i < k: the score of its expert, with the bits that all have."""
  found = w.when(
    w.lane < row.router.k,
    lambda *_: [w.load(row.logits, first + experts) for first in row.firsts],
    [_zero(w)] * len(row.firsts),
  )
  return _score(w, _added(found), sums)


def _held(w, ref, first, e: int, past: float) -> list:
  """Numbers lane, lane + 32, ... of e from `first` on; `past` after the last."""
  found = []
  for i in range(-(-e // warp.LANES)):
    place = w.lane + warp.LANES * i
    at = place if first is None else first + place
    if (i + 1) * warp.LANES <= e:
      found.append(w.load(ref, at))
    else:
      found += w.when(
        place < e, lambda _, at=at: [w.load(ref, at)], [w.value(past, 'f32')]
      )
  return found


def _logits(w, row: _Row) -> list:
  found = [
    _held(w, row.logits, first, row.e, 0.0 if i else -jnp.inf)
    for i, first in enumerate(row.firsts)
  ]
  return [_added(own) for own in zip(*found, strict=True)]


def _all_sums(w, row: _Row):
  softmax = row.router.kind == 'softmax'
  return _sums(w, row, _logits(w, row) if softmax else [])


def _sums(w, row: _Row, found):
  """Of softmax: the greatest logit, and the sum of exp(logit - it)."""
  if row.router.kind == 'sigmoid':
    return None
  most = functools.reduce(lambda a, b: a.maximum(b), found)
  for step in range(5):
    most = most.maximum(w.shuffle_xor(most, 1 << step))
  total = functools.reduce(
    lambda a, b: a + b, [w.exp(one - most) for one in found]
  )
  for step in range(5):
    total = total + w.shuffle_xor(total, 1 << step)
  return most, total


def _score(w, logit, sums):
  if sums is None:
    return w.value(1.0, 'f32') / (w.exp(logit * -1.0) + 1.0)
  return w.exp(logit - sums[0]) / sums[1]


def _ordered(w, x):
  """Unsigned integers in the order of the floats; none is 0."""
  bits = w.bits(x)
  return bits ^ (w.value(0) - (bits >> 31) | 0x80000000)


def _float(w, key):
  return w.float(
    key ^ w.where((key >> 31).differs(0), 0x80000000, w.value(warp.ALL))
  )


def _native(w, loads, bias, router: Router):
  """Lane i < k: the i-th expert; the keys of all, that order them; `_sums`."""
  e, keys = loads.e, []
  found = _logits(w, loads)
  # Asked for with the logits: what comes between is branches.
  added = [] if bias is None else _held(w, bias, None, e, 0.0)
  sums = _sums(w, loads, found)
  for i, logit in enumerate(found):
    score = _score(w, logit, sums)
    if added:
      score = score + added[i]
    key = _ordered(w, score)
    if (i + 1) * warp.LANES > e:
      key = w.where(w.lane + warp.LANES * i < e, key, 0)
    keys.append(key)
  if router.groups > 1:
    keys = _within_groups(w, keys, router)
  left, own = list(keys), w.value(0)
  for slot in range(router.k):
    place = _best(w, left)
    own = w.where(w.lane.equals(slot), place, own)
    if slot + 1 < router.k:
      left = _without(w, left, place, 0)
  return own, keys, sums


def _best(w, keys):
  """The lowest place that has the greatest key, for every lane."""
  best = w.reduce('max', _greatest(keys))
  place = w.value(MOST)
  for i in reversed(range(len(keys))):
    place = w.where(keys[i].equals(best), w.lane + warp.LANES * i, place)
  return w.reduce('min', place)


def _greatest(keys: list):
  """Pair by pair: a chain would be waited for longer."""
  while len(keys) > 1:
    pairs = zip(keys[::2], keys[1::2], strict=False)
    rest = keys[len(keys) // 2 * 2 :]
    keys = [one.maximum(other) for one, other in pairs] + rest
  return keys[0]


def _without(w, keys, place, lowest: int) -> list:
  """Keys, that of one place set to `lowest`."""
  own = place - w.lane  # 32 i in the lane that has it
  return [
    w.where(own.equals(warp.LANES * i), lowest, key)
    for i, key in enumerate(keys)
  ]


def _within_groups(w, keys, router: Router) -> list:
  """Keys, those outside the groups with the greatest sums of two set lowest."""
  size = len(keys) // router.groups
  sums = []
  for g in range(router.groups):
    first = second = w.value(0)
    for key in keys[g * size : (g + 1) * size]:
      second = second.maximum(first.minimum(key))
      first = first.maximum(key)
    most = w.reduce('max', first)
    holder = w.lowest_bit(w.ballot(first.equals(most)))
    first = w.where(w.lane.equals(holder), second, first)
    sums.append(_float(w, most) + _float(w, w.reduce('max', first)))
  out = []
  for g, own in enumerate(sums):
    above = w.value(0)
    for other, value in enumerate(sums):
      if other != g:
        beats = value >= own if other < g else value > own
        above = above + w.where(beats, w.value(1), 0)
    kept = above < router.top_groups
    out += [
      w.where(kept, key, LOWEST) for key in keys[g * size : (g + 1) * size]
    ]
  return out


def _plausible(w, scores, keys, used, least, router: Router):
  """Lane i < k: its expert, or the best one that no lane has."""
  low = (scores < least * router.plausibility) & (w.lane < router.k)
  implausible = w.ballot(low)
  for slot in range(router.k):

    def replace(used, slot=slot):
      left = keys
      for other in range(router.k):
        left = _without(w, left, w.shuffle(used, other), LOWEST)
      return [w.where(w.lane.equals(slot), _best(w, left), used)]

    hit = (implausible & (1 << slot)).differs(0)
    used = w.when(hit, replace, [used])[0]
  return used


def _write(w, slot, experts, chosen, out, router: Router, here=None) -> None:
  if router.normalise:
    total = w.shuffle(chosen, 0)
    for other in range(1, router.k):
      total = total + w.shuffle(chosen, other)
    chosen = chosen / (total + LEAST)
  gate = chosen * router.scale

  def write():
    w.store(out[0], slot, experts)
    w.store(out[1], slot, gate)

  own = w.lane < router.k
  w.when(own if here is None else here & own, write)


# --- Sorting -----------------------------------------------------------------


def _ranks(w, experts, counters, each) -> None:
  """each(slot, place, expert) for the slots of this warp's chunk.

  `counters` are where experts start; they are counted on.
  """
  below = (w.value(1) << w.lane) - 1
  slots = experts.size

  def step(start):
    slot = w.warp * CHUNK + start + w.lane
    here = slot < slots
    expert = w.when(
      here, lambda _: [w.load(experts, slot)], [w.value(warp.ALL)]
    )[0]
    same = w.match(expert)
    rank = w.count_bits(same & below)
    place = w.when(here, lambda _: [w.load(counters, expert)], [w.value(0)])[0]
    w.sync()
    w.when(
      here & rank.equals(0),
      lambda: w.store(counters, expert, place + w.count_bits(same)),
    )
    w.sync()
    w.when(here, lambda: each(slot, place + rank, expert))

  w.loop(0, CHUNK, warp.LANES, step)


def _count(w, experts, table, counters, *, chunks: int) -> None:
  count = counters.size

  def chunk():
    w.loop(w.lane, count, warp.LANES, lambda i: w.store(counters, i, 0))
    w.sync()
    _ranks(w, experts, counters, lambda *_: None)

    def write(i):
      w.store(table, w.warp * count + i, w.load(counters, i))

    w.loop(w.lane, count, warp.LANES, write)

  w.when(w.warp < chunks, chunk)


def _place(w, experts, starts, slots, places, counters, *, chunks: int) -> None:
  count = counters.size

  def chunk():
    def start(i):
      w.store(counters, i, w.load(starts, w.warp * count + i))

    w.loop(w.lane, count, warp.LANES, start)
    w.sync()

    def put(slot, place, expert):
      del expert
      w.store(places, slot, place)
      w.store(slots, place, slot)

    _ranks(w, experts, counters, put)

  w.when(w.warp < chunks, chunk)
