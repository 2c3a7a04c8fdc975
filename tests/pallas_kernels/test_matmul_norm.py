"""Dense matmul and RMSNorm: values, gradients, and the bits of a row."""

from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import mosaic
from pallas_kernels import norm
from pallas_kernels.grouped_matmul import gpu as grouped_gpu
from pallas_kernels.norm import gpu as norm_gpu
from pallas_kernels.norm import shapes


def draw(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def close(got, want, tolerance=4e-3):
  got = np.asarray(got, np.float32)
  assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize('name', NAMES)
def test_matmul(name, transpose=True):
  x, w, dy = draw(70, 128), draw(128, 192, seed=1), draw(70, 192, seed=2)
  w = w.T if transpose else w

  def ours(x, w):
    return matmul.matmul(x, w, transpose=transpose, implementation=name)

  wide = [a.astype(jnp.float32) for a in (x, w)]
  want, back = jax.vjp(lambda x, w: x @ (w.T if transpose else w), *wide)
  got, ours_back = jax.vjp(ours, x, w)
  close(got, want)
  for a, b in zip(ours_back(dy), back(dy.astype(jnp.float32)), strict=True):
    close(a, b)


@needs_interpreter
def test_matmul_has_the_bits_of_one_group_and_of_any_rows():
  x, w = draw(75, 128), draw(128, 64, seed=1)
  whole = matmul.matmul(x, w, implementation='gpu_interpret')
  one = matmul.matmul(x[3:4], w, implementation='gpu_interpret')
  np.testing.assert_array_equal(one, whole[3:4])
  grouped = grouped_matmul.grouped_matmul(
    x,
    jnp.stack([w, w]),
    jnp.asarray([13, 62]),
    implementation='gpu_interpret',
    tiles=grouped_gpu.Tiles(consumers=1, columns=64),
  )
  np.testing.assert_array_equal(grouped, whole)


# Of 32 and of 8 lanes, the last vector of some only; padded to a warpgroup.
@pytest.mark.parametrize('depth', [640, 72, 76])
@pytest.mark.parametrize('name', NAMES)
def test_norm(name, depth):
  x, dy = draw(3, 5, depth), draw(3, 5, depth, seed=2)
  scale = draw(depth, seed=1)

  def plain(x, scale):
    mean = jnp.mean(x * x, -1, keepdims=True)
    return x / jnp.sqrt(mean + 1e-5) * scale[None, None, :]

  def ours(x, scale):
    return norm.rms_norm(x, scale, epsilon=1e-5, implementation=name)

  wide = [a.astype(jnp.float32) for a in (x, scale)]
  want, back = jax.vjp(plain, *wide)
  got, ours_back = jax.vjp(ours, x, scale)
  close(got, want)
  for a, b in zip(ours_back(dy), back(dy.astype(jnp.float32)), strict=True):
    close(a, b)
  one = ours(x[1, 2:3], scale)
  np.testing.assert_array_equal(one, got[1, 2:3])


def in_lanes(x, scale, epsilon, share, each):
  """The order of addition of `norm.gpu`, written down again: [T, D] float32."""
  rows, depth = x.shape
  steps = -(-depth // (share * each))
  wide = np.zeros((rows, steps * share * each), np.float32)
  wide[:, :depth] = x
  square = (wide * wide).reshape(rows, steps, share, each)
  parts = np.zeros((2, rows, share), np.float32)
  for step in range(steps):
    for i in range(each):
      parts[i % 2] += square[:, step, :, i]
  total = parts[0] + parts[1]
  while total.shape[1] > 1:
    total = total[:, ::2] + total[:, 1::2]
  mean = total * np.float32(1 / depth) + np.float32(epsilon)
  return x * (np.float32(1) / np.sqrt(mean)) * scale


@pytest.mark.parametrize(
  'depth, dtype, share',
  [
    (128, 'bfloat16', 8),
    (256, 'bfloat16', 16),
    (600, 'bfloat16', 32),
    (100, 'float32', 16),
    (2040, 'bfloat16', 32),
  ],
)
def test_norm_of_narrow_rows_adds_in_the_order_it_says(depth, dtype, share):
  x, scale = draw(9, depth).astype(dtype), draw(depth, seed=1)
  assert norm_gpu.shared_by(depth, x.dtype.itemsize) == share
  got = norm_gpu.rms_norm(x, scale, 1e-6, interpret=True)
  wide = [np.asarray(a, np.float32) for a in (x, scale[None, :])]
  want = in_lanes(*wide, 1e-6, share, 16 // x.dtype.itemsize)
  np.testing.assert_array_equal(got, jnp.asarray(want).astype(dtype))


# By lanes, whole and with some that have no last vector, and by a warpgroup.
@pytest.mark.parametrize(
  'depth, dtype', [(128, 'bfloat16'), (576, 'bfloat16'), (100, 'float32')]
)
def test_a_sum_and_its_norm_have_the_bits_of_one_after_the_other(depth, dtype):
  x, more = (draw(2, 9, depth, seed=i).astype(dtype) for i in (0, 2))
  more = (more * 3e-3).at[0, 0].set(-x[0, 0])  # rounds, and a row of zeros
  scale = draw(depth, seed=1).astype(jnp.float32)
  total = (x.astype(jnp.float32) + more.astype(jnp.float32)).astype(dtype)
  for name in ('reference', 'gpu_interpret'):
    some = dict(epsilon=1e-5, implementation=name)
    got = norm.add_rms_norm(x, more, scale, **some)
    np.testing.assert_array_equal(got[0], total)
    np.testing.assert_array_equal(got[1], norm.rms_norm(total, scale, **some))


# Padded, whole for its threads, and with numbers of which none is 16 bytes' last.
@needs_interpreter
@pytest.mark.parametrize(
  'depth, dtype', [(76, 'bfloat16'), (1024, 'bfloat16'), (512, 'float32')]
)
def test_a_sum_and_its_norm_by_a_warpgroup(depth, dtype):
  x, more = (draw(3, depth, seed=i).astype(dtype) for i in (0, 2))
  scale = draw(depth, seed=1)
  got = norm.add_rms_norm(x, more, scale, implementation='gpu_interpret')
  total = norm.reference.add(x, more)
  np.testing.assert_array_equal(got[0], total)
  want = norm_gpu.by_warpgroup(total, scale, 1e-6, interpret=True)
  np.testing.assert_array_equal(got[1], want)
  named = norm.rms_norm(total, scale, implementation='gpu_interpret')
  np.testing.assert_array_equal(named, want)


def test_who_takes_a_row_hangs_on_its_length_alone():
  for depth, dtype, lanes in (
    (576, 'bfloat16', True),
    (1024, 'bfloat16', False),
    (1536, 'bfloat16', True),
    (2048, 'bfloat16', False),
    (7168, 'bfloat16', False),
    (512, 'float32', False),
    (128, 'float32', True),
    (576, 'float16', False),
  ):
    for rows in (0, 1, 16384):
      x = jax.ShapeDtypeStruct((rows, depth), dtype)
      assert norm_gpu._narrow(x) is lanes


@pytest.mark.parametrize('depth', [76, 576, 1024, 7168])
def test_norm_of_no_rows_lowers_for_cuda_and_launches_nothing(depth):
  x = jax.ShapeDtypeStruct((0, depth), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((depth,), jnp.bfloat16)
  for function, operands in (
    (norm_gpu.rms_norm, (x, scale)),
    (norm_gpu.add_rms_norm, (x, x, scale)),
  ):
    text = mosaic.lower(lambda *a, f=function: f(*a, 1e-6), *operands)
    assert 'mosaic_gpu' not in text
  empty = jnp.zeros((0, depth), jnp.bfloat16)
  got = norm_gpu.add_rms_norm(empty, empty, jnp.ones(depth), 1e-6)
  assert [one.shape for one in got] == [(0, depth)] * 2


def test_gradients_of_a_sum_and_its_norm():
  arrays = draw(5, 72), draw(5, 72, seed=3), draw(72, seed=1)
  dy = draw(5, 72, seed=2), draw(5, 72, seed=4)

  def ours(x, more, scale):
    return norm.add_rms_norm(x, more, scale, implementation='gpu_interpret')

  def apart(x, more, scale):
    total = x + more
    return total, norm.reference.rms_norm(total, scale, 1e-6)

  wide = [a.astype(jnp.float32) for a in arrays]
  want = jax.vjp(apart, *wide)[1](tuple(a.astype(jnp.float32) for a in dy))
  for a, b in zip(jax.vjp(ours, *arrays)[1](dy), want, strict=True):
    close(a, b)


@pytest.mark.parametrize('depth', [s.depth for s in shapes.TRAINING])
def test_norm_lowers_for_cuda(depth):
  x = jax.ShapeDtypeStruct((16384, depth), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((depth,), jnp.bfloat16)
  text = mosaic.lower(lambda *a: norm_gpu.rms_norm(*a, 1e-6), x, scale)
  assert text.count('custom_call @mosaic_gpu') == 1
  text = mosaic.lower(lambda *a: norm_gpu.add_rms_norm(*a, 1e-6), x, x, scale)
  assert text.count('custom_call @mosaic_gpu') == 1


def test_bad_input():
  with pytest.raises(ValueError, match='differ in K'):
    matmul.matmul(draw(4, 64), draw(128, 64))
  with pytest.raises(ValueError, match='cast one'):
    matmul.matmul(draw(4, 64), draw(64, 64).astype(jnp.float32))
  with pytest.raises(ValueError, match='multiple of 64'):
    matmul.matmul(draw(4, 72), draw(72, 64), implementation='gpu')
  with pytest.raises(ValueError, match='must end in'):
    norm.rms_norm(draw(4, 64), draw(32))
  with pytest.raises(ValueError, match='epsilon'):
    norm.rms_norm(draw(4, 64), draw(64), epsilon=-1.0)
  with pytest.raises(ValueError, match='differ; they are added'):
    norm.add_rms_norm(draw(4, 64), draw(3, 64), draw(64))
  with pytest.raises(ValueError, match='takes up to 16384'):
    norm.rms_norm(draw(4, 16512), draw(16512), implementation='gpu')
  x, scale = (
    jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((2**23, 512), (512,))
  )
  with pytest.raises(ValueError, match='32 bits'):
    jax.eval_shape(lambda *a: norm.rms_norm(*a, implementation='gpu'), x, scale)


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_on_the_device():
  x, w = draw(4096, 7168), draw(7168, 1536, seed=1)
  whole = matmul.matmul(x, w, implementation='gpu')
  close(whole[:64], np.asarray(x[:64], np.float32) @ np.asarray(w, np.float32))
  scale = draw(7168, seed=2)
  normed = norm.rms_norm(x, scale, implementation='gpu')
  want = norm.reference.rms_norm(x.astype(jnp.float32), scale, 1e-6)
  np.testing.assert_allclose(normed, want, rtol=8e-3)
  for depth in (576, 128, 2048):
    x_, scale_ = draw(4099, depth), draw(depth, seed=3)
    narrow = norm.rms_norm(x_, scale_, implementation='gpu')
    if depth < 2048:  # by lanes, whose bits the interpreter has too
      want = norm_gpu.rms_norm(x_[:64], scale_, 1e-6, interpret=True)
      np.testing.assert_array_equal(narrow[:64], want)
    some = norm.rms_norm(x_[5:], scale_, implementation='gpu')
    np.testing.assert_array_equal(some, narrow[5:])
    parts = norm.add_rms_norm(
      x_ - x_[::-1], x_[::-1], scale_, implementation='gpu'
    )
    total = norm.reference.add(x_ - x_[::-1], x_[::-1])
    np.testing.assert_array_equal(parts[0], total)
    want = norm.rms_norm(total, scale_, implementation='gpu')
    np.testing.assert_array_equal(parts[1], want)
  for rows in (1, 8, 100):
    some = matmul.matmul(x[7 : 7 + rows], w, implementation='gpu')
    np.testing.assert_array_equal(some, whole[7 : 7 + rows])
    some = norm.rms_norm(x[7 : 7 + rows], scale, implementation='gpu')
    np.testing.assert_array_equal(some, normed[7 : 7 + rows])
