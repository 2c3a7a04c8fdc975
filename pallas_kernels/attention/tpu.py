"""Pallas TPU: a tile of queries over blocks of keys, for packed and paged both.

Scores are held transposed, keys down and queries across, so that what belongs
to a query (bounds, maximum, sum, logarithm) is a row of lanes. Blocks that a
tile does not see are steps of the grid in which nothing is loaded or computed.
The expression of a merge is that of `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.attention import work as work_lib

ROWS = 128  # queries of a tile: a register of the vector unit is 128 lanes wide
LOWEST = -1e30
LOG2E = math.log2(math.e)
ORDER = ('parallel', 'parallel', 'arbitrary')


def unsupported(q, k, v, block: int, width: int) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  for name, array in (('q', q), ('k', k), ('v', v)):
    if array is not None and array.dtype not in (jnp.bfloat16, jnp.float32):
      return f'{name} is {array.dtype}; the TPU kernel takes bfloat16, float32'
  if block % 16:
    return f'block={block}; the TPU kernel takes multiples of 16'
  if v is None and width % 128 and width != k.shape[-1]:
    return (
      f'width={width}; where values are part of the keys the TPU kernel takes'
      ' multiples of 128'
    )
  return None


def dot(a: jax.Array, b: jax.Array, left: int, right: int) -> jax.Array:
  """Sums over these dimensions of a and b, in float32."""
  dims = (((left,), (right,)), ((), ()))
  return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def seen_by(low, high, first, keys: int) -> jax.Array:
  """[keys, queries]: whether keys from `first` on are in each query's bounds."""
  shape = keys, low.shape[-1]
  place = first + lax.broadcasted_iota(jnp.int32, shape, 0)
  return (place >= low[...]) & (place <= high[...])


def _kernel(first, end, _, low, high, q, k, *rest, tile, width, factor, shared):
  """Grid: head or sequence, tile of queries, block of keys."""
  v = k if shared else rest[0]
  out, log, total, run = rest[0 if shared else 1 :]
  i, j = tile(pl.program_id(0), pl.program_id(1)), pl.program_id(2)

  @pl.when(j == 0)
  def _():
    total[...] = jnp.zeros_like(total)
    run[0:1] = jnp.full_like(run[0:1], LOWEST)
    run[1:2] = jnp.zeros_like(run[1:2])

  number = first[i] + j

  @pl.when(number < end[i])
  def _():
    keys = k.shape[0]
    s = dot(k[...], q[...], 1, 1)
    s = jnp.where(seen_by(low, high, number * keys, keys), s, -jnp.inf)
    top = run[0:1]
    new = jnp.maximum(top, jnp.max(s, axis=0, keepdims=True) * factor)
    decay = jnp.exp2(top - new)
    p = jnp.exp2(s * factor - new)
    run[0:1] = new
    run[1:2] = run[1:2] * decay + jnp.sum(p, axis=0, keepdims=True)
    values = v[...][:, :width] if shared else v[...]
    total[...] = total[...] * decay + dot(values, p.astype(v.dtype), 0, 0)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    top, whole = run[0:1], run[1:2]
    any_ = whole > 0
    whole = jnp.where(any_, whole, 1.0)
    o = jnp.where(any_, total[...] / whole, 0.0)
    out[...] = o.T.astype(out.dtype)
    log[...] = jnp.where(any_, (top + jnp.log2(whole)) * (1 / LOG2E), LOWEST)


def run(
  q: jax.Array,
  low: jax.Array,
  high: jax.Array,
  keys: Sequence[jax.Array],
  specs: Sequence[Any],
  cut: Sequence[jax.Array],
  table: jax.Array,
  *,
  steps: int,
  tile: Callable[[Any, Any], Any],
  bounds_of: Callable[[Any], Any],
  width: int,
  scale: float,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """The kernel over tiles of ROWS queries.

  Args:
    q: [A, R, K], R a multiple of ROWS.
    low, high: int32 [C, 1, R], the keys that each query sees.
    keys: keys and values, or keys alone.
    specs: how their blocks [S, K] and [S, W] are found.
    cut: int32 first and end of the blocks of each tile.
    table: int32 [N, M], of pages.
    steps: blocks that a tile can have.
    tile: number of a tile in `cut`, of its place in [A, R / ROWS].
    bounds_of: place in [C] of a place in [A].
    width: W.
    scale: of scores.
    interpret: run on CPU.

  Returns:
    out [A, R, W] and log-sum-exp float32 [A, R].
  """
  a, r, key = q.shape
  bounds_block = pl.BlockSpec(
    (None, 1, ROWS), lambda i, t, j, *_: (bounds_of(i), 0, t)
  )
  out, log = pl.pallas_call(
    functools.partial(
      _kernel,
      tile=tile,
      width=width,
      factor=scale * LOG2E,
      shared=len(keys) == 1,
    ),
    out_shape=(
      jax.ShapeDtypeStruct((a, r, width), q.dtype),
      jax.ShapeDtypeStruct((a, 1, r), jnp.float32),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(a, r // ROWS, steps),
      in_specs=[
        bounds_block,
        bounds_block,
        pl.BlockSpec((None, ROWS, key), lambda i, t, j, *_: (i, t, 0)),
        *specs,
      ],
      out_specs=(
        pl.BlockSpec((None, ROWS, width), lambda i, t, j, *_: (i, t, 0)),
        pl.BlockSpec((None, 1, ROWS), lambda i, t, j, *_: (i, 0, t)),
      ),
      scratch_shapes=[
        pltpu.VMEM((width, ROWS), jnp.float32),
        pltpu.VMEM((8, ROWS), jnp.float32),
      ],
    ),
    name='attention',
    compiler_params=pltpu.CompilerParams(dimension_semantics=ORDER),
    interpret=interpret,
  )(*cut, table, low, high, q, *keys)
  return out, log[:, 0]


def _by_head(x: jax.Array, rows: int) -> jax.Array:
  """[T, H, K] -> [H, rows, K]."""
  x = jnp.pad(x, ((0, rows - x.shape[0]), (0, 0), (0, 0)))
  return jnp.swapaxes(x, 0, 1)


def _tiles(starts, ends, rows: int):
  """Bounds [1, 1, R] of padded rows, R a multiple of `rows`."""
  pad = (0, -starts.shape[0] % rows)
  return (
    jnp.pad(starts, pad)[None, None],
    jnp.pad(ends, pad, constant_values=-1)[None, None],
  )


@functools.partial(
  jax.jit, static_argnames=('block', 'width', 'scale', 'interpret')
)
def forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  *,
  block: int,
  width: int,
  scale: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Packed attention: out [T, H, W] and log-sum-exp float32 [T, H].

  The arguments are those of `reference.forward`.
  """
  t, h, _ = q.shape
  share = h // k.shape[1]
  low, high = _tiles(starts, ends, ROWS)
  cut = work_lib.blocks(low.reshape(-1, ROWS), high.reshape(-1, ROWS), block)

  def at(i, tile, j, first, end, _):
    return lax.div(i, share), jnp.minimum(first[tile] + j, end[tile] - 1), 0

  keys = [_by_head(x, t) for x in (k, v) if x is not None]
  out, log = run(
    _by_head(q, low.shape[-1]),
    low,
    high,
    keys,
    [pl.BlockSpec((None, block, x.shape[-1]), at) for x in keys],
    (cut[0], cut[2]),
    jnp.zeros((1, 1), jnp.int32),
    steps=t // block,
    tile=lambda i, t: t,
    bounds_of=lambda i: 0,
    width=width,
    scale=scale,
    interpret=interpret,
  )
  return jnp.swapaxes(out[:, :t], 0, 1), log.T[:t]


# --- Gradients ---------------------------------------------------------------


def _weights(number, keys, low, high, q, k, v, dout, log, dots, shared, scale):
  """p and ds of a pair of tiles, transposed, in q's dtype: see `reference`."""
  s = dot(k[...], q[...], 1, 1)
  seen = seen_by(low, high, number, keys)
  s = jnp.where(seen, s, -jnp.inf)
  p = jnp.exp2(s * (scale * LOG2E) - log[...] * LOG2E)
  values = v[...][:, : dout.shape[-1]] if shared else v[...]
  dp = dot(values, dout[...], 1, 1)
  ds = p * (dp - dots[...]) * scale
  return p.astype(q.dtype), ds.astype(q.dtype)


def _query_kernel(*refs, scale, shared):
  """dq. Grid: head, tile of queries, block of keys."""
  first, end, low, high, q, dout, log, dots, k, *rest = refs
  v = k if shared else rest[0]
  dq, total = rest[-2:]
  i, j = pl.program_id(1), pl.program_id(2)

  @pl.when(j == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  number = first[i] + j

  @pl.when(number < end[i])
  def _():
    keys = k.shape[0]
    _, ds = _weights(
      number * keys, keys, low, high, q, k, v, dout, log, dots, shared, scale
    )
    total[...] += dot(ds, k[...], 0, 0)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    dq[...] = total[...].astype(dq.dtype)


def _key_kernel(*refs, scale, shared, tiles):
  """dk and dv. Grid: head of keys, tile of them, head and tile of queries."""
  first, end, low, high, q, dout, log, dots, k, *rest = refs
  v = k if shared else rest.pop(0)
  outs, totals = rest[: len(rest) // 2], rest[len(rest) // 2 :]
  i, j = pl.program_id(1), pl.program_id(2)

  @pl.when(j == 0)
  def _():
    for total in totals:
      total[...] = jnp.zeros_like(total)

  @pl.when(first[i] + lax.rem(j, tiles) < end[i])
  def _():
    keys = k.shape[0]
    p, ds = _weights(
      i * keys, keys, low, high, q, k, v, dout, log, dots, shared, scale
    )
    totals[0][...] += dot(ds, q[...], 1, 0)
    more = dot(p, dout[...], 1, 0)
    if shared:
      totals[0][:, : more.shape[1]] += more
    else:
      totals[1][...] += more

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    for out, total in zip(outs, totals, strict=True):
      out[...] = total[...].astype(out.dtype)


def _gradient(body, arrays, cut, grid, query, key, out_shape, out_spec, **more):
  """One pass over pairs of tiles.

  Args:
    body: kernel.
    arrays: low, high, q, dout, log, dots, and keys with values or alone.
    cut: first and end of each tile's partners.
    grid: sizes.
    query, key: places (head, tile) of queries and of keys in the grid.
    out_shape, out_spec: of what stays, a tuple.
    more: whether to interpret.
  """
  low, high, q, dout, log, dots, *keys = arrays

  def rows(x, place):
    def at(*where):
      head, tile = place(*where)
      return head, tile, 0

    return pl.BlockSpec((None, ROWS, x.shape[-1]), at)

  def lanes(place, same):
    def at(*where):
      head, tile = place(*where)
      return 0 if same else head, 0, tile

    return pl.BlockSpec((None, 1, ROWS), at)

  return pl.pallas_call(
    body,
    out_shape=out_shape,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=grid,
      in_specs=[
        lanes(query, True),
        lanes(query, True),
        rows(q, query),
        rows(dout, query),
        lanes(query, False),
        lanes(query, False),
        *(rows(x, key) for x in keys),
      ],
      out_specs=out_spec,
      scratch_shapes=[
        pltpu.VMEM((ROWS, x.shape[-1]), jnp.float32) for x in out_shape
      ],
    ),
    name='attention_gradient',
    compiler_params=pltpu.CompilerParams(dimension_semantics=ORDER),
    **more,
  )(*cut, *arrays)


@functools.partial(
  jax.jit, static_argnames=('block', 'width', 'scale', 'interpret')
)
def backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  log: jax.Array,
  dots: jax.Array,
  dout: jax.Array,
  *,
  block: int,
  width: int,
  scale: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Gradients to q, k and v; the arguments are those of `reference.backward`.

  Tiles have ROWS queries and ROWS keys, whatever the block of the forward pass.
  """
  del block
  t, h, _ = q.shape
  g = k.shape[1]
  share, shared = h // g, v is None
  low, high = _tiles(starts, ends, ROWS)
  rows = low.shape[-1]
  tiles = rows // ROWS
  log, dots = (
    jnp.pad(x.astype(jnp.float32).T[:, None], ((0, 0), (0, 0), (0, rows - t)))
    for x in (log, dots)
  )
  keys = [_by_head(x, rows) for x in (k, v) if x is not None]
  arrays = [
    low,
    high,
    _by_head(q, rows),
    _by_head(dout, rows),
    log,
    dots,
    *keys,
  ]
  cut = work_lib.blocks(low.reshape(-1, ROWS), high.reshape(-1, ROWS), ROWS)
  (dq,) = _gradient(
    functools.partial(_query_kernel, scale=scale, shared=shared),
    arrays,
    (cut[0], cut[2]),
    (h, tiles, tiles),
    lambda n, i, j, first, end: (n, i),
    lambda n, i, j, first, end: (
      lax.div(n, share),
      jnp.minimum(first[i] + j, end[i] - 1),
    ),
    (jax.ShapeDtypeStruct(arrays[2].shape, q.dtype),),
    (pl.BlockSpec((None, ROWS, q.shape[-1]), lambda n, i, j, *_: (n, i, 0)),),
    interpret=interpret,
  )
  items = work_lib.key_items(low.reshape(-1), high.reshape(-1), ROWS, ROWS, 1)
  found = _gradient(
    functools.partial(_key_kernel, scale=scale, shared=shared, tiles=tiles),
    arrays,
    (items[:, 2], items[:, 3]),
    (g, tiles, share * tiles),
    lambda n, i, j, first, end: (
      n * share + lax.div(j, tiles),
      jnp.clip(first[i] + lax.rem(j, tiles), 0, jnp.maximum(end[i] - 1, 0)),
    ),
    lambda n, i, j, first, end: (n, i),
    tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in keys),
    tuple(
      pl.BlockSpec((None, ROWS, x.shape[-1]), lambda n, i, j, *_: (n, i, 0))
      for x in keys
    ),
    interpret=interpret,
  )
  dq, *found = (jnp.swapaxes(x[:, :t], 0, 1) for x in (dq, *found))
  return dq, found[0], None if shared else found[1]
