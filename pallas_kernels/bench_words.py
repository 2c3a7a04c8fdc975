"""The rows of the benchmark for route, delta, quantize and packed weights.

What these do takes as long as a launch or less, so on a GPU a time is the sum of
the kernels' own, without the gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench
from pallas_kernels import bench_time
from pallas_kernels import delta
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import quantize
from pallas_kernels import route
from pallas_kernels.delta import reference as delta_reference
from pallas_kernels.delta import shapes as delta_shapes
from pallas_kernels.grouped_matmul import packed
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.quantize import reference as quantize_reference
from pallas_kernels.quantize import shapes as quantize_shapes
from pallas_kernels.route import reference as route_reference
from pallas_kernels.route import shapes as route_shapes

Row = bench.Row


def _timed(row: Row, function: Callable[..., Any], *arguments: Any) -> Row:
  if dispatch.platform() != 'gpu':
    return bench._timed(row, function, *arguments)
  try:
    ready = jax.jit(function)
    took = bench_time.device_seconds(
      lambda: ready(*arguments), jax.block_until_ready
    )
  except Exception as error:  # one shape must not end the benchmark
    return dataclasses.replace(row, note=f'{type(error).__name__}: {error}')
  return dataclasses.replace(row, seconds=took)


def _differing(got: Any, want: Any) -> int:
  """Elements with other bits, of all arrays."""

  def bits(array):
    size = jnp.dtype(array.dtype).itemsize
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{8 * size}'))

  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return sum(int(jnp.sum(bits(a) != bits(b))) for a, b in pairs)


def changes(shape: delta_shapes.Shape) -> Iterator[Row]:
  """compact and scatter: bytes are those of the weights, once."""
  keys = jax.random.split(jax.random.key(1), 2)
  dtype = delta.WORDS[shape.bits // 8]
  base = jax.random.bits(keys[0], (shape.words,), dtype)
  hit = jax.random.uniform(keys[1], (shape.words,)) < shape.changed
  new = jnp.where(hit, base ^ dtype(1), base)
  size = dict(bytes=shape.words * shape.bits // 8)

  def ours(base, new):
    return delta.compact(base, new, shape.capacity)

  def theirs(base, new):
    return delta_reference.compact(base, new, shape.capacity)

  found = jax.jit(ours)(base, new)
  differing = _differing(found, jax.jit(theirs)(base, new))
  row = Row('delta', shape.name, 'ours', differing=differing, **size)
  yield _timed(row, ours, base, new)
  yield _timed(Row('delta', shape.name, 'xla', **size), theirs, base, new)
  row = Row('delta scatter', shape.name, 'xla', **size)
  yield _timed(row, delta.scatter, base, *found[1:])


def routing(shape: route_shapes.Shape) -> Iterator[Row]:
  """Native, replayed and audited routing, and the order of dispatch."""
  router, e = shape.router, shape.experts
  keys = jax.random.split(jax.random.key(1), 3)
  logits = jax.random.normal(keys[0], (shape.rows, e))
  bias = 0.1 * jax.random.normal(keys[1], (e,))
  careful = dataclasses.replace(router, plausibility=0.5)
  plain = route_reference.route
  experts = plain(logits, bias, None, router)[0]
  replay = jax.random.permutation(keys[2], experts).astype(jnp.int16)

  def sorted_(routed, order):
    return routed, order(routed[0], e)

  cases = {
    'route': (
      lambda z, b, r: route.route(z, b, router)[:2],
      lambda z, b, r: plain(z, b, None, router)[:2],
    ),
    'route replayed': (
      lambda z, b, r: route.route(z, b, router, r)[:2],
      lambda z, b, r: (
        r.astype(jnp.int32),
        route_reference.gates_of(z, r.astype(jnp.int32), router),
      ),
    ),
    'route audited': (
      lambda z, b, r: tuple(route.route(z, b, careful, r, audit=True)),
      lambda z, b, r: plain(z, b, r, careful),
    ),
    'route and order': (
      lambda z, b, r: sorted_(route.route(z, b, router)[:2], route.order),
      lambda z, b, r: sorted_(
        plain(z, b, None, router)[:2], route_reference.order
      ),
    ),
  }
  for operation, (ours, theirs) in cases.items():
    found, want = (jax.jit(f)(logits, bias, replay) for f in (ours, theirs))
    gates = [jax.tree.leaves(one)[1] for one in (found, want)]
    row = Row(operation, shape.name, 'ours', error=bench.relative(*gates))
    yield _timed(row, ours, logits, bias, replay)
    row = Row(operation, shape.name, 'xla')
    yield _timed(row, theirs, logits, bias, replay)


def rounding(shape: quantize_shapes.Shape) -> Iterator[Row]:
  """Every form; bytes are read in bfloat16 and written in the form."""
  x = jax.random.normal(jax.random.key(1), (shape.rows, shape.k), jnp.bfloat16)
  plain = quantize_reference
  cases = {
    'nvfp4': (quantize.nvfp4, lambda x: plain.nvfp4(x, True), 2 + 9 / 16),
    'mxfp8': (quantize.mxfp8, plain.mxfp8, 3 + 1 / 32),
    'fp8': (quantize.fp8, plain.fp8_squares, 3),
  }
  for form, (ours, theirs, each) in cases.items():
    size = dict(bytes=int(each * x.size))
    differing = _differing(jax.jit(ours)(x), jax.jit(theirs)(x))
    row = Row(f'quantize {form}', shape.name, 'ours', **size)
    yield _timed(dataclasses.replace(row, differing=differing), ours, x)
    yield _timed(dataclasses.replace(row, who='xla'), theirs, x)


def packed_weights(shape: grouped_shapes.Shape) -> Iterator[Row]:
  """Decoding with weights of four and eight bits, against bfloat16."""
  sizes = shape.sizes()
  group_sizes = jnp.asarray(sizes)
  keys = jax.random.split(jax.random.key(1), 2)
  x = jax.random.normal(keys[0], (shape.rows, shape.k), jnp.bfloat16)
  e, k, n = shape.groups, shape.k, shape.n
  w = jax.random.normal(keys[1], (e, k, n), jnp.bfloat16)
  codes, scale, outer = jax.lax.map(
    lambda one: quantize_reference.nvfp4(one.T, False), w
  )
  four = packed.Nvfp4(
    jnp.swapaxes(codes, 1, 2), jnp.swapaxes(scale, 1, 2), outer
  )
  eight = packed.Fp8(*jax.lax.map(quantize_reference.fp8_squares, w))
  run = grouped_matmul.grouped_matmul
  numbers = int((sizes > 0).sum()) * k * n
  for form, weights, each in (
    ('bfloat16', w, 2),
    ('nvfp4', four, 9 / 16),
    ('fp8', eight, 1),
  ):
    row = Row('packed weights', shape.name, 'ours', note=form)
    row = dataclasses.replace(row, bytes=int(each * numbers))
    if form != 'bfloat16':
      found = jax.jit(run)(x, weights, group_sizes)
      plain = packed._product(x, packed.unpack(weights), group_sizes, _exact())
      if form == 'nvfp4':
        own = jnp.repeat(outer, group_sizes, total_repeat_length=len(x))
        plain = plain * own[:, None]
      differing = _differing(found, plain.astype(x.dtype))
      row = dataclasses.replace(row, who=form, note='', differing=differing)
    yield _timed(row, run, x, weights, group_sizes)


def _exact() -> str:
  """The kernel of bfloat16 weights, whose bits those of packed ones are."""
  return 'gpu' if dispatch.platform() == 'gpu' else 'reference'
