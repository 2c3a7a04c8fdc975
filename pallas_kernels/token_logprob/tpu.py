"""Pallas TPU: logits a tile at a time in VMEM, merged online in their order."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.token_logprob import reference

ROWS, COLUMNS, DEPTH = 128, 512, 512
LANES = 128
BLOCKS_OF_WORDS = (
  32 * LANES // COLUMNS
)  # that have their bits in the same words
LOWEST = -1e30


def unsupported(hidden: jax.Array, unembed: jax.Array) -> str | None:
  """Why these shapes or types cannot be computed here, or None."""
  d = hidden.shape[1]
  if d > DEPTH and d % LANES:
    return f'D={d} is not a multiple of {LANES}; pad it with zeros'
  if hidden.dtype not in (jnp.bfloat16, jnp.float32):
    return f'{hidden.dtype}; the TPU kernel takes bfloat16 and float32'
  return None


def _kernel(x, w, token, scale, *refs, steps, blocks, vocabulary):
  """Grid: tile of rows, block of the vocabulary, step of D."""
  *words, out, total, run = refs
  j, i = pl.program_id(1), pl.program_id(2)

  @pl.when((i == 0) & (j == 0))
  def _():
    run[0] = jnp.full_like(run[0], LOWEST)
    for k in (1, 2, 3):
      run[k] = jnp.zeros_like(run[k])

  @pl.when(i == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  total[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

  @pl.when(i == steps - 1)
  def _():
    number = j * COLUMNS + lax.broadcasted_iota(jnp.int32, total.shape, 1)
    z = jnp.where(number < vocabulary, total[...] * scale[:, :1], LOWEST)
    chosen = jnp.where(number == token[:, :1], z, 0.0)
    if words:
      z = jnp.where(_kept_here(words[0][...], j), z, LOWEST)
    most = run[0][:, :1]
    top = jnp.maximum(most, jnp.max(z, axis=1, keepdims=True))
    shift = most - top
    factor = jnp.exp(shift)
    z = z - top
    weight = jnp.where(number < vocabulary, jnp.exp(z), 0.0)
    s, u = run[1][:, :1], run[2][:, :1]
    new = (
      top,
      factor * s + jnp.sum(weight, axis=1, keepdims=True),
      factor * (u + shift * s) + jnp.sum(weight * z, axis=1, keepdims=True),
      run[3][:, :1] + jnp.sum(chosen, axis=1, keepdims=True),
    )
    for k, value in enumerate(new):
      run[k] = jnp.broadcast_to(value, run.shape[1:])

  @pl.when((i == steps - 1) & (j == blocks - 1))
  def _():
    log = jnp.log(run[1])
    out[0] = run[3]
    out[1] = run[0] + log
    out[2] = log - run[2] / run[1]


def _by_lane(words: jax.Array, vocabulary: int) -> jax.Array:
  """Bits that lie as the kernel needs them, int32 [T, 128 ceil(V / 4096)].

  Of 4096 ids from f on, bit b of word l is id f + 128 b + l.
  """
  t, count = words.shape[0], -(-vocabulary // (32 * LANES))
  words = jnp.pad(words, ((0, 0), (0, count * LANES - words.shape[1])))
  place = jnp.arange(32, dtype=jnp.uint32)[None, :, None]

  def some(i):
    bits = reference.is_kept(words, i * (32 * LANES), 32 * LANES)
    bits = bits.reshape(t, 32, LANES).astype(jnp.uint32)
    return jnp.sum(bits << place, axis=1, dtype=jnp.uint32)

  found = jnp.swapaxes(lax.map(some, jnp.arange(count)), 0, 1)
  return lax.bitcast_convert_type(found.reshape(t, -1), jnp.int32)


def _kept_here(word: jax.Array, block: jax.Array) -> jax.Array:
  """bool [ROWS, COLUMNS] of words [ROWS, LANES] that hold some blocks."""
  count = COLUMNS // LANES
  shift = lax.rem(block, BLOCKS_OF_WORDS) * count
  bits = [
    lax.shift_right_logical(word, jnp.full_like(word, shift + i)) & 1
    for i in range(count)
  ]
  return jnp.concatenate(bits, axis=1) == 1


@functools.partial(jax.jit, static_argnames=('interpret',))
def statistics(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array,
  words: jax.Array | None = None,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chosen logit, log-sum-exp and entropy of z, each float32 [T].

  The arguments are those of `reference.statistics`.
  """
  (t, d), v = hidden.shape, unembed.shape[1]
  high = -(-t // ROWS) * ROWS
  pad = ((0, high - t), (0, 0))
  hidden = jnp.pad(hidden, pad)
  # Tiles of the vector unit are 128 lanes wide, so a row's value fills one.
  wide = jnp.zeros((1, LANES), jnp.int32)
  token = jnp.pad(tokens.astype(jnp.int32)[:, None] + wide, pad)
  scale = 1.0 / temperatures.astype(jnp.float32)[:, None]
  scale = jnp.pad(scale + wide.astype(jnp.float32), pad)
  depth = (
    d
    if d <= DEPTH
    else next(size for size in range(DEPTH, 0, -LANES) if d % size == 0)
  )
  blocks, steps = -(-v // COLUMNS), d // depth
  kept, kept_specs = (), []
  if words is not None:
    kept = (jnp.pad(_by_lane(words, v), pad),)
    kept_specs = [
      pl.BlockSpec(
        (ROWS, LANES), lambda r, j, i: (r, lax.div(j, BLOCKS_OF_WORDS))
      )
    ]
  out = pl.pallas_call(
    functools.partial(_kernel, steps=steps, blocks=blocks, vocabulary=v),
    out_shape=jax.ShapeDtypeStruct((3, high, LANES), jnp.float32),
    grid=(high // ROWS, blocks, steps),
    in_specs=[
      pl.BlockSpec((ROWS, depth), lambda r, j, i: (r, i)),
      pl.BlockSpec((depth, COLUMNS), lambda r, j, i: (i, j)),
      pl.BlockSpec((ROWS, LANES), lambda r, j, i: (r, 0)),
      pl.BlockSpec((ROWS, LANES), lambda r, j, i: (r, 0)),
      *kept_specs,
    ],
    out_specs=pl.BlockSpec((3, ROWS, LANES), lambda r, j, i: (0, r, 0)),
    scratch_shapes=[
      pltpu.VMEM((ROWS, COLUMNS), jnp.float32),
      pltpu.VMEM((4, ROWS, LANES), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary')
    ),
    name='token_logprob',
    cost_estimate=pl.CostEstimate(
      flops=2 * high * d * v,
      bytes_accessed=unembed.nbytes * (high // ROWS),
      transcendentals=high * v,
    ),
    interpret=interpret,
  )(hidden, unembed, token, scale, *kept)
  return tuple(out[:, :t, 0])
