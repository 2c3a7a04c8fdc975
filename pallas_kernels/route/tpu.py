"""Pallas TPU: routing, blocks of rows; and the order of dispatch.

A row's experts lie in the lanes. The best is taken K times: the greatest, and of
equal ones the lowest. For the order, slots lie in the lanes and experts in the
sublanes; how many slots before had the same expert is a product with a triangle
of ones, and blocks of slots follow one another with their counts.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.route.reference import LEAST
from pallas_kernels.route.reference import Router

ROWS, LANES = 128, 128
CHUNK = 256  # slots that are ranked at once
MOST = 1024


def unsupported(logits: jax.Array, router: Router) -> str | None:
  """Why this router cannot be computed here, or None."""
  e = logits.shape[1]
  if e > MOST or router.k > LANES:
    return (
      f'{e} experts, k={router.k}; the TPU kernel takes up to {MOST} experts'
      f' and k up to {LANES}'
    )
  return None if logits.shape[0] else 'there are no rows'


def unsupported_order(experts: jax.Array, count: int) -> str | None:
  """Why these experts cannot be sorted here, or None."""
  if count > MOST:
    return f'{count} experts; the TPU kernel takes up to {MOST}'
  return None if experts.size else 'there are no rows'


@functools.partial(jax.jit, static_argnames=('router', 'interpret'))
def route(
  logits: jax.Array,
  bias: jax.Array | None,
  replay: jax.Array | None,
  router: Router,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Experts, gates and native experts [R, K]; see the package.

  A block whose rows are all replayed, without plausibility, is not routed
  natively; what it has in the place of native experts are those replayed.
  """
  rows, e = logits.shape
  k = router.k
  if bias is None:
    bias = jnp.zeros((e,), jnp.float32)
  high = -(-rows // ROWS) * ROWS
  given = jnp.full((high, LANES), -1, jnp.int32)
  if replay is not None:
    given = given.at[:rows, :k].set(replay.astype(jnp.int32))
  logits = jnp.pad(logits, ((0, high - rows), (0, 0)))
  block = pl.BlockSpec((ROWS, LANES), lambda i: (i, 0))
  found = pl.pallas_call(
    functools.partial(_kernel, router=router, e=e),
    out_shape=[
      jax.ShapeDtypeStruct((high, LANES), dtype)
      for dtype in (jnp.int32, jnp.float32, jnp.int32)
    ],
    grid=(high // ROWS,),
    in_specs=[
      pl.BlockSpec((ROWS, e), lambda i: (i, 0)),
      pl.BlockSpec((1, e), lambda i: (0, 0)),
      block,
    ],
    out_specs=[block] * 3,
    name='route',
    cost_estimate=pl.CostEstimate(
      flops=4 * high * e * k,
      bytes_accessed=4 * high * (e + 4 * LANES),
      transcendentals=high * e,
    ),
    interpret=interpret,
  )(logits, bias[None], given)
  return tuple(one[:rows, :k] for one in found)


def _kernel(logits, bias, replay, experts, gates, native, *, router, e) -> None:
  k = router.k
  scores = _scores(logits[...], router)
  given = [replay[:, i : i + 1] for i in range(k)]
  known = functools.reduce(
    jnp.logical_and, [(one >= 0) & (one < e) for one in given]
  )
  every = jnp.min(known.astype(jnp.int32)) == 1
  skip = every if router.plausibility == 0 else jnp.bool_(False)

  def write(used, own):
    _put(experts, used)
    _put(native, own)
    _put(gates, _gates(scores, used, router))

  @pl.when(skip)
  def _():
    write(given, given)

  @pl.when(jnp.logical_not(skip))
  def _():
    selection = scores + bias[...]
    if router.groups > 1:
      selection = _within_groups(selection, router)
    left, own = selection, []
    for _ in range(k):
      place = _best(left)
      own.append(place)
      left = jnp.where(_number(left) == place, -jnp.inf, left)
    used = [jnp.where(known, a, b) for a, b in zip(given, own, strict=True)]
    if router.plausibility > 0:
      used = _plausible(scores, selection, own, used, router.plausibility)
    write(used, own)


def _put(ref, columns) -> None:
  """Columns [rows, 1] into the first lanes; the others are cut off later."""
  lane = lax.broadcasted_iota(jnp.int32, ref.shape, 1)
  wide = jnp.zeros(ref.shape, ref.dtype)
  for i, column in enumerate(columns):
    wide = jnp.where(lane == i, column, wide)
  ref[...] = wide


def _number(x):
  return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _scores(logits, router: Router):
  if router.kind == 'sigmoid':
    return 1.0 / (1.0 + jnp.exp(-logits))
  weight = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
  return weight / jnp.sum(weight, axis=1, keepdims=True)


def _best(x):
  """[rows, 1]: the lowest place of the greatest."""
  most = jnp.max(x, axis=1, keepdims=True)
  place = jnp.where(x == most, _number(x), x.shape[1])
  return jnp.min(place, axis=1, keepdims=True)


def _at(x, place):
  """[rows, 1]: x at a place of each row."""
  own = jnp.where(_number(x) == place, x, 0.0)
  return jnp.sum(own, axis=1, keepdims=True)


def _gates(scores, used, router: Router):
  chosen = [_at(scores, place) for place in used]
  if router.normalise:
    total = functools.reduce(lambda a, b: a + b, chosen)
    chosen = [one / (total + LEAST) for one in chosen]
  return [one * router.scale for one in chosen]


def _within_groups(selection, router: Router):
  """-inf outside the groups with the greatest sums of two; ties to the lower."""
  group = lax.div(
    _number(selection), jnp.int32(selection.shape[1] // router.groups)
  )
  sums = []
  for g in range(router.groups):
    own = jnp.where(group == g, selection, -jnp.inf)
    first = _best(own)
    rest = jnp.where(_number(own) == first, -jnp.inf, own)
    sums.append(
      jnp.max(own, axis=1, keepdims=True) + jnp.max(rest, axis=1, keepdims=True)
    )
  kept = jnp.zeros(selection.shape, jnp.int32)
  for g, own in enumerate(sums):
    above = jnp.zeros(own.shape, jnp.int32)
    for other, value in enumerate(sums):
      if other != g:
        beats = value >= own if other < g else value > own
        above = above + beats.astype(jnp.int32)
    kept = jnp.where((group == g) & (above < router.top_groups), 1, kept)
  return jnp.where(kept == 1, selection, -jnp.inf)


def _plausible(scores, selection, own, used, c: float):
  least = functools.reduce(jnp.minimum, [_at(scores, place) for place in own])
  used = list(used)
  for slot, current in enumerate(used):
    left = selection
    for other in used:
      left = jnp.where(_number(left) == other, -jnp.inf, left)
    kept = _at(scores, current) >= c * least
    used[slot] = jnp.where(kept, current, _best(left))
  return used


@functools.partial(jax.jit, static_argnames=('count', 'interpret'))
def order(
  experts: jax.Array, count: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Slots by expert, the inverse, and sizes; see the package."""
  flat = experts.reshape(-1).astype(jnp.int32)
  size = flat.shape[0]
  high = -(-size // CHUNK) * CHUNK
  block = pl.BlockSpec((1, CHUNK), lambda i: (0, i))
  ranks, sizes = pl.pallas_call(
    _rank,
    out_shape=[
      jax.ShapeDtypeStruct((1, high), jnp.int32),
      jax.ShapeDtypeStruct((count, LANES), jnp.int32),
    ],
    grid=(high // CHUNK,),
    in_specs=[block],
    out_specs=[block, pl.BlockSpec((count, LANES), lambda i: (0, 0))],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',)),
    name='route_order',
    cost_estimate=pl.CostEstimate(
      flops=2 * high * count * CHUNK, bytes_accessed=8 * high, transcendentals=0
    ),
    interpret=interpret,
  )(jnp.pad(flat, (0, high - size), constant_values=-1)[None])
  sizes = sizes[:, 0]
  starts = jnp.cumsum(sizes) - sizes
  places = ranks[0, :size] + starts[flat]
  slots = (
    jnp.zeros_like(places)
    .at[places]
    .set(jnp.arange(size, dtype=jnp.int32), unique_indices=True)
  )
  return slots, places, sizes


def _rank(experts, ranks, sizes) -> None:
  """Of each slot: how many before it have the same expert."""

  @pl.when(pl.program_id(0) == 0)
  def _():
    sizes[...] = jnp.zeros_like(sizes)

  count = sizes.shape[0]
  number = lax.broadcasted_iota(jnp.int32, (count, CHUNK), 0)
  hit = number == experts[...]
  ones = hit.astype(jnp.bfloat16)  # sums of up to 256 ones are exact in float32
  before = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
  after = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
  triangle = (before < after).astype(jnp.bfloat16)
  within = jnp.dot(ones, triangle, preferred_element_type=jnp.float32)
  so_far = sizes[:, :1]
  rank = jnp.where(hit, within.astype(jnp.int32) + so_far, 0)
  ranks[...] = jnp.sum(rank, axis=0, keepdims=True)
  sizes[...] += jnp.sum(hit.astype(jnp.int32), axis=1, keepdims=True)
