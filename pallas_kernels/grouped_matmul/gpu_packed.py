"""GPU: few rows times packed weights, which are unpacked in registers.

For decoding, where the time is that of reading the weights. A warp multiplies
up to 8, 16 or 32 rows of one group by a strip of columns. The weights are the
left operand of the tensor core and the rows the right one, so that few rows
waste little. As soon as a step of K is multiplied, the one that is `unroll` steps
further on is asked for, into the same registers. Where few warps run, those cannot
hold all that must be on its way: then the warps of a tile share out the bytes of the
steps after those and have them brought to the L2 cache. (Where many run, that only
adds reads of what the cache has lost again.) Which rows are a warp's it finds from
the sizes of all groups itself (`gpu_find`).

  nvfp4   bytes [E, K / 2, N] hold K even in the low bits and K odd in the high.
          A number of four bits times its scale is a bfloat16 exactly; the outer
          scale of the group is applied to the sum.
  fp8     bytes [E, K, N]; a number times the scale of its 128 x 128 block is
          rounded to bfloat16.

K is added in order, 16 products a step, as everywhere: the result is that of the
kernel of bfloat16 with the unpacked weights. Within a step Hopper adds its 16
products exactly, and which of them stands where does not matter: a lane takes the
four that make unpacking cheapest.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import warp
from pallas_kernels.grouped_matmul import gpu_find
from pallas_kernels.grouped_matmul import groups

STEP = 16  # of K, that the tensor core adds at once
WIDE = 4  # columns of a lane; a strip is eight times as wide
ROWS = (8, 16, 32)
WARPGROUPS = 1
# Rows of a warp -> steps of K whose words it holds, as many as its registers allow.
UNROLL = {8: 16, 16: 8, 32: 4}
UNROLL_FP8 = {8: 8, 16: 8, 32: 4}
AHEAD = 3  # times as many are brought to the L2 cache
FEW = 1024  # warps that do not keep the memory busy by themselves
BLOCK = 128  # of an fp8 scale
# Exponent and mantissa of a float8_e4m3fn are put into a bfloat16 as they are; this
# is what its exponent lacks.
_SHIFT = 120
# So are those of E2M1. Its 126 do not fit with the scale: 2^8 go with the outer one.
_NVFP4_SHIFT = 118


def unsupported(x: jax.Array, codes: jax.Array, k: int) -> str | None:
  """Why these cannot be multiplied here, or None."""
  n = codes.shape[-1]
  if x.dtype != jnp.bfloat16:
    return f'x is {x.dtype}; with packed weights the GPU kernel takes bfloat16'
  if k % STEP or n % (8 * WIDE):
    return (
      f'K={k}, N={n}; the GPU kernel takes multiples of {STEP} and {8 * WIDE}'
    )
  return None if x.shape[0] else 'there are no rows'


def grouped_matmul(
  x: jax.Array,
  codes: jax.Array,
  scale: jax.Array,
  outer: jax.Array | None,
  group_sizes: jax.Array,
  *,
  out_dtype: Any = None,
  rows: int = 8,
  unroll: int | None = None,
  ahead: int | None = None,
  interpret: bool = False,
) -> jax.Array:
  """y[m] = (x[m] @ unpacked w of the group) * outer[group].

  Args:
    x: bfloat16 [M, K], rows sorted by group.
    codes: uint8 [E, K / 2, N] with `outer`, else float8_e4m3fn [E, K, N].
    scale: float8_e4m3fn [E, K / 16, N], else float32 [E, K / 128, N / 128],
      rounded up.
    outer: float32 [E]; None: codes are fp8.
    group_sizes: int [E], summing to M.
    out_dtype: bfloat16 (x's) or float32.
    rows: of a warp, one of ROWS.
    unroll: steps of K that are loaded together, if they divide K; by `rows`.
    ahead: how many times as many are brought to the L2 cache; 0: none. Default by
      `rows` and the number of warps.
    interpret: run on CPU.

  Returns:
    [M, N].
  """
  m, k = x.shape
  n = codes.shape[-1]
  unroll = unroll or (UNROLL_FP8 if outer is None else UNROLL)[rows]
  while k % (STEP * unroll):
    unroll //= 2
  sizes = groups.sizes_of(group_sizes).astype(jnp.int32)
  strips = n // (8 * WIDE)
  warps = groups.most_tiles(m, codes.shape[0], rows) * strips
  blocks = -(-warps // (4 * WARPGROUPS))
  if ahead is None:
    ahead = AHEAD if warps <= FEW or rows == 32 else 0
  inputs = [sizes, x, codes, scale] + [outer] * (outer is not None)
  (y,) = warp.run(
    functools.partial(_kernel, k=k, n=n, rows=rows, unroll=unroll, ahead=ahead),
    *inputs,
    out=[jax.ShapeDtypeStruct((m, n), out_dtype or x.dtype)],
    warpgroups=WARPGROUPS,
    blocks=blocks,
    interpret=interpret,
  )
  return y


def _kernel(w, sizes, x, codes, scale, *rest, k, n, rows, unroll, ahead):
  outer, y = rest if len(rest) == 2 else (None, rest[0])
  strips = n // (8 * WIDE)
  group, first, end = gpu_find.find(w, sizes, w.warp // strips, rows)

  def product():
    column = (w.warp % strips) * (8 * WIDE) + (w.lane >> 2) * WIDE
    fp8 = outer is None
    own_codes = w.part(codes, group, k * n // (1 if fp8 else 2))
    own_scale = _scales(w, scale, group, k, n, fp8)
    load = functools.partial(
      _load_fp8 if fp8 else _load_nvfp4, w, own_codes, own_scale, column, n
    )
    # Of the codes and scales of a trip, which stand side by side, a share each.
    shares = [(own_codes, STEP * unroll * (8 * WIDE) // (1 if fp8 else 2))]
    shares += [] if fp8 else [(own_scale, unroll * 8 * WIDE)]
    far = functools.partial(_fetch_far, w, shares, strips)
    near = _rows_of(w, x, first, end, rows, k, together=outer is not None)
    unpack = _unpack_fp8 if outer is None else _unpack_nvfp4
    sums = _multiply(w, load, near, unpack, k, rows, unroll, far, ahead)
    if outer is not None:
      factor = w.load(outer, group) * 2.0 ** (126 - _NVFP4_SHIFT)
      sums = [one * factor for one in sums]
    _store(w, y, sums, first, end, column, n, rows)

  w.when(first < end, product)


def _scales(w, scale, group, k: int, n: int, fp8: bool):
  if fp8:
    return w.part(scale, group, -(-k // BLOCK) * -(-n // BLOCK))
  return w.part(scale, group, k // STEP * n)


def _fetch_far(w, shares, strips: int, trip) -> None:
  """Brings this warp's share of what all strips read in a trip nearer."""
  for ref, count in shares:
    w.prefetch(ref, (trip * strips + w.warp % strips) * count, count)


def _multiply(w, load, near, unpack, k, rows, unroll, far, ahead):
  """Sums [tile of 8 rows, pair of columns, 4], flat, over all of K."""
  tiles, pairs = rows // 8, WIDE // 2
  trips = k // (STEP * unroll)

  def fetch(trip, i):
    return near(trip, i, unroll) + load(trip, i, unroll)

  def step(trip, *carry):
    sums, words = list(carry[: 4 * tiles * pairs]), carry[4 * tiles * pairs :]
    following, each = [], len(words) // unroll
    later = (trip + 1).minimum(trips - 1)
    if ahead:
      w.when(trip + ahead < trips, lambda: far(trip + ahead))
    for i in range(unroll):
      own = words[i * each : (i + 1) * each]
      left, right = unpack(w, own[2 * tiles :], own[: 2 * tiles])
      for tile in range(tiles):
        for pair in range(pairs):
          at = 4 * (tile * pairs + pair)
          sums[at : at + 4] = w.multiply_add(
            left[pair], right[2 * tile : 2 * tile + 2], sums[at : at + 4]
          )
      following += fetch(later, i)
    return [*sums, *following]

  zero = [w.value(0.0, 'f32')] * (4 * tiles * pairs)
  for trip in range(1, min(ahead, trips)):
    far(w.value(trip))
  start = [one for i in range(unroll) for one in fetch(w.value(0), i)]
  carry = w.loop(0, trips, 1, step, [*zero, *start])
  return carry[: 4 * tiles * pairs]


def _rows_of(w, x, first, end, rows: int, k: int, together: bool):
  """What loads a step's part of the rows; past the end the last row again.

  `together`: four neighbours of K a lane, else two and those 8 further on.
  """
  last = end - 1
  lanes = [
    (first + 8 * i + (w.lane >> 2)).minimum(last) * k
    + (w.lane & 3) * (4 if together else 2)
    for i in range(rows // 8)
  ]

  def load(trip, i, unroll):
    words = []
    for own in lanes:
      place = own + trip * (STEP * unroll)
      if together:
        words += w.load_words(x, place, 2, offset=STEP * i)
        continue
      for half in (0, 8):
        words += w.load_words(x, place, 1, offset=STEP * i + half)
    return words

  return load


# --- Unpacking ---------------------------------------------------------------


def _load_nvfp4(w, codes, scale, column, n, trip, i, unroll):
  """Codes of four of K for each four columns: two words; then their scales."""
  row = trip * (STEP * unroll // 2) + (w.lane & 3) * 2
  words = []
  for next_row in (0, 1):
    words += w.load_words(
      codes, row * n + column, WIDE // 4, (8 * i + next_row) * n, once=True
    )
  return words + w.load_words(
    scale, trip * (unroll * n) + column, WIDE // 4, i * n, once=True
  )


def _halves(w, high, low):
  """Bytes of high and low, of four columns, as b32 of [low, high] each pair."""
  return w.permute(low, high, 0x5140), w.permute(low, high, 0x7362)


def _columns(w, even, odd):
  """A b32 of (even, odd) of K for each of four columns."""
  out = []
  for a, b in zip(even, odd, strict=True):
    out += [w.permute(a, b, 0x5410), w.permute(a, b, 0x7632)]
  return out


def _unpack_nvfp4(w, words, rows):
  """Operands of a step, where a lane has K + 0, 2 in one b32 and K + 1, 3 in one."""
  first, second, scales = words
  steps = _nvfp4_scales(w, scales)
  by_half = [[], []]
  for column, step in enumerate(steps):
    both = w.permute(first, second, (0x5410, 0x4501, 0x7632, 0x6723)[column])
    for half, into in enumerate(by_half):
      into.append(w.multiply_pairs(_nvfp4_values(both, half), step))
  right = []
  for i in range(0, len(rows), 2):
    right += [w.permute(rows[i], rows[i + 1], at) for at in (0x5410, 0x7632)]
  return _left(by_half), right


def _nvfp4_values(both, half: int):
  """The low digits of bytes 0 and 2, or their high ones, as bfloat16 times 2^-126.

  One product moves a digit to two places: where its sign belongs, and where its
  size is the lowest bit of the exponent with what goes before and after.
  """
  digits = both & 0x000F000F << 4 * half
  return (digits * ((1 << 12 | 1 << 6) >> 4 * half)) & 0x81C081C0


def _nvfp4_scales(w, word):
  """Twice the bfloat16 of each of four scales times 2^118."""
  back, more = (w.value(_pair(2.0**power)) for power in (_SHIFT, _NVFP4_SHIFT))
  even, odd = (word & 0x00FF00FF) * 16, (word >> 4) & 0x0FF00FF0
  even, odd = (
    w.multiply_pairs(w.multiply_pairs(one, back), more) for one in (even, odd)
  )
  return [
    w.permute(one, one, at) for at in (0x1010, 0x3232) for one in (even, odd)
  ]


def _left(by_half):
  first, second = by_half
  return [
    [first[i], first[i + 1], second[i], second[i + 1]]
    for i in range(0, len(first), 2)
  ]


def _load_fp8(w, codes, scale, column, n, trip, i, unroll):
  """Words of K, K + 1, K + 8, K + 9 for four columns each; the scale's bits."""
  row = trip * (STEP * unroll) + (w.lane & 3) * 2
  words = []
  for offset in (0, 1, 8, 9):
    words += w.load_words(
      codes,
      row * n + column,
      WIDE // 4,
      (STEP * i + offset) * n,
      once=True,
    )
  block = ((trip * unroll + i) * STEP) // BLOCK * -(-n // BLOCK)
  return [*words, w.bits(w.load(scale, block + column // BLOCK))]


def _unpack_fp8(w, words, rows):
  each = WIDE // 4
  *words, scale = words
  scale = w.float(scale)
  back = w.value(_pair(2.0**_SHIFT))

  def halves(word):
    high = word & 0x80808080 | (word >> 4) & 0x07070707
    return _halves(w, high, (word & 0x0F0F0F0F) << 4)

  def scaled(pair):
    pair = w.multiply_pairs(pair, back)
    low, high = w.float(pair << 16), w.float(pair & 0xFFFF0000)
    return w.pack(low * scale, high * scale)

  by_half = []
  for start in (0, 2 * each):
    columns = []
    for j in range(each):
      even, odd = words[start + j], words[start + each + j]
      columns += _columns(w, halves(even), halves(odd))
    by_half.append([scaled(one) for one in columns])
  return _left(by_half), rows


def _pair(value: float) -> int:
  """Twice the bfloat16 of a power of two."""
  bits = int(np.float32(value).view(np.uint32)) >> 16
  return bits | bits << 16


def _store(w, y, sums, first, end, column, n: int, rows: int) -> None:
  pairs = WIDE // 2
  for tile in range(rows // 8):
    for other in (0, 1):
      row = first + 8 * tile + (w.lane & 3) * 2 + other
      values = []
      for pair in range(pairs):
        at = 4 * (tile * pairs + pair) + other
        values += [sums[at], sums[at + 2]]

      def write(row=row, values=values):
        words = values
        if y.kind != 'f32':
          words = [
            w.pack(values[i], values[i + 1]) for i in range(0, len(values), 2)
          ]
        w.store_words(w.part(y, row, n), column, words)

      w.when(row < end, write)
