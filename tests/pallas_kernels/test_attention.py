"""Attention against a naive twin, and against itself cut in other ways."""

import dataclasses
import functools

import hypothesis
from hypothesis import strategies as st
from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention as ops
from pallas_kernels import dispatch
from pallas_kernels import mosaic
from pallas_kernels import paged_attention
from pallas_kernels.attention import gpu
from pallas_kernels.attention import gpu_absorbed
from pallas_kernels.attention import gpu_gradients
from pallas_kernels.attention import reference
from pallas_kernels.attention import shapes
from pallas_kernels.attention import work
from pallas_kernels.paged_attention import gpu as paged_gpu

BLOCK = 64
# Heads of queries and of keys, numbers of a key and of a value.
GROUPED = (2, 1, 64, 64)
EXPANDED = (1, 1, 192, 128)
ABSORBED = (2, 1, 576, 512)


def draw(t, heads, seed=0, dtype=jnp.bfloat16):
  """q, k, v [1, T, ...]; v None where values are part of the keys."""
  h, g, key, width = heads
  rng = np.random.default_rng(seed)
  some = lambda *size: jnp.asarray(rng.normal(size=(1, *size)), dtype)  # noqa: E731
  v = None if heads == ABSORBED else some(t, g, width)
  return some(t, h, key), some(t, g, key), v


def exact(t, heads, seed=0):
  """As `draw`, of small integers: what a matmul adds up in a block is exact.

  So are scores, and at the scale of `settings` the weights, of 8 bits each, are
  within 2^-8 of each other. To merge the blocks rounds at every step.
  """
  h, g, key, width = heads
  rng = np.random.default_rng(seed)
  some = lambda *size: jnp.asarray(  # noqa: E731
    rng.integers(-1, 2, (1, t, *size)), jnp.bfloat16
  )
  v = None if heads == ABSORBED else some(g, width)
  return some(h, key), some(g, key), v


def settings(heads, **more):
  width = heads[3] if heads == ABSORBED else 0
  return dict(scale=heads[2] ** -0.5, block=BLOCK, width=width) | more


def segments(t, *lengths, align=BLOCK):
  """Ids [1, T] of segments that start at multiples of `align`."""
  ids, at = np.zeros((1, t), np.int32), 0
  for number, length in enumerate(lengths, start=1):
    ids[0, at : at + length] = number
    at += -(-length // align) * align
  return jnp.asarray(ids)


def naive(q, k, v, ids, scale, block, width):
  """The whole matrix of scores, float32."""
  del block
  q, k = q.astype(jnp.float32), k.astype(jnp.float32)
  v = k[..., :width] if v is None else v.astype(jnp.float32)
  b, t, h, d = q.shape
  grouped = q.reshape(b, t, k.shape[2], -1, d)
  s = jnp.einsum('btgnd,bsgd->bgnts', grouped, k) * scale
  row = jnp.arange(t)
  seen = (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None]
  seen = (seen & (row[:, None] >= row[None])[None])[:, None, None]
  p = jnp.where(seen, jax.nn.softmax(jnp.where(seen, s, -1e30)), 0.0)
  return jnp.einsum('bgnts,bsgd->btgnd', p, v).reshape(b, t, h, -1)


def close(got, want, tolerance):
  got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
  assert got.shape == want.shape
  assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def bits(array):
  return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize(
  ('name', 'heads'),
  [('reference', GROUPED), ('reference', ABSORBED)]
  + [('tpu_interpret', heads) for heads in (GROUPED, EXPANDED, ABSORBED)]
  + [
    pytest.param('gpu_interpret', heads, marks=needs_interpreter)
    for heads in (GROUPED, EXPANDED)
  ],
)
def test_values_and_gradients(name, heads):
  """Two segments, the second not at a multiple of the block, and padding."""
  t = 190
  q, k, v = draw(t, heads)
  ids = segments(t, 70, 40, align=8)
  weight = jnp.asarray(np.random.default_rng(1).normal(size=(t, 1)))

  def loss(function, **more):
    def weighed(arrays):
      out = function(arrays['q'], arrays['k'], arrays.get('v'), ids, **more)
      return jnp.sum(out.astype(jnp.float32) * weight[None, :, None]), out

    return jax.jit(jax.value_and_grad(weighed, has_aux=True))

  arrays = {'q': q, 'k': k} | ({} if v is None else {'v': v})
  (_, out), found = loss(ops.attention, **settings(heads, implementation=name))(
    arrays
  )
  wide = {n: x.astype(jnp.float32) for n, x in arrays.items()}
  (_, want), wants = loss(naive, **settings(heads))(wide)
  close(out, want, 4e-3)
  assert not np.asarray(out, np.float32)[0, 112:].any()
  for array in arrays:
    assert found[array].dtype == jnp.bfloat16
    close(found[array], wants[array], 6e-3)
    assert not np.asarray(found[array], np.float32)[0, 112:].any()


@needs_interpreter
def test_gradients_of_absorbed():
  """Rows of heads that fill no block of 32, in parts and in two slices."""
  t, heads, sizes = 128, 3, dict(scale=0.05, width=512, block=64)
  q, k, _ = (x if x is None else x[0] for x in draw(t, (heads, *ABSORBED[1:])))
  starts, ends = ops.bounds(segments(t, 75, 30, align=8))
  dout = draw(t, (heads, 1, 512, 512), 1)[0][0]

  @jax.jit
  def both(q, k, dout):
    out, log = reference.forward(q, k, None, starts, ends, **sizes)
    dots = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    rows = starts, ends, log, dots, dout
    wants = reference.backward(q, k, None, *rows, **sizes)
    more = dict(scale=0.05, parts=3, rows=256, interpret=True)
    return gpu_absorbed.backward(q, k, *rows, **more), wants[:2]

  for got, want in zip(*both(q, k, dout), strict=True):
    assert got.dtype == jnp.bfloat16
    close(got, want, 3e-4)
    assert not np.asarray(got, np.float32)[110:].any()


def test_float32_and_a_batch():
  """Rows of a batch are apart, and T need be no multiple of the block."""
  q, k, v = (
    jnp.concatenate([a, b])
    for a, b in zip(
      draw(50, GROUPED, 2, jnp.float32),
      draw(50, GROUPED, 3, jnp.float32),
      strict=True,
    )
  )
  ids = jnp.concatenate([segments(50, 50), segments(50, 16, 20, align=16)])
  sizes = settings(GROUPED, block=16)
  out = packed('reference', GROUPED, block=16)(q, k, v, ids)
  np.testing.assert_allclose(
    out, naive(q, k, v, ids, **sizes), rtol=1e-5, atol=1e-5
  )


@functools.cache
def packed(name, heads, **more):
  sizes = settings(heads, implementation=name) | more
  return jax.jit(functools.partial(ops.attention, **sizes))


@functools.cache
def chunk(name, heads):
  sizes = settings(heads, implementation=name)
  del sizes['block']
  return jax.jit(functools.partial(paged_attention.paged_attention, **sizes))


def served(name, q, k, v, cut, heads, seed, first=0):
  """A segment's rows through pages in any order, `cut` queries at a time.

  Of those from `first` on.
  """
  rng = np.random.default_rng(seed)
  length = q.shape[1]
  count = -(-length // BLOCK)
  table = rng.permutation(count + 2)[:count]

  def pages(x):
    out = rng.normal(size=(count + 2, BLOCK, *x.shape[2:])).astype(x.dtype)
    whole = np.zeros((count * BLOCK, *x.shape[2:]), x.dtype)
    whole[:length] = x[0]
    out[table] = whole.reshape(count, BLOCK, *x.shape[2:])
    return jnp.asarray(out)

  cache = pages(k), None if v is None else pages(v), jnp.asarray(table[None])
  found = []
  for start in range(first, length, cut):
    some = np.zeros((1, cut, *q.shape[2:]), q.dtype)
    some[:, : length - start] = q[:, start : start + cut]
    place = start + np.arange(cut)
    place = jnp.asarray(np.where(place < length, place, -1)[None])
    found.append(chunk(name, heads)(jnp.asarray(some), *cache, place))
  return jnp.concatenate(found, axis=1)[:, : length - first]


@pytest.mark.parametrize('name', NAMES)
@hypothesis.settings(
  max_examples=3,
  deadline=None,
  derandomize=True,
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(
  before=st.integers(1, 128),
  length=st.integers(65, 128),
  seed=st.integers(0, 9),
)
def test_training_is_prefill_is_decoding(name, before, length, seed):
  """One row has the same bits, whatever is packed, cut, or paged how."""
  q, k, v = draw(256, GROUPED, seed)
  ids = segments(256, before, length)
  start = -(-before // BLOCK) * BLOCK
  run = packed(name, GROUPED)
  want = bits(run(q, k, v, ids)[:, start : start + length])
  own = [x[:, start : start + length] for x in (q, k, v)]
  room = [jnp.pad(x, ((0, 0), (0, 256 - length), (0, 0), (0, 0))) for x in own]
  alone = run(*room, segments(256, length))[:, :length]
  np.testing.assert_array_equal(bits(alone), want)
  cut = 40 if seed % 2 else 1
  if name != 'reference':
    cut = 40  # each call takes a while
  found = served(name, *own, cut, GROUPED, seed)
  np.testing.assert_array_equal(bits(found), want)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('heads', [EXPANDED, ABSORBED])
def test_latent_heads_are_served_as_trained(name, heads):
  """Contexts that end within a page and with it: a last query, and chunks."""
  q, k, v = exact(256, heads)
  out = bits(packed(name, heads)(q, k, v, segments(256, 101, 128)))
  for start, length in ((0, 101), (128, 128)):
    own = [x if x is None else x[:, start : start + length] for x in (q, k, v)]
    want = out[:, start : start + length]
    last = served(name, *own, 1, heads, 0, length - 1)
    np.testing.assert_array_equal(bits(last), want[:, -1:])
    for cut in (48, 80):
      found = served(name, *own, cut, heads, cut)
      np.testing.assert_array_equal(bits(found), want)


def test_training_is_decoding_inside_a_gradient():
  """The plain implementation, as the trainer runs it: under value_and_grad."""
  q, k, v = draw(192, ABSORBED)
  ids = segments(192, 100, 60)
  sizes = settings(ABSORBED, implementation='reference')

  def loss(q):
    out = ops.attention(q, k, v, ids, **sizes)
    return jnp.sum(out.astype(jnp.float32)), out

  (_, out), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(q)
  own = q[:, 128:188], k[:, 128:188], None
  found = served('reference', *own, 1, ABSORBED, 0)
  np.testing.assert_array_equal(bits(found), bits(out[:, 128:188]))


@needs_interpreter
def test_bits_do_not_depend_on_tiles():
  q, k, v = draw(256, GROUPED)
  ids = segments(256, 100, 64)
  found = [
    bits(packed('gpu_interpret', GROUPED, tiles=tiles)(q, k, v, ids))
    for tiles in (
      gpu.Tiles(),
      gpu.Tiles(overlap=True),
      gpu.Tiles(stages=3, slots=2, turns=False, overlap=True),
      gpu.Tiles(consumers=1, slots=2, turns=False),
    )
  ]
  for other in found[1:]:
    np.testing.assert_array_equal(other, found[0])


def test_tiles_of_tunings(monkeypatch):
  """By shape, block and length."""
  found = {'forward 192 128 128 long': dict(overlap=False, turns=True)}
  monkeypatch.setattr(dispatch, 'tuning', lambda operation: found)
  plain = gpu.fitting(192, 128, 128, False, False, 8192)
  tuned = gpu.tuned(192, 128, 128, False, 8192)
  assert tuned == dataclasses.replace(plain, overlap=False, turns=True)
  assert gpu.tuned(192, 128, 128, False, 4096).overlap
  assert gpu.tuned(192, 128, 64, False, 8192).overlap


@hypothesis.settings(deadline=None, derandomize=True, max_examples=8)
@hypothesis.given(
  lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
  align=st.sampled_from([1, 32]),
)
def test_items_cover_what_is_seen(lengths, align):
  """Every pair that is seen lies in a listed block; unmasked ones are whole."""
  t, rows, block = 512, 64, 32
  starts, ends = ops.bounds(segments(t, *lengths, align=align))
  low, high = np.asarray(starts), np.asarray(ends)
  place = np.arange(t)[None]
  seen = (place >= low[:, None]) & (place <= high[:, None])
  for item in np.asarray(work.packed_items(starts, ends, rows, block, 1, 1)):
    row, (first, middle, end) = item[0], item[5:8]
    part = seen[row : row + rows]
    assert not part[:, : first * block].any()
    assert not part[:, end * block :].any()
    assert part[:, first * block : middle * block].all()
  for row, _, first, end, middle, after in np.asarray(
    work.key_items(starts, ends, rows, block, 1)
  ):
    part = seen[:, row : row + rows]
    assert not part[: first * block].any() and not part[end * block :].any()
    assert part[middle * block : after * block].all()
    assert first <= middle <= after <= end


@hypothesis.settings(deadline=None, derandomize=True, max_examples=8)
@hypothesis.given(
  lengths=st.lists(st.integers(1, 75), min_size=1, max_size=3),
  heads=st.sampled_from([1, 3]),
)
def test_items_of_absorbed_gradients(lengths, heads):
  """A pair that is seen is in one item, and all ds that is read is written."""
  t, parts, rows, block = 256, 3, 128, gpu_absorbed.BLOCK
  starts, ends = ops.bounds(segments(t, *lengths, align=8))
  low, high = (np.repeat(np.asarray(x), heads) for x in (starts, ends))
  place = np.arange(t)[None]
  seen = (place >= low[:, None]) & (place <= high[:, None])
  written, read = (np.zeros(seen.shape, np.int32) for _ in range(2))
  plan = jax.jit(gpu_absorbed.plan, static_argnums=(2, 3, 4))
  for begin in range(0, t * heads, rows):
    items, ranges = plan(starts, ends, heads, parts, rows, begin)
    for item in np.asarray(items):
      own = slice(item[0], item[0] + 64)
      first, end, whole, after, least = item[2:] * block
      written[first:end, own] += 1
      assert least == begin and (begin <= first and end <= begin + rows)
      assert first <= whole <= after <= end
      assert seen[whole:after, own].all()
    for row, _, first, end in np.asarray(ranges):
      read[begin + row : begin + row + 64, first * 64 : end * 64] += 1
  assert (written[seen] == 1).all() and written.max() == 1
  assert (read[seen] == 1).all() and (read <= written).all()


@hypothesis.settings(deadline=None, derandomize=True, max_examples=8)
@hypothesis.given(
  lengths=st.lists(st.integers(1, 300), min_size=1, max_size=2),
  rows=st.sampled_from([32, 64]),
)
def test_splits_are_those_of_each_row(lengths, rows):
  """A tile is cut where each of its rows would be, counted from its segment."""
  t, block, split = 704, 32, 3
  ids = segments(t, *lengths, align=block)
  starts, ends = ops.bounds(ids)
  low, high = np.asarray(starts), np.asarray(ends)
  for item in np.asarray(
    work.packed_items(starts, ends, rows, block, 1, 1, split)
  ):
    (row, (first, _, end), count) = item[0], item[5:8], item[8]
    cuts = {first + split * i for i in range(1, count)}
    assert all(first < cut < end for cut in cuts)
    for a, b in zip(low[row : row + rows], high[row : row + rows], strict=True):
      own = set(range(a // block + split, b // block + 1, split))
      inside = {cut for cut in cuts if a // block < cut <= b // block}
      assert b < a or inside == own


@needs_interpreter
def test_splits_are_merged_alike():
  """Training, and decoding with splits in turn and apart, over three splits."""
  # One head: rows then lie in the same places of a tile in both. (The CPU's
  # matmul, which stands for the tensor core here, adds by the place.)
  q, k, v = (x[0] for x in draw(448, (1, 1, 128, 128)))
  starts, ends = ops.bounds(segments(448, 70, 300))
  sizes = dict(width=128, scale=0.1)
  out, log = gpu.forward(
    *(q, k, v, starts, ends), **sizes, block=BLOCK, split=128, interpret=True
  )
  want, logs = reference.forward(*(q, k, v, starts, ends), **sizes, block=BLOCK)
  close(out, want, 4e-3)
  np.testing.assert_allclose(log, logs, rtol=1e-5, atol=1e-4)
  pages = [x.reshape(7, BLOCK, 1, 128) for x in (k, v)]
  for apart in (False, True):
    found = paged_gpu.forward(
      *(q[None, 128:428], *pages, jnp.arange(2, 7)[None]),
      jnp.arange(300)[None],
      **sizes,
      split=128,
      apart=apart,
      interpret=True,
    )
    np.testing.assert_array_equal(bits(found[0]), bits(out[128:428]))


def lowered(shape, tiles=None, gradient=False):
  t = shape.rows * shape.tokens
  some = lambda *size: jax.ShapeDtypeStruct(size, jnp.bfloat16)  # noqa: E731
  bound = jax.ShapeDtypeStruct((t,), jnp.int32)
  q, k = some(t, shape.heads, shape.key), some(t, shape.groups, shape.key)
  v = None if shape.shared else some(t, shape.groups, shape.width)
  sizes = dict(scale=0.1)
  if gradient:
    row = jax.ShapeDtypeStruct((t, shape.heads), jnp.float32)
    dout = some(t, shape.heads, shape.width)
    sizes |= dict(block=shape.block, width=shape.width)
    return mosaic.lower(
      lambda *a: gpu.backward(*a, **sizes),
      *(q, k, v, bound, bound, row, row, dout),
    )
  sizes |= dict(block=shape.block, width=shape.width, tiles=tiles)
  return mosaic.lower(
    lambda *a: gpu.forward(*a, **sizes), q, k, v, bound, bound
  )


@pytest.mark.parametrize('shape', shapes.TRAINING[::2] + shapes.TRAINING[3:4])
def test_lowers_for_cuda(shape):
  assert 'mosaic_gpu' in lowered(shape)
  if shape.key > 64:
    assert lowered(shape, gradient=True).count('mosaic_gpu') >= 2


def test_memory_of_absorbed_gradients_is_bounded():
  """Of 8192 x 64 rows, so many at a time that their ds take 1 GiB."""
  text = lowered(
    shapes.Shape('', 1, 8192, 64, 1, 576, 512, 64, True), None, True
  )
  assert 'tensor<8192x65536xbf16>' in text
  assert 'tensor<8192x524288xbf16>' not in text


def test_lowers_without_overlap():
  assert 'mosaic_gpu' in lowered(shapes.TRAINING[0], gpu.Tiles())


def test_nothing():
  q, k, v = draw(0, GROUPED)
  out = ops.attention(q, k, v, segments(0), **settings(GROUPED))
  assert out.shape == (1, 0, 2, 64)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(q=(1, 8, 2, 32)), 'differ in the numbers of a head'),
    (dict(q=(1, 8, 3, 64), k=(1, 8, 2, 64)), 'not a multiple of the 2'),
    (dict(v=(1, 8, 1, 64), k=(1, 8, 2, 64)), 'in more than the last'),
    (dict(v=None), 'width=0; without v'),
    (dict(width=32), 'give width only where v is None'),
    (dict(q=(1, 9, 2, 64)), r'\[B, T, H, K\]'),
    (dict(ids=(1, 9)), r'segment_ids \(1, 9\) must be'),
    (dict(scale=0.0), 'scale=0.0 must be above 0'),
    (dict(dtype=jnp.float32), 'cast one'),
    (dict(block=32, implementation='gpu'), 'takes 64 and 128'),
    (
      dict(q=(1, 8, 2, 96), k=(1, 8, 1, 96), implementation='gpu'),
      'K=96, W=96; the GPU kernel takes multiples of 64',
    ),
    (dict(block=20, implementation='tpu'), 'takes multiples of 16'),
    (dict(implementation='tpu'), 'the default device is a cpu'),
  ],
)
def test_bad_input(change, message):
  change = (
    dict(q=(1, 8, 2, 64), k=(1, 8, 1, 64), v=(1, 8, 1, 64), ids=(1, 8))
    | dict(scale=1.0, block=64, width=0, dtype=jnp.bfloat16)
    | change
  )
  if change['k'] != (1, 8, 1, 64) and change['v'] == (1, 8, 1, 64):
    change['v'] = change['v'] if 'in more' in message else change['k']
  some = lambda size: size and jnp.zeros(size, jnp.bfloat16)  # noqa: E731
  q, k, v = (some(change.pop(name)) for name in 'qkv')
  ids = jnp.ones(change.pop('ids'), jnp.int32)
  with pytest.raises(ValueError, match=message):
    ops.attention(q.astype(change.pop('dtype')), k, v, ids, **change)


def test_tiles_that_cannot_be():
  with pytest.raises(ValueError, match='slots=3'):
    gpu.Tiles(slots=3)
  with pytest.raises(ValueError, match='consumers=3'):
    gpu.Tiles(consumers=3)
  with pytest.raises(ValueError, match='block=16'):
    gpu_gradients.Tiles(block=16)
  q, k, v = draw(64, GROUPED)
  ids = segments(64, 64)
  with pytest.raises(ValueError, match='fewer stages'):
    ops.attention(
      *(q, k, v, ids),
      **settings(GROUPED, implementation='gpu_interpret'),
      tiles=gpu.Tiles(stages=20),
    )


def test_tiles_that_fit():
  """Wide sums are of short blocks, and long segments take no turns."""
  assert gpu_gradients.fitting(192, 128, 192) == gpu_gradients.Tiles(64, 3)
  assert gpu_gradients.fitting(192, 128, 320) == gpu_gradients.Tiles(32, 4)
  assert gpu_gradients.fitting(128, 128, 256) == gpu_gradients.Tiles(64, 4)
  turns = lambda *a: gpu.fitting(*a[:3], False, False, a[3]).turns  # noqa: E731
  assert turns(128, 128, 128, 4096) and not turns(128, 128, 128, 8192)
  assert turns(192, 128, 64, 8192) and not turns(192, 128, 128, 8192)


needs_gpu = pytest.mark.skipif(
  mosaic.available() is not None, reason='needs a Hopper GPU'
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
  'heads', [(8, 2, 128, 128), (6, 2, 64, 64), (4, 4, 192, 128), ABSORBED]
)
def test_on_the_device(heads):
  """Values, gradients, and bits in training, prefill and decoding."""
  t, before, length = 1024, 333, 500
  q, k, v = draw(t, heads)
  ids = segments(t, before, length)
  start = -(-before // BLOCK) * BLOCK
  sizes = settings(heads, implementation='gpu')
  arrays = (q, k) if v is None else (q, k, v)

  def run(function, **more):
    def weighed(*a):
      out = function(*a[:2], a[2] if len(a) > 2 else None, ids, **more)
      return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    every = tuple(range(len(arrays)))
    return jax.jit(jax.value_and_grad(weighed, every, has_aux=True))

  (_, out), found = run(ops.attention, **sizes)(*arrays)
  wide = [x.astype(jnp.float32) for x in arrays]
  with jax.default_matmul_precision('highest'):
    (_, want), wants = run(naive, **settings(heads))(*wide)
  close(out, want, 4e-3)
  for got, exact in zip(found, wants, strict=True):
    close(got, exact, 8e-3)
  again = run(ops.attention, **sizes)(*arrays)[1]
  for one, two in zip(found, again, strict=True):
    np.testing.assert_array_equal(bits(one), bits(two))
  own = [None if x is None else x[:, start : start + length] for x in (q, k, v)]
  for cut in (1, 77, 500):
    want = out[:, start : start + length]
    found = served('gpu', *own, cut, heads, cut)
    np.testing.assert_array_equal(bits(found), bits(want))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize('shape', [s for s in shapes.TRAINING if s.shared])
def test_gradients_of_absorbed_on_the_device(shape):
  """Real sizes: against XLA's products, and the same bits twice."""
  t, sizes = shape.tokens, dict(scale=shape.key**-0.5, width=shape.width)
  q, k, _ = (
    x if x is None else x[0]
    for x in draw(t, (shape.heads, shape.groups, *ABSORBED[2:]))
  )
  dout = draw(t, (shape.heads, 1, shape.width, 64), 1)[0][0]
  starts, ends = ops.bounds(segments(t, t // 3, 1, 200, t // 2))

  @jax.jit
  def run(q, k, dout):
    out, log = gpu.forward(q, k, None, starts, ends, block=64, **sizes)
    dots = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    rows = q, k, None, starts, ends, log, dots, dout
    first = gpu.backward(*rows, block=64, **sizes)[:2]
    return first, reference.backward(*rows, block=512, **sizes)[:2]

  found, wants = run(q, k, dout)
  for got, want in zip(found, wants, strict=True):
    close(got, want, 4e-3)
  for one, two in zip(found, run(q, k, dout)[0], strict=True):
    np.testing.assert_array_equal(bits(one), bits(two))
