"""Experts on other devices: rows go to them, and what they make comes back.

A token's K rows are sorted by the device that holds their expert. They travel in
rounds: in each, a device sends every other at most `capacity` rows,
in buffers of one static size, by one all-to-all. With a balanced router one
round does; rounds go on until every row was served, and nothing is dropped. The
loop has a custom derivative, for the number of its trips is known only while it
runs: the backward pass sends rows and cotangents the same way.

The K results of a token are added up in slot order, in float32, after the last
round: not even the number of rounds changes a bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from composer import mesh as mesh_lib
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul as grouped

Array = jax.Array
Layout = mesh_lib.Layout

MULTIPLE = 8  # rows of a buffer come in multiples of it


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Static sizes of one exchange."""

  axes: tuple[str, ...]  # mesh axes that the experts lie over
  devices: int  # P
  capacity: int  # C, rows for each device and round
  rounds: bool  # whether more than one may be needed
  all_axes: tuple[str, ...]  # over which the number of rounds is agreed
  implementation: str  # a name of `EXCHANGES`


@struct.dataclass
class Plan:
  """Where each of the R K rows of R tokens goes."""

  source: Array  # int32 [R K], rows in the order that they are sent in
  start: Array  # int32 [P], first row for each device
  count: Array  # int32 [P]
  expert: Array  # int32 [R K], on its device, in the order of `source`
  device: Array  # int32 [R, K]
  place: Array  # int32 [R, K], among the rows for that device


def experts_exchanged(
  layout: Layout,
  p: Any,
  x: Array,
  experts: Array,
  gates: Array,
  implementation: str | None = None,
) -> Array:
  """Sum of a token's experts, weighted by its gates, wherever they are.

  Inside of `shard_map`. The backward pass computes the experts again.

  Args:
    layout: static; `chunk` tokens go at once.
    p: `gate_up` [E / P, D, 2, F] and `down` [E / P, F, D] of this device's
      experts; float32 or bfloat16, as x is.
    x: [R, D].
    experts: int32 [R, K], of all experts.
    gates: float32 [R, K].
    implementation: a name of `EXCHANGES`; None: 'ragged' where it exists.

  Returns:
    [R, D], in x's dtype.
  """
  rows, k = experts.shape
  chunk = _divisor(rows, layout.chunk or rows)
  sizes = _sizes(layout, chunk, k, p['gate_up'].shape[0], implementation)
  weights = (p['gate_up'], p['down'])
  return _chunked(sizes, chunk, weights, x, experts, gates)


def _sizes(layout, chunk, k, held, implementation) -> Sizes:
  devices = layout.size(*layout.expert_axes)
  most = chunk * min(k, held)  # the experts of a token differ
  wanted = math.ceil(layout.slack * chunk * k / devices)
  capacity = min(most, -(-wanted // MULTIPLE) * MULTIPLE)
  if implementation is None:
    implementation = 'padded' if dispatch.platform() == 'cpu' else 'ragged'
  if implementation not in EXCHANGES:
    raise ValueError(
      f'there is no exchange {implementation!r}; choose one of'
      f' {", ".join(EXCHANGES)}'
    )
  return Sizes(
    layout.expert_axes,
    devices,
    capacity,
    capacity < most,
    mesh_lib.AXES,
    implementation,
  )


def _divisor(rows: int, most: int) -> int:
  return next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)


# --- one round ----------------------------------------------------------------


def _counting_sort(
  keys: Array, groups: int
) -> tuple[Array, Array, Array, Array]:
  """Sorts keys [N], each below `groups`; equal ones keep their order.

  By products and one scatter: XLA takes many seconds to compile a sort of this
  size for a TPU.

  Returns:
    (place [N] of each key among its equals, place in the whole, its inverse,
    size of each group [groups]), int32.
  """
  n, block = keys.shape[0], _divisor(keys.shape[0], 256)
  one_hot = keys[:, None] == jnp.arange(groups)[None]
  blocks = one_hot.astype(jnp.bfloat16).reshape(n // block, block, groups)
  # Sums of zeros and ones, exact in float32 up to 2^24.
  before = jnp.tri(block, k=-1, dtype=jnp.bfloat16)
  inside = jnp.einsum(
    'ij,bjg->big', before, blocks, preferred_element_type=jnp.float32
  )
  sums = jnp.sum(blocks, axis=1, dtype=jnp.float32)  # [N / block, G]
  ahead = jnp.cumsum(sums, axis=0) - sums
  count = jnp.sum(sums, axis=0).astype(jnp.int32)
  start = jnp.cumsum(count) - count
  ranks = (inside + ahead[:, None]).reshape(n, groups)
  rank = jnp.sum(jnp.where(one_hot, ranks, 0), axis=1).astype(jnp.int32)
  place = start[keys] + rank
  order = jnp.zeros((n,), jnp.int32)
  order = order.at[place].set(
    jnp.arange(n, dtype=jnp.int32), unique_indices=True
  )
  return rank, place, order, count


def _plan(sizes: Sizes, held: int, experts: Array) -> Plan:
  flat = experts.reshape(-1)
  device = flat // held
  rank, _, source, count = _counting_sort(device, sizes.devices)
  return Plan(
    source=source,
    start=jnp.cumsum(count) - count,
    count=count,
    expert=flat[source] % held,
    device=device.reshape(experts.shape),
    place=rank.reshape(experts.shape),
  )


def _rounds(sizes: Sizes, plan: Plan) -> Array:
  """Trips until all devices have sent all rows; the same on all of them."""
  most = jax.lax.pmax(jnp.max(plan.count), sizes.all_axes)
  return -(-most // sizes.capacity)


def _taken(sizes: Sizes, plan: Plan, trip: Array) -> tuple[Array, Array, Array]:
  """(index into `source` [P, C], whether it is a row [P, C], rows [P])."""
  ahead = trip * sizes.capacity
  places = ahead + jnp.arange(sizes.capacity, dtype=jnp.int32)
  index = plan.start[:, None] + places[None, :]
  valid = places[None, :] < plan.count[:, None]
  index = jnp.where(valid, index, 0)
  return index, valid, jnp.clip(plan.count - ahead, 0, sizes.capacity)


def _padded(sizes: Sizes, x: Array, counts: Array, received: Array) -> Array:
  del counts, received
  return jax.lax.all_to_all(x, sizes.axes, 0, 0, tiled=True)


def _ragged(sizes: Sizes, x: Array, counts: Array, received: Array) -> Array:
  """Only rows that are there travel; the rest of the buffer stays zero."""
  flat = x.reshape(-1, *x.shape[2:])
  device = jax.lax.axis_index(sizes.axes)
  starts = jnp.arange(sizes.devices, dtype=jnp.int32) * sizes.capacity
  out = jax.lax.ragged_all_to_all(
    flat,
    jnp.zeros_like(flat),
    starts,
    counts,
    jnp.broadcast_to(device * sizes.capacity, starts.shape).astype(jnp.int32),
    received,
    axis_name=sizes.axes[0] if len(sizes.axes) == 1 else sizes.axes,
  )
  return out.reshape(x.shape)


EXCHANGES = {'padded': _padded, 'ragged': _ragged}


@struct.dataclass
class Arrived:
  """Rows of all devices, sorted by the expert that they are for."""

  order: Array  # int32 [P C], of the rows in the buffer
  back: Array  # its inverse
  sizes: Array  # int32 [E / P]
  real: Array  # bool [P C, 1]
  counts: Array  # int32 [P], rows sent to each device
  received: Array  # int32 [P], rows got from each


def _arrive(sizes: Sizes, held: int, plan: Plan, taken: Any) -> Arrived:
  """Tells the others which experts are wanted, and hears it from them."""
  index, valid, counts = taken
  wanted = jnp.where(valid, plan.expert[index], held).astype(jnp.int32)
  wanted = _padded(sizes, wanted, counts, counts)
  received = jnp.sum(wanted < held, axis=1, dtype=jnp.int32)
  wanted = wanted.reshape(-1)
  _, back, order, count = _counting_sort(wanted, held + 1)
  real = jnp.arange(wanted.shape[0]) < wanted.shape[0] - count[held]
  return Arrived(order, back, count[:held], real[:, None], counts, received)


def _send(sizes: Sizes, arrived: Arrived, rows: Array) -> Array:
  """rows [P, C, ...] to the devices of their experts: [P C, ...], sorted."""
  send = EXCHANGES[sizes.implementation]
  got = send(sizes, rows, arrived.counts, arrived.received)
  return got.reshape(-1, *got.shape[2:])[arrived.order]


def _return(sizes: Sizes, arrived: Arrived, rows: Array) -> Array:
  """Inverse of `_send`: [P C, ...], sorted, to [P, C, ...] at their senders."""
  send = EXCHANGES[sizes.implementation]
  back = rows[arrived.back].reshape(
    sizes.devices, sizes.capacity, *rows.shape[1:]
  )
  return send(sizes, back, arrived.received, arrived.counts)


def _products(arrived: Arrived, weights: Any, rows: Array) -> Array:
  """The experts' feed-forward of sorted rows [P C, D]."""
  gate_up, down = weights
  held, d, _, f = gate_up.shape
  flat = gate_up.reshape(held, d, 2 * f)
  both = grouped.grouped_matmul(rows, flat, arrived.sizes)
  # Past the rows that are there, a product may be anything.
  both = jnp.where(arrived.real, both, 0).astype(jnp.float32)
  hidden = jax.nn.silu(both[:, :f]) * both[:, f:]
  out = grouped.grouped_matmul(hidden.astype(rows.dtype), down, arrived.sizes)
  return jnp.where(arrived.real, out, 0)


def _slots(sizes: Sizes, plan: Plan, trip: Array, back: Array) -> Array:
  """What came back [P, C, ...], by token and slot: [R, K, ...], else 0."""
  place = plan.place - trip * sizes.capacity
  here = (place >= 0) & (place < sizes.capacity)
  index = plan.device * sizes.capacity + jnp.where(here, place, 0)
  found = back.reshape(-1, *back.shape[2:])[index]
  here = here.reshape(*here.shape, *[1] * (found.ndim - 2))
  return jnp.where(here, found, 0)


def _trips(sizes: Sizes, plan: Plan, body: Any, carry: Any) -> Any:
  """carry = body(trip, carry) for every round."""
  if not sizes.rounds:
    return body(jnp.int32(0), carry)
  return jax.lax.fori_loop(0, _rounds(sizes, plan), body, carry)


# --- all of them --------------------------------------------------------------


def _one_chunk(sizes, weights, x, experts, gates):
  """Values of one chunk of tokens; see `experts_exchanged`."""
  held, k = weights[0].shape[0], experts.shape[1]
  plan = _plan(sizes, held, experts)

  def body(trip, slots):
    taken = _taken(sizes, plan, trip)
    arrived = _arrive(sizes, held, plan, taken)
    rows = x[plan.source[taken[0]] // k]  # [P, C, D]
    out = _products(arrived, weights, _send(sizes, arrived, rows))
    back = _return(sizes, arrived, out)
    return slots + _slots(sizes, plan, trip, back)

  slots = jnp.zeros((*experts.shape, x.shape[1]), x.dtype)
  return _combine(gates, _trips(sizes, plan, body, slots)).astype(x.dtype)


def _combine(gates: Array, slots: Array) -> Array:
  total = jnp.zeros((slots.shape[0], slots.shape[2]), jnp.float32)
  for slot in range(slots.shape[1]):
    total = total + gates[:, slot, None] * slots[:, slot]
  return total


def _one_chunk_gradient(sizes, weights, x, experts, gates, dy, sums):
  """(dx [R, D], dgates [R, K], sums + gradients of the weights).

  Rows go out again with their cotangents. A gate's cotangent <y, dy> is made
  where y is, so that y need not travel.
  """
  held, k = weights[0].shape[0], experts.shape[1]
  plan = _plan(sizes, held, experts)

  def body(trip, carry):
    slots, dgates, sums = carry
    taken = _taken(sizes, plan, trip)
    arrived = _arrive(sizes, held, plan, taken)
    source = plan.source[taken[0]]  # [P, C]
    rows = _send(sizes, arrived, x[source // k])
    cotangents = _send(sizes, arrived, dy[source // k])
    gate = _send(sizes, arrived, gates.reshape(-1)[source][..., None])
    out, pull = jax.vjp(functools.partial(_products, arrived), weights, rows)
    wide = cotangents.astype(jnp.float32)
    dgate = jnp.sum(out * wide, axis=-1, keepdims=True)  # [P C, 1]
    scaled = jnp.where(arrived.real, gate * wide, 0).astype(out.dtype)
    grad, drows = pull(scaled)
    sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grad)
    drows = _return(sizes, arrived, jnp.where(arrived.real, drows, 0))
    dgate = _return(sizes, arrived, dgate)
    slots = slots + _slots(sizes, plan, trip, drows)
    dgates = dgates + _slots(sizes, plan, trip, dgate)[..., 0]
    return slots, dgates, sums

  slots = jnp.zeros((*experts.shape, x.shape[1]), x.dtype)
  start = (slots, jnp.zeros_like(gates), sums)
  slots, dgates, sums = _trips(sizes, plan, body, start)
  dx = _combine(jnp.ones_like(gates), slots)
  return dx.astype(x.dtype), dgates, sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(sizes, chunk, weights, x, experts, gates):
  run = functools.partial(_one_chunk, sizes, weights)
  if chunk == x.shape[0]:
    return run(x, experts, gates)
  parts = _cut(chunk, (x, experts, gates))
  return jax.lax.map(lambda a: run(*a), parts).reshape(x.shape)


def _cut(chunk: int, arrays: Any) -> Any:
  return jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), arrays)


def _chunked_forward(sizes, chunk, weights, x, experts, gates):
  out = _chunked(sizes, chunk, weights, x, experts, gates)
  return out, (weights, x, experts, gates)


def _chunked_backward(sizes, chunk, residuals, dy):
  weights, x, experts, gates = residuals
  sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
  run = functools.partial(_one_chunk_gradient, sizes, weights)
  if chunk == x.shape[0]:
    dx, dgates, sums = run(x, experts, gates, dy, sums)
  else:

    def body(sums, part):
      dx, dgates, sums = run(*part, sums)
      return sums, (dx, dgates)

    parts = _cut(chunk, (x, experts, gates, dy))
    sums, (dx, dgates) = jax.lax.scan(body, sums, parts)
  # Gradients of the weights stay float32 up to here; the cotangent of a
  # bfloat16 weight is bfloat16, rounded once.
  grads = jax.tree.map(lambda s, w: s.astype(w.dtype), sums, weights)
  return grads, dx.reshape(x.shape), None, dgates.reshape(gates.shape)


_chunked.defvjp(_chunked_forward, _chunked_backward)
