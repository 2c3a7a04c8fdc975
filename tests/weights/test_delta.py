"""The codec: bit-exact, checked, and decodable from its specification."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard

from composer.weights import delta

_NAMES = ('a', 'b/c', 'b/d', 'z')


def _bits(flat):
  return {
    name: (array.dtype.name, array.shape, array.tobytes())
    for name, array in flat.items()
  }


def _random(rng, dtype, shape):
  """Any bit pattern: every NaN, both zeros, infinities, subnormals."""
  size = int(np.prod(shape)) * dtype.itemsize
  return np.frombuffer(rng.bytes(size), np.uint8).view(dtype).reshape(shape)


def _weights(rng, tree):
  return {
    name: _random(rng, delta.DTYPES[dtype], shape)
    for name, (dtype, shape) in tree.items()
  }


def _step(rng, base, share, size):
  """`share` of the words moves by up to `size` units in the last place."""
  new = {}
  for name, array in base.items():
    words = array.reshape(-1).view(f'u{array.itemsize}').copy()
    moved = rng.random(words.shape) < share
    step = rng.integers(-size, size + 1, words.shape).astype(words.dtype)
    words[moved] += step[moved]
    new[name] = words.view(array.dtype).reshape(array.shape)
  return new


def _bf16(seed=0, count=4096):
  rng = np.random.default_rng(seed)
  weights = (0.05 * rng.standard_normal(count)).astype(ml_dtypes.bfloat16)
  return {'w': weights, 's': np.ones((3,), np.float32)}


@st.composite
def _pairs(draw):
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  shapes = st.sampled_from([(), (0,), (1,), (3, 5), (0, 4), (700,), (8, 9, 10)])
  tree = {
    name: (draw(st.sampled_from(sorted(delta.DTYPES))), draw(shapes))
    for name in _NAMES[: draw(st.integers(0, len(_NAMES)))]
  }
  base = _weights(rng, tree)
  if draw(st.booleans()):
    return base, _weights(rng, tree)
  share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.6, 1.0]))
  return base, _step(rng, base, share, draw(st.sampled_from([1, 3, 1000])))


@settings(max_examples=120, deadline=None)
@given(_pairs(), st.sampled_from(['step', 'overwrite']))
def test_round_trip_is_bit_exact(pair, values):
  base, new = pair
  before = _bits(base)
  blob = delta.encode(base, new, values=values)
  got = delta.apply(base, blob)
  assert _bits(got) == _bits(new)
  assert _bits(base) == before
  assert _bits(delta.apply(got, blob)) == _bits(new)  # repeated
  assert _bits(_decode_by_the_book(base, blob)) == _bits(new)
  assert delta.inspect(blob).changed == delta.count_changed(base, new)


def test_many_buckets(monkeypatch):
  """Tensors cut by buckets, buckets that fuse tensors, over threads."""
  monkeypatch.setattr(delta, 'BUCKET_WORDS', 100)
  rng = np.random.default_rng(1)
  tree = {f't{i}': ('bfloat16', (i * 7,)) for i in range(30)}
  tree |= {'f': ('float32', (33, 3)), 'g': ('float32', (2,))}
  base = _weights(rng, tree)
  new = _step(rng, base, 0.1, 2)
  new['t20'] = base['t20']
  blob = delta.encode(base, new)
  assert len(delta.inspect(blob).buckets) > 20
  assert _bits(delta.apply(base, blob)) == _bits(new)
  assert _bits(_decode_by_the_book(base, blob)) == _bits(new)


@pytest.mark.parametrize('share', [0.001, 0.05, 0.2, 0.6, 1.0])
def test_arrays_of_any_layout(share):
  rng = np.random.default_rng(2)
  base = {'w': _random(rng, np.dtype('float32'), (40, 60)).T[::2]}
  new = {'w': _step(rng, base, share, 3)['w'].copy(order='F')}
  got = delta.apply(base, delta.encode(base, new))
  assert _bits(got) == _bits(new)
  with pytest.raises(ValueError, match='read-only'):
    got['w'][0, 0] = 0


def test_half_applied_base_is_completed_by_overwrite():
  base = _bf16()
  new = _step(np.random.default_rng(3), base, 0.3, 2)
  half = {'w': base['w'].copy(), 's': new['s']}
  half['w'][:2000] = new['w'][:2000]
  blob = delta.encode(base, new, values='overwrite')
  assert _bits(delta.apply(half, blob)) == _bits(new)
  with pytest.raises(ValueError, match='wrong base'):
    delta.apply(half, delta.encode(base, new))


@pytest.mark.parametrize('share', [0.0, 0.02, 0.15, 1.0])
def test_every_flip_and_every_cut_is_refused(share):
  base = {'w': _bf16(count=300)['w']}
  blob = delta.encode(base, _step(np.random.default_rng(4), base, share, 1))
  for offset in range(len(blob)):
    broken = bytearray(blob)
    broken[offset] ^= 1 << (offset % 8)
    with pytest.raises(ValueError):
      delta.apply(base, bytes(broken))
    with pytest.raises(ValueError):
      delta.apply(base, blob[:offset])
  with pytest.raises(ValueError):
    delta.apply(base, blob + b'\0')


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_forged_blobs_give_the_result_or_a_value_error(data):
  """Even with the outer digest made good: nothing else is ever returned."""
  base = {'w': _bf16(count=200)['w']}
  share = data.draw(st.sampled_from([0.05, 0.2, 0.9]))
  new = _step(np.random.default_rng(5), base, share, 1)
  body = bytearray(delta.encode(base, new)[:-16])
  for _ in range(data.draw(st.integers(1, 3))):
    offset = data.draw(st.integers(0, len(body) - 1))
    body[offset] = data.draw(st.sampled_from(b'019[]{},"\0\xff~'))
  blob = bytes(body) + xxhash.xxh3_128_digest(body)
  try:
    got = delta.apply(base, blob)
  except ValueError:
    return
  assert _bits(got) == _bits(new)


def test_wrong_base_and_newer_format():
  base, new = _bf16(0), _bf16(1)
  blob = delta.encode(base, new)
  with pytest.raises(ValueError, match='wrong base'):
    delta.apply(_bf16(2), blob)
  with pytest.raises(ValueError, match='tree'):
    delta.apply({'w': base['w']}, blob)
  newer = bytearray(blob)
  newer[len(delta.MAGIC)] += 1
  with pytest.raises(ValueError, match='format 2'):
    delta.apply(base, bytes(newer))


@pytest.mark.parametrize(
  'new, message',
  [
    ({'w': np.zeros(3, np.float32)}, 'different names'),
    ({'w': np.zeros(3, np.float16), 'v': np.zeros(2, np.int8)}, "'w' is"),
    ({'w': np.zeros((3, 1), np.float32), 'v': np.zeros(2, np.int8)}, "'w' is"),
    ({'w': [1.0], 'v': np.zeros(2, np.int8)}, 'not a numpy array'),
    ({'w': np.zeros(3, '>f4'), 'v': np.zeros(2, np.int8)}, 'dtype'),
    ({'w': np.zeros(3, ml_dtypes.int4), 'v': np.zeros(2, np.int8)}, 'pack'),
  ],
)
def test_trees_that_differ_are_named(new, message):
  base = {'w': np.zeros(3, np.float32), 'v': np.zeros(2, np.int8)}
  with pytest.raises(ValueError, match=message):
    delta.encode(base, new)
  with pytest.raises(ValueError, match='values='):
    delta.encode(base, base, values='best')


def test_digests_compose_and_see_everything():
  weights = {'a': np.zeros(4, np.float32), 'b': np.ones(2, np.float16)}
  parts = delta.tensor_digests({'a': weights['a']})
  parts |= delta.tensor_digests({'b': weights['b']})
  whole = delta.combine_digests(delta.describe(weights), parts)
  assert whole == delta.digest(weights)
  others = [
    {'a': weights['a'], 'c': weights['b']},
    {'a': weights['a'].reshape(2, 2), 'b': weights['b']},
    {'a': weights['a'].view(np.int32), 'b': weights['b']},
    {'a': -weights['a'], 'b': weights['b']},  # negative zero
  ]
  assert len({whole, *map(delta.digest, others)}) == 5


@pytest.mark.parametrize(
  'share, bound', [(0.001, 2.0), (0.01, 1.2), (0.1, 1.15), (0.6, 1.25)]
)
def test_size_is_near_the_entropy_of_mask_and_step(share, bound):
  """Uniform changes of one unit in the last place: H(mask) + 1 bit each."""
  count = 400_000
  base = {'w': _bf16(count=count)['w']}
  rng = np.random.default_rng(6)
  words = base['w'].view(np.uint16).copy()
  moved = rng.random(count) < share
  words[moved] += rng.choice([1, 2**16 - 1], count)[moved].astype(np.uint16)
  blob = delta.encode(base, {'w': words.view(ml_dtypes.bfloat16)})
  mask_bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
  assert len(blob) < bound * count * (mask_bits + share) / 8


def _decode_by_the_book(base, blob):
  """A second decoder, from the specification alone; element by element."""
  assert blob[:7] == b'CMPDELT' and blob[7] == 1
  end = 12 + int.from_bytes(blob[8:12], 'little')
  header = json.loads(blob[12:end])
  assert xxhash.xxh3_128(blob[:-16]).digest() == blob[-16:]
  words = {
    width: b''.join(
      base[name].tobytes()
      for name in sorted(base)
      if base[name].itemsize == width
    )
    for width in (1, 2, 4, 8)
  }
  result = {width: bytearray(data) for width, data in words.items()}
  for bucket in header['buckets']:
    streams = []
    for raw, stored in bucket['streams']:
      data = blob[end : end + stored]
      end += stored
      if stored == 0:
        data = bytes(raw)
      elif stored != raw:
        data = zstandard.ZstdDecompressor().decompress(data)
      streams.append(data)
    width = bucket['width']
    positions = list(range(bucket['words'] if streams else 0))
    if bucket['coding'] == 'gaps':
      positions, at, gap = [], -1, 0
      for byte in streams.pop(0):
        gap += byte
        if byte != 255:
          at, gap = at + gap + 1, 0
          positions.append(at)
    elif bucket['coding'] == 'mask':
      bits = streams.pop(0)
      positions = [p for p in positions if bits[p // 8] >> (p % 8) & 1]
    for k, position in enumerate(positions):
      code = sum(plane[k] << 8 * i for i, plane in enumerate(streams))
      low = (bucket['start'] + position) * width
      if header['values'] == 'step':
        step = code // 2 if code % 2 == 0 else -(code + 1) // 2
        old = int.from_bytes(words[width][low : low + width], 'little')
        code = (old + step) % (1 << 8 * width)
      result[width][low : low + width] = code.to_bytes(width, 'little')
  assert end == len(blob) - 16
  flat, offsets = {}, dict.fromkeys(result, 0)
  for name in sorted(base):
    array = base[name]
    low = offsets[array.itemsize]
    data = bytes(result[array.itemsize][low : low + array.nbytes])
    offsets[array.itemsize] += array.nbytes
    flat[name] = np.frombuffer(data, array.dtype).reshape(array.shape)
  return flat
