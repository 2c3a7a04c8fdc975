"""Grouped matmul with weights of four and eight bits."""

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul as ops
from pallas_kernels import mosaic
from pallas_kernels import quantize
from pallas_kernels import warp
from pallas_kernels.grouped_matmul import gpu_find
from pallas_kernels.grouped_matmul import gpu_packed
from pallas_kernels.grouped_matmul import packed
from pallas_kernels.grouped_matmul import shapes

NAMES = ('reference', 'gpu_interpret', 'tpu_interpret')
SIZES = [3, 0, 9, 1]
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rows(k=256, seed=0):
  """Quarters, so that sums are exact in whatever order a CPU adds."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(
    np.round(4 * rng.normal(size=(sum(SIZES), k))) / 4, jnp.bfloat16
  )


def nvfp4(k=256, n=128, seed=1):
  """Every code; scales from the least denormal to the greatest."""
  rng = np.random.default_rng(seed)
  e = len(SIZES)
  codes = rng.integers(0, 256, (e, k // 2, n), np.uint8)
  scale = rng.integers(0, 127, (e, k // 16, n), np.uint8)
  scale[:, :2] = rng.integers(0, 8, (e, 2, n))  # denormals
  scale = jax.lax.bitcast_convert_type(jnp.asarray(scale), jnp.float8_e4m3fn)
  outer = jnp.asarray(rng.uniform(0.5, 2, e), jnp.float32)
  return packed.Nvfp4(jnp.asarray(codes), scale, outer)


def fp8(k=256, n=128, seed=1):
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 127, (len(SIZES), k, n), np.uint8)
  codes |= rng.integers(0, 2, codes.shape, np.uint8) << 7
  codes = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
  scale = np.exp(rng.normal(size=(len(SIZES), -(-k // 128), -(-n // 128))))
  return packed.Fp8(codes, jnp.asarray(scale, jnp.float32))


def values(w):
  """float64 weights, a number at a time from its bits."""
  if isinstance(w, packed.Fp8):
    scale = np.asarray(w.scale).repeat(128, 1).repeat(128, 2)
    _, k, n = w.codes.shape
    wide = np.asarray(w.codes, np.float32) * scale[:, :k, :n]
    return np.asarray(jnp.asarray(wide).astype(jnp.bfloat16), np.float64)
  codes = np.asarray(w.codes)
  out = np.zeros((codes.shape[0], 2 * codes.shape[1], codes.shape[2]))
  for half in (0, 1):
    part = codes >> (4 * half) & 15
    out[:, half::2] = np.where(part & 8, -1, 1) * GRID[part & 7]
  scale = np.asarray(w.scale, np.float64).repeat(16, axis=1)
  return out * scale * np.asarray(w.outer, np.float64)[:, None, None]


def by_hand(x, w):
  ends = np.cumsum(SIZES)
  x, w = np.asarray(x, np.float64), values(w)
  return np.concatenate(
    [
      x[end - size : end] @ one
      for end, size, one in zip(ends, SIZES, w, strict=True)
    ]
  )


def close(got, want, tolerance=4e-3):
  got = np.asarray(got, np.float64)
  assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('draw', [nvfp4, fp8])
def test_values(name, draw):
  x, w = rows(), draw()
  got = ops.grouped_matmul(x, w, jnp.asarray(SIZES), implementation=name)
  assert got.dtype == x.dtype
  close(got, by_hand(x, w))


@pytest.mark.parametrize('draw', [nvfp4, fp8])
def test_kernel_unpacks_without_loss(draw):
  # One row that is 1 at one place picks a row of the weights.
  w = draw(k=48, n=32)
  place = [5, 17, 46, 31]
  x = jnp.asarray(np.eye(48)[place], jnp.bfloat16)
  got = gpu_packed.grouped_matmul(
    x,
    w.codes,
    w.scale,
    getattr(w, 'outer', None),
    jnp.ones(len(place), jnp.int32),
    out_dtype=jnp.float32,
    interpret=True,
  )
  want = [one[at] for one, at in zip(values(w), place, strict=True)]
  np.testing.assert_array_equal(got, np.asarray(want, np.float32))


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(
  sizes=strategies.lists(
    strategies.sampled_from([0, 0, 0, 1, 7, 8, 9, 40]), min_size=1, max_size=384
  ),
  tile=strategies.sampled_from(gpu_packed.ROWS),
)
def test_warps_find_their_rows(sizes, tile):
  """As a plan that was made before; past the last tile there is nothing."""
  tiles = 128

  def kernel(w, sizes, *found):
    for place, value in zip(
      found, gpu_find.find(w, sizes, w.warp, tile), strict=True
    ):
      w.when(w.lane.equals(0), lambda r=place, v=value: w.store(r, w.warp, v))

  found = warp.run(
    kernel,
    jnp.asarray(sizes, jnp.int32),
    out=[jax.ShapeDtypeStruct((tiles,), jnp.int32)] * 3,
    warpgroups=1,
    blocks=tiles // 4,
    interpret=True,
  )
  ends = np.cumsum(sizes)
  want = [
    (group, first, end)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True))
    for first in range(end - size, end, tile)
  ]
  want += [(0, 0, 0)] * tiles
  np.testing.assert_array_equal(np.stack(found, 1), want[:tiles])


@pytest.mark.parametrize('tile', [16, 32])
def test_bits_depend_on_the_row_alone(tile):
  x, w = rows(), nvfp4()
  owner = np.repeat(np.arange(len(SIZES)), SIZES)

  def run(kept, tile):
    sizes = np.bincount(owner[kept], minlength=len(SIZES))
    return gpu_packed.grouped_matmul(
      x[jnp.asarray(kept)],
      *w,
      jnp.asarray(sizes),
      rows=tile,
      unroll=2,
      out_dtype=jnp.float32,
      interpret=True,
    )

  whole = np.asarray(run(np.arange(len(owner)), 8))
  kept = np.array([2, 0, 11, 4, 12])  # another order within the groups
  np.testing.assert_array_equal(
    np.asarray(run(kept, tile)).view(np.int32), whole[kept].view(np.int32)
  )


def test_gated_and_gradient():
  x, w = rows(), nvfp4(n=256)
  halves = packed.Nvfp4(
    w.codes.reshape(*w.codes.shape[:2], 2, 128),
    w.scale.reshape(*w.scale.shape[:2], 2, 128),
    w.outer / 4096,
  )
  sizes = jnp.asarray(SIZES)
  both = by_hand(x, w) / 4096
  gate, up = both[:, :128], both[:, 128:]
  got = ops.grouped_matmul(x, halves, sizes, gated=True)
  close(got, gate / (1 + np.exp(-gate)) * up, 1e-2)

  def loss(x):
    return jnp.sum(ops.grouped_matmul(x, w, sizes).astype(jnp.float32))

  wide = values(w).sum(2)
  close(jax.grad(loss)(x), np.repeat(wide, SIZES, axis=0), 1e-2)


def test_what_quantize_makes_of_a_matrix():
  rng = np.random.default_rng(3)
  matrices = jnp.asarray(rng.normal(size=(len(SIZES), 256, 128)), jnp.bfloat16)
  made = [quantize.nvfp4(one.T, outer='all') for one in matrices]
  codes, scale, outer = (jnp.stack(one) for one in zip(*made, strict=True))
  w = packed.Nvfp4(jnp.swapaxes(codes, 1, 2), jnp.swapaxes(scale, 1, 2), outer)
  off = values(w) - np.asarray(matrices, np.float64)
  assert np.linalg.norm(off) <= 0.12 * np.linalg.norm(matrices)
  x = rows()
  close(ops.grouped_matmul(x, w, jnp.asarray(SIZES)), by_hand(x, w))


@pytest.mark.parametrize('shape', shapes.DECODING[1:3])
def test_lowers_for_cuda(shape):
  e, k, n = shape.groups, shape.k, shape.n
  w = packed.Nvfp4(
    jax.ShapeDtypeStruct((e, k // 2, n), jnp.uint8),
    jax.ShapeDtypeStruct((e, k // 16, n), jnp.float8_e4m3fn),
    jax.ShapeDtypeStruct((e,), jnp.float32),
  )
  text = mosaic.lower(
    lambda x, w, sizes: ops.grouped_matmul(x, w, sizes, implementation='gpu'),
    jax.ShapeDtypeStruct((shape.rows, k), jnp.bfloat16),
    w,
    jax.ShapeDtypeStruct((e,), jnp.int32),
  )
  assert 'mosaic_gpu' in text


def test_bad_input():
  x, w, sizes = rows(), nvfp4(), jnp.asarray(SIZES)

  def call(x=x, w=w, sizes=sizes, **more):
    ops.grouped_matmul(x, w, sizes, **more)

  for message, change in {
    'two numbers a byte': dict(w=w._replace(codes=w.codes[:, 1:])),
    'codes are int8': dict(w=w._replace(codes=w.codes.astype(jnp.int8))),
    'outer': dict(w=w._replace(outer=w.outer[:2])),
    'scale \\(4, 15, 128\\)': dict(w=w._replace(scale=w.scale[:, 1:])),
    'one size for each': dict(sizes=sizes[:2]),
    'sum to 14': dict(sizes=sizes.at[1].set(1)),
    'take neither': dict(transpose=True),
    'multiply twice': dict(w=fp8(), gated=True),
    'takes bfloat16': dict(
      x=x.astype(jnp.float32), implementation='gpu_interpret'
    ),
  }.items():
    with pytest.raises(ValueError, match=message):
      call(**change)


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('draw', [nvfp4, fp8])
def test_on_the_device(draw):
  """The bits of the bfloat16 kernel with the unpacked weights."""
  x, w = rows(7168), draw(7168, 2048)
  sizes = jnp.asarray(SIZES)
  outer = getattr(w, 'outer', None)
  want = packed._product(x, packed.unpack(w), sizes, 'gpu')
  if outer is not None:
    want = want * jnp.repeat(outer, sizes, total_repeat_length=len(x))[:, None]
  for tile in gpu_packed.ROWS:
    got = gpu_packed.grouped_matmul(
      x, w.codes, w.scale, outer, sizes, rows=tile, out_dtype=jnp.float32
    )
    np.testing.assert_array_equal(got, want)
