"""Rounding to eight and four bits, bit for bit against numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels import quantize
from pallas_kernels import warp
from pallas_kernels.quantize import gpu
from pallas_kernels.quantize import reference
from pallas_kernels.quantize import shapes

NAMES = ('reference', 'gpu_interpret', 'tpu_interpret')
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
ONE = np.float32(1)


def draw(rows, k, dtype=jnp.bfloat16, seed=0):
  """Rows of very different sizes; a row and a block of zeros; a -0.0."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(rows, k)) * np.exp(3 * rng.normal(size=(rows, 1)))
  x[1], x[2, :16], x[0, 3] = 0, 0, -0.0
  return jnp.asarray(x, dtype)


def exact(rows=64, k=256):
  """Rows whose greatest are all of bfloat16, with blocks at ties of E4M3."""
  rng = np.random.default_rng(0)
  x = rng.integers(128, 256, (rows, k)) * 2.0 ** rng.integers(-9, -7, (rows, k))
  x[:, 0] = np.arange(128, 256, 128 // rows) / 64
  return jnp.asarray(x, jnp.bfloat16)


def e4m3(x):
  return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def by_hand_nvfp4(x, by_row):
  """A number at a time; the nearest code by distance, ties to the even one."""
  x = np.asarray(x, np.float32)
  rows, k = x.shape
  most = np.abs(x).max(1) if by_row else np.full(rows, np.abs(x).max())
  outer = most * np.float32(1 / 2688)
  codes = np.zeros((rows, k), np.uint8)
  scale = np.zeros((rows, k // 16), ml_dtypes.float8_e4m3fn)
  for row in range(rows):
    for block in range(k // 16):
      part = x[row, 16 * block : 16 * block + 16]
      wide = np.float32(6) * outer[row]
      one = np.abs(part).max() / wide if wide > 0 else np.float32(0)
      scale[row, block] = e4m3(one)
      step = np.float32(scale[row, block]) * outer[row]
      for i, value in enumerate(part):
        q = value / step if step > 0 else np.float32(0)
        apart = np.abs(GRID - np.abs(q))
        near = np.flatnonzero(apart == apart.min())
        code = next((c for c in near if c % 2 == 0), near[0])
        codes[row, 16 * block + i] = code | 8 * np.signbit(q)
  packed = codes[:, ::2] | codes[:, 1::2] << 4
  return packed, scale, outer if by_row else outer[0]


def by_hand_mxfp8(x):
  x = np.asarray(x, np.float32).reshape(len(x), -1, 32)
  most = np.abs(x).max(2)
  fraction, exponent = np.frexp(most / np.float32(448))
  exponent = np.where(fraction == 0.5, exponent - 1, exponent)
  exponent = np.where(most == 0, -127, exponent)
  values = e4m3(x * np.float32(2) ** -exponent.astype(np.float32)[:, :, None])
  return values.reshape(len(x), -1), (exponent + 127).astype(np.uint8)


def by_hand_fp8(x):
  x = np.asarray(x, np.float32)
  rows, k = x.shape
  scale = np.zeros((-(-rows // 128), -(-k // 128)), np.float32)
  values = np.zeros((rows, k), ml_dtypes.float8_e4m3fn)
  for i, j in np.ndindex(scale.shape):
    square = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
    scale[i, j] = np.abs(x[square]).max() / np.float32(448)
    if scale[i, j] > 0:
      values[square] = e4m3(x[square] / scale[i, j])
  return values, scale


def same_bits(got, want):
  for one, other in zip(got, want, strict=True):
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype and one.shape == other.shape
    np.testing.assert_array_equal(
      np.atleast_1d(one).view(np.uint8), np.atleast_1d(other).view(np.uint8)
    )


@pytest.mark.parametrize('name', NAMES)
def test_nvfp4(name):
  x = draw(5, 80)
  found = quantize.nvfp4(x, implementation=name)
  same_bits(found, by_hand_nvfp4(x, True))
  if name != 'reference':
    found = quantize.nvfp4(x, outer='all', implementation=name)
    same_bits(found, by_hand_nvfp4(x, False))


@pytest.mark.parametrize('name', NAMES)
def test_eight_bits(name):
  x = draw(131, 160, jnp.float32)
  same_bits(quantize.mxfp8(x, implementation=name), by_hand_mxfp8(x))
  same_bits(quantize.fp8(x, implementation=name), by_hand_fp8(x))


@pytest.mark.parametrize('name', NAMES[:2])
def test_compiled_as_it_is_written(name):
  """XLA folds constants, 6 * (x * c) to x * (6 c), where nothing keeps them."""
  x = exact()
  run = jax.jit(functools.partial(quantize.nvfp4, implementation=name))
  same_bits(run(x), by_hand_nvfp4(x, True))


def test_quotients_of_double_are_those_of_single():
  """Of any bits that are normal, and of quotients as near to a middle as can be."""
  rng = np.random.default_rng(1)
  bits = rng.integers(0, 2**23, (2, 100_000), np.uint32)
  bits |= rng.integers(127 - 60, 127 + 60, bits.shape, np.uint32) << 23
  a, b = bits.view(np.float32)
  # Above: a is the number next to b (q + half a place of q).
  q = rng.integers(2**23, 2**24, 100_000).astype(np.float64)
  near = (np.ldexp(q + 0.5, -23) * b.astype(np.float64)).astype(np.float32)
  a, b = np.concatenate([a, near]), np.concatenate([b, b])
  want = a / b
  for run in (reference.in_double, reference.quotient):
    np.testing.assert_array_equal(jax.jit(run)(a, b), want)


FORMS = (quantize.nvfp4, quantize.mxfp8, quantize.fp8)


@pytest.mark.parametrize('form', FORMS)
def test_divisions_on_a_gpu_are_exact(form):
  """XLA's of float32 are approximate there, and so is what LLVM narrows to them.

  Each is of float64, of products with 3: of widened float32 LLVM makes float32
  again. The kernel's are `div.rn`.
  """
  traced = jax.jit(lambda x: form(x, implementation='reference')).trace(
    like(256, 512)
  )
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  found = re.findall(r'stablehlo.divide (%\w+), (%\w+) : (\S+)', text)
  assert len(found) == (1 if form is quantize.mxfp8 else 2)
  for a, b, kind in found:
    assert kind.endswith('xf64>')
    for operand in (a, b):
      assert f'{operand} = stablehlo.multiply ' in text
  kernel = written(form)
  assert set(re.findall(r'div\S*f32', kernel)) == {'div.rn.f32'}
  assert 'approx' not in kernel


def written(form):
  """The kernel of lanes as PTX."""
  rows, k = 256, 512
  out = [(one.dtype, one.size) for one in jax.eval_shape(form, like(rows, k))]
  kernel = {
    'nvfp4': functools.partial(gpu._nvfp4, rows=rows, by_row=True),
    'mxfp8': gpu._mxfp8,
    'fp8': functools.partial(gpu._fp8, rows=rows, each=8),
  }[form.__name__]
  return warp.ptx(kernel, [(jnp.dtype(jnp.bfloat16), rows * k), *out], 1, 1)


def like(rows, k):
  return jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)


def test_every_tie_of_the_grid():
  # With the greatest 2688 and 6 of a block: t = 1, s = 1, and x / (s t) is x.
  middles = (GRID[1:] + GRID[:-1]) / 2
  near = np.concatenate([GRID, middles, np.nextafter(middles, 0)])
  near = np.concatenate([near, np.nextafter(middles, 9)])
  x = np.zeros((1, 64), np.float32)
  x[0, 0], x[0, 16 : 16 + len(near)] = 2688, near
  x[0, 32:64:16] = 6
  for name in NAMES[:2]:
    found = quantize.nvfp4(jnp.asarray(x), implementation=name)
    same_bits(found, by_hand_nvfp4(x, True))


def test_scales_are_read_from_their_bits():
  every = jnp.arange(127, dtype=jnp.uint8)  # that is not negative, nor NaN
  scale = jax.lax.bitcast_convert_type(every, jnp.float8_e4m3fn)
  found = jax.jit(quantize.reference.from_e4m3)(scale)
  np.testing.assert_array_equal(found, np.asarray(scale, np.float32))


def test_a_row_does_not_depend_on_others():
  x = draw(5, 80)
  whole = quantize.nvfp4(x, implementation='gpu_interpret')
  some = quantize.nvfp4(x[3:4], implementation='gpu_interpret')
  same_bits(some, [one[3:4] for one in whole])


@pytest.mark.parametrize(
  ('form', 'widen', 'part'),
  [
    # Half a step of the greatest: 1 of 6 (and its scale rounds), 16 of 256.
    (quantize.nvfp4, quantize.widen_nvfp4, 0.2),
    (quantize.mxfp8, quantize.widen_mxfp8, 16 / 256),
    (quantize.fp8, quantize.widen_fp8, 16 / 256),
  ],
)
def test_what_is_left_after_rounding(form, widen, part):
  x = np.asarray(draw(5, 96, jnp.float32))
  off = np.abs(jax.jit(lambda x: widen(*form(x)))(jnp.asarray(x)) - x)
  most = np.abs(x).max(None if form is quantize.fp8 else 1)
  assert (off.max(1) <= part * most).all()


def test_lowers_for_cuda():
  x = jax.ShapeDtypeStruct(
    (shapes.TRAINING[0].rows, shapes.TRAINING[0].k), jnp.bfloat16
  )
  for form in (quantize.nvfp4, quantize.mxfp8, quantize.fp8):
    assert 'mosaic_gpu' in mosaic.lower(
      lambda x, form=form: form(x, implementation='gpu'), x
    )


def test_bad_input():
  with pytest.raises(ValueError, match='not a multiple of 16'):
    quantize.nvfp4(jnp.zeros((2, 24)))
  with pytest.raises(ValueError, match='not a multiple of 32'):
    quantize.mxfp8(jnp.zeros((2, 48)))
  with pytest.raises(ValueError, match='float32 or bfloat16'):
    quantize.fp8(jnp.zeros((2, 48), jnp.float16))
  with pytest.raises(ValueError, match="outer='token'"):
    quantize.nvfp4(jnp.zeros((2, 32)), outer='token')


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_on_the_device():
  for x in (draw(300, 512), exact(128, 512)):
    wanted = by_hand_nvfp4(x, True), by_hand_mxfp8(x), by_hand_fp8(x)
    for name in (
      'gpu',
      'reference',
    ):  # which XLA compiles, otherwise than for a CPU
      for form, want in zip(FORMS, wanted, strict=True):
        run = jax.jit(functools.partial(form, implementation=name))
        same_bits(run(x), want)
