"""Mosaic GPU: the gradient to each group's matrix, rows added in their order.

dw[e] = x[rows of e]^T @ dy[rows of e]. The structure is that of gpu.py; here
the rows are what is summed over, so a group's first and last block may hold
rows of its neighbours, and the consumers set those to zero in shared memory
before they multiply. Nothing is padded, and nothing is added by two blocks.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import groups


def weight_gradient(
  x: jax.Array,
  dy: jax.Array,
  group_sizes: jax.Array,
  *,
  tiles: gpu.Tiles,
  out_dtype: Any = None,
  interpret: bool = False,
) -> jax.Array:
  """dw[e] = sum over the rows of e of x[m]^T dy[m]; zero for an empty group.

  Args:
    x: [M, K], rows sorted by group.
    dy: [M, N].
    group_sizes: int [E], summing to M.
    tiles: consumers * rows of K by columns of N; depth is of rows.
    out_dtype: default x's; float32 is possible.
    interpret: run on CPU.

  Returns:
    [E, K, N].
  """
  m, k = x.shape
  n = dy.shape[1]
  dtype = jnp.dtype(out_dtype or x.dtype)
  if reason := gpu.unsupported(x, dy, x.dtype):
    raise ValueError(reason)
  share = tiles.columns // tiles.consumers
  if share % gpu.STORE:
    raise ValueError(
      f'columns={tiles.columns} / consumers={tiles.consumers} is not a multiple'
      f' of {gpu.STORE}'
    )
  if m % gpu.ALIGN:
    pad = ((0, -m % gpu.ALIGN), (0, 0))
    x, dy = jnp.pad(x, pad), jnp.pad(dy, pad)
  starts, ends = groups.bounds(group_sizes)
  sms = 2 if interpret else mosaic.cores()
  kernel = mosaic.launch(
    mosaic.partial(_body, t=tiles, k=k, n=n, sms=sms),
    out=jax.ShapeDtypeStruct((starts.shape[0], k, n), dtype),
    scratch=_scratch(tiles, x.dtype, dtype),
    grid=sms,
    warpgroups=tiles.consumers + 1,
    interpret=interpret,
  )
  return kernel(starts, ends, x, dy)


def _scratch(t: gpu.Tiles, dtype, out_dtype):
  """Ring of x and dy, results that wait, barriers; against the limit."""
  x = (t.stages, t.consumers, t.depth, t.rows)
  dy = (t.stages, t.depth, t.columns)
  out = (t.consumers, t.slots, t.rows, gpu.STORE)
  used = mosaic.shared_bytes((x, dtype), (dy, dtype), (out, out_dtype))
  mosaic.check_shared(t, used)
  return (
    mosaic.tiled(x, dtype),
    mosaic.tiled(dy, dtype),
    mosaic.tiled(out, out_dtype),
    plgpu.Barrier(num_arrivals=t.consumers + 1, num_barriers=t.stages),
    plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    plgpu.Barrier(num_arrivals=t.consumers),
  )


def _body(starts, ends, x, dy, dw, x_ring, dy_ring, waiting, *rest, **kw):
  """One block: the last warpgroup loads, the others multiply."""
  full, empty, cleaned = rest
  t, k, n, sms = kw['t'], kw['k'], kw['n'], kw['sms']
  high, wide = -(-k // (t.consumers * t.rows)), -(-n // t.columns)
  sm, wg = lax.axis_index('sm'), lax.axis_index('wg')
  total = starts.shape[0] * high * wide
  trips = mosaic.cdiv(jnp.maximum(total - sm, 0), sms)

  def tile(trip):
    """Group, its bounds, first block row, blocks; row and column of a tile."""
    index = trip * sms + sm
    group = lax.div(index, jnp.int32(high * wide))
    row, column = gpu.order(index - group * high * wide, high, wide, t.panel)
    start, end = starts[group], ends[group]
    base = lax.div(start, jnp.int32(gpu.ALIGN)) * gpu.ALIGN
    steps = jnp.where(end > start, mosaic.cdiv(end - base, t.depth), 0)
    return group, start, end, base, steps, row, column

  @pl.when(wg == t.consumers)
  def _():
    plgpu.set_max_registers(40, action='decrease')
    _produce(x, dy, x_ring, dy_ring, full, empty, tile, trips, t)

  @pl.when(wg < t.consumers)
  def _():
    plgpu.set_max_registers(gpu.registers(t.consumers), action='increase')
    _consume(dw, x_ring, dy_ring, waiting, full, empty, cleaned, tile, trips, t)


def _produce(x, dy, x_ring, dy_ring, full, empty, tile, trips, t):
  def one_tile(trip, step):
    _, _, _, base, steps, row, column = tile(trip)

    def one_step(i, step):
      slot = lax.rem(step, jnp.int32(t.stages))
      rows = pl.ds(pl.multiple_of(base + i * t.depth, gpu.ALIGN), t.depth)
      plgpu.barrier_wait(empty.at[slot])
      plgpu.copy_gmem_to_smem(
        dy.at[rows, pl.ds(column * t.columns, t.columns)],
        dy_ring.at[slot],
        full.at[slot],
      )
      for consumer in range(t.consumers):
        first = (row * t.consumers + consumer) * t.rows
        plgpu.copy_gmem_to_smem(
          x.at[rows, pl.ds(first, t.rows)],
          x_ring.at[slot, consumer],
          full.at[slot],
        )
      return step + 1

    return lax.fori_loop(0, steps, one_step, step)

  lax.fori_loop(0, trips, one_tile, jnp.int32(0))
  for slot in range(t.stages):  # leaves the barriers as they were
    plgpu.barrier_wait(empty.at[slot])


def _clean(x_part, dy_part, first, start, end, cleaned):
  """Sets rows outside start to end to zero in this consumer's shares."""
  for part in (x_part, dy_part):
    row = first + plgpu.broadcasted_iota(
      jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA
    )
    # A select and no product: a neighbour's NaN must not come through.
    value = part[...]
    part[...] = jnp.where(
      (row >= start) & (row < end), value, jnp.zeros_like(value)
    )
  plgpu.commit_smem()
  plgpu.barrier_arrive(cleaned)
  plgpu.barrier_wait(cleaned)


def _consume(dw, x_ring, dy_ring, waiting, full, empty, cleaned, *rest):
  tile, trips, t = rest
  wg = lax.axis_index('wg')
  share = t.columns // t.consumers
  for slot in range(t.stages):
    plgpu.barrier_arrive(empty.at[slot])

  def multiply(step, start, end, base, steps, total):
    def block(i, edge):
      slot = lax.rem(step + i, jnp.int32(t.stages))
      left, right = x_ring.at[slot, wg], dy_ring.at[slot]
      plgpu.barrier_wait(full.at[slot])
      if edge:
        own = dy_ring.at[slot, :, pl.ds(wg * share, share)]
        _clean(left, own, base + i * t.depth, start, end, cleaned)
      plgpu.wgmma(total, left.transpose((1, 0)), right)
      plgpu.wgmma_wait(1)  # the block before this one is done

      @pl.when(i > 0)
      def _():
        before = lax.rem(step + i - 1, jnp.int32(t.stages))
        plgpu.barrier_arrive(empty.at[before])

    @pl.when(steps > 0)
    def _():
      block(jnp.int32(0), True)

    def inner(i, _):
      block(i, False)
      return ()

    lax.fori_loop(1, steps - 1, inner, ())

    @pl.when(steps > 1)
    def _():
      block(steps - 1, True)

    plgpu.wgmma_wait(0)

    @pl.when(steps > 0)
    def _():
      last = lax.rem(step + steps - 1, jnp.int32(t.stages))
      plgpu.barrier_arrive(empty.at[last])

    return total[...]

  def one_tile(trip, step):
    group, start, end, base, steps, row, column = tile(trip)
    total = pl.run_scoped(
      lambda total: multiply(step, start, end, base, steps, total),
      plgpu.ACC((t.rows, t.columns), jnp.float32),
    )
    total = total.astype(dw.dtype)
    rows = pl.ds((row * t.consumers + wg) * t.rows, t.rows)
    blocks = t.columns // gpu.STORE
    for i in range(blocks):
      part = waiting.at[wg, i % t.slots]
      before = gpu.unread(i, blocks, t.slots)
      plgpu.wait_smem_to_gmem(before, wait_read_only=True)
      part[...] = total[:, i * gpu.STORE : (i + 1) * gpu.STORE]
      plgpu.commit_smem()
      columns = pl.ds(column * t.columns + i * gpu.STORE, gpu.STORE)
      plgpu.copy_smem_to_gmem(part, dw.at[group, rows, columns])
    return step + steps

  lax.fori_loop(0, trips, one_tile, jnp.int32(0))
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
