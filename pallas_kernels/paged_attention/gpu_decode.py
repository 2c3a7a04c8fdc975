"""Mosaic GPU: a step of decoding, the newest key and value written and attended.

Each block of threads has one sequence and one head of keys: a warpgroup loads the
queries that share the head, the key and value of the newest token (XLA lays them
side by side while it computes them), and the pages so far. The newest key and
value go to their place in the last page, and at once into the copy of it that is
attended with. So a step of decoding is one launch
where writing, padding, attending and cutting were five, each of which takes a GPU
longer to start than a short context to read.

`forward_turning` is the same of queries and keys that are not turned yet (rotary
positions): it reads them where their product has left them and turns them itself.
Nothing is then launched between that product and attention.

Blocks are merged by the code of `attention`, in its order, so the bits are those
of a write that `paged_attention` follows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.attention import gpu
from pallas_kernels.attention import gpu_kernel
from pallas_kernels.paged_attention import gpu as paged

ROWS = gpu.ROWS
LINES = 8  # rows of a tile in memory, which a copy begins at
MOST_STAGES = 3  # blocks of keys and values on their way
SHARED = mosaic.SHARED_BYTES // 2 - 2048  # two blocks of threads share it


def takes(q, k_pages, v_pages, table, split: int | None) -> bool:
  """Whether this kernel can: what it cannot, it leaves to the general one.

  That has the values which are part of keys, the long keys of latent attention,
  and splits of few long sequences. jax 0.10 hands no pages to a kernel that
  changes them.
  """
  if v_pages is None or not mosaic.interprets():  # jax 0.11
    return False
  (n, h, key), (block, g) = q.shape, k_pages.shape[1:3]
  if h // g + 2 > ROWS or key > 128 or key != v_pages.shape[-1]:
    return False
  sums = ROWS, key
  if split is None:
    blocks = paged.SPLIT // block
    return not paged.few(n * g, table.shape[1], blocks, sums)
  return split == 0


def forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  table: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(out [N, H, W], k_pages, v_pages); the arguments are those of the package.

  The pages are changed in place where XLA finds nobody else who needs them.
  """
  n, h, key = q.shape
  g = k_pages.shape[2]
  share = h // g
  high = -(-(share + 2) // LINES) * LINES
  newest = [x.reshape(n, g, -1, key) for x in (q, k, v)]
  fill = jnp.zeros((n, g, high - share - 2, key), q.dtype)
  rows = jnp.concatenate([*newest, fill], axis=2).reshape(-1, key)
  # What follows the queries of a sequence is read with them, and not used.
  rows = jnp.pad(rows, ((0, ROWS - high), (0, 0)))
  arrays = positions, table, rows, k_pages, v_pages
  out, *pages = _launch(arrays, None, n * g, share, high, scale, interpret)
  return out.reshape(n, h, key), *pages


def forward_turning(
  qkv: jax.Array,
  turns: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  table: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`forward` of queries and keys that are turned here.

  Args:
    qkv: [N, H + 2 G, K], queries, keys and values as their product leaves them.
    turns: float32 [N, K], cos and then sin of the K / 2 pairs.
    (others): see `forward`.
  """
  n, heads, key = qkv.shape
  g = k_pages.shape[2]
  h = heads - 2 * g
  arrays = positions, table, qkv.reshape(-1, key), k_pages, v_pages
  out, *pages = _launch(arrays, turns, n * g, h // g, 0, scale, interpret)
  return out.reshape(n, h, key), *pages


def _launch(arrays, turns, items, share, high, scale, interpret):
  """(out [N H, W], k_pages, v_pages).

  `high` rows of memory are of one sequence and head; 0: they are as in
  `forward_turning`, and there are turns.
  """
  positions, table, rows, *pages = arrays
  block, g, key = pages[0].shape[1:]
  work = gpu.plan(
    *(key, key, block, scale, False, True),
    gpu.Tiles(1, _stages(block, key), 1, turns=False),
    interpret,
    log=False,
  )
  pages = [jax.new_ref(x) for x in pages]
  sizes = dict(heads=g, share=share, high=high)
  out = mosaic.launch(
    mosaic.partial(_body, work=work, **sizes),
    out=jax.ShapeDtypeStruct((items * share, key), rows.dtype),
    scratch=_scratch(work, rows.dtype, turns is not None),
    grid=items,
    warpgroups=1,
    interpret=interpret,
    approximate=True,
  )(
    positions.astype(jnp.int32),
    table.astype(jnp.int32),
    *([rows] if turns is None else [rows, turns]),
    *pages,
  )
  return out, *(jax.freeze(ref) for ref in pages)


def _stages(block: int, key: int) -> int:
  """As many as leave room for another block of threads, and at least two."""
  rest = 4 * ROWS * key + 4096
  return min(max((SHARED - rest) // (4 * block * key), 2), MOST_STAGES)


def _scratch(work: gpu.Work, dtype, turns: bool) -> list[Any]:
  tile, newest = (ROWS, work.key), (1, work.key)
  stages = work.tiles.stages, work.block, work.key
  fresh = tile if turns else newest
  used = mosaic.shared_bytes(
    *((shape, dtype) for shape in (*2 * (tile, stages), fresh, newest)),
    (newest, jnp.float32),
  )
  mosaic.check_shared(work.tiles, used)
  extra = [mosaic.linear(newest, jnp.float32)] if turns else []
  return [
    mosaic.tiled(tile, dtype),
    mosaic.tiled(stages, dtype),
    mosaic.tiled(stages, dtype),
    mosaic.linear(tile, dtype),
    mosaic.linear(fresh, dtype),
    mosaic.linear(newest, dtype),
    *extra,
    plgpu.Barrier(num_arrivals=3 + turns),
    plgpu.Barrier(num_arrivals=1, num_barriers=stages[0]),
    plgpu.Barrier(num_arrivals=1, num_barriers=stages[0]),
    plgpu.Barrier(num_arrivals=1),
  ]


@dataclasses.dataclass(frozen=True)
class _Refs:
  """References of a running kernel, by what they hold."""

  positions: Any
  table: Any
  rows: Any  # queries, newest keys and values
  turns: Any  # of the newest tokens, or None
  k_pages: Any
  v_pages: Any
  out: Any
  queries: Any  # what follows is shared memory
  keys: Any
  values: Any
  waiting: Any  # the output
  key: Any  # of the newest token; with turns it follows its queries
  value: Any
  turn: Any  # of the newest token, or None
  first: Any  # barriers: of queries, the newest key and value
  key_full: Any
  value_full: Any
  free: Any  # everyone has read a stage


def _body(*refs, work: gpu.Work, heads: int, share: int, high: int):
  r = _named(refs, turns=not high)
  item = lax.axis_index('sm')
  sequence, head = (f(item, jnp.int32(heads)) for f in (lax.div, lax.rem))
  position = r.positions[sequence]
  rows = pl.ds(item * share, share)

  @pl.when(position >= 0)
  def _():
    if high:
      _fetch(r, item, share, high)
    else:
      _fetch_unturned(r, sequence, head, heads, share)
    blocks = lax.div(position, jnp.int32(work.block)) + 1
    load = mosaic.partial(_load_block, r, sequence, head)
    for j in range(work.tiles.stages):
      pl.when(j < blocks)(mosaic.partial(load, jnp.int32(j), j))
    plgpu.barrier_wait(r.first)
    if not high:
      _turn(r, work)
    new = r if high else dataclasses.replace(r, key=r.key.at[pl.ds(share, 1)])
    _write_newest(new, sequence, head, position, work)
    out, _, total = _attend(new, load, blocks, position, work)
    inverse = gpu_kernel.across(1.0 / total, out.shape)
    _store(r, (out * inverse).astype(r.out.dtype), rows, share)

  @pl.when(position < 0)
  def _():
    nothing = jnp.zeros((ROWS, work.width), r.out.dtype)
    _store(r, plgpu.layout_cast(nothing, plgpu.Layout.WGMMA), rows, share)

  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _named(refs, turns: bool) -> _Refs:
  if turns:
    return _Refs(*refs)
  inputs, buffers = 3, 12  # that stand before the two that are left out
  some = *refs[:inputs], None, *refs[inputs:buffers], None, *refs[buffers:]
  return _Refs(*some)


def _fetch(r: _Refs, item, share: int, high: int):
  """Queries, key and value that lie beside each other, with some fill."""
  low = pl.multiple_of(item * high, LINES)
  for first, count, buffer in (
    (low, ROWS, r.queries),
    (low + share, 1, r.key),
    (low + share + 1, 1, r.value),
  ):
    source = r.rows.at[pl.ds(first, count)]
    plgpu.copy_gmem_to_smem(source, buffer, r.first)


def _fetch_unturned(r: _Refs, sequence, head, heads: int, share: int):
  """The same of the rows of a product: all queries, all keys, all values."""
  low = sequence * ((share + 2) * heads)
  for first, count, buffer in (
    (low + head * share, share, r.key.at[pl.ds(0, share)]),
    (low + heads * share + head, 1, r.key.at[pl.ds(share, 1)]),
    (low + heads * (share + 1) + head, 1, r.value),
  ):
    source = r.rows.at[pl.ds(first, count)]
    plgpu.copy_gmem_to_smem(source, buffer, r.first)
  plgpu.copy_gmem_to_smem(r.turns.at[pl.ds(sequence, 1)], r.turn, r.first)


def _turn(r: _Refs, work: gpu.Work):
  """Turns queries and key where they are; then the queries to be multiplied.

  Below the key is what was in memory before: rows that nothing comes of.
  """
  half = work.key // 2
  parts = pl.ds(0, half), pl.ds(half, half)
  layout = plgpu.Layout.WGMMA
  first, second = (
    mosaic.load(r.key.at[:, part], layout).astype(jnp.float32) for part in parts
  )
  cos, sin = (
    lax.broadcast_in_dim(
      mosaic.load(r.turn.at[0, part], layout.reduce(0)), first.shape, [1]
    )
    for part in parts
  )
  kind = r.out.dtype
  r.key.at[:, parts[0]][...] = (first * cos - second * sin).astype(kind)
  r.key.at[:, parts[1]][...] = (second * cos + first * sin).astype(kind)
  plgpu.commit_smem()
  r.queries[...] = mosaic.load(r.key, layout)
  plgpu.commit_smem()


def _write_newest(r: _Refs, sequence, head, position, work: gpu.Work):
  page = r.table[sequence, lax.div(position, jnp.int32(work.block))]
  place = lax.rem(position, jnp.int32(work.block))
  one = pl.ds(head, 1)
  plgpu.copy_smem_to_gmem(r.key, r.k_pages.at[page, place, one])
  plgpu.copy_smem_to_gmem(r.value, r.v_pages.at[page, place, one])


def _load_block(r: _Refs, sequence, head, j, stage):
  page = r.table[sequence, j]
  for pages, buffer, full in (
    (r.k_pages, r.keys, r.key_full),
    (r.v_pages, r.values, r.value_full),
  ):
    plgpu.copy_gmem_to_smem(
      pages.at[page, :, head], buffer.at[stage], full.at[stage]
    )


def _attend(r: _Refs, load, blocks, position, work: gpu.Work):
  """(output, maximum, sum) over all blocks; the newest token is in the last."""
  stages, shape = jnp.int32(work.tiles.stages), (ROWS, work.block)

  def merge(j, carry, last):
    out, top, total = carry
    stage = lax.rem(j, stages)
    plgpu.barrier_wait(r.key_full.at[stage])
    if last:
      _put(r.keys.at[stage], r.key, position, work)
    right = r.keys.at[stage].transpose((1, 0))

    def scores(s):
      plgpu.wgmma(s, r.queries, right)
      return s[...]

    s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
    sees = _sees(position) if last else None
    p, top, total, decay = gpu_kernel.softmax(s, top, total, j, sees, work)
    out = out * gpu_kernel.across(decay, out.shape)
    plgpu.barrier_wait(r.value_full.at[stage])
    if last:
      _put(r.values.at[stage], r.value, position, work)
    small = p.astype(r.out.dtype)
    out = gpu_kernel.accumulate(out, small, r.values.at[stage], work.interpret)
    if not last:

      @pl.when(j + stages < blocks)
      def _():
        plgpu.barrier_arrive(r.free)
        plgpu.barrier_wait(r.free)
        load(j + stages, stage)

    return out, top, total

  carry = gpu_kernel.start(work.width)
  carry = lax.fori_loop(0, blocks - 1, mosaic.partial(merge, last=False), carry)
  return merge(blocks - 1, carry, last=True)


def _sees(position):
  """First and last key that each row sees."""
  by_row = plgpu.Layout.WGMMA.reduce(1)
  low = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.int32), by_row)
  return low, low + position


def _put(buffer, row, position, work: gpu.Work):
  """Puts the newest row into its place of a block in shared memory."""
  block = buffer[...]
  place = plgpu.broadcasted_iota(
    jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA
  )
  newest = mosaic.load(row.at[0], plgpu.Layout.WGMMA.reduce(0))
  newest = lax.broadcast_in_dim(newest, block.shape, [1])
  mine = place == lax.rem(position, jnp.int32(work.block))
  buffer[...] = jnp.where(mine, newest, block)
  plgpu.commit_smem()


def _store(r: _Refs, out, rows, share: int):
  r.waiting[...] = out
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(r.waiting.at[pl.ds(0, share)], r.out.at[rows])
