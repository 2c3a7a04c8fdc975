"""Paged attention against a loop over sequences."""

import re

from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels import mosaic
from pallas_kernels import paged_attention as ops
from pallas_kernels.attention import gpu as packed_gpu
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention import gpu_decode
from pallas_kernels.paged_attention import shapes

# Sequences, queries, heads of queries and of keys, K, W, tokens a page.
DECODING = (3, 1, 4, 2, 128, 128, 64)
GUESSING = (2, 3, 4, 1, 64, 64, 64)
PREFILLING = (1, 40, 4, 1, 64, 64, 64)
ABSORBED = (2, 1, 64, 1, 576, 512, 64)


def draw(sizes, seed=0):
  """Queries, pages, table and positions; the last sequence has no query."""
  n, queries, h, g, key, width, page = sizes
  rng = np.random.default_rng(seed)
  pages, most = 3 * n + 2, 3

  def some(*size):
    return jnp.asarray(rng.normal(size=size), jnp.bfloat16)

  table = rng.permutation(pages)[: n * most].reshape(n, most)
  first = rng.integers(0, page * most - queries + 1, n)
  positions = first[:, None] + np.arange(queries)[None]
  if n > 1:
    positions[-1] = -1
  v = None if sizes == ABSORBED else some(pages, page, g, width)
  return (
    some(n, queries, h, key),
    some(pages, page, g, key),
    v,
    jnp.asarray(table, jnp.int32),
    jnp.asarray(positions, jnp.int32),
  )


def by_hand(q, k_pages, v_pages, table, positions, width, scale):
  """One query and head at a time, float64."""
  q, k_pages = np.asarray(q, np.float64), np.asarray(k_pages, np.float64)
  v_pages = k_pages[..., :width] if v_pages is None else v_pages
  n, queries, h, _ = q.shape
  share = h // k_pages.shape[2]
  out = np.zeros((n, queries, h, v_pages.shape[-1]))
  for i, j, head in np.ndindex(n, queries, h):
    seen = int(positions[i, j]) + 1
    if seen > 0:
      keys, values = (
        np.concatenate(np.asarray(x, np.float64)[np.asarray(table[i])])
        for x in (k_pages, v_pages)
      )
      s = keys[:seen, head // share] @ q[i, j, head] * scale
      p = np.exp(s - s.max())
      out[i, j, head] = p @ values[:seen, head // share] / p.sum()
  return out


@pytest.mark.parametrize(
  ('name', 'sizes'),
  [(name, DECODING) for name in NAMES[:2]]
  + [('reference', ABSORBED), ('tpu_interpret', ABSORBED)]
  + [
    pytest.param('gpu_interpret', sizes, marks=needs_interpreter)
    for sizes in (DECODING, GUESSING, PREFILLING, ABSORBED)
  ],
)
def test_values(name, sizes):
  arrays = draw(sizes)
  scale = sizes[4] ** -0.5
  width = sizes[5] if arrays[2] is None else 0
  got = jax.jit(
    lambda *a: ops.paged_attention(
      *a, scale=scale, width=width, implementation=name
    )
  )(*arrays)
  want = by_hand(*arrays, width, scale)
  got = np.asarray(got, np.float64)
  assert np.linalg.norm(got - want) <= 4e-3 * np.linalg.norm(want)
  if sizes[0] > 1:
    assert not got[-1].any()


def test_positions_of_the_first_query():
  q, k, v, table, _ = draw(GUESSING)
  some = dict(scale=0.1)
  first = jnp.asarray([7, -1])
  each = jnp.asarray([[7, 8, 9], [-1, -1, -1]])
  np.testing.assert_array_equal(
    ops.paged_attention(q, k, v, table, first, **some),
    ops.paged_attention(q, k, v, table, each, **some),
  )


def written(pages, new, table, positions):
  """Pages with the newest numbers of every sequence that has any, by numpy."""
  out, block = np.array(pages), pages.shape[1]
  for row, at in enumerate(np.asarray(positions)):
    if at >= 0:
      out[table[row, at // block], at % block] = np.asarray(new)[row]
  return out


def check_decode(heads, groups, key, block, positions, name, fused):
  """Bits are those of a write and of `paged_attention` after it."""
  rng, n, most = np.random.default_rng(1), len(positions), 4
  some = lambda *size: jnp.asarray(rng.normal(size=size), jnp.bfloat16)  # noqa: E731
  q, k, v = (some(n, count, key) for count in (heads, groups, groups))
  pages = [some(n * most, block, groups, key) for _ in range(2)]
  table = rng.permutation(n * most).reshape(n, most).astype(np.int32)
  where = jnp.asarray(table), jnp.asarray(positions, jnp.int32)
  some = dict(scale=key**-0.5, implementation=name)
  after = [
    jnp.asarray(written(old, new, table, positions))
    for old, new in zip(pages, (k, v), strict=True)
  ]
  want = jax.jit(
    lambda q, *a: ops.paged_attention(q[:, None], *a, **some)[:, 0]
  )(q, *after, where[0], where[1][:, None])
  got = jax.jit(lambda *a: ops.decode(*a, fused=fused, **some))(
    q, k, v, *pages, *where
  )
  for x, y in zip(got, (want, *after), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
  ('name', 'fused'),
  [
    ('reference', True),
    ('tpu_interpret', False),
    pytest.param('gpu_interpret', True, marks=needs_interpreter),
  ],
)
def test_decode(name, fused):
  key = 128 if name.startswith('tpu') else 64
  check_decode(6, 2, key, 64, [200, -1, 255, 63], name, fused)


@needs_interpreter
def test_decode_as_tuned(monkeypatch):
  """Where the device's tunings say so, one kernel writes and attends."""
  runs, forward = [], gpu_decode.forward

  def counted(*args, **options):
    runs.append(args)
    return forward(*args, **options)

  monkeypatch.setattr(gpu_decode, 'forward', counted)
  tuned = {'decode': {'fused': True}}
  monkeypatch.setattr(dispatch, 'tuning', lambda _: tuned)
  check_decode(7, 1, 128, 128, [127, 128], 'gpu_interpret', None)
  assert len(runs) == 1


def check_turning(heads, groups, key, block, positions, name):
  """Bits are those of turning, then `decode`; returns what was taken."""
  rng, n, most = np.random.default_rng(1), len(positions), 3
  some = lambda *size: jnp.asarray(rng.normal(size=size), jnp.bfloat16)  # noqa: E731
  qkv = some(n, heads + 2 * groups, key)
  pages = [some(n * most, block, groups, key) for _ in range(2)]
  table = rng.permutation(n * most).reshape(n, most).astype(np.int32)
  where = jnp.asarray(table), jnp.asarray(positions, jnp.int32)
  angles = rng.normal(size=(n, 1, key // 2))
  cos, sin = (  # of 16 bits, so that products are exact
    np.asarray(jax.lax.reduce_precision(np.float32(f(angles)), 8, 15))
    for f in (np.cos, np.sin)
  )
  turning = np.asarray(qkv[:, : heads + groups], np.float32)
  a, b = turning[..., : key // 2], turning[..., key // 2 :]
  turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  turned = jnp.asarray(turned, jnp.bfloat16)
  some = dict(scale=0.1, implementation=name)
  parts = turned[:, :heads], turned[:, heads:], qkv[:, heads + groups :]
  want = ops.decode(*parts, *pages, *where, fused=True, **some)
  turns = jnp.concatenate([cos[:, 0], sin[:, 0]], axis=1)
  got = ops.decode_turning(qkv, turns, *pages, *where, **some)
  for x, y in zip(got, want, strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
  return qkv, turns, *pages, *where


@needs_interpreter
def test_decode_that_turns(monkeypatch):
  check_turning(4, 1, 128, 128, [127, 200], 'gpu_interpret')
  taken = check_turning(6, 2, 64, 64, [100, -1, 63], 'gpu_interpret')
  named = dict(implementation='gpu_interpret')
  qkv, turns, k_pages, v_pages, table, positions = taken
  asked = lambda v: ops.turns_itself(6, k_pages, v, table, **named)  # noqa: E731
  assert not asked(v_pages)  # no tuning says that it is faster
  tuned = {'decode': {'turning': True}}
  monkeypatch.setattr(dispatch, 'tuning', lambda _: tuned)
  assert asked(v_pages) and not asked(None)
  assert not ops.turns_itself(6, k_pages, v_pages, table)  # on a CPU
  rest = k_pages, v_pages, table, positions
  with pytest.raises(ValueError, match='only the GPU kernel turns'):
    ops.decode_turning(qkv, turns, *rest, scale=0.1)
  with pytest.raises(ValueError, match=r'turns .* must be \[N, K\]'):
    ops.decode_turning(qkv, turns[1:], *rest, scale=0.1, **named)
  none = qkv[:0], turns[:0], k_pages, v_pages, table[:0], positions[:0]
  out, *pages = ops.decode_turning(*none, scale=0.1, **named)
  assert out.shape == (0, 6, 64) and pages[0] is k_pages


@pytest.mark.parametrize(
  ('heads', 'key', 'width', 'interprets'),
  [(63, 64, 64, True), (2, 128, 64, True), (2, 64, 64, False)],
  ids=['many heads', 'narrow values', 'jax 0.10'],
)
def test_what_turns_nothing_says_so(heads, key, width, interprets, monkeypatch):
  """Before anything is lowered; what `decode` takes is not always turned."""
  monkeypatch.setattr(mosaic, 'interprets', lambda: interprets)
  monkeypatch.setattr(gpu_decode, 'forward_turning', None)
  some = lambda *size: jnp.zeros(size, jnp.bfloat16)  # noqa: E731
  with pytest.raises(
    ValueError,
    match=rf'qkv \(1, {heads + 2}, {key}\).*K = W to 128 and up to 62 heads',
  ):
    ops.decode_turning(
      *(some(1, heads + 2, key), jnp.ones((1, key))),
      *(some(2, 64, 1, size) for size in (key, width)),
      *(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32)),
      scale=0.1,
      implementation='gpu_interpret',
    )


@needs_interpreter
def test_decode_that_turns_lowers_for_cuda():
  some = lambda *size: jax.ShapeDtypeStruct(size, jnp.bfloat16)  # noqa: E731
  whole = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)  # noqa: E731
  n, h, g, key, block = 16, 9, 3, 64, 64
  text = mosaic.lower(
    lambda *a: gpu_decode.forward_turning(*a, scale=0.1),
    some(n, h + 2 * g, key),
    jax.ShapeDtypeStruct((n, key), jnp.float32),
    *[some(99, block, g, key)] * 2,
    whole(n, 3),
    whole(n),
  )
  assert len(re.findall(r'custom_call @mosaic_gpu', text)) == 1
  assert 'stablehlo.pad' not in text and 'stablehlo.concatenate' not in text


@needs_interpreter
def test_decode_lowers_for_cuda():
  some = lambda *size: jax.ShapeDtypeStruct(size, jnp.bfloat16)  # noqa: E731
  whole = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)  # noqa: E731
  n, h, g, key, block = 16, 9, 3, 64, 64
  text = mosaic.lower(
    lambda *a: gpu_decode.forward(*a, scale=0.1),
    some(n, h, key),
    *[some(n, g, key)] * 2,
    *[some(99, block, g, key)] * 2,
    whole(n, 3),
    whole(n),
  )
  (call,) = re.findall(r'custom_call @mosaic_gpu.*', text)
  assert 'output_operand_alias' in call  # pages are changed where they are
  assert 'scatter' not in text


def test_what_decode_leaves_to_the_general_kernel():
  some = lambda *size: jax.ShapeDtypeStruct(size, jnp.bfloat16)  # noqa: E731
  pages = some(99, 64, 3, 64)
  table = jax.ShapeDtypeStruct((16, 3), jnp.int32)
  long = jax.ShapeDtypeStruct((1, 999), jnp.int32)
  new = mosaic.interprets()
  takes = gpu_decode.takes
  assert takes(some(16, 9, 64), pages, pages, table, None) == new
  assert not takes(some(16, 9, 64), pages, None, table, 0)
  assert not takes(some(16, 189, 64), pages, pages, table, 0)
  assert not takes(some(16, 9, 64), pages, pages, table, 64)
  wide = some(99, 64, 3, 128)
  assert takes(some(1, 9, 128), wide, wide, long, 0) == new
  assert not takes(some(1, 9, 128), wide, wide, long, None)  # in splits


@pytest.mark.parametrize(
  'shape', shapes.DECODING[1:] + shapes.PREFILLING + shapes.FEW
)
def test_lowers_for_cuda(shape):
  n, count = shape.sequences, shape.tokens // shape.block
  some = lambda *size: jax.ShapeDtypeStruct(size, jnp.bfloat16)  # noqa: E731
  whole = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)  # noqa: E731
  page = n * count, shape.block, shape.groups
  text = mosaic.lower(
    lambda *a: gpu.forward(*a, width=shape.width, scale=0.1, split=None),
    some(n, shape.queries, shape.heads, shape.key),
    some(*page, shape.key),
    None if shape.shared else some(*page, shape.width),
    whole(n, count),
    whole(n, shape.queries),
  )
  # Of few long sequences the splits are merged by a second kernel.
  kernels = len(re.findall(r'custom_call @mosaic_gpu', text))
  assert kernels == 1 + (shape in shapes.FEW)


def in_place_case(n, queries, heads, first, pages):
  rows = first + n * queries
  keys = jax.random.split(jax.random.key(0), 3)
  shapes_ = (rows, heads, 64), (pages, 64, 2, 64), (pages, 64, 2, 64)
  arrays = [
    jax.random.normal(key, shape, jnp.bfloat16)
    for key, shape in zip(keys, shapes_, strict=True)
  ]
  table = jnp.arange(n * 2, dtype=jnp.int32).reshape(n, 2) % pages
  place = jnp.arange(n * queries, dtype=jnp.int32).reshape(n, queries) + 37
  place = jnp.where(place % queries > queries - 3, -1, place % 128)
  return *arrays, table, place


@needs_interpreter
def test_rows_where_they_lie():
  """Bits of rows that are laid out for the kernel, and as many of them."""
  q, k, v, table, place = in_place_case(1, 16, 16, 3, 2)
  want = ops.paged_attention(
    q[3:].reshape(1, 16, 16, 64),
    *(k, v, table, place),
    scale=0.1,
    implementation='gpu_interpret',
  )
  got = gpu.in_place(
    *(q, k, v, table, place.reshape(-1)),
    first=3,
    width=64,
    scale=0.1,
    interpret=True,
  )
  assert got.shape == q.shape
  np.testing.assert_array_equal(
    np.asarray(got[3:]).view(np.uint16),
    np.asarray(want).reshape(16, 16, 64).view(np.uint16),
  )


def test_rows_where_they_lie_lower_for_cuda():
  q, k, v, table, place = in_place_case(4, 16, 32, 64, 8)
  k, v = (jnp.tile(x, (1, 1, 2, 1)) for x in (k, v))
  text = mosaic.lower(
    lambda *a: gpu.in_place(*a, first=64, width=64, scale=0.1),
    *(q, k, v, table, place.reshape(-1)),
  )
  assert 'mosaic_gpu' in text and 'stablehlo.transpose' not in text


def test_rows_that_cannot_stay(monkeypatch):
  """Four heads to one of keys, and where nothing says that it is faster."""
  q, k, v, table, place = in_place_case(2, 16, 8, 0, 4)
  sizes = dict(first=0, width=64, scale=0.1)
  assert gpu.in_place(q, k, v, table, place.reshape(-1), **sizes) is None
  arguments = q, k, v, table, place.reshape(-1)
  assert ops.in_place(*arguments, first=0, scale=0.1) is None
  found = {'chunk': {'in_place': True}}
  monkeypatch.setattr(dispatch, 'tuning', lambda operation: found)
  assert ops.in_place(*arguments, first=0, scale=0.1) is None  # a CPU


def test_when_sequences_are_few():
  sums = 64, 512
  assert gpu.few(4, 512, 16, sums)
  assert not gpu.few(4, 16, 16, sums)  # one split each
  assert not gpu.few(132, 512, 16, sums)  # enough of them
  assert not gpu.few(4, 512, 16, (64, 64))  # a row is no line of a warpgroup
  assert not gpu.few(64, 2**14, 16, sums)  # gigabytes of sums


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(table=(3, 3)), r'table \(3, 3\) must be \[N, M\] with N = 2'),
    (dict(positions=(2, 2)), r'must be \[N, Q\] = \(2, 3\)'),
    (dict(at=192), 'position 192 lies past the 3 pages of 64 tokens'),
    (dict(k=(8, 64, 1, 32)), 'differ in the numbers of a head'),
    (dict(v=None), 'width=0; without v'),
    (dict(real=True), 'positions is float32; give integers'),
    (dict(split=96), 'split=96 must be a multiple of block=64'),
    (dict(k=(8, 32, 1, 64), implementation='gpu'), 'takes 64 and 128'),
    (dict(implementation='gpu'), 'the default device is a cpu'),
  ],
)
def test_bad_input(change, message):
  change = (
    dict(k=(8, 64, 1, 64), v=(), table=(2, 3), positions=(2, 3), at=0)
    | dict(real=False, implementation=None, split=0)
    | change
  )
  k = jnp.zeros(change['k'], jnp.bfloat16)
  v = None if change['v'] is None else k
  positions = jnp.full(change['positions'], change['at'])
  with pytest.raises(ValueError, match=message):
    ops.paged_attention(
      jnp.zeros((2, 3, 4, 64), jnp.bfloat16),
      k,
      v,
      jnp.zeros(change['table'], jnp.int32),
      positions.astype(jnp.float32) if change['real'] else positions,
      scale=1.0,
      split=change['split'],
      implementation=change['implementation'],
    )


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('sizes', [(9, 1, 32, 4, 128, 128, 128), ABSORBED])
def test_on_the_device(sizes):
  """Values, and bits with other sequences beside, other pages, other tiles."""
  arrays = draw(sizes)
  width, scale = sizes[5], sizes[4] ** -0.5
  run = jax.jit(lambda *a: gpu.forward(*a, width=width, scale=scale))
  out = np.asarray(run(*arrays))
  want = by_hand(*arrays, width, scale)
  assert np.linalg.norm(out - want) <= 4e-3 * np.linalg.norm(want)
  q, k, v, table, positions = arrays
  turned = lambda x: None if x is None else jnp.roll(x, 5, axis=0)  # noqa: E731
  moved = (table + 5) % k.shape[0]
  other = run(q[1:], turned(k), turned(v), moved[1:], positions[1:])
  np.testing.assert_array_equal(np.asarray(other), out[1:])
  if v is not None:
    tiles = packed_gpu.Tiles(consumers=1, stages=2, turns=False, overlap=True)
    other = gpu.forward(*arrays, width=width, scale=scale, tiles=tiles)
    np.testing.assert_array_equal(np.asarray(other), out)


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_decode_on_the_device():
  rng = np.random.default_rng(0)
  for heads, groups, key, block in ((9, 3, 64, 64), (32, 4, 128, 128)):
    positions = rng.integers(-1, 4 * block, 64)
    check_decode(heads, groups, key, block, positions, 'gpu', True)
    check_turning(heads, groups, key, block, positions % (3 * block), 'gpu')


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('shape', shapes.FEW)
def test_splits_on_the_device(shape):
  """Splits in turn and apart have the same bits, and the values are right."""
  sizes = 2, 1, shape.heads, shape.groups, shape.key, shape.width, shape.block
  q, _, _, _, _ = draw((*sizes[:5], 64, sizes[6]))
  count = 4096 // shape.block
  rng = np.random.default_rng(1)
  some = lambda *size: jnp.asarray(rng.normal(size=size), jnp.bfloat16)  # noqa: E731
  k = some(2 * count, shape.block, shape.groups, shape.key)
  v = None if shape.shared else some(*k.shape[:3], shape.width)
  table = rng.permutation(2 * count).reshape(2, count).astype(np.int32)
  arrays = q, k, v, table, np.asarray([[4095], [2500]], np.int32)
  scale = shape.key**-0.5
  one, two = (
    np.asarray(
      gpu.forward(
        *(None if x is None else jnp.asarray(x) for x in arrays),
        width=shape.width,
        scale=scale,
        split=1024,
        apart=apart,
      )
    )
    for apart in (False, True)
  )
  np.testing.assert_array_equal(one, two)
  want = by_hand(*arrays, shape.width, scale)
  assert np.linalg.norm(two - want) <= 4e-3 * np.linalg.norm(want)
