"""GPU: RMSNorm, rows apart from each other, by lanes of a warp or by a warpgroup.

Who takes a row hangs on its length and type alone, since the two add in different
orders. On an H100, 16 rows of 1024 and of 2048 took 2.2 and 3.2 us by lanes, and
1.3 by a warpgroup, to each thread of which they give whole vectors; of 576, 1.9 and
4.6. Of 16,384 rows of 1024 it was 24.9 and 27.4 us.

Other rows of up to NARROW numbers are of 8, 16 or 32 lanes, by their length, so
that a warp has up to four rows and nothing is padded. A lane holds vectors of 16 bytes,
every 8th, 16th or 32nd of its row; it adds the squares of the even and of the odd
places of each, one after another, then lanes are added in pairs, those of distance
1, 2, 4, ... The order depends on the length alone. Products, sums, the root and
its inverse are rounded one by one, as IEEE 754 has it.

Rows that are a sum of two are added as they are read, and rounded to their type:
what is normed, and written down, is the rounded sum.

Heads of one product that have a scale of their own, or none, are rows one after
another, so one launch norms them all, each by the code of `rms_norm`.

Longer rows, and those that are no whole vectors, take a warpgroup each too, through
Mosaic GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
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
NARROW = 2048  # D of rows that lanes of a warp take
VECTOR = 16  # bytes of a load
# Vectors of a row that a lane holds at most, if more lanes can share. On an H100
# 16,384 rows of 576 took 10.2 us by 32 lanes and 15.2 by 8, 64 rows 2.0 and 3.3.
HELD = 2
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
  run = by_lanes if _narrow(x) else by_warpgroup
  return run(x, scale, epsilon, interpret=interpret)


def add_rms_norm(
  x: jax.Array,
  more: jax.Array,
  scale: jax.Array,
  epsilon: float,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """(x + more, `rms_norm` of it), of the bits of one after the other."""
  if _narrow(x):
    return tuple(_by_lanes(x, more, [scale], epsilon, interpret))
  return tuple(_by_warpgroup(x, more, scale, epsilon, interpret))


def norms_heads(x: jax.Array) -> bool:
  """Whether `rms_norm_heads` takes x [N, H, K]."""
  return _narrow(x)


def rms_norm_heads(
  x: jax.Array,
  scales: Sequence[jax.Array],
  counts: tuple[int, ...],
  epsilon: float,
  *,
  interpret: bool = False,
) -> jax.Array:
  """`rms_norm` of the first counts[0] heads of x [N, H, K] by scales[0], and so on.

  What follows them is as it was.
  """
  rows = x.reshape(-1, x.shape[-1])
  heads = _Heads(x.shape[1], counts)
  (y,) = _by_lanes(rows, None, scales, epsilon, interpret, heads)
  return y.reshape(x.shape)


def _narrow(x) -> bool:
  """Whether lanes take such rows [..., D]; whatever their number."""
  d, each = x.shape[-1], VECTOR // x.dtype.itemsize
  lanes = d <= NARROW and d % each == 0 and d % (LANES * each) != 0
  return lanes and x.dtype != jnp.float16


# --- Lanes -------------------------------------------------------------------


def by_lanes(
  x: jax.Array, scale: jax.Array, epsilon: float, *, interpret: bool = False
) -> jax.Array:
  """Of bfloat16 or float32 rows of whole vectors."""
  return _by_lanes(x, None, [scale], epsilon, interpret)[0]


@dataclasses.dataclass(frozen=True)
class _Heads:
  """Which of `every` rows in a row is normed by which scale."""

  every: int = 1
  counts: tuple[int, ...] = (1,)

  @property
  def normed(self) -> int:
    return sum(self.counts)


def _by_lanes(
  x, more, scales, epsilon, interpret, heads=_Heads()
) -> list[jax.Array]:
  """[norm], or [sum, norm] where there is more to add."""
  t, d = x.shape
  rows = [x] if more is None else [x, more]
  if not x.size:
    return rows
  share = shared_by(d, x.dtype.itemsize)
  warps = -(-t * share // warp.LANES)
  return warp.run(
    functools.partial(
      _lanes,
      depth=d,
      share=share,
      epsilon=epsilon,
      adds=more is not None,
      heads=heads,
    ),
    *rows,
    *(s.astype(jnp.float32) if s.dtype == jnp.float16 else s for s in scales),
    out=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * len(rows),
    warpgroups=WARPS // 4,
    blocks=-(-warps // WARPS),
    interpret=interpret,
  )


def shared_by(depth: int, size: int) -> int:
  """Lanes of a row: 8, or 16 or 32 where these would hold too much."""
  vectors = depth * size // VECTOR
  return next((n for n in (8, 16) if vectors <= HELD * n), 32)


def _lanes(
  w, *refs, depth: int, share: int, epsilon: float, adds: bool, heads: _Heads
) -> None:
  x, *scales, y = refs
  more, total = (scales.pop(0), scales.pop()) if adds else (None, None)
  each = VECTOR // x.bytes
  row = (w.warp * warp.LANES + w.lane) // share
  own = (w.lane & (share - 1)) * each  # first number of a row that it holds
  here = row < x.size // depth
  start = row * depth + own
  steps = _steps(here, own, depth // each, share, each)

  def read(ref):
    words = []
    for inside, offsets in steps:
      got = functools.partial(_read, w, ref, start, offsets)
      words += w.when(inside, got, [0] * (4 * len(offsets)))
    return words

  # Asked for before the sum: who asks after it waits once more, and who asks
  # between two stores, at each of them.
  head = row % heads.every if heads.every > 1 else None
  weights = _scaled(w, scales, heads, head, own, steps, each)
  words, others = read(x), read(more) if adds else []
  if adds:
    pairs = zip(_floats(w, x, words), _floats(w, x, others), strict=True)
    words = [w.bits(one) for one in _words(w, x, [a + b for a, b in pairs])]
  numbers, weights = _floats(w, x, words), _floats(w, scales[0], weights)
  even = odd = w.value(0.0, 'f32')
  for i in range(0, len(numbers), 2):
    even += numbers[i] * numbers[i]
    odd += numbers[i + 1] * numbers[i + 1]
  square = even + odd
  distance = 1
  while distance < share:
    square += w.shuffle_xor(square, distance)
    distance *= 2
  root = w.root(square * (1.0 / depth) + epsilon)
  inverse = w.value(1.0, 'f32') / root

  held = 0
  for inside, offsets in steps:
    for offset in offsets:
      some = numbers[held * each : (held + 1) * each]
      heavy = weights[held * each : (held + 1) * each]
      sums = words[held * 4 : (held + 1) * 4]
      held += 1

      def write(some=some, heavy=heavy, sums=sums, offset=offset):
        if adds:
          w.store_words(total, start + offset, sums)
        out = [a * inverse * b for a, b in zip(some, heavy, strict=True)]
        w.store_words(y, start + offset, _words(w, y, out))

      if heads.normed == heads.every:
        w.when(inside, write)
        continue
      copy = functools.partial(w.store_words, y, start + offset, sums)
      w.when(inside & (head < heads.normed), write)
      w.when(inside & (head >= heads.normed), copy)


def _scaled(w, scales, heads: _Heads, head, own, steps, each: int) -> list:
  """Words of the scale of a lane's row, where it has one."""
  found = []
  for inside, offsets in steps:
    some = [0] * (each * scales[0].bytes // 4 * len(offsets))
    first = 0
    for scale, count in zip(scales, heads.counts, strict=True):
      got = functools.partial(_weights, w, scale, own, offsets, each)
      mine = inside
      if head is not None:
        mine = mine & (head >= first) & (head < first + count)
      some = w.when(mine, got, some)
      first += count
    found += some
  return found


def _steps(here, own, vectors: int, share: int, each: int) -> list:
  """(whether a lane has them, their offsets): of all lanes, then of some."""
  whole = vectors // share
  offsets = [step * share * each for step in range(whole)]
  steps = [(here, offsets)]
  if vectors % share:
    more = here & (own < (vectors - whole * share) * each)
    steps.append((more, [whole * share * each]))
  return steps


def _read(w, ref, start, offsets, *_) -> list:
  found = []
  for offset in offsets:
    found += w.load_words(ref, start, 4, offset=offset, once=True)
  return found


def _floats(w, x, words) -> list:
  """Numbers of words of the array's own elements."""
  if x.kind == 'f32':
    return [w.float(one) for one in words]
  return [
    w.float(half) for one in words for half in (one << 16, one & 0xFFFF0000)
  ]


def _weights(w, scale, own, offsets, each: int, *_) -> list:
  """Words of `each` numbers of the scale from place `own` + each offset."""
  words = each * scale.bytes // 4
  most = min(words, 4)
  found = []
  for offset in offsets:
    for i in range(0, words, most):
      more = offset + i * 4 // scale.bytes
      found += w.load_words(scale, own, most, offset=more)
  return found


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
  return _by_warpgroup(x, None, scale, epsilon, interpret)[0]


def _by_warpgroup(x, more, scale, epsilon, interpret) -> list[jax.Array]:
  """[norm], or [sum, norm] where there is more to add."""
  t, d = x.shape
  rows = [x] if more is None else [x, more]
  if not x.size:
    return rows
  pad = -d % LANES  # zeros add nothing to the sum
  rows = [jnp.pad(one, ((0, 0), (0, pad))) if pad else one for one in rows]
  scale = jnp.pad(scale, (0, pad)) if pad else scale
  blocks = 2 if interpret else min(t, BLOCKS * mosaic.cores())
  adds = more is not None

  def body(*refs):
    x, *others, y = refs
    scale = others[adds]
    first = lax.axis_index('sm')
    weight = scale[...].astype(jnp.float32)

    @pl.loop(0, mosaic.cdiv(jnp.maximum(t - first, 0), blocks))
    def _(i):
      row = first + i * blocks
      wide = x[row].astype(jnp.float32)
      if adds:
        more, _, total = others
        rounded = (wide + more[row].astype(jnp.float32)).astype(total.dtype)
        total[row] = rounded
        wide = rounded.astype(jnp.float32)
      mean = jnp.sum(wide * wide) * (1.0 / d)
      y[row] = (wide * lax.rsqrt(mean + epsilon) * weight).astype(y.dtype)

  found = mosaic.launch(
    body,
    out=[jax.ShapeDtypeStruct(rows[0].shape, x.dtype)] * len(rows),
    scratch=[],
    grid=blocks,
    warpgroups=1,
    interpret=interpret,
  )(*rows, scale)
  return [one[:, :d] if pad else one for one in found]
