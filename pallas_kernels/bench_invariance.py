"""What one order of addition costs: our fixed choice against free tuning.

A kernel's tiles change no bit, so they are tuned; a block of keys and a block of
the vocabulary are part of what is computed, so they are not. For each operation
the choice that a model gets is timed against the fastest of some others, those
included that round elsewhere, as a tuner that may do anything would find it. A norm
and a route have no tiles: XLA's own, which may add in any order, are beside them.

Elements are counted that differ between the choice and all tilings that must
not change them, and between all rows and some of them in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels import bench_rows
from pallas_kernels import bench_shapes
from pallas_kernels import bench_time
from pallas_kernels import bench_tune
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import norm
from pallas_kernels import paged_attention
from pallas_kernels import route
from pallas_kernels import token_logprob
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.matmul import shapes as matmul_shapes
from pallas_kernels.norm import shapes as norm_shapes
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.route import shapes as route_shapes
from pallas_kernels.token_logprob import shapes as logprob_shapes

BLOCKS = (64, 128)  # tokens of a block of keys
EPSILON = 1e-6  # of norms, as a model has it


class Trial(NamedTuple):
  """An operation at a shape.

  Attributes:
    draw: arguments from a seed.
    fixed: as a model calls it, of the arguments.
    tilings: by name, the same in another cut; they must change no bit.
    others: by name, what rounds elsewhere.
    some: some rows, in another order, of what `fixed` gave and the arguments:
      (what it gave for them, what it gives for these alone).
  """

  draw: Callable[[Any], tuple[Any, ...]]
  fixed: Callable[..., Any]
  tilings: dict[str, Callable[..., Any]]
  others: dict[str, Callable[..., Any]]
  some: Callable[..., tuple[Any, Any]]


def rows(case: bench_shapes.Invariance) -> Rows:
  """The choice's time and differing elements, then the fastest other one's."""
  trial = TRIALS[case.operation](case.shape)
  arguments = jax.eval_shape(trial.draw, bench_rows.SEED)
  out = jax.eval_shape(trial.fixed, *arguments)

  def some(out, *arguments):
    return bench_rows.differing(*trial.some(out, *arguments))

  programs = {
    'draw': (trial.draw, bench_rows.SEED),
    'fixed': (trial.fixed, *arguments),
    'some': (some, out, *arguments),
    'same': (bench_rows.differing, out, out),
  }
  cuts = trial.tilings | trial.others
  programs |= {label: (cut, *arguments) for label, cut in cuts.items()}
  ready = bench_rows.ahead(programs, {'draw'})
  yield None
  row = Row(f'invariance {case.operation}', case.shape.name, 'ours')
  arguments = bench_rows.draw(ready['draw'])
  if dispatch.platform() == 'cpu':  # XLA's, which has no fixed order
    yield bench_rows.timed(row, ready['fixed'], *arguments)
    return
  yield from _measured(row, trial, ready, arguments)


def _measured(row: Row, trial: Trial, ready, arguments) -> Iterator[Row]:
  out = ready['fixed'](*arguments)
  differing = int(ready['some'](out, *arguments))
  found = {}
  for label in trial.tilings | trial.others:
    try:
      other = ready[label](*arguments)
    except Exception:  # it does not fit, or the kernel does not take it
      continue
    if label in trial.tilings:
      differing += int(ready['same'](out, other))
    del other
    found[label] = _seconds(ready[label], arguments)
  row = dataclasses.replace(row, differing=differing)
  del out
  if not found:
    took = _seconds(ready['fixed'], arguments)
    yield dataclasses.replace(row, seconds=took, note='nothing to choose from')
    return
  best = min(found, key=found.get)
  ours, theirs, cost = _in_turns(ready['fixed'], ready[best], arguments)
  yield dataclasses.replace(row, seconds=ours)
  note = f'cost {max(cost, 1.0):.3f}; of {len(found)} others: {best}'
  yield dataclasses.replace(
    row, who='tuned', seconds=theirs, differing=None, note=note
  )


def _seconds(ready: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
  call = lambda: ready(*arguments)  # noqa: E731
  return bench_rows.seconds(call, jax.block_until_ready)


def _in_turns(one, other, arguments) -> tuple[float, float, float]:
  """Median seconds of both, and the median over turns of their ratio.

  Both come once in each turn, so that what slows the device for a while, or
  heats it up, slows both of them.
  """
  calls = [lambda f=f: f(*arguments) for f in (one, other)]
  pairs = bench_time.in_turns(calls, jax.block_until_ready)
  ratios = statistics.median(a / b for a, b in pairs)
  return *map(statistics.median, zip(*pairs, strict=True)), ratios


def _named() -> str | None:
  """The kernel, which raises where it does not take a block."""
  device = dispatch.platform()
  return None if device == 'cpu' else device


# --- Operations --------------------------------------------------------------


def _tiles(rows_: int) -> dict[str, Any]:
  """Tilings of a matmul by name: of many rows, or of a few."""
  from pallas_kernels.grouped_matmul import gpu

  if rows_ > 1024:
    changes = (*bench_tune.MANY, dict(columns=128, stages=6))
  else:
    changes = (
      dict(),
      dict(consumers=1, columns=64, depth=128),
      dict(consumers=1, columns=128, depth=128),
      dict(consumers=1, columns=256, depth=64),
      dict(consumers=1, columns=64, depth=64, stages=8),
    )
  return {_words(change): gpu.Tiles(**change) for change in changes}


def _words(change: dict[str, Any]) -> str:
  return ', '.join(f'{k}={v}' for k, v in change.items()) or 'defaults'


def _grouped(shape: grouped_shapes.Shape) -> Trial:
  sizes = shape.sizes()
  owner = np.repeat(np.arange(len(sizes)), sizes)
  kept = np.random.default_rng(2).permutation(len(owner))[::3]
  kept = kept[np.argsort(owner[kept], kind='stable')].astype(np.int32)
  counts = np.bincount(owner[kept], minlength=len(sizes)).astype(np.int32)
  run = grouped_matmul.grouped_matmul

  def draw(seed):
    w = bench_rows.normal_at(
      seed, 2, shape.groups, shape.k, shape.n
    ) * jnp.bfloat16(0.02)
    return (
      bench_rows.normal_at(seed, 1, shape.rows, shape.k),
      w,
      jnp.asarray(sizes),
    )

  def some(y, x, w, group_sizes):
    del group_sizes
    return y[kept], run(x[kept], w, jnp.asarray(counts))

  tilings = _with_tiles(run, shape.rows // max((sizes > 0).sum(), 1))
  return Trial(draw, run, tilings, {}, some)


def _with_tiles(run: Callable[..., Any], rows_: int) -> dict[str, Any]:
  if dispatch.platform() != 'gpu':
    return {}
  # Of few rows a group, as in decoding, other tilings come into question.
  many = 2048 if rows_ >= 128 else 1
  return {
    label: lambda *a, tiles=tiles: run(*a, tiles=tiles)
    for label, tiles in _tiles(many).items()
  }


def _matmul(shape: matmul_shapes.Shape) -> Trial:
  run = matmul.matmul

  def draw(seed):
    x = bench_rows.normal_at(seed, 1, shape.rows, shape.k)
    return x, bench_rows.normal_at(seed, 2, shape.k, shape.n)

  def some(y, x, w):
    return y[::-3], run(x[::-3], w)

  return Trial(draw, run, _with_tiles(run, shape.rows), {}, some)


def _attention(shape: attention_shapes.Shape) -> Trial:
  b, t, h, g = shape.rows, shape.tokens, shape.heads, shape.groups
  more = dict(scale=shape.key**-0.5, width=shape.width if shape.shared else 0)

  def draw(seed):
    v = (
      None
      if shape.shared
      else bench_rows.normal_at(seed, 3, b, t, g, shape.width)
    )
    q, k = (
      bench_rows.normal_at(seed, i, b, t, n, shape.key)
      for i, n in ((1, h), (2, g))
    )
    return q, k, v

  def run(q, k, v, block=shape.block, tiles=None):
    ids = jnp.ones(q.shape[:2], jnp.int32)
    return attention.attention(
      q, k, v, ids, block=block, tiles=tiles, implementation=_named(), **more
    )

  def some(out, *arrays):
    """The first half of the last sequence, by itself."""
    half = [None if x is None else x[-1:, : t // 2] for x in arrays]
    return out[-1:, : t // 2], run(*half)

  tilings = {}
  if dispatch.platform() == 'gpu':
    from pallas_kernels.attention import gpu_tiles

    for change in (
      dict(),
      dict(turns=False),
      dict(overlap=True),
    ):
      tiles = gpu_tiles.Tiles(**change)
      tilings[_words(change)] = lambda *a, tiles=tiles: run(*a, tiles=tiles)
  return Trial(draw, run, tilings, _with_blocks(run, shape.block), some)


def _with_blocks(run: Callable[..., Any], own: int) -> dict[str, Any]:
  return {
    f'blocks of {size} keys': lambda *a, size=size: run(*a, block=size)
    for size in BLOCKS
    if size != own
  }


def _paged(shape: paged_shapes.Shape) -> Trial:
  n, h, g = shape.sequences, shape.heads, shape.groups

  def draw(seed):
    size = n * shape.tokens, g
    v = (
      None
      if shape.shared
      else bench_rows.normal_at(seed, 3, *size, shape.width)
    )
    first = jnp.arange(n) * 37 % max(shape.tokens // 2, 1)
    first = jnp.minimum(first + shape.tokens // 2, shape.tokens - shape.queries)
    positions = first[:, None] + jnp.arange(shape.queries)[None, :]
    return (
      bench_rows.normal_at(seed, 1, n, shape.queries, h, shape.key),
      bench_rows.normal_at(seed, 2, *size, shape.key),
      v,
      positions.astype(jnp.int32),
    )

  def run(q, k, v, positions, block=shape.block, turn=0, split=0):
    pages = [None if x is None else _pages(x, block) for x in (k, v)]
    count = len(k) // block
    pages = [None if x is None else jnp.roll(x, turn, axis=0) for x in pages]
    table = (jnp.arange(count, dtype=jnp.int32) + turn) % count
    return paged_attention.paged_attention(
      q,
      *pages,
      table.reshape(-1, shape.tokens // block)[: len(q)],
      positions,
      scale=shape.key**-0.5,
      width=shape.width if shape.shared else 0,
      split=split,
      implementation=_named(),
    )

  few = n // 2 + 1

  def some(out, q, k, v, positions):
    """Fewer sequences, all of whose pages lie elsewhere."""
    other = run(q[:few], k, v, positions[:few], turn=n + 3)
    return out[:few], other

  others = _with_blocks(run, shape.block)
  if dispatch.platform() == 'gpu':
    from pallas_kernels.paged_attention import gpu

    size = gpu.SPLIT
    others[f'splits of {size}'] = lambda *a: run(*a, split=size)
  return Trial(draw, run, {}, others, some)


def _pages(x: jax.Array, block: int) -> jax.Array:
  return x.reshape(len(x) // block, block, *x.shape[1:])


def _token_logprob(shape: logprob_shapes.Shape) -> Trial:
  t, d, v = shape.tokens, shape.depth, shape.vocabulary
  run = token_logprob.token_logprob

  def draw(seed):
    tokens = jax.random.randint(jax.random.key(seed + 1), (t,), 0, v)
    unembed = bench_rows.normal_at(seed, 2, d, v) * jnp.bfloat16(2 / d**0.5)
    hidden, heat = (
      bench_rows.normal_at(seed, 1, t, d),
      jnp.linspace(0.5, 1.5, t),
    )
    return hidden, unembed, tokens, heat

  tilings = {}
  if dispatch.platform() == 'gpu':
    from pallas_kernels.grouped_matmul import gpu as matmul_gpu
    from pallas_kernels.token_logprob import gpu

    def cut(*arguments, tiles):
      chosen, log, entropy = gpu.statistics(*arguments, tiles=tiles)
      return chosen - log, entropy

    for change in (
      dict(panel=2),
      dict(panel=4),
      dict(panel=8),
      dict(panel=16),
      dict(panel=4, stages=3),
    ):
      tiles = matmul_gpu.Tiles(columns=gpu.BLOCK, **change)
      tilings[_words(change)] = lambda *a, tiles=tiles: cut(*a, tiles=tiles)
  few = slice(None, None, -5)

  def some(found, hidden, unembed, tokens, temperatures):
    other = run(hidden[few], unembed, tokens[few], temperatures[few])
    return tuple(one[few] for one in found), other

  return Trial(draw, run, tilings, {}, some)


def _norm(shape: norm_shapes.Shape) -> Trial:
  run = norm.rms_norm

  def draw(seed):
    x = bench_rows.normal_at(seed, 1, shape.rows, shape.depth)
    return x, bench_rows.normal_at(seed, 2, shape.depth)

  def some(y, x, scale):
    return y[::-3], run(x[::-3], scale)

  others = {'XLA': lambda *a: norm.reference.rms_norm(*a, EPSILON)}
  if dispatch.platform() == 'gpu':
    from pallas_kernels.norm import gpu

    if shape.depth <= gpu.NARROW:
      others['lanes'] = lambda *a: gpu.by_lanes(*a, EPSILON)
      others['a warpgroup'] = lambda *a: gpu.by_warpgroup(*a, EPSILON)
  return Trial(draw, run, {}, others, some)


def _route(shape: route_shapes.Shape) -> Trial:
  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    logits = jax.random.normal(keys[0], (shape.rows, shape.experts))
    return logits, 0.01 * jax.random.normal(keys[1], (shape.experts,))

  def run(logits, bias):
    return route.route(logits, bias, shape.router)[:2]

  def some(found, logits, bias):
    return tuple(one[::-3] for one in found), run(logits[::-3], bias)

  def plain(logits, bias):
    return route.reference.route(logits, bias, None, shape.router)[:2]

  return Trial(draw, run, {}, {'XLA': plain}, some)


TRIALS = {
  'grouped_matmul': _grouped,
  'matmul': _matmul,
  'attention': _attention,
  'paged_attention': _paged,
  'token_logprob': _token_logprob,
  'norm': _norm,
  'route': _route,
}
