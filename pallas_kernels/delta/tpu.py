"""Pallas TPU: what changed, moved to the left of each line of 128 words.

A changed word has to move left by the unchanged words before it in its line,
counted by a product with a triangle of ones. It moves in seven steps of 1, 2, 4,
... lanes, of which each word takes those that are in its count. XLA then gathers
from the lines.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

LANES = 128
LINES = 256  # of a block
_LANE, _LEFT, _VALID = (
  0,
  7,
  14,
)  # where a word's lane, way left and validity are


def unsupported(words: jax.Array) -> str | None:
  """Why these words cannot be compared here, or None."""
  return None if words.size else 'there are no elements'


@functools.partial(jax.jit, static_argnames=('capacity', 'interpret'))
def compact(
  base: jax.Array, new: jax.Array, capacity: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Count, positions and words of what changed, of unsigned [N]; see package."""
  size = base.size
  lines = -(-size // LANES)
  lines = -(-lines // LINES) * LINES
  pad = (0, lines * LANES - size)
  both = [jnp.pad(one, pad).reshape(lines, LANES) for one in (base, new)]
  block = pl.BlockSpec((LINES, LANES), lambda i: (i, 0))
  lanes, words = pl.pallas_call(
    _kernel,
    out_shape=[jax.ShapeDtypeStruct((lines, LANES), jnp.int32)] * 2,
    grid=(lines // LINES,),
    in_specs=[block] * 2,
    out_specs=[block] * 2,
    interpret=interpret,
  )(*both)
  counts = jnp.sum(lanes >= 0, axis=1, dtype=jnp.int32)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  number = jnp.arange(capacity, dtype=jnp.int32)
  line = jnp.searchsorted(ends, number, side='right').astype(jnp.int32)
  here = line < lines
  line = jnp.minimum(line, lines - 1)
  slot = line * LANES + number - (ends - counts)[line]
  slot = jnp.where(here, slot, 0)
  positions = line * LANES + lanes.reshape(-1)[slot]
  found = words.reshape(-1)[slot].astype(base.dtype)
  return (
    ends[-1],
    jnp.where(here, positions, size),
    jnp.where(here, found, jnp.zeros_like(found)),
  )


def _kernel(base, new, lanes, words) -> None:
  """Lanes (-1 where there are no more) and words of each line, leftmost first."""
  word = _bits(new[...])
  changed = (_bits(base[...]) ^ word) != 0
  shape = changed.shape
  lane = lax.broadcasted_iota(jnp.int32, shape, 1)
  above = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
  triangle = (
    above < lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
  ).astype(jnp.bfloat16)
  same = jnp.where(changed, 0.0, 1.0).astype(jnp.bfloat16)
  left = jnp.dot(same, triangle, preferred_element_type=jnp.float32)
  left = left.astype(jnp.int32)
  state = jnp.where(
    changed, lane | (left << _LEFT) | (1 << _VALID), jnp.zeros_like(lane)
  )
  for step in range(7):
    by = 1 << step
    other = pltpu.roll(state, LANES - by, 1)
    comes = ((other >> (_LEFT + step)) & 1 == 1) & (lane < LANES - by)
    goes = (state >> (_LEFT + step)) & 1 == 1
    word = jnp.where(comes, pltpu.roll(word, LANES - by, 1), word)
    state = jnp.where(comes, other, jnp.where(goes, 0, state))
  valid = (state >> _VALID) & 1 == 1
  lanes[...] = jnp.where(valid, state & (LANES - 1), -1)
  words[...] = word


def _bits(x):
  """int32 with the bits of unsigned words."""
  if x.dtype.itemsize == 4:
    return lax.bitcast_convert_type(x, jnp.int32)
  return x.astype(jnp.int32)
