"""The rows of the benchmark for a whole MoE layer, as a model runs it.

Route, sort, gather, the experts' two products and the combination; what comes
before (norm and the product with the router) and after is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_rows
from pallas_kernels import bench_shapes
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import route
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows

EXPANDED = 5e9  # numbers of rows times experts that XLA may be asked to hold


class Arrays(NamedTuple):
  """Arrays of a layer."""

  x: jax.Array  # [T, D]
  logits: jax.Array  # float32 [T, E]
  bias: jax.Array | None  # float32 [E]
  gate_up: jax.Array  # [E, D, 2, F]
  down: jax.Array  # [E, F, D]


def layer(shape: bench_shapes.Layer) -> Rows:
  """Ours against XLA's and PyTorch's, on the same arrays."""
  if dispatch.platform() == 'cpu':
    small = dataclasses.replace(shape.router, k=2)
    shape = dataclasses.replace(
      shape, width=64, hidden=64, experts=8, router=small
    )
  ours = functools.partial(_by_kernels, router=shape.router)
  some = np.asarray([0, shape.rows - 1])
  few = np.arange(shape.rows)[::-3]

  def differing(drawn, found):
    """Of fewer rows, the other way round."""
    less = drawn._replace(x=drawn.x[few], logits=drawn.logits[few])
    return bench_rows.differing(ours(*less)[0], found[few])

  def error(drawn, found, experts, gates):
    want = _exact(drawn, experts[some], gates[some], some)
    return bench_rows.relative(found[some], want)

  drawn = jax.eval_shape(functools.partial(_draw, shape), bench_rows.SEED)
  results = jax.eval_shape(ours, *drawn)
  programs = {
    'draw': (functools.partial(_draw, shape), bench_rows.SEED),
    'ours': (ours, *drawn),
    'error': (error, drawn, *results),
    'differing': (differing, drawn, results[0]),
  }
  ready = bench_rows.ahead(programs, {'draw', 'error'})
  yield None
  yield from _rows(shape, ready, bench_rows.draw(ready['draw']))


def _rows(shape: bench_shapes.Layer, ready, drawn: Arrays) -> Iterator[Row]:
  found, experts, gates = ready['ours'](*drawn)
  used = np.bincount(np.asarray(experts).reshape(-1))
  active = int((used > 0).sum())
  size = dict(
    flops=shape.flops, bytes=2 * 3 * active * shape.width * shape.hidden
  )
  row = Row('moe layer', shape.name, 'ours', **size)
  checks = dict(error=lambda: ready['error'](drawn, found, experts, gates))
  if dispatch.platform() != 'cpu':  # there it is XLA's
    checks['differing'] = lambda: ready['differing'](drawn, found)
  own = bench_rows.checked(row, **checks)
  yield bench_rows.timed(own, ready['ours'], *drawn)
  row = dataclasses.replace(row, who='xla')
  expanded = shape.rows * shape.router.k * shape.experts * shape.width
  if expanded < EXPANDED or dispatch.platform() != 'gpu':
    theirs = functools.partial(_by_xla, router=shape.router)
    yield bench_rows.timed(row, theirs, *drawn)
  else:
    note = f'it would hold {2 * expanded / 2**30:.0f} GiB of rows'
    yield dataclasses.replace(row, note=note)
  torch = bench_rows.torch()
  if torch is not None:
    row = dataclasses.replace(row, who='torch')
    shared = _shared(drawn, torch)
    call = functools.partial(_by_torch, torch, shape.router, *shared)
    yield bench_rows.torch_timed(row, torch, call)


def _draw(shape: bench_shapes.Layer, seed: Any) -> Arrays:
  keys = bench_rows.keys(seed, 5)
  e, d, f = shape.experts, shape.width, shape.hidden

  def draw(i, *size):
    return bench_rows.normal(keys[i], *size)

  bias = 0.01 * jax.random.normal(keys[4], (e,))
  return Arrays(
    draw(0, shape.rows, d),
    jax.random.normal(keys[1], (shape.rows, e)),
    bias if shape.router.kind == 'sigmoid' else None,
    draw(2, e, d, 2, f) * jnp.bfloat16(d**-0.5),
    draw(3, e, f, d) * jnp.bfloat16(f**-0.5),
  )


def _combine(out, places, gates):
  """sum_k gate[t, k] out[place of (t, k)], in float32, slot after slot."""
  rows, k = gates.shape
  slots = out[places].reshape(rows, k, -1)
  total = jnp.zeros((rows, out.shape[1]), jnp.float32)
  for slot in range(k):
    total = total + gates[:, slot, None] * slots[:, slot]
  return total.astype(out.dtype)


def _by_kernels(x, logits, bias, gate_up, down, router):
  """By one launch to the experts where there are few rows, as a model does."""
  sent = route.send(x, logits, bias, router)
  if sent is None:
    routed = route.route(logits, bias, router)
    order = route.order(routed.experts, down.shape[0])
    rows = x[order.slots // router.k]
    sent = route.Sent(*routed[:2], rows, order.places, order.sizes)
  sizes = sent.groups
  hidden = grouped_matmul.grouped_matmul(sent.rows, gate_up, sizes, gated=True)
  out = grouped_matmul.grouped_matmul(hidden, down, sizes)
  return _combine(out, sent.places, sent.gates), sent.experts, sent.gates


def _by_xla(x, logits, bias, gate_up, down, router):
  e, d, _, f = gate_up.shape
  plain = route.reference
  experts, gates, _ = plain.route(logits, bias, None, router)
  slots, places, sizes = plain.order(experts, e)
  both = jax.lax.ragged_dot(
    x[slots // router.k], gate_up.reshape(e, d, 2 * f), sizes
  )
  hidden = jax.nn.silu(both[:, :f]) * both[:, f:]
  return _combine(jax.lax.ragged_dot(hidden, down, sizes), places, gates)


def _shared(drawn: Arrays, torch: Any) -> list[Any]:
  """The arrays as PyTorch sees them; gate and up side by side."""
  e, d, _, f = drawn.gate_up.shape
  arrays = drawn._replace(gate_up=drawn.gate_up.reshape(e, d, 2 * f))
  return [None if a is None else torch.from_dlpack(a) for a in arrays]


def _by_torch(torch, router, x, logits, bias, gate_up, down):
  """The same by PyTorch's own grouped matmul."""
  k, f = router.k, down.shape[1]
  sigmoid = router.kind == 'sigmoid'
  scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
  selection = scores if bias is None else scores + bias
  experts = torch.topk(selection, k).indices
  gates = scores.gather(1, experts)
  gates = gates / gates.sum(1, keepdim=True) * router.scale
  flat = experts.flatten()
  order = torch.argsort(flat, stable=True)
  ends = torch.bincount(flat, minlength=down.shape[0]).cumsum(0)
  ends = ends.to(torch.int32)
  both = torch._grouped_mm(x[order // k], gate_up, offs=ends)
  hidden = torch.nn.functional.silu(both[:, :f]) * both[:, f:]
  out = torch._grouped_mm(hidden, down, offs=ends)
  back = torch.empty_like(order)
  back[order] = torch.arange(order.numel(), device=order.device)
  slots = out[back].view(len(x), k, -1)
  return (slots * gates[..., None]).sum(1).to(x.dtype)


def _exact(drawn: Arrays, experts, gates, rows) -> jax.Array:
  """Some rows in float32, one expert after another."""

  def one(slot):
    row, expert, gate = slot
    wide = lambda a: a[expert].astype(jnp.float32)  # noqa: E731
    into = jnp.einsum(
      'd,dpf->pf',
      drawn.x[row].astype(jnp.float32),
      wide(drawn.gate_up),
      precision='highest',
    )
    hidden = jax.nn.silu(into[0]) * into[1]
    return gate * jnp.dot(hidden, wide(drawn.down), precision='highest')

  n, k = experts.shape
  slots = jnp.repeat(rows, k), experts.reshape(-1), gates.reshape(-1)
  return jnp.sum(jax.lax.map(one, slots).reshape(n, k, -1), axis=1)
