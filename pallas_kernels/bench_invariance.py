"""What one order of addition costs: our fixed choice against free tuning.

A kernel's tiles change no bit, so they are tuned; a block of keys and a block of
the vocabulary are part of what is computed, so they are not. For each operation
the choice that a model gets is timed against the fastest of some others, those
included that round elsewhere, as a tuner that may do anything would find it.

Elements are counted that differ between the choice and all tilings that must
not change them, and between all rows and some of them in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels import bench
from pallas_kernels import bench_shapes
from pallas_kernels import bench_time
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import norm
from pallas_kernels import paged_attention
from pallas_kernels import route
from pallas_kernels import token_logprob
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.matmul import shapes as matmul_shapes
from pallas_kernels.norm import shapes as norm_shapes
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.route import shapes as route_shapes
from pallas_kernels.token_logprob import shapes as logprob_shapes

Row = bench.Row
BLOCKS = (64, 128)  # tokens of a block of keys
TURNS = 3


class Trial(NamedTuple):
  """An operation at a shape.

  Attributes:
    fixed: as a model calls it, of `arguments`.
    arguments: arrays.
    tilings: by name, the same in another cut; they must change no bit.
    others: by name, what rounds elsewhere.
    some: some rows, in another order: (results of `fixed`, results of these).
  """

  fixed: Callable[..., Any]
  arguments: tuple[Any, ...]
  tilings: dict[str, Callable[..., Any]]
  others: dict[str, Callable[..., Any]]
  some: Callable[[Any], tuple[Any, Any]]


def rows(case: bench_shapes.Invariance) -> Iterator[Row]:
  """The choice's time and differing elements, then the fastest other one's."""
  shape = case.shape
  if dispatch.platform() == 'cpu':
    shape = bench.small(shape)
  trial = TRIALS[case.operation](shape)
  row = Row(f'invariance {case.operation}', shape.name, 'ours')
  fixed, took, out = _measured(trial.fixed, trial.arguments)
  row = dataclasses.replace(row, seconds=took)
  if dispatch.platform() == 'cpu':  # XLA's, which has no fixed order
    yield row
    return
  differing = _differing(*trial.some(out))
  found = {}
  for label, function in (trial.tilings | trial.others).items():
    try:
      ready, took, other = _measured(function, trial.arguments)
    except Exception:  # it does not fit, or the kernel does not take it
      continue
    found[label] = took, ready
    if label in trial.tilings:
      differing += _differing(out, other)
  row = dataclasses.replace(row, differing=differing)
  if not found:
    yield row
    return
  best = min(found, key=lambda label: found[label][0])
  ours, theirs = _in_turns(fixed, found[best][1], trial.arguments)
  yield dataclasses.replace(row, seconds=ours)
  note = f'cost {max(ours / theirs, 1.0):.3f}; of {len(found)} others: {best}'
  yield dataclasses.replace(
    row, who='tuned', seconds=theirs, differing=None, note=note
  )


def _measured(
  function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Callable[..., Any], float, Any]:
  """(function, compiled once; seconds; results)."""
  ready = jax.jit(function)
  out = ready(*arguments)
  return ready, _seconds(ready, arguments), out


def _seconds(ready: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
  return bench.seconds(lambda: ready(*arguments), jax.block_until_ready)


def _in_turns(one, other, arguments) -> tuple[float, float]:
  """Seconds of both: what slows the device for a while slows both of them.

  Both by the clock, or both of the kernels alone: near the limit of
  `bench.seconds` one might be measured without its launch and one with it.
  """
  calls = [lambda f=f: f(*arguments) for f in (one, other)]
  wait = jax.block_until_ready

  def turns(measure):
    return [tuple(measure(call, wait) for call in calls) for _ in range(TURNS)]

  pairs = turns(bench_time.seconds)
  if min(map(min, pairs)) < bench_time.SHORT:
    alone = turns(bench_time.device_seconds)
    pairs = alone if all(map(all, alone)) else pairs
  a, b = sorted(pairs, key=lambda pair: pair[0] / pair[1])[TURNS // 2]
  return a, b


def _differing(got: Any, want: Any) -> int:
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return sum(int(jnp.sum(a != b)) for a, b in pairs)


def _named() -> str | None:
  """The kernel, which raises where it does not take a block."""
  device = dispatch.platform()
  return None if device == 'cpu' else device


def _normal(seed: int, *size: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), size, jnp.bfloat16)


# --- Operations --------------------------------------------------------------


def _tiles(rows_: int) -> dict[str, Any]:
  """Tilings of a matmul by name: of many rows, or of a few."""
  from pallas_kernels.grouped_matmul import gpu

  if rows_ > 1024:
    changes = (
      dict(stages=3, slots=4),
      dict(stages=3, slots=1, panel=4),
      dict(panel=16),
      dict(columns=192),
      dict(rows=128, columns=128),
      dict(columns=128, stages=6),
    )
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
  x = _normal(1, shape.rows, shape.k)
  w = _normal(2, shape.groups, shape.k, shape.n) * jnp.bfloat16(0.02)
  run = grouped_matmul.grouped_matmul

  def some(y):
    owner = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.random.default_rng(2).permutation(len(owner))[::3]
    kept = kept[np.argsort(owner[kept], kind='stable')]
    counts = np.bincount(owner[kept], minlength=len(sizes))
    return y[kept], run(x[kept], w, jnp.asarray(counts, jnp.int32))

  return Trial(
    run,
    (x, w, jnp.asarray(sizes)),
    _with_tiles(run, shape.rows // max((sizes > 0).sum(), 1)),
    {},
    some,
  )


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
  x, w = _normal(1, shape.rows, shape.k), _normal(2, shape.k, shape.n)
  run = matmul.matmul
  return Trial(
    run,
    (x, w),
    _with_tiles(run, shape.rows),
    {},
    lambda y: (y[::-3], run(x[::-3], w)),
  )


def _attention(shape: attention_shapes.Shape) -> Trial:
  b, t, h, g = shape.rows, shape.tokens, shape.heads, shape.groups
  q, k = _normal(1, b, t, h, shape.key), _normal(2, b, t, g, shape.key)
  v = None if shape.shared else _normal(3, b, t, g, shape.width)
  more = dict(scale=shape.key**-0.5, width=shape.width if shape.shared else 0)

  def run(q, k, v, block=shape.block, tiles=None):
    ids = jnp.ones(q.shape[:2], jnp.int32)
    return attention.attention(
      q, k, v, ids, block=block, tiles=tiles, implementation=_named(), **more
    )

  tilings = {}
  if dispatch.platform() == 'gpu':
    from pallas_kernels.attention import gpu_tiles

    for change in (
      dict(),
      dict(turns=False),
      dict(overlap=True),
      dict(stages=3),
    ):
      tiles = gpu_tiles.Tiles(**change)
      tilings[_words(change)] = lambda *a, tiles=tiles: run(*a, tiles=tiles)
  half = slice(t // 2)  # the first half of the last sequence, by itself
  return Trial(
    run,
    (q, k, v),
    tilings,
    _with_blocks(run, shape.block),
    lambda out: (
      out[-1:, half],
      run(*(None if x is None else x[-1:, half] for x in (q, k, v))),
    ),
  )


def _with_blocks(run: Callable[..., Any], own: int) -> dict[str, Any]:
  return {
    f'blocks of {size} keys': lambda *a, size=size: run(*a, block=size)
    for size in BLOCKS
    if size != own
  }


def _paged(shape: paged_shapes.Shape) -> Trial:
  n, h, g = shape.sequences, shape.heads, shape.groups
  q = _normal(1, n, shape.queries, h, shape.key)
  k = _normal(2, n * shape.tokens, g, shape.key)
  v = None if shape.shared else _normal(3, n * shape.tokens, g, shape.width)
  first = jnp.arange(n) * 37 % max(shape.tokens // 2, 1)
  first = jnp.minimum(first + shape.tokens // 2, shape.tokens - shape.queries)
  positions = first[:, None] + jnp.arange(shape.queries)[None, :]
  positions = positions.astype(jnp.int32)

  def run(q, k, v, positions, block=shape.block):
    pages = [None if x is None else _pages(x, block) for x in (k, v)]
    table = jnp.arange(len(k) // block, dtype=jnp.int32)
    return paged_attention.paged_attention(
      q,
      *pages,
      table.reshape(-1, shape.tokens // block)[: len(q)],
      positions,
      scale=shape.key**-0.5,
      width=shape.width if shape.shared else 0,
      implementation=_named(),
    )

  few = n // 2 + 1
  return Trial(
    run,
    (q, k, v, positions),
    {},
    _with_blocks(run, shape.block),
    lambda out: (out[:few], run(q[:few], k, v, positions[:few])),
  )


def _pages(x: jax.Array, block: int) -> jax.Array:
  return x.reshape(len(x) // block, block, *x.shape[1:])


def _token_logprob(shape: logprob_shapes.Shape) -> Trial:
  t, d, v = shape.tokens, shape.depth, shape.vocabulary
  unembed = _normal(2, d, v) * jnp.bfloat16(2 / d**0.5)
  tokens = jax.random.randint(jax.random.key(3), (t,), 0, v)
  hidden, temperatures = _normal(1, t, d), jnp.linspace(0.5, 1.5, t)
  run = token_logprob.token_logprob
  tilings = {}
  if dispatch.platform() == 'gpu':
    from pallas_kernels.grouped_matmul import gpu as matmul_gpu
    from pallas_kernels.token_logprob import gpu

    def cut(*arguments, tiles):
      chosen, log, entropy = gpu.statistics(*arguments, tiles=tiles)
      return chosen - log, entropy

    for change in (
      dict(panel=2),
      dict(panel=8),
      dict(panel=16),
      dict(panel=4, stages=3),
    ):
      tiles = matmul_gpu.Tiles(columns=gpu.BLOCK, **change)
      tilings[_words(change)] = lambda *a, tiles=tiles: cut(*a, tiles=tiles)
  few = slice(None, None, -5)

  def some(found):
    other = run(hidden[few], unembed, tokens[few], temperatures[few])
    return tuple(one[few] for one in found), other

  arguments = hidden, unembed, tokens, temperatures
  return Trial(run, arguments, tilings, {}, some)


def _norm(shape: norm_shapes.Shape) -> Trial:
  x, scale = _normal(1, shape.rows, shape.depth), _normal(2, shape.depth)
  run = norm.rms_norm
  return Trial(
    run, (x, scale), {}, {}, lambda y: (y[::-3], run(x[::-3], scale))
  )


def _route(shape: route_shapes.Shape) -> Trial:
  keys = jax.random.split(jax.random.key(1), 2)
  logits = jax.random.normal(keys[0], (shape.rows, shape.experts))
  bias = 0.01 * jax.random.normal(keys[1], (shape.experts,))

  def run(logits, bias):
    return route.route(logits, bias, shape.router)[:2]

  def some(found):
    return tuple(one[::-3] for one in found), run(logits[::-3], bias)

  return Trial(run, (logits, bias), {}, {}, some)


TRIALS = {
  'grouped_matmul': _grouped,
  'matmul': _matmul,
  'attention': _attention,
  'paged_attention': _paged,
  'token_logprob': _token_logprob,
  'norm': _norm,
  'route': _route,
}
