"""The rows of the benchmark for attention over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels import bench_rows
from pallas_kernels import dispatch
from pallas_kernels import paged_attention
from pallas_kernels.bench_attention import LARGE
from pallas_kernels.bench_attention import exact
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows
from pallas_kernels.paged_attention import shapes

# Steps that are timed together, so that the copy of the pages before them is none.
LOOP = 256


def paged(shape: shapes.Shape) -> Rows:
  """Sequences of half to all of the shape's tokens, in pages in any order.

  Few sequences are cut into splits, as decoding in `fast` does; a row without
  splits, whose bits are those of training, is beside it.
  """
  n, queries, block = shape.sequences, shape.queries, shape.block
  count = shape.tokens // block
  rng = np.random.default_rng(1)
  table = rng.permutation(n * count).reshape(n, count).astype(np.int32)
  first = rng.integers(shape.tokens // 2, shape.tokens - queries + 1, n)
  first = np.minimum(first, shape.tokens - queries)
  positions = (first[:, None] + np.arange(queries)).astype(np.int32)
  row = Row('paged_attention', shape.name, 'ours', **_size(shape, first))
  few = shape in shapes.FEW
  split = _split(shape) if few else 0

  def draw(seed):
    keys = bench_rows.keys(seed, 3)
    size = n * count, block, shape.groups
    return (
      bench_rows.normal(keys[0], n, queries, shape.heads, shape.key),
      bench_rows.normal(keys[1], *size, shape.key),
      None if shape.shared else bench_rows.normal(keys[2], *size, shape.width),
      jnp.asarray(table),
      jnp.asarray(positions),
    )

  arguments = jax.eval_shape(draw, bench_rows.SEED)
  out = (n, queries, shape.heads, shape.width)
  out = jax.ShapeDtypeStruct(out, arguments[0].dtype)
  sizes = dict(scale=shape.key**-0.5, width=shape.width if shape.shared else 0)
  run = functools.partial(paged_attention.paged_attention, **sizes)
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (functools.partial(run, split=split), *arguments),
    'error': (functools.partial(_error, shape), *arguments, out),
    'moved': (
      functools.partial(_moved, functools.partial(run, split=split)),
      *(*arguments, out),
    ),
  }
  if split:
    programs['whole'] = run, *arguments
    sizes['width'] = shape.width
    programs['in turn'] = (
      functools.partial(_in_turn, sizes | dict(split=split)),
      *(*arguments, out),
    )
  ready = bench_rows.ahead(programs, {'draw', 'error'})
  yield None
  yield from _rows(shape, row, ready, bench_rows.draw(ready['draw']), run)


def step(shape: shapes.Shape) -> Rows:
  """Writes a token of each sequence and attends: by one kernel, and by two.

  Times are of a step of LOOP, each with what the one before attended to as its
  queries; the pages stay where they are.
  """
  n, block = shape.sequences, shape.block
  count = shape.tokens // block
  rng = np.random.default_rng(1)
  table = rng.permutation(n * count).reshape(n, count).astype(np.int32)
  at = rng.integers(shape.tokens // 2, shape.tokens, n).astype(np.int32)

  def draw(seed):
    keys = bench_rows.keys(seed, 5)
    new, pages = (n, shape.groups), (n * count, block, shape.groups)
    wanted = (n, shape.heads), new, new, pages, pages
    some = [
      bench_rows.normal(key, *size, shape.key)
      for key, size in zip(keys, wanted, strict=True)
    ]
    return *some, jnp.asarray(table), jnp.asarray(at)

  def once(*arrays, fused):
    return paged_attention.decode(
      *arrays, scale=shape.key**-0.5, split=0, fused=fused
    )

  def loop(q, k, v, keys, values, table, positions, fused):
    def body(_, carry):
      q, keys, values = carry
      return once(q, k, v, keys, values, table, positions, fused=fused)

    return jax.lax.fori_loop(0, LOOP, body, (q, keys, values))[0]

  arguments = jax.eval_shape(draw, bench_rows.SEED)
  programs = {'draw': (draw, bench_rows.SEED)}
  for who, fused in (('ours', True), ('apart', False)):
    programs[who] = functools.partial(loop, fused=fused), *arguments
    programs[f'{who} once'] = functools.partial(once, fused=fused), *arguments
  ready = bench_rows.ahead(programs, {'draw'})
  yield None
  arrays = bench_rows.draw(ready['draw'])

  def differing():
    both = [ready[f'{who} once'](*arrays) for who in ('ours', 'apart')]
    return bench_rows.differing(*both)

  row = Row('decode step', shape.name, 'ours', **_size(shape, at))
  ours = bench_rows.checked(row, differing=differing)
  apart = dataclasses.replace(row, who='apart', note='write, then attend')
  for one in (ours, apart):
    one = bench_rows.timed(one, ready[one.who], *arrays)
    if one.seconds:
      one = dataclasses.replace(one, seconds=one.seconds / LOOP)
    yield one


def _split(shape: shapes.Shape) -> int:
  """Tokens of a split as decoding chooses it; 0 where nothing is split."""
  if dispatch.platform() != 'gpu':
    return 0
  from pallas_kernels.paged_attention import gpu

  return gpu.SPLIT if gpu.SPLIT % shape.block == 0 else 0


def _size(shape: shapes.Shape, first: np.ndarray) -> dict[str, int]:
  """Operations, and bytes of the pages that are seen."""
  queries = shape.queries
  seen = (first + queries - 1) // shape.block + 1
  pairs = int((first + 1).sum()) * queries
  pairs += shape.sequences * queries * (queries - 1) // 2
  return dict(
    flops=2 * pairs * shape.heads * (shape.key + shape.width),
    bytes=int(seen.sum()) * shape.block * shape.token_bytes,
  )


def _rows(
  shape: shapes.Shape, row: Row, ready, arguments, run
) -> Iterator[Row]:
  out = ready['ours'](*arguments)

  def differing():
    found = int(ready['moved'](*arguments, out))
    if 'in turn' in ready:
      found += int(ready['in turn'](*arguments, out))
    return found

  own = bench_rows.checked(
    row, error=lambda: ready['error'](*arguments, out), differing=differing
  )
  if 'whole' in ready:
    own = dataclasses.replace(own, note=own.note or 'in splits')
  yield bench_rows.timed(own, ready['ours'], *arguments)
  if 'whole' in ready:
    whole = dataclasses.replace(row, who='whole', note='without splits')
    yield bench_rows.timed(whole, ready['whole'], *arguments)
  scores = 4 * shape.sequences * shape.heads * shape.queries * shape.tokens
  if scores < LARGE:
    theirs = functools.partial(_naive, width=shape.width, scale=shape.key**-0.5)
    row = dataclasses.replace(row, who='xla')
    yield bench_rows.timed(row, theirs, *arguments)


def _error(shape: shapes.Shape, q, k, v, table, positions, out) -> jax.Array:
  """Of the last four queries of the last sequence, the last head."""
  own = k[table[-1], :, -1].reshape(-1, shape.key)
  values = own[:, : shape.width]
  if v is not None:
    values = v[table[-1], :, -1].reshape(-1, shape.width)
  scale = shape.key**-0.5
  want = exact(q[-1, -4:, -1], own, values, positions[-1, -4:], scale)
  return bench_rows.relative(out[-1, -4:, -1], want)


def _moved(run, q, k, v, table, positions, out) -> jax.Array:
  """Elements that differ for half of the sequences, in other pages."""
  few = slice(len(q) // 2, None)
  k, v = (None if x is None else jnp.roll(x, 3, axis=0) for x in (k, v))
  other = run(q[few], k, v, (table[few] + 3) % len(k), positions[few])
  return bench_rows.differing(other, out[few])


def _in_turn(sizes, q, k, v, table, positions, out) -> jax.Array:
  """Elements that differ where one block of threads takes all splits."""
  from pallas_kernels.paged_attention import gpu

  other = gpu.forward(q, k, v, table, positions, apart=False, **sizes)
  return bench_rows.differing(other, out)


def _naive(q, k, v, table, positions, width, scale):
  """What one writes first: all pages side by side, then a softmax."""
  n, queries, h, key = q.shape
  g = k.shape[2]
  k = k[table].reshape(n, -1, g, key)
  v = k[..., :width] if v is None else v[table].reshape(n, -1, g, width)
  q = q.reshape(n, queries, g, h // g, key)
  s = attention.reference.product('nqgid,nsgd->ngqis', q, k) * scale
  seen = jnp.arange(k.shape[1])[None, None] <= positions[:, :, None]
  s = jnp.where(seen[:, None, :, None], s, -1e30)
  p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
  out = attention.reference.product('ngqis,nsgd->nqgid', p, v)
  return out.reshape(n, queries, h, width).astype(q.dtype)
