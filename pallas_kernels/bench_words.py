"""The rows of the benchmark for route, delta, quantize and packed weights.

What these do takes as long as a launch or less, so on a GPU a time is that of the
kernels alone, without the gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench_rows
from pallas_kernels import delta
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import quantize
from pallas_kernels import route
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows
from pallas_kernels.delta import reference as delta_reference
from pallas_kernels.delta import shapes as delta_shapes
from pallas_kernels.grouped_matmul import packed
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.quantize import reference as quantize_reference
from pallas_kernels.quantize import shapes as quantize_shapes
from pallas_kernels.route import reference as route_reference
from pallas_kernels.route import shapes as route_shapes

timed = functools.partial(bench_rows.timed, kernels=True)


def _pair(
  row: Row, ours, theirs, arguments, compare: Callable[[Any, Any], Row]
) -> Iterator[Row]:
  """A row of ours, compared with what XLA gives, and one of XLA's."""
  ready = bench_rows.ahead({'theirs': (theirs, *arguments)})['theirs']
  try:
    checked = compare(ours(*arguments), ready(*arguments))
  except Exception as error:  # said, and timed all the same
    note = f'{bench_rows.UNCHECKED}{bench_rows.reason(error)}'
    checked = dataclasses.replace(row, note=note)
  yield timed(checked, ours, *arguments)
  yield timed(dataclasses.replace(row, who='xla'), ready, *arguments)


def changes(shape: delta_shapes.Shape) -> Rows:
  """compact and scatter.

  Bytes are those that have to move: both arrays are read, and what changed is
  written. The note gives the weights alone, once; of them no more than half the
  rate of a copy is possible, which counts what it reads and what it writes.
  """
  dtype = delta.WORDS[shape.bits // 8]

  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    base = jax.random.bits(keys[0], (shape.words,), dtype)
    hit = jax.random.uniform(keys[1], (shape.words,)) < shape.changed
    return base, jnp.where(hit, base ^ dtype(1), base)

  ours = functools.partial(delta.compact, capacity=shape.capacity)
  theirs = functools.partial(delta_reference.compact, capacity=shape.capacity)
  arrays = jax.eval_shape(draw, bench_rows.SEED)
  programs = {'draw': (draw, bench_rows.SEED), 'ours': (ours, *arrays)}
  ready = bench_rows.ahead(programs, {'draw'})
  yield None
  arrays = bench_rows.draw(ready['draw'])
  once = shape.words * shape.bits // 8
  changed = int(shape.words * shape.changed)
  moved = 2 * once + changed * (4 + shape.bits // 8)
  row = Row('delta', shape.name, 'ours', bytes=moved)

  def compare(got, want):
    differing = int(bench_rows.differing(got, want))
    return dataclasses.replace(row, differing=differing)

  for one in _pair(row, ready['ours'], theirs, arrays, compare):
    if one.seconds:
      rate = f'{once / one.seconds / 1e12:.2f} TB/s of weights'
      note = f'{one.note}, {rate}' if one.note else rate
      one = dataclasses.replace(one, note=note)
    yield one
  found = ready['ours'](*arrays)
  row = Row('delta scatter', shape.name, 'xla', bytes=2 * once)
  yield timed(row, delta.scatter, arrays[0], *found[1:])


def routing(shape: route_shapes.Shape) -> Rows:
  """Native, replayed and audited routing, and the order of dispatch."""
  router, e = shape.router, shape.experts
  cases = _routings(router, e)

  def draw(seed):
    keys = bench_rows.keys(seed, 3)
    logits = jax.random.normal(keys[0], (shape.rows, e))
    bias = 0.1 * jax.random.normal(keys[1], (e,))
    experts = route_reference.route(logits, bias, None, router)[0]
    replay = jax.random.permutation(keys[2], experts).astype(jnp.int16)
    return logits, bias, replay

  arrays = jax.eval_shape(draw, bench_rows.SEED)
  programs = {name: (ours, *arrays) for name, (ours, _) in cases.items()}
  programs['draw'] = draw, bench_rows.SEED
  ready = bench_rows.ahead(programs, {'draw'})
  yield None
  arrays = bench_rows.draw(ready['draw'])
  for operation, (_, theirs) in cases.items():
    row = Row(operation, shape.name, 'ours')

    def compare(got, want, row=row):
      gates = [jax.tree.leaves(one)[1] for one in (got, want)]
      error = float(bench_rows.relative(*gates))
      return dataclasses.replace(row, error=error)

    yield from _pair(row, ready[operation], theirs, arrays, compare)


def _routings(router: route_reference.Router, e: int):
  """By operation ours and XLA's, of logits, bias and replayed experts."""
  careful = dataclasses.replace(router, plausibility=0.5)
  plain = route_reference.route

  def sorted_(routed, order):
    return routed, order(routed[0], e)

  return {
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


def rounding(shape: quantize_shapes.Shape) -> Rows:
  """Every form; bytes are read in bfloat16 and written in the form.

  Rows are of very different sizes and their numbers of all that bfloat16 has;
  those that it draws itself are few, and their quotients fewer.
  """

  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    x = jax.random.normal(keys[0], (shape.rows, shape.k))
    wide = jnp.exp(3 * jax.random.normal(keys[1], (shape.rows, 1)))
    return (x * wide).astype(jnp.bfloat16)

  x = jax.eval_shape(draw, bench_rows.SEED)
  plain = quantize_reference
  cases = {
    'nvfp4': (quantize.nvfp4, lambda x: plain.nvfp4(x, True), 2 + 9 / 16),
    'mxfp8': (quantize.mxfp8, plain.mxfp8, 3 + 1 / 32),
    'fp8': (quantize.fp8, plain.fp8_squares, 3),
  }
  programs = {form: (ours, x) for form, (ours, _, _) in cases.items()}
  programs['draw'] = draw, bench_rows.SEED
  ready = bench_rows.ahead(programs, {'draw'})
  yield None
  x = bench_rows.draw(ready['draw'])
  for form, (_, theirs, each) in cases.items():
    row = Row(f'quantize {form}', shape.name, 'ours', bytes=int(each * x.size))

    def compare(got, want, row=row):
      differing = int(bench_rows.differing(got, want))
      return dataclasses.replace(row, differing=differing)

    yield from _pair(row, ready[form], theirs, (x,), compare)


def packed_weights(shape: grouped_shapes.Shape) -> Rows:
  """Decoding with weights of four and eight bits, against bfloat16."""
  sizes = shape.sizes()
  e, k, n = shape.groups, shape.k, shape.n
  run = grouped_matmul.grouped_matmul

  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    x = bench_rows.normal(keys[0], shape.rows, k)
    w = bench_rows.normal(keys[1], e, k, n)
    codes, scale, outer = jax.lax.map(
      lambda one: quantize_reference.nvfp4(one.T, False), w
    )
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    four = packed.Nvfp4(swap(codes), swap(scale), outer)
    eight = packed.Fp8(*jax.lax.map(quantize_reference.fp8_squares, w))
    return x, {'bfloat16': w, 'nvfp4': four, 'fp8': eight}

  def differing(x, weights, group_sizes, found):
    """From what the kernel of bfloat16 weights gives, unpacked."""
    own = 'gpu' if dispatch.platform() == 'gpu' else 'reference'
    plain = packed._product(x, packed.unpack(weights), group_sizes, own)
    if isinstance(weights, packed.Nvfp4):
      outer = jnp.repeat(weights.outer, group_sizes, total_repeat_length=len(x))
      plain = plain * outer[:, None]
    return bench_rows.differing(found, plain.astype(x.dtype))

  x, forms = jax.eval_shape(draw, bench_rows.SEED)
  counts = jax.ShapeDtypeStruct(sizes.shape, jnp.int32)
  y = jax.ShapeDtypeStruct((shape.rows, n), x.dtype)
  programs = {'draw': (draw, bench_rows.SEED)}
  for form, weights in forms.items():
    programs[form] = run, x, weights, counts
    if form != 'bfloat16':
      programs[f'{form} differing'] = differing, x, weights, counts, y
  ready = bench_rows.ahead(programs, {'draw'})
  yield None
  x, forms = bench_rows.draw(ready['draw'])
  arrays = jnp.asarray(sizes)
  numbers = int((sizes > 0).sum()) * k * n
  for form, each in (('bfloat16', 2), ('nvfp4', 9 / 16), ('fp8', 1)):
    arguments = x, forms[form], arrays
    row = Row('packed weights', shape.name, 'ours', note=form)
    row = dataclasses.replace(row, bytes=int(each * numbers))
    if form != 'bfloat16':
      row = dataclasses.replace(row, who=form, note='')

      def compare(form=form, arguments=arguments):
        found = ready[form](*arguments)
        return ready[f'{form} differing'](*arguments, found)

      row = bench_rows.checked(row, differing=compare)
    yield timed(row, ready[form], *arguments)
