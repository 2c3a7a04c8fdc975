"""RMSNorm of heads side by side: the bits of `rms_norm` of each kind by itself."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels import norm
from pallas_kernels.norm import gpu as norm_gpu


def draw(*shape, seed=0, dtype='bfloat16'):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), dtype)


def apart(x, scales, counts, **some):
  """Each kind cut out, normed, and put back."""
  parts, first = [], 0
  for count, scale in zip(counts, scales, strict=True):
    part = x[:, first : first + count]
    parts.append(norm.rms_norm(part, scale, **some))
    first += count
  return jnp.concatenate([*parts, x[:, first:]], axis=1)


# Of lanes, whole and with some that have no last vector.
@settings(max_examples=30, deadline=None)
@given(
  rows=st.integers(0, 7),
  counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
  rest=st.integers(0, 3),
  of=st.sampled_from(
    [(128, 'bfloat16'), (64, 'bfloat16'), (72, 'bfloat16'), (20, 'float32')]
  ),
  wide=st.booleans(),
)
def test_bits_are_those_of_each_part(rows, counts, rest, of, wide):
  depth, dtype = of
  x = draw(rows, sum(counts) + rest, depth, dtype=dtype)
  kind = 'float32' if wide else dtype
  scales = [draw(depth, seed=i + 1, dtype=kind) for i in range(len(counts))]
  some = dict(epsilon=1e-5, implementation='gpu_interpret')
  got = norm.rms_norm_heads(x, scales, counts, **some)
  assert got.dtype == x.dtype
  np.testing.assert_array_equal(got, apart(x, scales, counts, **some))


@pytest.mark.parametrize('name', NAMES)
def test_every_implementation(name):
  x, scales = draw(9, 7, 64), [draw(64, seed=1), draw(64, seed=2)]
  got = norm.rms_norm_heads(x, scales, (3, 2), implementation=name)
  wide = np.asarray(x, np.float32)
  want = wide.copy()
  for heads, scale in ((slice(0, 3), scales[0]), (slice(3, 5), scales[1])):
    mean = (wide[:, heads] ** 2).mean(-1, keepdims=True)
    want[:, heads] /= np.sqrt(mean + 1e-6)
    want[:, heads] *= np.asarray(scale, np.float32)
  np.testing.assert_array_equal(got[:, 5:], x[:, 5:])
  np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=8e-3)


@pytest.mark.parametrize('name', ['reference', 'gpu_interpret'])
def test_no_rows(name):
  x, scales = draw(0, 6, 64), (draw(64, seed=1), draw(64, seed=2))

  def run(x, scales):
    return norm.rms_norm_heads(x, scales, (3, 2), implementation=name)

  y, pull = jax.vjp(run, x, scales)
  dx, dscales = pull(y)
  assert y.shape == dx.shape == x.shape
  for one in dscales:
    np.testing.assert_array_equal(one, np.zeros(64))


@needs_interpreter
def test_heads_that_no_lanes_take_are_normed_apart():
  x, scales = draw(2, 4, 1024), [draw(1024, seed=1), draw(1024, seed=2)]
  assert not norm_gpu.norms_heads(x)
  some = dict(implementation='gpu_interpret')
  got = norm.rms_norm_heads(x, scales, (2, 1), **some)
  np.testing.assert_array_equal(got, apart(x, scales, (2, 1), **some))


def test_gradients():
  x, scales = draw(5, 6, 72), (draw(72, seed=1), draw(72, seed=2))
  dy = draw(5, 6, 72, seed=3)

  def ours(x, scales):
    return norm.rms_norm_heads(
      x, scales, (3, 2), implementation='gpu_interpret'
    )

  def plain(x, scales):
    parts = [x[:, :3], x[:, 3:5]]
    normed = [
      part
      / jnp.sqrt(jnp.mean(part * part, axis=-1, keepdims=True) + 1e-6)
      * scale[None, None]
      for part, scale in zip(parts, scales, strict=True)
    ]
    return jnp.concatenate([*normed, x[:, 5:]], axis=1)

  wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, scales))
  want = jax.vjp(plain, *wide)[1](dy.astype(jnp.float32))
  got = jax.vjp(ours, x, scales)[1](dy)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a = np.asarray(a, np.float32)
    assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(b)


@pytest.mark.parametrize('rows', [64, 16384])
def test_is_one_launch(rows):
  x = jax.ShapeDtypeStruct((rows, 40, 128), jnp.bfloat16)
  scale = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
  text = mosaic.lower(
    lambda x, q, k: norm_gpu.rms_norm_heads(x, (q, k), (32, 4), 1e-6),
    *(x, scale, scale),
  )
  assert text.count('custom_call @mosaic_gpu') == 1


@pytest.mark.parametrize(
  'shape, scales, counts, match',
  [
    ((4, 64), [64], [1], r'must be \[N, H, K\]'),
    ((4, 3, 64), [64, 64], [1], 'as many'),
    ((4, 3, 64), [], [], 'at least one'),
    ((4, 3, 64), [64], [0], '1 or more'),
    ((4, 3, 64), [64, 64], [2, 2], 'no more heads than the 3'),
    ((4, 3, 64), [64, 32], [1, 1], 'must end in'),
  ],
)
def test_bad_input(shape, scales, counts, match):
  scales = [draw(size) for size in scales]
  with pytest.raises(ValueError, match=match):
    norm.rms_norm_heads(draw(*shape), scales, counts)


def test_scales_of_two_dtypes_are_refused():
  scales = [draw(64), draw(64, dtype='float32')]
  with pytest.raises(ValueError, match='one dtype'):
    norm.rms_norm_heads(draw(4, 3, 64), scales, [1, 1])


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('rows', [1, 64, 4099])
def test_on_the_device(rows):
  x, scales = draw(rows, 40, 128), [draw(128, seed=1), draw(128, seed=2)]
  some = dict(implementation='gpu')
  got = norm.rms_norm_heads(x, scales, (32, 4), **some)
  np.testing.assert_array_equal(got, apart(x, scales, (32, 4), **some))
