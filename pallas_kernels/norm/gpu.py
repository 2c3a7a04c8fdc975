"""GPU: RMSNorm, rows apart from each other, by lanes of a warp or by a warpgroup.

Rows of up to NARROW numbers are of 8, 16 or 32 lanes, by their length, so that a
warp has up to four rows and nothing is padded. A lane holds vectors of 16 bytes,
every 8th, 16th or 32nd of its row; it adds the squares of the even and of the odd
places of each, one after another, then lanes are added in pairs, those of distance
1, 2, 4, ... The order depends on the length alone. Products, sums, the root and
its inverse are rounded one by one, as IEEE 754 has it.

Longer rows, and those that are no whole vectors, take a warpgroup each, through
Mosaic GPU.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels import warp

LANES = 128  # threads of a warpgroup; D is spread over them
MOST = 16384  # D that still fits into their registers
# Blocks a multiprocessor. Of one warpgroup each: those of one block share the
# scratch memory of reductions, and mix up their rows.
BLOCKS = 8
NARROW = 1024  # D of rows that lanes of a warp take
VECTOR = 16  # bytes of a load
HELD = 9  # vectors of a row that a lane holds at most, if more lanes can share
WARPS = 4  # of a block


def unsupported(x: jax.Array) -> str | None:
  """Why this shape or type cannot be computed here, or None."""
  if x.shape[1] > MOST:
    return f'D={x.shape[1]}; the GPU kernel takes up to {MOST}'
  if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    return f'{x.dtype}; the GPU kernel takes bfloat16, float16 and float32'
  if x.size >= 2**32:
    return f'{x.size} numbers; the GPU kernel counts them in 32 bits'
  return None


def rms_norm(
  x: jax.Array, scale: jax.Array, epsilon: float, *, interpret: bool = False
) -> jax.Array:
  """y = x / sqrt(mean x^2 + epsilon) scale: x [T, D], scale [D]."""
  d, each = x.shape[1], VECTOR // x.dtype.itemsize
  narrow = x.dtype != jnp.float16 and d <= NARROW and d % each == 0
  run = by_lanes if narrow and x.size else by_warpgroup
  return run(x, scale, epsilon, interpret=interpret)


# --- Lanes -------------------------------------------------------------------


def by_lanes(
  x: jax.Array, scale: jax.Array, epsilon: float, *, interpret: bool = False
) -> jax.Array:
  """Of bfloat16 or float32 rows of whole vectors."""
  t, d = x.shape
  share = shared_by(d, x.dtype.itemsize)
  warps = -(-t * share // warp.LANES)
  (y,) = warp.run(
    functools.partial(_lanes, depth=d, share=share, epsilon=epsilon),
    x,
    scale.astype(jnp.float32) if scale.dtype == jnp.float16 else scale,
    out=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    warpgroups=WARPS // 4,
    blocks=-(-warps // WARPS),
    interpret=interpret,
  )
  return y


def shared_by(depth: int, size: int) -> int:
  """Lanes of a row: 8, or 16 or 32 where these would hold too much."""
  vectors = depth * size // VECTOR
  return next((n for n in (8, 16) if vectors <= HELD * n), 32)


def _lanes(w, x, scale, y, *, depth: int, share: int, epsilon: float) -> None:
  each = VECTOR // x.bytes
  vectors = depth // each
  row = (w.warp * warp.LANES + w.lane) // share
  own = (w.lane & (share - 1)) * each  # first number of a row that it holds
  here = row < x.size // depth
  start = row * depth + own
  whole = vectors // share  # vectors that all lanes have

  def read(steps):
    found = []
    for step in steps:
      offset = step * share * each
      found += w.load_words(x, start, 4, offset=offset, once=True)
    return found

  words = w.when(here, lambda *_: read(range(whole)), [0] * (4 * whole))
  parts = [here] * whole
  if vectors % share:
    more = here & (own < (vectors - whole * share) * each)
    words += w.when(more, lambda *_: read([whole]), [0] * 4)
    parts.append(more)
  numbers = _floats(w, x, words)
  even = odd = w.value(0.0, 'f32')
  for i in range(0, len(numbers), 2):
    even += numbers[i] * numbers[i]
    odd += numbers[i + 1] * numbers[i + 1]
  total = even + odd
  distance = 1
  while distance < share:
    total += w.shuffle_xor(total, distance)
    distance *= 2
  root = w.root(total * (1.0 / depth) + epsilon)
  inverse = w.value(1.0, 'f32') / root

  for step, inside in enumerate(parts):
    some = numbers[step * each : (step + 1) * each]
    offset = step * share * each

    def write(some=some, offset=offset):
      weights = _weights(w, scale, own, offset, each)
      out = [a * inverse * b for a, b in zip(some, weights, strict=True)]
      w.store_words(y, start + offset, _words(w, y, out))

    w.when(inside, write)


def _floats(w, x, words) -> list:
  """Numbers of words of the array's own elements."""
  if x.kind == 'f32':
    return [w.float(one) for one in words]
  return [
    w.float(half) for one in words for half in (one << 16, one & 0xFFFF0000)
  ]


def _weights(w, scale, own, offset: int, each: int) -> list:
  """`each` numbers of the scale from place `own` + offset."""
  words = each * scale.bytes // 4
  most = min(words, 4)
  found = []
  for i in range(0, words, most):
    more = offset + i * 4 // scale.bytes
    found += w.load_words(scale, own, most, offset=more)
  return _floats(w, scale, found)


def _words(w, y, numbers) -> list:
  """What is stored of them: float32, or pairs of bfloat16."""
  if y.kind == 'f32':
    return numbers
  pairs = zip(numbers[::2], numbers[1::2], strict=True)
  return [w.pack(low, high) for low, high in pairs]


# --- A warpgroup -------------------------------------------------------------


def by_warpgroup(
  x: jax.Array, scale: jax.Array, epsilon: float, *, interpret: bool = False
) -> jax.Array:
  """Of any rows up to MOST."""
  t, d = x.shape
  more = -d % LANES  # zeros add nothing to the sum
  x = jnp.pad(x, ((0, 0), (0, more)))
  scale = jnp.pad(scale, (0, more))
  blocks = 2 if interpret else min(t, BLOCKS * mosaic.cores())

  def body(x, scale, y):
    first = lax.axis_index('sm')
    weight = scale[...].astype(jnp.float32)

    @pl.loop(0, mosaic.cdiv(jnp.maximum(t - first, 0), blocks))
    def _(i):
      row = first + i * blocks
      wide = x[row].astype(jnp.float32)
      mean = jnp.sum(wide * wide) * (1.0 / d)
      y[row] = (wide * lax.rsqrt(mean + epsilon) * weight).astype(y.dtype)

  y = mosaic.launch(
    body,
    out=jax.ShapeDtypeStruct(x.shape, x.dtype),
    scratch=[],
    grid=blocks,
    warpgroups=1,
    interpret=interpret,
  )(x, scale)
  return y[:, :d]
