"""Mosaic GPU: logits a tile at a time, never in memory.

The matmul is that of grouped_matmul with one group; instead of a store, each
consumer reduces its 256 columns of logits to five numbers a row:

  m = max z,  s = sum exp(z - m),  u = sum exp(z - m) (z - m),  c = z[token]

Of ids that were not kept z is LOWEST; in a block with none that was, s and u are
what they are, and are merged with the factor 0. `gpu_merge` merges the blocks of
256 in their order. The block is part of what is computed (another one would round
elsewhere), so it is not tuned. `gpu_scored`, for few rows whose logits are wanted
too, has the same bits: it reduces a tile of z by the expression that is here.

A large vocabulary is cut into launches of some tiles a multiprocessor each. On an
H100, 16,384 rows of 7168 by 163,840 columns took 109 to 122 ms in one launch and
58 to 61 in several; of 2048 by 151,936, 17 either way. The cause was not measured;
that multiprocessors drift apart, and no longer find in the L2 cache what another
has read, is a guess.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul import gpu as matmul
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.token_logprob import gpu_merge

NAME = 'token_logprob'  # in the tunings
ROWS, BLOCK = 64, 256
TILES = matmul.Tiles(columns=BLOCK, panel=16)
# Of long rows, what all blocks read at a time must still fit into the L2 cache.
DEEP, DEEP_TILES = 4096, matmul.Tiles(columns=BLOCK, panel=4)
WAVES = 32  # tiles of a multiprocessor in a launch, about
WORDS = BLOCK // 32  # of 32 bits, what is kept of a block
LOWEST = -1e30  # instead of -inf, whose difference with itself is NaN


def unsupported(hidden: jax.Array, unembed: jax.Array) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  return matmul.unsupported(hidden, unembed, hidden.dtype)


def statistics(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array,
  words: jax.Array | None = None,
  *,
  tiles: matmul.Tiles | None = None,
  waves: int = WAVES,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chosen logit, log-sum-exp and entropy of z = hidden @ unembed / temperature.

  Args:
    hidden: bfloat16 [T, D].
    unembed: bfloat16 [D, V].
    tokens: int32 [T].
    temperatures: float32 [T].
    words: uint32 [T, ceil(V / 32)], of `reference.kept_words`; None: all.
    tiles: columns must be BLOCK; default by D, or as tuned.
    waves: of tiles in a launch, about; no bit depends on it.
    interpret: run on CPU.

  Returns:
    Three float32 [T].
  """
  (t, d), v = hidden.shape, unembed.shape[1]
  tiles = tiles or tuned(d)
  high = -(-t // ROWS) * ROWS
  pad = (0, high - t)
  hidden = jnp.pad(hidden, (pad, (0, 0))) if pad[1] else hidden
  scale = jnp.pad(1.0 / temperatures.astype(jnp.float32), pad)
  tokens = jnp.pad(tokens.astype(jnp.int32), pad)
  kept = () if words is None else (by_block(words, high, v),)
  launch = _launch(tiles, d, v, hidden.dtype, high, len(kept), interpret)
  size = tiles.consumers * tiles.rows
  table, count = groups.row_tiles(jnp.full((1,), high, jnp.int32), high, size)
  sms = 2 if interpret else mosaic.cores()
  blocks = -(-v // BLOCK)
  some = min(columns_of_launch(-(-high // size), sms, waves), blocks)
  operands = table, count, hidden, unembed[None], scale, tokens

  def part(first):
    return launch(some)(*operands, first[None], *kept)

  starts = jnp.arange(0, blocks, some, dtype=jnp.int32)
  parts = part(starts[0])[None] if some == blocks else lax.map(part, starts)
  log, entropy, chosen = gpu_merge.merged(parts, blocks, t, interpret=interpret)
  return chosen, log, entropy


def _launch(tiles, d, v, dtype, high: int, cut: int, interpret):
  """launch(blocks of the vocabulary) gives the kernel."""
  check_tiles(tiles)
  sms = 2 if interpret else mosaic.cores()
  work = matmul.Work(tiles, d, v, sms)
  stages, used = matmul.ring(work, dtype)
  mosaic.check_shared(tiles, used + 1024 * tiles.consumers)

  def launch(blocks: int):
    return mosaic.launch(
      mosaic.partial(_body, work=work, cut=cut),
      out=jax.ShapeDtypeStruct((4, blocks, high), jnp.float32),
      scratch=[
        mosaic.linear((tiles.consumers, 4, ROWS), jnp.float32),
        *stages,
      ],
      grid=sms,
      warpgroups=tiles.consumers + 1,
      interpret=interpret,
    )

  return launch


def check_tiles(tiles: matmul.Tiles) -> None:
  """ValueError for tiles of another block than that of which sums are."""
  if tiles.columns != BLOCK or tiles.rows != ROWS:
    raise ValueError(f'{tiles}: columns must be {BLOCK} and rows {ROWS}')


def tuned(depth: int) -> matmul.Tiles:
  """Tiles for rows of so many numbers; no bit depends on them."""
  tiles = DEEP_TILES if depth > DEEP else TILES
  change = dispatch.tuning(NAME).get(f'depth {depth}', {})
  return dataclasses.replace(tiles, **change)


def columns_of_launch(row_tiles: int, sms: int, waves: int) -> int:
  """Blocks of the vocabulary in a launch that leave the fewest processors idle."""
  target = max(1, round(waves * sms / row_tiles))

  def busy(some):
    tiles = some * row_tiles
    return tiles / (-(-tiles // sms) * sms)

  return max(range(target, 3 * target // 2 + 1), key=busy)


def by_block(words: jax.Array, high: int, vocabulary: int) -> jax.Array:
  """int32 [8 blocks, high]: the words of a block of columns for rows in a row."""
  count = -(-vocabulary // BLOCK) * WORDS
  pad = ((0, high - words.shape[0]), (0, count - words.shape[1]))
  return lax.bitcast_convert_type(jnp.pad(words, pad).T, jnp.int32)


def kept_here(word, place):
  """bool [rows, BLOCK] of the words of a block, each int32 [rows, BLOCK]."""
  found = word[0]
  for i in range(1, WORDS):
    found = jnp.where(place >= 32 * i, word[i], found)
  return lax.shift_right_arithmetic(found, place & 31) & 1 == 1


def across(row):
  return lax.broadcast_in_dim(row, (ROWS, BLOCK), [0])


def words_here(kept, column, here, by_row):
  """Of a block from `column` on, each word of its rows, over the block."""
  line = lax.div(column, jnp.int32(32))
  return [
    across(mosaic.load(kept.at[line + i, here], by_row)) for i in range(WORDS)
  ]


def scaled(total, factor, number, columns: int):
  """z [ROWS, BLOCK] of sums and the factors of rows; LOWEST past the last column.

  Of a product, and z - m behind it, a compiler would make one operation, which
  rounds once. What keeps them apart is that z is chosen; and where it can tell
  that no column is past the end, as it can of 2 or 4 whole blocks, the choice is
  left to the factors, which it cannot know: none is below LOWEST.
  """
  end = across(jnp.where(factor < LOWEST, jnp.int32(0), jnp.int32(columns)))
  return jnp.where(number < end, total * across(factor), LOWEST)


def reduced(z):
  """m, s and u of z [ROWS, BLOCK]; what all bits of a sum hang on."""
  most = z.max(axis=1)
  z = z - across(most)
  weight = jnp.exp(z)
  return most, weight.sum(axis=1), (weight * z).sum(axis=1)


def _body(table, count, x, w, scale, tokens, first, *refs, work, cut: int):
  kept, (parts, small, *stages) = refs[:cut], refs[cut:]
  before = first[0] * BLOCK
  wide = jnp.minimum(parts.shape[1], -(-work.n // BLOCK) - first[0])
  wg = lax.axis_index('wg')
  layout = plgpu.Layout.WGMMA

  def finish(total, own, column):
    here = pl.ds(pl.multiple_of(own[0], ROWS), ROWS)
    by_row = layout.reduce(1)
    token = mosaic.load(tokens.at[here], by_row)
    factor = mosaic.load(scale.at[here], by_row)
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=layout)
    number = column + place
    z = scaled(total, factor, number, work.n)
    chosen = jnp.where(number == across(token), z, 0.0).sum(axis=1)
    if cut:
      word = words_here(kept[0], column, here, by_row)
      z = jnp.where(kept_here(word, place), z, LOWEST)
    found = *reduced(z), chosen
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, value in enumerate(found):
      small[wg, i] = value
    plgpu.commit_smem()
    block = lax.div(column - before, jnp.int32(BLOCK))
    for i in range(4):
      plgpu.copy_smem_to_gmem(small.at[wg, i], parts.at[i, block, here])

  matmul.multiply_tiles(
    table, count, x, w, stages, finish, work, (before, wide)
  )

  @pl.when(wg < work.tiles.consumers)
  def _():
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
