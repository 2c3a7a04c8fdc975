"""The rows of the benchmark for matmuls, grouped and dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_others
from pallas_kernels import bench_rows
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.matmul import shapes as matmul_shapes

EXPANDED = 5e9  # numbers of rows times groups that XLA may be asked to hold
STOCK = (64, 128)  # rows of a block of the kernel that comes with jax


def grouped(shape: grouped_shapes.Shape) -> Rows:
  """Forward and, of shapes for training, both gradients; ours and theirs."""
  sizes = shape.sizes()
  some = int(np.argmax(sizes))  # the group that is checked
  end = int(np.cumsum(sizes)[some])
  rows = slice(end - int(sizes[some]), end)
  training = shape in grouped_shapes.TRAINING

  def draw(seed):
    keys = bench_rows.keys(seed, 3)
    x = bench_rows.normal(keys[0], shape.rows, shape.k)
    w = bench_rows.normal(keys[1], shape.groups, shape.k, shape.n)
    return x, w * 0.02, bench_rows.normal(keys[2], shape.rows, shape.n)

  x, w, dy = jax.eval_shape(draw, bench_rows.SEED)
  counts = jax.ShapeDtypeStruct(sizes.shape, jnp.int32)
  run, gradient = grouped_matmul.grouped_matmul, grouped_matmul.weight_gradient
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (run, x, w, counts),
    'error': (
      lambda x, w, y: bench_rows.relative(
        y[rows], bench_rows.exact(x[rows], w[some])
      ),
      *(x, w, dy),
    ),
  }
  cuts = _cuts(sizes)
  for label, (kept, _, compare) in cuts.items():
    kept = jax.ShapeDtypeStruct(kept.shape, jnp.int32)
    programs[label] = compare, x, w, dy, kept, counts
  if training:
    programs |= {
      'dx': (functools.partial(run, transpose=True), dy, w, counts),
      'dx error': (
        lambda dy, w, dx: bench_rows.relative(
          dx[rows], bench_rows.exact(dy[rows], w[some].T)
        ),
        *(dy, w, x),
      ),
      'dw': (gradient, x, dy, counts),
      'dw error': (
        lambda x, dy, dw: bench_rows.relative(
          dw[some], bench_rows.exact(x[rows].T, dy[rows])
        ),
        *(x, dy, w),
      ),
    }
  programs |= {name: (call, x, w, counts) for name, call in _stock(shape)}
  for name, call in bench_others.grouped().items():
    if training or not name:
      programs[f'tokamax {name}'.strip()] = call, x, w, dy, counts
  ready = bench_rows.ahead(programs, {'draw', 'error', 'dx error', 'dw error'})
  yield None
  arrays = *bench_rows.draw(ready['draw']), jnp.asarray(sizes)
  yield from _forward(shape, ready, cuts, arrays)
  if training:
    yield from _gradients(shape, ready, arrays)
  yield from _torch(shape, sizes, arrays, training)


def _size(shape: grouped_shapes.Shape) -> dict[str, int]:
  active = int((shape.sizes() > 0).sum())
  return dict(flops=shape.flops, bytes=2 * active * shape.k * shape.n)


def _forward(shape, ready, cuts, arrays) -> Iterator[Row]:
  x, w, dy, group_sizes = arrays
  row = Row('grouped_matmul', shape.name, 'ours', **_size(shape))
  y = ready['ours'](x, w, group_sizes)

  def differing():
    return sum(
      int(ready[label](x, w, y, kept, counts))
      for label, (kept, counts, _) in cuts.items()
    )

  own = bench_rows.checked(row, error=lambda: ready['error'](x, w, y))
  if cuts:
    own = bench_rows.checked(own, differing=differing)
  yield bench_rows.timed(own, ready['ours'], x, w, group_sizes)
  expanded = shape.rows * shape.groups * shape.k
  if expanded < EXPANDED and shape.groups <= 64:  # it expands x for each group
    theirs = dataclasses.replace(row, who='xla')
    yield bench_rows.timed(theirs, jax.lax.ragged_dot, x, w, group_sizes)
  row = dataclasses.replace(row, who='jax mosaic')
  stock = [
    bench_rows.timed(row, ready[name], x, w, group_sizes)
    for name, _ in _stock(shape)
  ]
  if stock:  # the best of a few tilings
    yield min(stock, key=lambda one: one.seconds or 1e9)
  if 'tokamax' in ready:
    row = dataclasses.replace(row, who='tokamax', note=bench_others.UNTUNED)
    yield bench_rows.timed(row, ready['tokamax'], x, w, dy, group_sizes)


def _gradients(shape, ready, arrays) -> Iterator[Row]:
  x, w, dy, group_sizes = arrays
  for name, own in (('dx', (dy, w)), ('dw', (x, dy))):
    row = Row(f'grouped_matmul {name}', shape.name, 'ours', **_size(shape))

    def error(name=name, own=own):
      return ready[f'{name} error'](*own, ready[name](*own, group_sizes))

    ours = bench_rows.checked(row, error=error)
    yield bench_rows.timed(ours, ready[name], *own, group_sizes)
    if (theirs := f'tokamax {name}') in ready:
      row = dataclasses.replace(row, who='tokamax', note=bench_others.UNTUNED)
      yield bench_rows.timed(row, ready[theirs], *arrays)


def _torch(shape, sizes, arrays, training: bool) -> Iterator[Row]:
  torch = bench_rows.torch()
  if torch is None:
    return
  x, w, dy = (torch.from_dlpack(array) for array in arrays[:3])
  offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device='cuda')
  run = functools.partial(torch._grouped_mm, offs=offsets)
  calls = {'grouped_matmul': lambda: run(x, w)}
  if training:
    calls['grouped_matmul dx'] = lambda: run(dy, w.transpose(1, 2))
    calls['grouped_matmul dw'] = lambda: run(x.t(), dy)
  for operation, call in calls.items():
    row = Row(operation, shape.name, 'torch', **_size(shape))
    yield bench_rows.torch_timed(row, torch, call)


def gated(shape: grouped_shapes.Shape) -> Rows:
  """The first two products of experts with their activation, of a few rows."""
  sizes = shape.sizes()
  some = int(np.argmax(sizes))
  end = int(np.cumsum(sizes)[some])
  rows = slice(end - int(sizes[some]), end)
  run = functools.partial(grouped_matmul.grouped_matmul, gated=True)

  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    x = bench_rows.normal(keys[0], shape.rows, shape.k)
    w = bench_rows.normal(keys[1], shape.groups, shape.k, 2, shape.n)
    return x, w * jnp.bfloat16(0.02)

  def error(x, w, y):
    gate, up = (bench_rows.exact(x[rows], w[some, :, i]) for i in (0, 1))
    return bench_rows.relative(y[rows], jax.nn.silu(gate) * up)

  def alone(x, w, y):
    """Elements that differ where one row is all that there is."""
    last = np.zeros(len(sizes), np.int32)
    last[some] = 1
    return bench_rows.differing(
      run(x[end - 1 : end], w, jnp.asarray(last)), y[end - 1 : end]
    )

  x, w = jax.eval_shape(draw, bench_rows.SEED)
  counts = jax.ShapeDtypeStruct(sizes.shape, jnp.int32)
  y = jax.ShapeDtypeStruct((shape.rows, shape.n), x.dtype)
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (run, x, w, counts),
    'error': (error, x, w, y),
    'alone': (alone, x, w, y),
    'xla': (_gated_stock, x, w, counts),
  }
  ready = bench_rows.ahead(programs, {'draw', 'error', 'alone'})
  yield None
  arrays = *bench_rows.draw(ready['draw']), jnp.asarray(sizes)
  y = ready['ours'](*arrays)
  size = {name: 2 * value for name, value in _size(shape).items()}
  row = Row('gated matmul', shape.name, 'ours', **size)
  own = bench_rows.checked(
    row,
    error=lambda: ready['error'](*arrays[:2], y),
    differing=lambda: ready['alone'](*arrays[:2], y),
  )
  yield bench_rows.timed(own, ready['ours'], *arrays)
  yield bench_rows.timed(
    dataclasses.replace(row, who='xla'), ready['xla'], *arrays
  )
  torch = bench_rows.torch()
  if torch is not None:
    call = _gated_torch(torch, sizes, *arrays[:2])
    theirs = dataclasses.replace(row, who='torch')
    yield bench_rows.torch_timed(theirs, torch, call)


def _gated_stock(x, w, group_sizes):
  y = jax.lax.ragged_dot(x, w.reshape(*w.shape[:2], -1), group_sizes)
  gate, up = jnp.split(y, 2, axis=1)
  return jax.nn.silu(gate) * up


def _gated_torch(torch, sizes: np.ndarray, x, w) -> Callable[[], Any]:
  x, w = torch.from_dlpack(x), torch.from_dlpack(w.reshape(*w.shape[:2], -1))
  offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device='cuda')

  def call():
    gate, up = torch._grouped_mm(x, w, offs=offsets).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up

  return call


def _cuts(sizes: np.ndarray) -> dict[str, tuple[Any, Any, Callable]]:
  """Some rows, in another order, with other tiles: (rows, sizes, comparison)."""
  if dispatch.platform() != 'gpu':
    return {}
  from pallas_kernels.grouped_matmul import gpu
  from pallas_kernels.grouped_matmul import gpu_few

  rng = np.random.default_rng(2)
  owner = np.repeat(np.arange(len(sizes)), sizes)
  found = {}
  for rows, tiles in (
    (1, gpu.Tiles()),
    (8, gpu.Tiles(consumers=1, columns=64, depth=128)),
    (8, gpu_few.Few(rows=8)),
    (len(owner) // 3 + 1, gpu.Tiles(rows=128, columns=128, stages=3, slots=1)),
    (len(owner), gpu.Tiles(stages=3, panel=3)),
  ):
    kept = rng.permutation(len(owner))[:rows]
    kept = kept[np.argsort(owner[kept], kind='stable')]
    counts = np.bincount(owner[kept], minlength=len(sizes))

    def compare(x, w, y, kept, counts, tiles=tiles):
      other = grouped_matmul.grouped_matmul(x[kept], w, counts, tiles=tiles)
      return bench_rows.differing(other, y[kept])

    both = (one.astype(np.int32) for one in (kept, counts))
    found[f'{len(kept)} rows, {tiles}'] = *both, compare
  return found


def _stock(shape: grouped_shapes.Shape) -> list[tuple[str, Callable]]:
  """The kernel that comes with jax, in a few tilings."""
  if dispatch.platform() != 'gpu' or shape.groups > 64:  # unrolls over groups
    return []
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

  def call(x, w, group_sizes, block):
    return ragged_dot_mgpu.ragged_dot(
      x,
      w,
      group_sizes=group_sizes,
      block_m=block,
      block_n=128,
      block_k=64,
      max_concurrent_steps=4,
      grid_block_n=8,
    )

  return [
    (f'stock {block}', functools.partial(call, block=block)) for block in STOCK
  ]


def dense(shape: matmul_shapes.Shape) -> Rows:
  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    x = bench_rows.normal(keys[0], shape.rows, shape.k)
    return x, bench_rows.normal(keys[1], shape.k, shape.n)

  def error(x, w, y):
    some = slice(0, min(512, shape.rows))
    return bench_rows.relative(y[some], bench_rows.exact(x[some], w))

  def few(x, w, y):
    return bench_rows.differing(matmul.matmul(x[:7], w), y[:7])

  x, w = jax.eval_shape(draw, bench_rows.SEED)
  y = jax.ShapeDtypeStruct((shape.rows, shape.n), x.dtype)
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (matmul.matmul, x, w),
    'error': (error, x, w, y),
    'few': (few, x, w, y),
  }
  ready = bench_rows.ahead(programs, {'draw', 'error'})
  yield None
  x, w = bench_rows.draw(ready['draw'])
  y = ready['ours'](x, w)
  size = dict(flops=shape.flops, bytes=2 * shape.k * shape.n)
  row = Row('matmul', shape.name, 'ours', **size)
  own = bench_rows.checked(
    row,
    error=lambda: ready['error'](x, w, y),
    differing=lambda: ready['few'](x, w, y),
  )
  yield bench_rows.timed(own, ready['ours'], x, w)
  theirs = dataclasses.replace(row, who='xla')
  yield bench_rows.timed(theirs, lambda x, w: x @ w, x, w)
  torch = bench_rows.torch()
  if torch is not None:
    xt, wt = torch.from_dlpack(x), torch.from_dlpack(w)
    theirs = dataclasses.replace(row, who='torch')
    yield bench_rows.torch_timed(theirs, torch, lambda: xt @ wt)
