"""Grouped matmul: every implementation against a loop, and its order of sums."""

import functools

import hypothesis
from hypothesis import strategies as st
from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul as ops
from pallas_kernels import mosaic
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import gpu_few
from pallas_kernels.grouped_matmul import gpu_weights
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.grouped_matmul import shapes

SIZES = ([70, 0, 3, 131, 1], [0, 0, 5])
TILES = (
  gpu.Tiles(),
  gpu.Tiles(stages=3, slots=4, panel=1),
  gpu.Tiles(rows=128, columns=128, stages=3, slots=1),
  gpu.Tiles(consumers=1, columns=64, depth=128, stages=2),
)
FORWARD = (*TILES, gpu_few.Few(rows=16))


def draw(sizes, k=128, n=128, seed=0, dtype=jnp.bfloat16):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(sum(sizes), k)), dtype)
  w = jnp.asarray(rng.normal(size=(len(sizes), k, n)), dtype)
  return x, w, jnp.asarray(sizes, jnp.int32)


def by_hand(x, w, sizes):
  """The loop that the operation stands for, in float64."""
  ends = np.cumsum(sizes)
  x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
  parts = [
    x[end - size : end] @ m for end, size, m in zip(ends, sizes, w, strict=True)
  ]
  return np.concatenate(parts)


def close(got, want, tolerance=4e-3):
  """Relative error of the whole; bfloat16 rounds to 2^-9 = 0.002."""
  got = np.asarray(got, np.float64)
  assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def bits(array):
  return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize('sizes', SIZES)
@pytest.mark.parametrize('name', NAMES)
def test_values(name, sizes):
  x, w, group_sizes = draw(sizes)
  want = by_hand(x, w, sizes)
  close(ops.grouped_matmul(x, w, group_sizes, implementation=name), want)
  turned = jnp.swapaxes(w, 1, 2)
  got = ops.grouped_matmul(
    x, turned, group_sizes, transpose=True, implementation=name
  )
  close(got, want)


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
  ('rows', 'n', 'e'), [(0, 64, 3), (0, 64, 0), (5, 0, 1)]
)
def test_nothing_is_launched_where_there_is_nothing(rows, n, e, name, gated):
  """No rows, no groups, no columns; the copy engine could not describe them."""
  x = jnp.ones((rows, 64), jnp.bfloat16)
  w = jnp.ones((e, 64, 2, n) if gated else (e, 64, n), jnp.bfloat16)
  sizes = jnp.full((e,), rows, jnp.int32)

  def run(x, w):
    return ops.grouped_matmul(x, w, sizes, gated=gated, implementation=name)

  y, pull = jax.vjp(run, x, w)
  assert (y.shape, y.dtype) == ((rows, n), x.dtype)
  dx, dw = pull(y)
  assert dx.shape == x.shape and dw.shape == w.shape
  assert not np.asarray(dx).any() and not np.asarray(dw).any()
  if name != 'reference' and e == 1:
    wide = ops.product(x, w.reshape(64, -1), name)
    assert (wide.shape, wide.dtype) == ((rows, w[0, 0].size), jnp.float32)


def test_weight_gradients_of_float32_fit():
  """Results that wait take twice the room of those of bfloat16."""
  some = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
  text = mosaic.lower(
    functools.partial(ops.weight_gradient, out_dtype=jnp.float32),
    *(some, some, jax.ShapeDtypeStruct((4,), jnp.int32)),
  )
  assert 'mosaic_gpu' in text


@hypothesis.given(
  slots=st.integers(1, 6), blocks=st.integers(1, 6), tiles=st.integers(1, 4)
)
def test_a_slot_is_filled_when_its_store_has_been_read(slots, blocks, tiles):
  """Stores are read in their order; `unread` of them may still be to come."""
  stored = []
  for _ in range(tiles):
    for i in range(blocks):
      left = gpu.unread(i, blocks, slots)
      assert 0 <= left < slots
      waiting = stored[max(len(stored) - left, 0) :]
      assert i % slots not in waiting
      stored.append(i % slots)
  if blocks % slots == 0:  # none is waited for that need not be
    assert gpu.unread(0, blocks, slots) == slots - 1


@pytest.mark.parametrize('name', NAMES)
def test_gated(name):
  sizes = SIZES[0]
  x, _, group_sizes = draw(sizes)
  _, w, _ = draw(sizes, n=256, seed=1)
  gate, up = (by_hand(x, w[:, :, i : i + 128], sizes) for i in (0, 128))
  got = ops.grouped_matmul(
    x,
    w.reshape(5, 128, 2, 128),
    group_sizes,
    gated=True,
    implementation=name,
  )
  close(got, gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize(
  ('name', 'gated'),
  [
    ('reference', False),
    ('reference', True),
    ('tpu_interpret', False),
    # Gated uses all three kernels, and a minute is all that there is.
    pytest.param('gpu_interpret', True, marks=needs_interpreter),
  ],
)
def test_gradients(name, gated):
  sizes = [70, 0, 3, 66]
  x, w, group_sizes = draw(sizes, n=128)
  if gated:
    w = draw(sizes, n=256, seed=1)[1].reshape(4, 128, 2, 128)
  weight = np.random.default_rng(2).normal(size=(sum(sizes), 128))

  def loss(x, w, implementation):
    y = ops.grouped_matmul(
      x, w, group_sizes, gated=gated, implementation=implementation
    )
    return jnp.sum(y.astype(jnp.float32) * jnp.asarray(weight, jnp.float32))

  def plain(x, w):
    ends = np.cumsum(sizes)
    parts = []
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
      rows = x[end - size : end]
      if gated:
        gate, up = rows @ w[group, :, 0], rows @ w[group, :, 1]
        parts.append(jax.nn.silu(gate) * up)
      else:
        parts.append(rows @ w[group])
    return jnp.sum(jnp.concatenate(parts) * jnp.asarray(weight, jnp.float32))

  wide = x.astype(jnp.float32), w.astype(jnp.float32)
  wants = jax.grad(plain, (0, 1))(*wide)
  gots = jax.grad(loss, (0, 1))(x, w, name)
  for got, want in zip(gots, wants, strict=True):
    assert got.dtype == x.dtype
    # Three more roundings to bfloat16 where it is gated.
    close(got, np.asarray(want, np.float64), 1e-2 if gated else 4e-3)
  assert not np.asarray(gots[1][1], np.float32).any()  # the empty group's


@needs_interpreter
@hypothesis.settings(
  max_examples=3,
  deadline=None,
  derandomize=True,
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(
  sizes=st.lists(st.integers(0, 140), min_size=1, max_size=2).filter(sum),
  tiles=st.sampled_from(FORWARD),
  data=st.data(),
)
def test_bits_depend_on_the_row_alone(sizes, tiles, data):
  # Sums of such products are exact. The CPU's own matmul, which stands for the
  # tensor core here, adds in an order that depends on place and depth; the order
  # of the tensor core is tested on the device.
  x, w, group_sizes = draw(sizes)
  x, w = jnp.round(4 * x) / 4, jnp.round(4 * w) / 4
  y = bits(
    ops.grouped_matmul(
      x, w, group_sizes, implementation='gpu_interpret', tiles=tiles
    )
  )
  # Some of the rows, in another order within their groups, other tiles.
  owner = np.repeat(np.arange(len(sizes)), sizes)
  kept = data.draw(
    st.lists(st.integers(0, sum(sizes) - 1), min_size=1, unique=True)
  )
  kept = sorted(kept, key=lambda row: owner[row])
  other = ops.grouped_matmul(
    x[jnp.asarray(kept)],
    w,
    jnp.bincount(jnp.asarray(owner[kept]), length=len(sizes)),
    implementation='gpu_interpret',
    tiles=data.draw(st.sampled_from(FORWARD)),
  )
  np.testing.assert_array_equal(bits(other), y[kept])


@needs_interpreter
def test_weight_gradient_bits_do_not_depend_on_tiles():
  sizes = SIZES[0]
  x, _, group_sizes = draw(sizes)
  dy = draw(sizes, k=128, seed=3)[0]
  found = [
    bits(
      gpu_weights.weight_gradient(
        x, dy, group_sizes, tiles=tiles, interpret=True
      )
    )
    for tiles in TILES[1:3]
  ]
  np.testing.assert_array_equal(*found)


@pytest.mark.parametrize('name', NAMES[1:])
def test_neighbours_nan_stays_out_of_the_weight_gradient(name):
  sizes = [3, 66, 5]
  x, _, group_sizes = draw(sizes)
  dy = draw(sizes, k=128, seed=3)[0]
  hurt = ops.weight_gradient(
    x.at[:3].set(jnp.nan),
    dy.at[-5:].set(jnp.nan),
    group_sizes,
    implementation=name,
  )
  assert not jnp.isnan(hurt[1]).any()
  assert jnp.isnan(hurt[0]).any() and jnp.isnan(hurt[2]).any()


@pytest.mark.parametrize('tiles', TILES)
@pytest.mark.parametrize('shape', shapes.TRAINING[:2] + shapes.DECODING[-1:])
def test_lowers_for_cuda(shape, tiles):
  k, n, e = shape.k, shape.n, shape.groups
  x = jax.ShapeDtypeStruct((shape.rows, k), jnp.bfloat16)
  dy = jax.ShapeDtypeStruct((shape.rows, n), jnp.bfloat16)
  w = jax.ShapeDtypeStruct((e, k, n), jnp.bfloat16)
  sizes = jax.ShapeDtypeStruct((e,), jnp.int32)

  def rows(x, w, sizes):
    return gpu.grouped_matmul(x, w, sizes, tiles=tiles)

  def weights(x, dy, sizes):
    return gpu_weights.weight_gradient(x, dy, sizes, tiles=tiles)

  assert 'mosaic_gpu' in mosaic.lower(rows, x, w, sizes)
  assert 'mosaic_gpu' in mosaic.lower(weights, x, dy, sizes)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(
  sizes=st.lists(st.integers(0, 300), min_size=6, max_size=6),
  align=st.sampled_from([1, 8, 64]),
  empty=st.booleans(),
)
def test_tiles_cover_every_row_once(sizes, align, empty):
  table, count = groups.row_tiles(jnp.asarray(sizes), 1800, 64, align, empty)
  table, count = np.asarray(table), int(groups.count_of(count))
  assert count <= len(table)
  most = groups.most_tiles(max(sum(sizes), 1), 6, 64, align)
  assert count <= most + (6 if empty else 0)
  seen = np.full(sum(sizes), -1)
  visited = []
  for group, first, start, end in table[:count]:
    assert first % align == 0 and end - start == sizes[group]
    rows = np.arange(max(first, start), min(first + 64, end))
    assert (seen[rows] == -1).all()
    seen[rows] = group
    visited.append(group)
  np.testing.assert_array_equal(seen, np.repeat(np.arange(len(sizes)), sizes))
  if empty:
    assert set(visited) == set(range(len(sizes)))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(sizes=[3, 4]), 'sum to 7'),
    (dict(sizes=[9, -1]), 'least -1'),
    (dict(sizes=[8]), 'one size for each'),
    (dict(sizes=[4.0, 4.0]), 'give integers'),
    (dict(k=64), 'differ in K'),
    (dict(dtype=jnp.float32), 'cast one'),
    (dict(implementation='cuda'), 'is unknown'),
    (dict(implementation='tpu'), 'the default device is a cpu'),
    (dict(n=100, implementation='gpu'), 'multiple of 64'),
    (dict(gated=True), r'\[E, K, 2, N\]'),
  ],
)
def test_bad_input(change, message):
  change = {'sizes': [5, 3], 'k': 128, 'n': 64, 'dtype': jnp.bfloat16} | change
  x = jnp.zeros((8, 128), jnp.bfloat16)
  w = jnp.zeros((2, change.pop('k'), change.pop('n')), change.pop('dtype'))
  with pytest.raises(ValueError, match=message):
    ops.grouped_matmul(x, w, jnp.asarray(change.pop('sizes')), **change)


def test_tiles_that_do_not_fit():
  x, w, sizes = draw([8])
  with pytest.raises(ValueError, match='fewer stages'):
    gpu.grouped_matmul(x, w, sizes, tiles=gpu.Tiles(stages=9))
  with pytest.raises(ValueError, match='columns=100'):
    gpu.Tiles(columns=100)


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_on_the_device():
  """Real sizes: values, and bits over tiles, rows and order."""
  shape = shapes.TRAINING[1]
  sizes = shape.sizes()
  x, w, group_sizes = draw(list(sizes), shape.k, shape.n)
  y = ops.grouped_matmul(x, w, group_sizes, implementation='gpu')
  close(y[: sizes[0]], by_hand(x[: sizes[0]], w[:1], sizes[:1]))
  for tiles in FORWARD:
    again = ops.grouped_matmul(
      x, w, group_sizes, implementation='gpu', tiles=tiles
    )
    np.testing.assert_array_equal(bits(again), bits(y))
  rng = np.random.default_rng(1)
  owner = np.repeat(np.arange(shape.groups), sizes)
  for rows in (1, 8, 77, 4096):
    kept = rng.permutation(shape.rows)[:rows]
    kept = kept[np.argsort(owner[kept], kind='stable')]
    some = ops.grouped_matmul(
      x[kept],
      w,
      jnp.bincount(jnp.asarray(owner[kept]), length=shape.groups),
      implementation='gpu',
    )
    np.testing.assert_array_equal(bits(some), bits(y)[kept])
