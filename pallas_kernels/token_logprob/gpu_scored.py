"""Mosaic GPU: logits of few rows and what their softmax hangs on, in one pass.

Who draws a token needs the logits: `scored` stores them on the way, and
`renormalised` reads them back to reduce them again over what was kept. Both have
the bits of `gpu.statistics`, for a tile of z is reduced by the same expression,
wherever it comes from, and blocks are merged alike.

What bounds it is reading the unembedding, so nothing may hold up the loads for
longer than the ring of stages lasts. A consumer that has a tile of z hardly waits:
its parts have places in shared memory from which the copy engine takes them (which
are free again long before the next tile), or are stored from registers. There is
one group of rows, known beforehand, so there is no plan of them in memory; and z
has no rows that only fill a tile.

A small vocabulary has few blocks of 256 columns, and most multiprocessors would
have none while a few read all of the unembedding. There the product is a launch of
its own, of narrower tiles, and another one reduces its blocks (`Cut.apart`).
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul import gpu as matmul
from pallas_kernels.grouped_matmul import gpu_few
from pallas_kernels.token_logprob import gpu
from pallas_kernels.token_logprob import gpu_merge

ROWS, BLOCK, LOWEST = gpu.ROWS, gpu.BLOCK, gpu.LOWEST
# The product is apart where one of so many multiprocessors, or fewer, would have
# a block. On an H200 that took 0.90 of the time for 2 blocks, 0.65 for 8, 0.96
# for 16, 0.99 for 32 and 0.95 for 64.
IDLE = 2


@dataclasses.dataclass(frozen=True)
class Cut:
  """How the work is cut; it changes the speed and no bit of the result.

  Attributes:
    tiles: `gpu.check_tiles`; `slots`: parts of z that wait in shared memory.
    direct: whether z is stored from registers, by 32 bytes, where rows are a
      multiple of 64; else, and of other rows, by the copy engine.
    apart: whether the product is a launch of its own, `grouped_matmul.product`;
      nothing else is read then.
  """

  tiles: matmul.Tiles
  direct: bool = False
  apart: bool = False


class _Rows:
  """`groups.row_tiles` of one group: a reference that needs no memory."""

  def __init__(self, rows: int, tile: int):
    self.rows, self.tile = rows, tile

  def __getitem__(self, place):
    number, field = place
    return (0, number * self.tile, 0, self.rows)[field]


def cut_for(rows: int, depth: int, vocabulary: int) -> Cut:
  """As tuned for so many rows of so many numbers, or the default.

  The tunings' keys are `scored few D`, of up to 64 rows, and `scored whole D`, of
  more that are a multiple of 64; their fields those of `matmul.Tiles`, and direct.
  Of a small vocabulary, and rows that `gpu_few.usual` is for, the product is apart.
  """
  blocks = -(-rows // ROWS) * -(-vocabulary // BLOCK)
  idle = blocks * IDLE <= mosaic.cores()
  apart = idle and gpu_few.usual(rows, vocabulary) is not None
  if rows <= ROWS:
    size, change = 'few', dict(consumers=1, stages=4, slots=3, direct=False)
  elif rows % ROWS == 0:
    size, change = 'whole', dict(consumers=2, stages=4, slots=1, direct=True)
  else:
    size, change = '', dict(consumers=2, stages=3, slots=2, direct=False)
  change |= dispatch.tuning(gpu.NAME).get(f'scored {size} {depth}', {})
  direct = change.pop('direct')
  return Cut(dataclasses.replace(gpu.tuned(depth), **change), direct, apart)


def scored(
  hidden: jax.Array,
  unembed: jax.Array,
  temperatures: jax.Array,
  *,
  cut: Cut | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """z, its log-sum-exp and its entropy, in one pass over `unembed`.

  Args:
    hidden: bfloat16 [T, D].
    unembed: bfloat16 [D, V].
    temperatures: float32 [T].
    cut: default `cut_for` these sizes.
    interpret: run on CPU.

  Returns:
    float32 [T, V], [T], [T].
  """
  (t, d), v = hidden.shape, unembed.shape[1]
  cut = cut or cut_for(t, d, v)
  rows, high = (-(-t // n) * n for n in (matmul.ALIGN, ROWS))
  if rows != t:
    hidden = jnp.pad(hidden, ((0, rows - t), (0, 0)))
  scale = jnp.pad(1.0 / temperatures.astype(jnp.float32), (0, high - t))
  blocks = -(-v // BLOCK)
  if cut.apart:
    name = 'gpu_interpret' if interpret else 'gpu'
    product = grouped_matmul.product(hidden, unembed, name)
    z, parts = _launch_blocks(_scale_blocks, (rows, v), [product], interpret)(
      product, scale
    )
  else:
    z, parts = _launch(cut, (rows, d, v), hidden.dtype, interpret)(
      hidden, unembed[None], scale
    )
  log, entropy = gpu_merge.merged(parts[None], blocks, t, interpret=interpret)
  return z if rows == t else z[:t], log, entropy


def _launch(cut: Cut, sizes, dtype, interpret: bool):
  """The kernel for sizes (T, D, V), T a multiple of `matmul.ALIGN`."""
  (rows, d, v), tiles = sizes, cut.tiles
  gpu.check_tiles(tiles)
  direct = cut.direct and rows % ROWS == 0
  high, blocks = -(-rows // ROWS) * ROWS, -(-v // BLOCK)
  sms = 2 if interpret else mosaic.cores()
  work = matmul.Work(tiles, d, v, sms)
  stages, used = matmul.ring(work, dtype)
  slots = tiles.consumers, tiles.slots, ROWS, matmul.STORE
  waiting = [] if direct else [mosaic.tiled(slots, jnp.float32)]
  if waiting:
    used += mosaic.shared_bytes((slots, jnp.float32))
  mosaic.check_shared(tiles, used + 1024 * tiles.consumers)
  return mosaic.launch(
    mosaic.partial(_body, work=work, rows=rows, direct=direct),
    out=[
      jax.ShapeDtypeStruct((rows, v), jnp.float32),
      jax.ShapeDtypeStruct((3, blocks, high), jnp.float32),
    ],
    scratch=[
      mosaic.linear((tiles.consumers, 3, ROWS), jnp.float32),
      *waiting,
      *stages,
    ],
    grid=sms,
    warpgroups=tiles.consumers + 1,
    interpret=interpret,
  )


def _body(
  x, w, scale, z_ref, parts, small, *refs, work, rows: int, direct: bool
):
  waiting, stages = refs[: not direct], refs[not direct :]
  tiles, layout = work.tiles, plgpu.Layout.WGMMA
  wg = lax.axis_index('wg')

  def finish(total, own, column):
    first = pl.multiple_of(own[0], ROWS)
    here = pl.ds(first, ROWS)
    factor = mosaic.load(scale.at[here], layout.reduce(1))
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=layout)
    z = gpu.scaled(total, factor, column + place, work.n)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
    if direct:
      _store(z, z_ref, here, column, work.n)
    else:
      _copy(z, z_ref, waiting[0], (first, min(rows, ROWS)), column, tiles.slots)
    for i, value in enumerate(gpu.reduced(z)):
      small[wg, i] = value
    plgpu.commit_smem()
    block = lax.div(column, jnp.int32(BLOCK))
    for i in range(3):
      plgpu.copy_smem_to_gmem(small.at[wg, i], parts.at[i, block, here])

  table = _Rows(rows, tiles.consumers * ROWS)
  count = np.asarray([-(-rows // table.tile)], np.int32)
  matmul.multiply_tiles(table, count, x, w, stages, finish, work)

  @pl.when(wg < tiles.consumers)
  def _():
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _pieces(column, wide: int):
  """(columns of a tile, columns of z), of pieces that are there or are not."""
  for i in range(0, BLOCK, wide):
    yield slice(i, i + wide), pl.ds(column + i, wide)


def _store(z, z_ref, here, column, n: int) -> None:
  """From registers; of a tile past the end only whole pieces that are there."""
  if n % BLOCK == 0:
    z_ref[here, pl.ds(column, BLOCK)] = z
    return
  for own, columns in _pieces(column, matmul.STORE):

    @pl.when(column + own.start < n)
    def _(own=own, columns=columns):
      z_ref[here, columns] = z[:, own]


def _copy(z, z_ref, waiting, rows, column, slots: int) -> None:
  """By the copy engine, which leaves out what is past the end."""
  first, box = rows
  wg = lax.axis_index('wg')
  for i, (own, columns) in enumerate(_pieces(column, matmul.STORE)):
    slot = waiting.at[wg, i % slots]
    if i >= slots:
      plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    slot[...] = z[:, own]
    plgpu.commit_smem()
    source = slot if box == ROWS else slot.at[pl.ds(0, box)]
    plgpu.copy_smem_to_gmem(source, z_ref.at[pl.ds(first, box), columns])


def renormalised(
  z: jax.Array, words: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Log-sum-exp and entropy of `scored`'s z over what is kept.

  Args:
    z: float32 [T, V].
    words: see `gpu.statistics`.
    interpret: run on CPU.

  Returns:
    Two float32 [T].
  """
  t, v = z.shape
  high, blocks = -(-t // ROWS) * ROWS, -(-v // BLOCK)
  if t % matmul.ALIGN:  # the copy engine takes rows by eight
    z = jnp.pad(z, ((0, -t % matmul.ALIGN), (0, 0)))
  (parts,) = _launch_blocks(_cut_blocks, z.shape, [], interpret)(
    z, gpu.by_block(words, high, v)
  )
  log, entropy = gpu_merge.merged(parts[None], blocks, t, interpret=interpret)
  return log, entropy


def _launch_blocks(body, sizes, out, interpret: bool):
  """m, s and u of all blocks of what is in memory, behind others of `out`."""
  t, v = sizes
  high, blocks = -(-t // ROWS) * ROWS, -(-v // BLOCK)
  sms = 2 if interpret else mosaic.cores()
  return mosaic.launch(
    mosaic.partial(body, sms=sms),
    out=[
      *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in out),
      jax.ShapeDtypeStruct((3, blocks, high), jnp.float32),
    ],
    scratch=[
      mosaic.linear((3, ROWS), jnp.float32),
      mosaic.tiled((ROWS, BLOCK), jnp.float32),
      plgpu.Barrier(),
    ],
    grid=sms,
    warpgroups=1,
    interpret=interpret,
  )


def _cut_blocks(z_ref, kept, parts, *scratch, sms: int):
  """Of z in memory, [T, V], over what is kept."""

  def values(z, here, column, place):
    z = jnp.where(column + place < z_ref.shape[1], z, LOWEST)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    word = gpu.words_here(kept, column, here, by_row)
    return jnp.where(gpu.kept_here(word, place), z, LOWEST)

  _reduce_blocks(z_ref, parts, *scratch, sms=sms, values=values)


def _scale_blocks(
  product, scale, z_ref, parts, small, tile, arrived, *, sms: int
):
  """Of hidden @ unembed in memory, [T, V], which becomes z."""
  rows, v = product.shape

  def values(total, here, column, place):
    factor = mosaic.load(scale.at[here], plgpu.Layout.WGMMA.reduce(1))
    # In the place of the product, from which the copy engine takes it.
    tile[...] = gpu.scaled(total, factor, column + place, v)
    plgpu.commit_smem()
    box = min(rows, ROWS)
    source = tile if box == ROWS else tile.at[pl.ds(0, box)]
    some = pl.ds(here.start, box), pl.ds(column, BLOCK)
    plgpu.copy_smem_to_gmem(source, z_ref.at[some])
    # Read back: of a product of what comes from memory, the choice in `scaled`
    # was not enough to keep it from z - m.
    return plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)

  _reduce_blocks(product, parts, small, tile, arrived, sms=sms, values=values)


def _reduce_blocks(source, parts, small, tile, arrived, *, sms: int, values):
  """Tiles of 64 rows by 256; `values` makes of one what is reduced."""
  rows, v = source.shape
  wide = -(-v // BLOCK)
  sm = lax.axis_index('sm')
  tiles = -(-rows // ROWS) * wide
  layout = plgpu.Layout.WGMMA

  @pl.loop(0, mosaic.cdiv(jnp.maximum(tiles - sm, 0), sms))
  def _(trip):
    index = trip * sms + sm
    block = lax.rem(index, jnp.int32(wide))
    first = pl.multiple_of(lax.div(index, jnp.int32(wide)) * ROWS, ROWS)
    here, column = pl.ds(first, ROWS), block * BLOCK
    there = source.at[here, pl.ds(column, BLOCK)]
    plgpu.copy_gmem_to_smem(there, tile, arrived)
    plgpu.barrier_wait(arrived)
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=layout)
    z = values(plgpu.layout_cast(tile[...], layout), here, column, place)
    found = gpu.reduced(z)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, value in enumerate(found):
      small[i] = value
    plgpu.commit_smem()
    for i in range(3):
      plgpu.copy_smem_to_gmem(small.at[i], parts.at[i, block, here])

  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
