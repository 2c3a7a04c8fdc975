"""What changed between two arrays, against numpy, and back again."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta
from pallas_kernels import mosaic
from pallas_kernels.delta import shapes

# `warp` runs kernels of lanes on a CPU with any jax.
NAMES = ('reference', 'gpu_interpret', 'tpu_interpret')


def draw(size, share, dtype=np.uint16, seed=0):
  rng = np.random.default_rng(seed)
  base = rng.integers(0, np.iinfo(dtype).max, size, dtype)
  hit = rng.random(size) < share
  flips = rng.integers(1, np.iinfo(dtype).max, size, dtype)
  return base, np.where(hit, base ^ flips, base)


def by_hand(base, new, capacity):
  (places,) = np.nonzero(base != new)
  positions = np.full(capacity, base.size)
  words = np.zeros(capacity, base.dtype)
  kept = places[:capacity]
  positions[: len(kept)], words[: len(kept)] = kept, new[kept]
  return len(places), positions, words


def check(base, new, capacity, name):
  got = delta.compact(
    jnp.asarray(base), jnp.asarray(new), capacity, implementation=name
  )
  for one, want in zip(got, by_hand(base, new, capacity), strict=True):
    np.testing.assert_array_equal(one, want)
  assert got[2].dtype == base.dtype


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.uint32])
def test_compact(name, dtype):
  check(*draw(5000, 0.02, dtype), 300, name)


@hypothesis.settings(
  max_examples=12,
  deadline=None,
  derandomize=True,
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(
  size=st.sampled_from([1, 7, 2047, 2048, 2049, 33000]),
  share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
  capacity=st.sampled_from([1, 40, 40000]),
)
def test_any_share_and_capacity(size, share, capacity):
  # 0.2 and 1.0 are more than the slots of a tile hold.
  check(*draw(size, share), capacity, 'gpu_interpret')


def test_words_are_bits_and_scatter_is_the_inverse():
  base = jnp.asarray([[1.0, jnp.nan, 0.0], [2.0, 3.0, 4.0]], jnp.bfloat16)
  new = base.at[0, 2].set(-0.0).at[1, 1].set(5.0)
  count, positions, words = jax.jit(delta.compact, static_argnums=2)(
    base, new, 4
  )
  assert count == 2
  np.testing.assert_array_equal(positions, [2, 4, 6, 6])
  back = delta.scatter(base, positions, words)
  assert back.dtype == base.dtype and back.shape == base.shape
  np.testing.assert_array_equal(
    np.asarray(back).view(np.uint16), np.asarray(new).view(np.uint16)
  )


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.uint8])
def test_lowers_for_cuda(dtype):
  words = jax.ShapeDtypeStruct((2**20,), dtype)
  text = mosaic.lower(
    lambda a, b: delta.compact(a, b, 1000, implementation='gpu'), words, words
  )
  assert 'mosaic_gpu' in text


def test_bad_input():
  words = jnp.zeros(8, jnp.uint16)
  for message, arguments in {
    'differ': (words, words[:4], 3),
    'capacity=0': (words, words, 0),
    'no words of 8': (jnp.zeros(8, bool), jnp.zeros(8, bool), 3),
    'too many for int32': (
      jax.ShapeDtypeStruct((2**31,), jnp.uint8),
      jax.ShapeDtypeStruct((2**31,), jnp.uint8),
      3,
    ),
  }.items():
    with pytest.raises(ValueError, match=message):
      delta.compact(*arguments)
  with pytest.raises(ValueError, match='must both be'):
    delta.scatter(words, jnp.zeros(3, jnp.int32), words[:2])
  with pytest.raises(ValueError, match='words of uint16'):
    delta.scatter(words, jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_on_the_device():
  for dtype in (np.uint8, np.uint16, np.uint32):
    for share in (0.0, 0.003, 0.3, 1.0):
      check(*draw(3_000_001, share, dtype), 900_000, 'gpu')
  shape = shapes.TRAINING[0]
  assert shape.capacity >= shape.words * shape.changed
