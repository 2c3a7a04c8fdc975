"""GPU: rounding to eight and four bits; a lane holds 16 numbers of a row.

With nvfp4 a warp reads a row twice, the second time from the cache: for the
greatest of the row, and to round. A lane's 16 numbers are a block there, and half
a block of mxfp8. With fp8 a warp has a square of 128, of which a lane holds 16
bytes of a row, and reads it twice too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import warp
from pallas_kernels.quantize.reference import E2M1_MAX
from pallas_kernels.quantize.reference import E4M3_MAX
from pallas_kernels.quantize.reference import outer_of

EACH = 16  # numbers of a lane
SQUARE = 128
AT_ONCE = 4  # loads of a square that are on their way together
WARPGROUPS = 1
SIZE = 0x7FFFFFFF  # all bits of a float32 but its sign


def unsupported(x: jax.Array, form: str) -> str | None:
  """Why this cannot be rounded here, or None."""
  del form
  return None if x.size else 'there are no numbers'


def _launch(kernel, *inputs, out, warps: int, interpret: bool):
  return warp.run(
    kernel,
    *inputs,
    out=out,
    warpgroups=WARPGROUPS,
    blocks=-(-warps // (4 * WARPGROUPS)),
    interpret=interpret,
  )


def nvfp4(
  x: jax.Array, by_row: bool, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Codes, scale and outer; see the package."""
  rows, k = x.shape
  inputs = [x]
  if not by_row:
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    inputs.append(outer_of(largest))
  out = [
    jax.ShapeDtypeStruct((rows, k // 2), jnp.uint8),
    jax.ShapeDtypeStruct((rows, k // EACH), jnp.float8_e4m3fn),
    jax.ShapeDtypeStruct((rows,), jnp.float32),
  ]
  kernel = functools.partial(_nvfp4, rows=rows, by_row=by_row)
  codes, scale, outer = _launch(
    kernel,
    *[one.reshape(-1) if not one.ndim else one for one in inputs],
    out=out,
    warps=rows,
    interpret=interpret,
  )
  return codes, scale, outer if by_row else inputs[1]


def _nvfp4(w, x, *refs, rows: int, by_row: bool) -> None:
  codes, scales, outers = refs[-3:]
  k = x.size // rows

  def one_row(row):
    def greatest(start, most):
      numbers = _numbers(w, x, row * k + start, start < k)
      return [most.maximum(_most(w, numbers))]

    if by_row:
      most = w.loop(w.lane * EACH, k, EACH * warp.LANES, greatest, [0])[0]
      most = w.float(w.reduce('max', most))
      outer = most * (1 / (E2M1_MAX * E4M3_MAX))
    else:
      outer = w.load(refs[0], 0)

    def block(start):
      place = row * k + start
      numbers = _numbers(w, x, place, start < k)
      most = w.float(_most(w, numbers))
      wide = outer * E2M1_MAX
      scale = _divide(w, most, wide).minimum(w.value(E4M3_MAX, 'f32'))
      byte = w.e4m3(scale, _zero(w))
      step = w.float((byte & 0x7F) << 20) * 2.0**120 * outer
      digits = [_e2m1(w, one, step) for one in numbers]
      words = [
        functools.reduce(
          lambda a, b: a | b,
          [digit << (4 * i) for i, digit in enumerate(digits[at : at + 8])],
        )
        for at in (0, 8)
      ]
      w.store_words(codes, place >> 1, words)
      w.store(scales, place // EACH, byte)

    w.loop(w.lane * EACH, k, EACH * warp.LANES, block)
    w.when(w.lane.equals(0), lambda: w.store(outers, row, outer))

  w.loop(w.warp, rows, w.warps, one_row)


def mxfp8(
  x: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Values and exponents; see the package."""
  rows, k = x.shape
  return tuple(
    _launch(
      _mxfp8,
      x,
      out=[
        jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows, k // 32), jnp.uint8),
      ],
      warps=-(-x.size // (EACH * warp.LANES)),
      interpret=interpret,
    )
  )


def _mxfp8(w, x, values, exponents) -> None:
  def some(start):
    place = start + w.lane * EACH
    here = place < x.size
    numbers = _numbers(w, x, place, here)
    most = _most(w, numbers)
    most = w.float(most.maximum(w.shuffle_xor(most, 1)))
    bits = w.bits(most / w.value(E4M3_MAX, 'f32'))
    more = w.where((bits & 0x7FFFFF).differs(0), w.value(1), 0)
    exponent = (bits >> 23) + more
    factor = w.float((w.value(254) - exponent) << 23)
    words = _e4m3_words(w, [one * factor for one in numbers])
    w.when(here, lambda: w.store_words(values, place, words))
    first = here & (w.lane & 1).equals(0)
    w.when(first, lambda: w.store(exponents, place >> 5, exponent))

  each = EACH * warp.LANES
  w.loop(w.warp * each, x.size, w.warps * each, some)


def fp8(
  x: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Values and scales; see the package."""
  rows, k = x.shape
  vectors = k * x.dtype.itemsize % 16 == 0
  high, wide = -(-rows // SQUARE), -(-k // SQUARE)
  return tuple(
    _launch(
      functools.partial(
        _fp8, rows=rows, each=16 // x.dtype.itemsize if vectors else 1
      ),
      x,
      out=[
        jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((high, wide), jnp.float32),
      ],
      warps=high * wide,
      interpret=interpret,
    )
  )


def _fp8(w, x, values, scales, *, rows: int, each: int) -> None:
  """A lane has `each` numbers of a row at once, 1 where rows do not align."""
  k = x.size // rows
  wide = -(-k // SQUARE)
  lanes = SQUARE // each  # that a row takes
  deep = max(1, warp.LANES // lanes)  # rows of a load
  across = max(1, lanes // warp.LANES)  # loads of a row

  def square(number):
    first = number // wide * SQUARE + w.lane // lanes
    column = number % wide * SQUARE + w.lane % lanes * each

    def load(start):
      loaded = []
      for i in range(AT_ONCE):
        row = first + start + i // across * deep
        own = column + i % across * (warp.LANES * each)
        inside, place = (row < rows) & (own < k), row * k + own
        numbers = _vector(w, x, place, inside, each)
        loaded.append((inside, place, numbers))
      return loaded

    def greatest(start, most):
      for _, _, numbers in load(start):
        most = most.maximum(_most(w, numbers))
      return [most]

    step = AT_ONCE // across * deep
    most = w.loop(0, SQUARE, step, greatest, [0])[0]
    most = w.float(w.reduce('max', most))
    scale = most / w.value(E4M3_MAX, 'f32')

    def round_(start):
      for inside, place, numbers in load(start):
        rounded = [_divide(w, one, scale) for one in numbers]

        def write(place=place, rounded=rounded):
          if each == 1:
            w.store(values, place, w.e4m3(rounded[0], _zero(w)))
          else:
            w.store_words(values, place, _e4m3_words(w, rounded))

        w.when(inside, write)

    w.loop(0, SQUARE, step, round_)
    w.when(w.lane.equals(0), lambda: w.store(scales, number, scale))

  w.loop(w.warp, scales.size, w.warps, square)


def _vector(w, x, place, inside, each: int) -> list:
  """float32 of `each` elements, 0 outside."""
  if each == 1:
    return [_number(w, x, place, inside)]
  found = w.when(inside, lambda *_: w.load_words(x, place, 4), [0] * 4)
  return _floats(w, x, found)


def _zero(w):
  return w.value(0.0, 'f32')


def _divide(w, a, b):
  """a / b rounded once, 0 where b is 0."""
  return w.where(b > 0.0, a / b, 0.0)


def _number(w, x, place, inside):
  """float32 of an element, 0 outside."""

  def load(_):
    value = w.load(x, place)
    return [value if x.kind == 'f32' else w.float(value << 16)]

  return w.when(inside, load, [_zero(w)])[0]


def _numbers(w, x, place, inside) -> list:
  """float32 of the 16 elements from `place`, 0 outside."""
  words = 4 * x.bytes  # of 32 bits

  def load(*_):
    found = []
    for i in range(words // 4):
      found += w.load_words(x, place, 4, offset=i * 16 // x.bytes)
    return found

  return _floats(w, x, w.when(inside, load, [0] * words))


def _floats(w, x, found) -> list:
  """Of words of the array's own elements."""
  if x.kind == 'f32':
    return [w.float(one) for one in found]
  out = []
  for one in found:
    out += [w.float(one << 16), w.float(one & 0xFFFF0000)]
  return out


def _most(w, numbers):
  """Bits of the greatest size; they are ordered as the sizes are."""
  return functools.reduce(
    lambda a, b: a.maximum(b), [w.bits(one) & SIZE for one in numbers]
  )


def _e2m1(w, number, step):
  """Code of number / step to nearest, ties to even; 0 where step is 0."""
  bits = w.bits(number)
  size = w.float(bits & SIZE) / step
  four = size >= 1.75
  two = size >= w.where(four, w.value(3.5, 'f32'), 0.75)
  low = w.where(two, w.value(1.25, 'f32'), 0.25)
  high = w.where(two, w.value(5.0, 'f32'), 2.5)
  one = size > w.where(four, high, low)
  code = (bits >> 31) << 3
  for hit, worth in ((four, 4), (two, 2), (one, 1)):
    code = code | w.where(hit, w.value(worth), 0)
  return w.where(step > 0.0, code, 0)


def _e4m3_words(w, numbers) -> list:
  """Four to a b32."""
  pairs = [
    w.e4m3(numbers[i], numbers[i + 1]) for i in range(0, len(numbers), 2)
  ]
  return [pairs[i] | pairs[i + 1] << 16 for i in range(0, len(pairs), 2)]
