"""The kernel of few rows: exact sums, the bits of the general one."""

import functools
import json

import hypothesis
from hypothesis import strategies as st
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import mosaic
from pallas_kernels import warp
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import gpu_few
from pallas_kernels.grouped_matmul import groups

# All of K asked for at once, or a ring; K that ends within a stage.
TILES = (
  gpu_few.Few(),
  gpu_few.Few(columns=16, depth=16, stages=3),
  gpu_few.Few(columns=32, depth=96, stages=2),
  gpu_few.Few(columns=64, depth=128, stages=2),
)
GROUPED = (
  gpu_few.Few(rows=8),
  gpu_few.Few(columns=32, depth=32, stages=3, rows=16),
  gpu_few.Few(columns=64, depth=128, stages=9, rows=32),
)
K, N = 320, 64


def draw(*shape, seed=0):
  """bfloat16, of which sums of products are exact in float32."""
  rng = np.random.default_rng(seed)
  return jnp.round(4 * jnp.asarray(rng.normal(size=shape), jnp.bfloat16)) / 4


def bits(array):
  return np.asarray(array).view(f'uint{8 * array.dtype.itemsize}')


@needs_interpreter
@hypothesis.settings(
  max_examples=4,
  deadline=None,
  derandomize=True,
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(
  rows=st.integers(1, 140),
  tiles=st.sampled_from(TILES),
  dtype=st.sampled_from([jnp.bfloat16, jnp.float32]),
  seed=st.integers(0, 9),
)
def test_sums_are_exact(rows, tiles, dtype, seed):
  # The order of the tensor core is tested on the device.
  x, w = draw(rows, K, seed=seed), draw(K, N, seed=10 + seed)
  got = gpu_few.grouped_matmul(
    x, w[None], tiles=tiles, out_dtype=dtype, interpret=True
  )
  want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  want = jnp.asarray(want, jnp.float32).astype(dtype)
  np.testing.assert_array_equal(bits(got), bits(want))


@needs_interpreter
@pytest.mark.parametrize(
  ('sizes', 'tiles', 'planned'),
  [([5, 0, 3, 1], GROUPED[0], False), ([1, 0, 13, 40, 9], GROUPED[1], True)],
)
def test_sums_of_groups_are_exact(sizes, tiles, planned):
  x, w = draw(sum(sizes), 192), draw(len(sizes), 192, N, seed=1)
  group_sizes = jnp.asarray(sizes)
  if planned:
    table = groups.row_tiles(group_sizes, len(x), tiles.rows, gpu.ALIGN)
    group_sizes = groups.Planned(group_sizes, {tiles.rows: table})
  got = grouped_matmul.grouped_matmul(
    x, w, group_sizes, implementation='gpu_interpret', tiles=tiles
  )
  owner = np.repeat(np.arange(len(sizes)), sizes)
  want = np.einsum(
    'mk,mkn->mn', np.asarray(x, np.float64), np.asarray(w, np.float64)[owner]
  )
  want = jnp.asarray(want, jnp.float32).astype(jnp.bfloat16)
  np.testing.assert_array_equal(bits(got), bits(want))


@needs_interpreter
def test_gated_groups_have_the_bits_of_the_general_kernel():
  sizes = jnp.asarray([1, 0, 13, 2])
  x, w = draw(16, 192), draw(4, 192, 2, N, seed=1)
  found = [
    grouped_matmul.grouped_matmul(
      x, w, sizes, gated=True, implementation='gpu_interpret', tiles=tiles
    )
    for tiles in (
      gpu.Tiles(consumers=1, columns=128, stages=2),
      GROUPED[2],
    )
  ]
  np.testing.assert_array_equal(*map(bits, found))


@hypothesis.settings(deadline=None, max_examples=6)
@hypothesis.given(
  sizes=st.lists(
    st.sampled_from([0, 0, 0, 1, 2, 7, 8, 9, 40]), min_size=2, max_size=100
  ).filter(sum),
  rows=st.sampled_from([8, 16, 64]),
)
def test_blocks_find_their_rows(sizes, rows):
  """As they stand in a plan; past the last tile there is nothing."""
  few = gpu_few.Few(columns=32, rows=rows)
  m = -(-sum(sizes) // 8) * 8
  work = gpu_few.Work(few, m, 64, 64, False, groups=len(sizes))
  blocks = work.row_tiles * work.wide

  def kernel(w, sizes, found, memory):
    gpu_few._find(w, sizes, memory, work=work)
    w.when(
      w.own.equals(1) & (w.lane < 3),
      lambda: w.store(found, w.block * 3 + w.lane, w.load(memory, w.lane)),
    )

  (found,) = warp.run(
    kernel,
    jnp.asarray(sizes, jnp.int32),
    out=[jax.ShapeDtypeStruct((blocks, 3), jnp.int32)],
    warpgroups=1,
    blocks=blocks,
    block_scratch=4,
    interpret=True,
  )
  table, last = groups.row_tiles(jnp.asarray(sizes), m, work.box, gpu.ALIGN)
  group, first, start, end = np.asarray(table).T
  want = np.stack([group, np.maximum(first, start), end], axis=1)
  assert int(last[-1]) <= len(want)
  want[int(last[-1]) :] = 0
  np.testing.assert_array_equal(found, np.repeat(want, work.wide, axis=0))


@needs_interpreter
def test_gated_bits_are_those_of_the_general_kernel():
  x, w = draw(16, K), draw(1, K, 2, N, seed=1)
  found = [
    grouped_matmul.grouped_matmul(
      x,
      w,
      jnp.asarray([16]),
      gated=True,
      implementation='gpu_interpret',
      tiles=tiles,
    )
    for tiles in (
      gpu.Tiles(consumers=1, columns=128, stages=2),
      TILES[0],
      TILES[3],
    )
  ]
  np.testing.assert_array_equal(*map(bits, found[:2]))
  np.testing.assert_array_equal(*map(bits, found[1:]))


def test_the_tunings_say_where_it_is_taken(monkeypatch):
  table = {
    'few': dict(depth=128),
    'few gated': dict(columns=16),
    'few gated 128 64': dict(columns=64, most=8),
    'few 64 64': dict(columns=64, most=8),
    'few 192 64': dict(depth=192),
  }
  monkeypatch.setattr(
    dispatch, 'tuning', lambda name: table if name == 'matmul' else {}
  )

  def tuned(rows, k, gated=False, groups=1, transpose=False):
    x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
    w = (groups, k, 2, 64) if gated else (groups, k, 64)
    w = jax.ShapeDtypeStruct(w, jnp.bfloat16)
    return grouped_matmul._tuned_few(x, w, transpose, gated)

  assert tuned(64, 128) == gpu_few.Few(depth=128)
  assert tuned(64, 192, gated=True) == gpu_few.Few(columns=16)
  assert tuned(8, 64) == gpu_few.Few(64, most=8)
  assert tuned(64, 64, gated=True) == gpu_few.Few(columns=16)
  assert tuned(8, 128, gated=True) == gpu_few.Few(64, most=8)
  usual = gpu_few.Few(columns=64, depth=128, stages=6, most=256)
  assert tuned(9, 128, gated=True) == tuned(65, 128) == usual
  assert tuned(257, 128) is tuned(8, 128, groups=2) is None
  assert tuned(0, 128) is tuned(8, 128, transpose=True) is None
  name = grouped_matmul.NAME
  few = {'few 128 64': dict(rows=8)}
  monkeypatch.setattr(
    dispatch, 'tuning', lambda of: few if of == name else table
  )
  assert tuned(8, 128, groups=2) == gpu_few.Few(rows=8)
  assert tuned(8, 128) == gpu_few.Few(depth=128)
  assert tuned(8, 128, groups=2, gated=True) is None  # of plain ones it is
  # Of fewer groups than where it was measured: more than a tile of rows each.
  assert tuned(17, 128, groups=2) is None
  assert tuned(17, 128, groups=3) == gpu_few.Few(rows=8)
  assert tuned(65, 128, groups=48) is None


def test_what_no_tuning_knows_takes_it_where_blocks_are_few(monkeypatch):
  monkeypatch.setattr(dispatch, 'tuning', lambda name: {})
  cores = mosaic.cores()

  def tuned(rows, n, gated=False, groups=1):
    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    w = (groups, 128, 2, n) if gated else (groups, 128, n)
    w = jax.ShapeDtypeStruct(w, jnp.bfloat16)
    return grouped_matmul._tuned_few(x, w, False, gated)

  few = gpu_few.usual(1, 64)
  for gated in (False, True):
    assert tuned(1, 64, gated) == tuned(256, 64, gated) == few
    assert tuned(257, 64, gated) is None
    assert tuned(64, 64 * 3 * cores, gated) == few
    assert tuned(64, 64 * (3 * cores + 1), gated) is None
    assert tuned(65, 64 * 3 * cores, gated) is None
    assert tuned(8, 64, gated, groups=2) is None
  none = {'few 128 64': dict(most=0), 'few gated': dict(most=0)}
  monkeypatch.setattr(dispatch, 'tuning', lambda name: none)
  assert tuned(8, 64) is tuned(8, 64, gated=True) is None
  assert tuned(8, 128) == few
  # The interpreter adds up a stage at once.
  x, w = draw(8, 128), draw(1, 128, 64)
  assert grouped_matmul._tuned_few(x, w, interpret=True) is None


def test_tunings_can_be():
  for path in dispatch.TUNINGS.glob('*.json'):
    tables = json.loads(path.read_text())
    found = [*tables.get('matmul', {}).items()]
    found += [
      (key, values)
      for key, values in tables.get('grouped_matmul', {}).items()
      if key.startswith('few')
    ]
    for key, values in found:
      gpu_few.Few(**values)
      words = [word for word in key.split() if word != 'gated']
      assert words[0] == 'few' and len(words) in (1, 3)
    for key, values in tables.get('grouped_matmul', {}).items():
      if key.startswith('few'):  # what it stores of 32 bytes is of one group
        assert gpu_few.Few(**values).columns > 16


def test_a_tuned_product_takes_it(monkeypatch):
  seen = []
  table = {'few': {}, 'few gated': {}}
  monkeypatch.setattr(dispatch, 'tuning', lambda name: table)
  monkeypatch.setattr(
    gpu_few,
    'grouped_matmul',
    lambda x, w, sizes, **more: (
      seen.append(more) or jnp.zeros((4, N), jnp.float32)
    ),
  )
  x, w = draw(4, K), draw(K, N)
  matmul.matmul(x, w, implementation='gpu_interpret')
  grouped_matmul.product(x, w, 'gpu_interpret')
  grouped_matmul.grouped_matmul(
    x,
    jnp.stack([w, w], axis=1)[None],
    jnp.asarray([4]),
    gated=True,
    implementation='gpu_interpret',
  )
  assert [one['tiles'] for one in seen] == [gpu_few.Few()] * 3
  assert seen[1]['out_dtype'] == jnp.float32 and seen[2]['gated']


# The widths of SmolLM2 and of Qwen3; few rows are padded, many are of tiles.
@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize(
  ('rows', 'k', 'n'), [(1, 576, 960), (256, 1536, 576), (64, 4096, 2048)]
)
def test_lowers_for_cuda(rows, k, n, gated):
  text = mosaic.lower(
    lambda x, w: [
      gpu_few.grouped_matmul(x, w, gated=gated, tiles=tiles) for tiles in TILES
    ],
    jax.ShapeDtypeStruct((rows, k), jnp.bfloat16),
    jax.ShapeDtypeStruct((1, k, 2, n) if gated else (1, k, n), jnp.bfloat16),
  )
  assert text.count('@mosaic_gpu_v2') == len(TILES)


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('planned', [False, True])
def test_groups_are_one_launch(planned, gated):
  k, n, e = 576, 1536, 384
  few = gpu_few.Few(rows=8)

  def run(x, w, sizes, table, last):
    plan = {8: (table, last)} if planned else {64: (table, last)}
    sizes = groups.Planned(sizes, plan)
    return gpu_few.grouped_matmul(x, w, sizes, tiles=few, gated=gated)

  whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
  text = mosaic.lower(
    run,
    jax.ShapeDtypeStruct((8, k), jnp.bfloat16),
    jax.ShapeDtypeStruct((e, k, 2, n) if gated else (e, k, n), jnp.bfloat16),
    *(whole(e), whole(8, 4), whole(1)),
  )
  assert (
    text.count('stablehlo.custom_call') == 1 == text.count('@mosaic_gpu_v2')
  )
  assert 'stablehlo.reduce' not in text


@needs_interpreter  # where it is, layouts are chosen in a step of their own
def test_rows_are_not_swizzled_from_a_moving_start(monkeypatch):
  """Between two rows a swizzled store would not meet the copy engine's."""
  from jax.experimental.mosaic.gpu import dialect_lowering

  seen = []
  lower = dialect_lowering.lower_mgpu_dialect

  def spy(module, *arguments, **options):
    seen.append(str(module))
    return lower(module, *arguments, **options)

  monkeypatch.setattr(dialect_lowering, 'lower_mgpu_dialect', spy)
  mosaic.lower(
    lambda x, w, sizes: [
      gpu_few.grouped_matmul(x, w, sizes, tiles=tiles) for tiles in GROUPED
    ],
    jax.ShapeDtypeStruct((16, K), jnp.bfloat16),
    jax.ShapeDtypeStruct((8, K, N), jnp.bfloat16),
    jax.ShapeDtypeStruct((8,), jnp.int32),
  )
  stores = [
    line
    for module in seen
    for line in module.splitlines()
    if 'mosaic_gpu.vector_store"' in line and 'offset: ?' in line
  ]
  assert len(stores) == len(GROUPED)
  assert all('in_transforms = [[]]' in line for line in stores)


def test_stages_fit_into_shared_memory():
  wide = gpu_few.Few(columns=64, depth=256, stages=99)
  work = gpu_few.Work(wide, 64, 8192, 64, gated=True, size=4)
  assert work.stages == 2
  gpu_few._scratch(work, jnp.bfloat16, jnp.float32)  # or it raises
  assert gpu_few.Work(gpu_few.Few(), 64, 576, 64, gated=False).stages == 9
  many = gpu_few.Few(columns=16, depth=16, stages=99)
  assert gpu_few.Work(many, 8, 8192, 64, gated=False).stages == 32


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(columns=128), 'columns=128'),
    (dict(columns=64, depth=96), 'depth=96'),
    (dict(depth=512), 'depth=512'),
    (dict(stages=1), 'stages=1'),
    (dict(rows=24), 'rows=24'),
  ],
)
def test_tiles_that_cannot_be(change, message):
  with pytest.raises(ValueError, match=message):
    gpu_few.Few(**change)


def test_what_it_does_not_take():
  x, w = draw(8, K), draw(1, K, N)
  run = functools.partial(gpu_few.grouped_matmul, tiles=gpu_few.Few())
  with pytest.raises(ValueError, match='some rows, not transposed'):
    run(x[:0], w)
  with pytest.raises(ValueError, match='transpose=True'):
    run(x, draw(1, N, K), transpose=True)
  with pytest.raises(ValueError, match='float32'):
    run(x.astype(jnp.float32), w.astype(jnp.float32))
  with pytest.raises(ValueError, match='columns=16'):
    two = jnp.asarray([3, 5])
    run(x, draw(2, K, N), two, tiles=gpu_few.Few(columns=16, depth=16))


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize(('k', 'n'), [(576, 960), (1536, 576)])
def test_on_the_device(k, n, gated):
  """The bits of the general kernel, of values whose sums are not exact."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(256, k)), jnp.bfloat16)
  w = (1, k, 2, n) if gated else (1, k, n)
  w = jnp.asarray(rng.normal(size=w) / 16, jnp.bfloat16)
  whole = gpu.grouped_matmul(
    x, w, jnp.asarray([256]), tiles=gpu.Tiles(), gated=gated
  )
  for tiles in TILES:
    for first, rows in ((0, 256), (3, 1), (7, 64), (9, 100)):
      some = gpu_few.grouped_matmul(
        x[first : first + rows], w, tiles=tiles, gated=gated
      )
      np.testing.assert_array_equal(bits(some), bits(whole[first:][:rows]))


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('gated', [False, True])
def test_groups_on_the_device(gated):
  """The same of uneven and empty groups, whose rows a block finds itself."""
  rng = np.random.default_rng(0)
  e, k, n = 48, 576, 192
  sizes = rng.choice([0, 0, 1, 2, 7, 9, 30], e)
  x = jnp.asarray(rng.normal(size=(sizes.sum(), k)), jnp.bfloat16)
  w = (e, k, 2, n) if gated else (e, k, n)
  w = jnp.asarray(rng.normal(size=w) / 16, jnp.bfloat16)
  sizes = jnp.asarray(sizes, jnp.int32)
  want = gpu.grouped_matmul(x, w, sizes, tiles=gpu.Tiles(), gated=gated)
  for tiles in GROUPED:
    got = gpu_few.grouped_matmul(x, w, sizes, tiles=tiles, gated=gated)
    np.testing.assert_array_equal(bits(got), bits(want))
