"""Mosaic GPU: logits a tile at a time, and in memory only where asked for.

The matmul is that of grouped_matmul with one group; instead of a store, each
consumer reduces its 256 columns of logits to five numbers a row:

  m = max z,  s = sum exp(z - m),  u = sum exp(z - m) (z - m),  c = z[token]

Of ids that were not kept z is LOWEST; in a block with none that was, s and u are
what they are, and are merged with the factor 0. A second kernel merges the blocks
of 256 in their order. The block is part of what is computed (another one would
round elsewhere), so it is not tuned.

Who draws a token needs the logits of few rows: `scored` stores them on the way,
and `renormalised` reads them back to reduce them again over what was kept. Both
have the bits of `statistics`, for a tile of z is reduced by the same expression,
wherever it comes from.

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

NAME = 'token_logprob'  # in the tunings
ROWS, BLOCK = 64, 256
TILES = matmul.Tiles(columns=BLOCK, panel=16)
# Of long rows, what all blocks read at a time must still fit into the L2 cache.
DEEP, DEEP_TILES = 4096, matmul.Tiles(columns=BLOCK, panel=4)
WAVES = 32  # tiles of a multiprocessor in a launch, about
LANES = 128  # rows that one warpgroup of the merge takes
UNROLL = 8
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
  t, d = hidden.shape
  v = unembed.shape[1]
  tiles = tiles or _tuned(d)
  high = -(-t // LANES) * LANES
  tokens = jnp.pad(tokens.astype(jnp.int32), (0, high - t))
  kept = () if words is None else (_by_block(words, high, v),)
  launch = _launch(tiles, d, v, hidden.dtype, high, len(kept), interpret)
  row_tiles = -(-high // (tiles.consumers * tiles.rows))
  sms = 2 if interpret else mosaic.cores()
  blocks = -(-v // BLOCK)
  some = min(columns_of_launch(row_tiles, sms, waves), blocks)
  operands = _operands(hidden, unembed, temperatures, tiles, high, high)

  def part(first):
    return launch(some)(*operands, tokens, first[None], *kept)[0]

  starts = jnp.arange(0, blocks, some, dtype=jnp.int32)
  parts = part(starts[0])[None] if some == blocks else lax.map(part, starts)
  return tuple(_merged(parts, blocks, interpret)[:, :t])


def scored(
  hidden: jax.Array,
  unembed: jax.Array,
  temperatures: jax.Array,
  *,
  tiles: matmul.Tiles | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """z, its log-sum-exp and its entropy, in one pass over `unembed`.

  Args:
    (others): see `statistics`.
    tiles: by T, if not given.

  Returns:
    float32 [T, V], [T], [T].
  """
  (t, d), v = hidden.shape, unembed.shape[1]
  # One consumer has no rows to multiply where there are at most 64.
  few = {'consumers': 1} if t <= 64 else {'consumers': 2, 'stages': 3}
  tiles = tiles or dataclasses.replace(_tuned(d), **few)
  high = -(-t // LANES) * LANES
  launch = _launch(tiles, d, v, hidden.dtype, high, 0, interpret, rows=t)
  blocks = -(-v // BLOCK)
  operands = _operands(hidden, unembed, temperatures, tiles, high, t)
  nothing = jnp.zeros((high,), jnp.int32), jnp.zeros((1,), jnp.int32)
  parts, z = launch(blocks)(*operands, *nothing)
  _, log, entropy = _merged(parts[None], blocks, interpret)[:, :t]
  return z, log, entropy


def renormalised(
  z: jax.Array, words: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Log-sum-exp and entropy of `scored`'s z over what is kept.

  Args:
    z: float32 [T, V].
    words: see `statistics`.
    interpret: run on CPU.

  Returns:
    Two float32 [T].
  """
  t, v = z.shape
  high, blocks = -(-t // LANES) * LANES, -(-v // BLOCK)
  sms = 2 if interpret else mosaic.cores()
  parts = mosaic.launch(
    mosaic.partial(_reduce_again, sms=sms),
    out=jax.ShapeDtypeStruct((4, blocks, high), jnp.float32),
    scratch=[
      mosaic.linear((3, ROWS), jnp.float32),
      mosaic.tiled((ROWS, BLOCK), jnp.float32),
      plgpu.Barrier(),
    ],
    grid=sms,
    warpgroups=1,
    interpret=interpret,
  )(z, _by_block(words, high, v))
  _, log, entropy = _merged(parts[None], blocks, interpret)[:, :t]
  return log, entropy


def _operands(hidden, unembed, temperatures, tiles, high: int, rows: int):
  """What every launch takes first; `rows` of the `high` are multiplied."""
  pad = (0, high - hidden.shape[0])
  hidden = jnp.pad(hidden, (pad, (0, 0))) if pad[1] else hidden
  scale = jnp.pad(1.0 / temperatures.astype(jnp.float32), pad)
  table, count = groups.row_tiles(
    jnp.full((1,), rows, jnp.int32), rows, tiles.consumers * tiles.rows
  )
  return table, count, hidden, unembed[None], scale


def _launch(tiles, d, v, dtype, high: int, cut: int, interpret, rows: int = 0):
  """launch(blocks of the vocabulary) gives the kernel; `rows` of z are stored."""
  if tiles.columns != BLOCK or tiles.rows != ROWS:
    raise ValueError(f'{tiles}: columns must be {BLOCK} and rows {ROWS}')
  sms = 2 if interpret else mosaic.cores()
  work = matmul.Work(tiles, d, v, sms)
  stages, used = matmul.ring(work, dtype)
  out, waiting = [], []
  if rows:
    slots = (tiles.consumers, tiles.slots, ROWS, matmul.STORE)
    out = [jax.ShapeDtypeStruct((rows, v), jnp.float32)]
    used += mosaic.shared_bytes((slots, jnp.float32))
    kinds = mosaic.tiled, mosaic.linear
    waiting = [plgpu.RefUnion(*(kind(slots, jnp.float32) for kind in kinds))]
  mosaic.check_shared(tiles, used + 1024 * tiles.consumers)

  def launch(blocks: int):
    return mosaic.launch(
      mosaic.partial(_body, work=work, cut=cut, logits=bool(rows)),
      out=[jax.ShapeDtypeStruct((4, blocks, high), jnp.float32), *out],
      scratch=[
        mosaic.linear((tiles.consumers, 4, ROWS), jnp.float32),
        *waiting,
        *stages,
      ],
      grid=sms,
      warpgroups=tiles.consumers + 1,
      interpret=interpret,
    )

  return launch


def _merged(parts: jax.Array, blocks: int, interpret: bool) -> jax.Array:
  """float32 [3, high] of parts [launches, 4, blocks of a launch, high]."""
  sms = 2 if interpret else mosaic.cores()
  return mosaic.launch(
    mosaic.partial(_merge, sms=sms, blocks=blocks),
    out=jax.ShapeDtypeStruct((3, parts.shape[-1]), jnp.float32),
    scratch=[],
    grid=sms,
    warpgroups=1,
    interpret=interpret,
  )(parts)


def _tuned(depth: int) -> matmul.Tiles:
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


def _by_block(words: jax.Array, high: int, vocabulary: int) -> jax.Array:
  """int32 [8 blocks, high]: the words of a block of columns for rows in a row."""
  count = -(-vocabulary // BLOCK) * WORDS
  pad = ((0, high - words.shape[0]), (0, count - words.shape[1]))
  return lax.bitcast_convert_type(jnp.pad(words, pad).T, jnp.int32)


def _kept_here(word, place):
  """bool [rows, BLOCK] of the words of a block, each int32 [rows, BLOCK]."""
  found = word[0]
  for i in range(1, WORDS):
    found = jnp.where(place >= 32 * i, word[i], found)
  return lax.shift_right_arithmetic(found, place & 31) & 1 == 1


def _across(row):
  return lax.broadcast_in_dim(row, (ROWS, BLOCK), [0])


def _words_here(kept, column, here, by_row):
  """Of a block from `column` on, each word of its rows, over the block."""
  line = lax.div(column, jnp.int32(32))
  return [
    _across(mosaic.load(kept.at[line + i, here], by_row)) for i in range(WORDS)
  ]


def _reduced(z):
  """m, s and u of z [ROWS, BLOCK]; what all bits of a sum hang on."""
  most = z.max(axis=1)
  z = z - _across(most)
  weight = jnp.exp(z)
  return most, weight.sum(axis=1), (weight * z).sum(axis=1)


def _body(
  table, count, x, w, scale, tokens, first, *refs, work, cut: int, logits: bool
):
  kept, (parts, *refs) = refs[:cut], refs[cut:]
  stored, (small, *refs) = refs[:logits], refs[logits:]
  waiting, stages = refs[:logits], refs[logits:]
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
    z = jnp.where(number < work.n, total * _across(factor), LOWEST)
    if logits:
      matmul.store(z, stored[0], waiting[0], own, column, work.tiles)
    chosen = jnp.where(number == _across(token), z, 0.0).sum(axis=1)
    if cut:
      word = _words_here(kept[0], column, here, by_row)
      z = jnp.where(_kept_here(word, place), z, LOWEST)
    found = *_reduced(z), chosen
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


def _reduce_again(z_ref, kept, parts, small, tile, arrived, *, sms: int):
  """m, s and u of all blocks of z in memory, [T, V]: tiles of 64 rows by 256."""
  rows, v = z_ref.shape
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
    plgpu.copy_gmem_to_smem(z_ref.at[here, pl.ds(column, BLOCK)], tile, arrived)
    plgpu.barrier_wait(arrived)
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=layout)
    z = plgpu.layout_cast(tile[...], layout)
    z = jnp.where(column + place < v, z, LOWEST)
    word = _words_here(kept, column, here, layout.reduce(1))
    z = jnp.where(_kept_here(word, place), z, LOWEST)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, value in enumerate(_reduced(z)):
      small[i] = value
    plgpu.commit_smem()
    for i in range(3):
      plgpu.copy_smem_to_gmem(small.at[i], parts.at[i, block, here])

  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge(parts, out, *, sms: int, blocks: int):
  """Merges the blocks of 128 rows at a time, in order: two passes.

  With M the greatest maximum, s = sum_j s_j e^(m_j - M) and
  u = sum_j e^(m_j - M) (u_j + (m_j - M) s_j): the entropy is log s - u / s.
  """
  some, high = parts.shape[2:]
  sm = lax.axis_index('sm')
  trips = mosaic.cdiv(jnp.maximum(high // LANES - sm, 0), sms)
  zero = jnp.zeros((LANES,), jnp.float32)

  def loop(step, carry):
    """step(j, carry) for all blocks; some at once, so that loads overlap."""

    def some(i, carry):
      for j in range(UNROLL):
        carry = step(i * UNROLL + j, carry)
      return carry

    carry = lax.fori_loop(0, blocks // UNROLL, some, carry)
    for j in range(blocks // UNROLL * UNROLL, blocks):
      carry = step(j, carry)
    return carry

  @pl.loop(0, trips)
  def _(trip):
    here = pl.ds((trip * sms + sm) * LANES, LANES)

    def part(i, j):
      launch = lax.div(jnp.int32(j), jnp.int32(some))
      return parts[launch, i, j - launch * some, here]

    most = loop(lambda j, most: jnp.maximum(most, part(0, j)), zero + LOWEST)

    def add(j, carry):
      s, u, c = carry
      shift = part(0, j) - most
      factor = jnp.exp(shift)
      own = part(1, j)
      s = s + own * factor
      u = u + factor * (part(2, j) + shift * own)
      return s, u, c + part(3, j)

    s, u, c = loop(add, (zero, zero, zero))
    log = jnp.log(s)
    out[0, here] = c
    out[1, here] = most + log
    out[2, here] = log - u / s
