"""The codec: bit-exact, checked, and decodable from its specification."""

from __future__ import annotations

import pathlib
import sys

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest
import xxhash

from composer.weights import coding
from composer.weights import delta

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import book  # noqa: E402

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


def _adam(rate, count, seed=0):
  """Masters that move by rate x N(0, 1), seen as bfloat16: (base, new)."""
  rng = np.random.default_rng(seed)
  master = (0.05 * rng.standard_normal(count)).astype(np.float32)
  moved = master + np.float32(rate) * rng.standard_normal(count, np.float32)
  return {'w': master.astype(ml_dtypes.bfloat16)}, {
    'w': moved.astype(ml_dtypes.bfloat16)
  }


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


@settings(max_examples=150, deadline=None)
@given(_pairs(), st.sampled_from(['step', 'overwrite']))
def test_round_trip_is_bit_exact(pair, values):
  base, new = pair
  before = _bits(base)
  blob = delta.encode(base, new, values=values)
  got = delta.apply(base, blob)
  assert _bits(got) == _bits(new)
  assert _bits(base) == before
  assert _bits(delta.apply(got, blob)) == _bits(new)  # repeated
  assert _bits(book.decode(base, blob)) == _bits(new)
  assert delta.inspect(blob).changed == delta.count_changed(base, new)


@pytest.mark.parametrize('values', ['step', 'overwrite'])
@pytest.mark.parametrize('rate', [1e-7, 1e-5, 1e-3])
def test_the_book_agrees_at_length(rate, values):
  """Long gaps, horizons, hot classes, a gain that moves."""
  base, new = _adam(rate, 30_000)
  base['frozen'] = base['w'].copy()
  new['frozen'] = base['w'].copy()
  new['frozen'][20_000] += 1
  blob = delta.encode(base, new, values=values)
  assert _bits(delta.apply(base, blob)) == _bits(new)
  assert _bits(book.decode(base, blob)) == _bits(new)


@pytest.mark.parametrize('values', ['step', 'overwrite'])
@pytest.mark.parametrize('dtype', sorted(delta.DTYPES))
def test_every_pattern_of_every_dtype(dtype, values):
  """All words of 8 and 16 bits, to their neighbours and to all others."""
  dtype = delta.DTYPES[dtype]
  width = dtype.itemsize
  kinds = np.arange(min(1 << 8 * width, 1 << 16), dtype=f'u{width}')
  words = kinds << np.array(8 * width - min(16, 8 * width), kinds.dtype)
  rng = np.random.default_rng(1)
  near = words + np.array(1, words.dtype)
  for new in (near, rng.permutation(words), np.where(words % 5, words, near)):
    base, new = {'w': words.view(dtype)}, {'w': new.view(dtype)}
    blob = delta.encode(base, new, values=values)
    assert _bits(delta.apply(base, blob)) == _bits(new)


def test_many_buckets(monkeypatch):
  """Tensors cut by pieces, buckets that fuse tensors, over threads."""
  monkeypatch.setattr(delta, 'PIECE_BYTES', 240)
  monkeypatch.setattr(book, 'PIECE_BYTES', 240)
  rng = np.random.default_rng(1)
  tree = {f't{i}': ('bfloat16', (i * 7,)) for i in range(30)}
  tree |= {'f': ('float32', (33, 3)), 'g': ('float32', (2,))}
  tree |= {'h': ('uint8', (500,)), 'k': ('float16', (50,))}
  tree |= {'\u00e9"\x7f\U0001f600': ('uint8', (3,)), '\uffee': ('uint8', (0,))}
  base = _weights(rng, tree)
  new = _step(rng, base, 0.1, 2)
  new['t20'] = base['t20']
  blobs = [delta.encode(base, new, threads=n) for n in (1, 2, 5)]
  assert blobs[0] == blobs[1] == blobs[2]
  assert len(delta.inspect(blobs[0]).buckets) > 20
  for threads in (1, 4):
    assert _bits(delta.apply(base, blobs[0], threads=threads)) == _bits(new)
  assert _bits(book.decode(base, blobs[0])) == _bits(new)


def test_a_dense_delta_needs_no_base():
  """What depends on nothing of the base is right on any of them."""
  base, new = _bf16(0), _bf16(1)
  rng = np.random.default_rng(9)
  new = {name: _random(rng, a.dtype, a.shape) for name, a in new.items()}
  blob = delta.encode(base, new)
  assert {b.coding for b in delta.inspect(blob).buckets} == {coding.RAW}
  assert _bits(delta.apply(_bf16(2), blob)) == _bits(new)
  assert _bits(book.decode(base, blob)) == _bits(new)


def test_pieces_of_full_size():
  """More than one piece of 8 MiB, and a class that no sample sees."""
  base, new = _adam(1e-7, (delta.PIECE_BYTES // 2) * 2 + 77)
  base['w'][12345] = new['w'][12345] = 3e38
  new['w'][12345] = -3e38
  blob = delta.encode(base, new)
  assert len(delta.inspect(blob).buckets) == 3
  assert _bits(delta.apply(base, blob)) == _bits(new)


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
  # In place, and again in place.
  for _ in range(2):
    assert _bits(delta.apply(half, blob, out=half)) == _bits(new)
  assert _bits(half) == _bits(new)


def test_out_is_written_and_refused():
  base, new = _bf16(0), _bf16(1)
  blob = delta.encode(base, new)
  older = {name: np.zeros_like(array) for name, array in base.items()}
  got = delta.apply(base, blob, out=older)
  assert _bits(older) == _bits(new) and got['w'] is older['w']
  with pytest.raises(ValueError, match='overwrite'):
    delta.apply(base, blob, out=base)
  with pytest.raises(ValueError, match='read-only'):
    delta.apply(base, blob, out=delta.apply(base, blob))
  with pytest.raises(ValueError, match='different names'):
    delta.apply(base, blob, out={'w': older['w']})


@pytest.mark.parametrize('values', ['step', 'overwrite'])
@pytest.mark.parametrize('share', [0.0, 0.02, 0.15, 1.0])
def test_every_flip_and_every_cut_is_refused(share, values):
  base = {'w': _bf16(count=300)['w']}
  new = _step(np.random.default_rng(4), base, share, 1)
  blob = delta.encode(base, new, values=values)
  for offset in range(len(blob)):
    broken = bytearray(blob)
    broken[offset] ^= 1 << (offset % 8)
    with pytest.raises(ValueError):
      delta.apply(base, bytes(broken))
    with pytest.raises(ValueError):
      delta.apply(base, blob[:offset])
  with pytest.raises(ValueError):
    delta.apply(base, blob + b'\0')


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_forged_blobs_give_the_result_or_a_value_error(data):
  """Even with the outer digest made good: nothing else is ever returned."""
  share = data.draw(st.sampled_from([0.05, 0.2, 0.9]))
  rng = np.random.default_rng(5)
  base = {'w': _bf16(count=200)['w'], 'q': _random(rng, np.dtype('u1'), (90,))}
  new = _step(rng, base, share, data.draw(st.sampled_from([1, 5000])))
  values = data.draw(st.sampled_from(['step', 'overwrite']))
  body = bytearray(delta.encode(base, new, values=values)[:-8])
  for _ in range(data.draw(st.integers(1, 3))):
    offset = data.draw(st.integers(0, len(body) - 1))
    body[offset] = data.draw(st.integers(0, 255))
  body = body[: data.draw(st.sampled_from([len(body), len(body) - 1]))]
  blob = bytes(body) + xxhash.xxh3_64_digest(body)
  try:
    got = delta.apply(base, blob)
  except ValueError:
    return
  assert _bits(got) == _bits(new)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(sorted(delta.DTYPES)))
def test_any_payload_decodes_to_something_or_is_refused(payload, dtype):
  """No bound is left, whatever the coder reads."""
  kind = coding.kind_of(delta.DTYPES[dtype])
  rng = np.random.default_rng(7)
  words = _random(rng, np.dtype(f'u{kind.width}'), (500,)).copy()
  for how in (coding.SPARSE, coding.RAW, coding.ZSTD):
    try:
      coding.apply(
        kind, coding.Coded(how, 1, payload), [words], len(payload) % 2
      )
    except ValueError as error:
      assert str(error)


def test_wrong_base_and_other_formats():
  base = _bf16(0)
  new = _step(np.random.default_rng(8), base, 0.1, 1)
  blob = delta.encode(base, new)
  with pytest.raises(ValueError, match='wrong base'):
    delta.apply(_bf16(2), blob)
  with pytest.raises(ValueError, match='tree'):
    delta.apply({'w': base['w']}, blob)
  for version in (1, delta.FORMAT - 1, delta.FORMAT + 1):
    other = bytearray(blob)
    other[len(delta.MAGIC)] = version
    with pytest.raises(ValueError, match=f'format {version}'):
      delta.apply(base, bytes(other))


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
  assert delta.inspect(delta.encode(weights, weights)).result == whole
  others = [
    {'a': weights['a'], 'c': weights['b']},
    {'a': weights['a'].reshape(2, 2), 'b': weights['b']},
    {'a': weights['a'].view(np.int32), 'b': weights['b']},
    {'a': -weights['a'], 'b': weights['b']},  # negative zero
  ]
  assert len({whole, *map(delta.digest, others)}) == 5


def _changes(base, new):
  """What a device would find: (positions, words) of the tensors that differ."""
  found = {}
  for name in base:
    old, now = (
      x[name].reshape(-1).view(f'u{x[name].itemsize}') for x in (base, new)
    )
    (where,) = np.nonzero(old != now)
    if where.size:
      found[name] = where.astype(np.uint32), now[where]
  return found


@settings(max_examples=100, deadline=None)
@given(_pairs(), st.sampled_from(['step', 'overwrite']))
def test_encoding_from_changes_gives_the_same_bytes(pair, values):
  base, new = pair
  changes = _changes(base, new)
  blob = delta.encode(base, new, values=values)
  out = {name: np.zeros_like(array) for name, array in base.items()}
  assert delta.encode_changes(base, changes, out=out, values=values) == blob
  assert _bits(out) == _bits(new)
  assert delta.encode(base, new, changes=changes, values=values) == blob
  # Those that change nothing are left out.
  everywhere = {
    name: (np.arange(a.size), a.reshape(-1).view(f'u{a.itemsize}').copy())
    for name, a in new.items()
  }
  assert delta.encode_changes(base, everywhere, values=values) == blob


def test_changes_over_many_buckets(monkeypatch):
  monkeypatch.setattr(delta, 'PIECE_BYTES', 240)
  base, new = _adam(1e-3, 5000)
  base['b'], new['b'] = np.zeros(400, np.float32), np.ones(400, np.float32)
  got = delta.encode_changes(base, _changes(base, new))
  assert got == delta.encode(base, new)


@pytest.mark.parametrize(
  'name, positions, words, message',
  [
    ('x', [0], np.uint16([1]), 'does not have'),
    ('w', [0.0], np.uint16([1]), 'integers'),
    ('w', [0], np.uint32([1]), 'uint16'),
    ('w', [0, 1], np.uint16([1]), 'integers'),
    ('w', [1, 1], np.uint16([1, 2]), 'ascend'),
    ('w', [2, 1], np.uint16([1, 2]), 'ascend'),
    ('w', [-1, 1], np.uint16([1, 2]), 'ascend'),
    ('w', [0, 4096], np.uint16([1, 2]), 'ascend'),
  ],
)
def test_changes_that_cannot_be_are_refused(name, positions, words, message):
  base = _bf16()
  out = {name: np.zeros_like(array) for name, array in base.items()}
  with pytest.raises(ValueError, match=message):
    delta.encode_changes(base, {name: (np.array(positions), words)}, out=out)
  assert not out['w'].any()


def test_changes_that_contradict_the_new_weights_are_refused():
  base, new = _bf16(0), _bf16(1)
  wrong = {'w': (np.array([0]), ~new['w'][:1].view(np.uint16))}
  with pytest.raises(ValueError, match='differs from the changes'):
    delta.encode(base, new, changes=wrong)


def test_compiling_ahead_takes_any_dtype():
  for dtype in delta.DTYPES:
    delta.compile_for(dtype)


def _entropy(share):
  share = np.clip(share, 1e-12, 1 - 1e-12)
  return -share * np.log2(share) - (1 - share) * np.log2(1 - share)


def _value_bits(steps):
  _, counts = np.unique(steps, return_counts=True)
  return float(-(counts * np.log2(counts / counts.sum())).sum())


@pytest.mark.parametrize(
  'share, bound',
  [(0.001, 1.1), (0.005, 1.05), (0.02, 1.02), (0.1, 1.02), (0.5, 1.02)],
)
def test_uniform_changes_cost_their_entropy(share, bound):
  """Changes that weights say nothing of: H(mask) + 1 bit each."""
  count = 600_000
  base = {'w': _bf16(count=count)['w']}
  rng = np.random.default_rng(6)
  words = base['w'].view(np.uint16).copy()
  moved = rng.random(count) < share
  words[moved] += rng.choice([1, 2**16 - 1], count)[moved].astype(np.uint16)
  blob = delta.encode(base, {'w': words.view(ml_dtypes.bfloat16)})
  assert len(blob) < bound * count * (_entropy(share) + share) / 8


@pytest.mark.parametrize('rate', [1e-7, 1e-6, 3e-6, 1e-5])
def test_changes_of_an_optimizer_cost_less_than_their_entropy(rate):
  base, new = _adam(rate, 1_000_000)
  old, now = base['w'].view(np.uint16), new['w'].view(np.uint16)
  moved = old != now
  alike = len(old) * _entropy(moved.mean()) + _value_bits((now - old)[moved])
  assert 0.0005 < moved.mean() < 0.12
  size = 8 * len(delta.encode(base, new))
  assert size < 0.8 * alike
  # And near what there is to gain from the exponents.
  classes = (old >> 7) & 255
  words = np.bincount(classes)
  changed = np.bincount(classes, moved)
  given = float((words * _entropy(changed / np.maximum(words, 1))).sum())
  assert size < 1.06 * (given + _value_bits((now - old)[moved]))
