"""Mid-training data: every token once, in place, and the same after a restart."""

from __future__ import annotations

import json
import pathlib
import sysconfig

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from composer import data

LENGTH, ALIGN = 32, 8


def make_sessions(count=40, seed=0, longest=LENGTH, tag=1000):
  """Sessions whose tokens name them: tag * (session + 1) + position."""
  rng = np.random.default_rng(seed)
  sessions = []
  for i, n in enumerate(rng.integers(2, longest + 1, count)):
    tokens = (tag * (i + 1) + np.arange(n)).astype(np.int32)
    sessions.append((tokens, rng.random(n) < 0.3))
  return sessions


def encode(text):
  return list(text.encode())


def dataset(sessions=None, files=None, **changes):
  arguments = dict(
    batch_size=4,
    sequence_length=LENGTH,
    python_share=0.25,
    align=ALIGN,
    seed=0,
  )
  arguments.update(changes)
  return data.midtraining(
    make_sessions() if sessions is None else sessions,
    [('a.py', 'x = 1\n' * 200), ('b.py', 'y = 2\n' * 100)]
    if files is None
    else files,
    encode,
    **arguments,
  )


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def assert_same(a, b):
  assert len(a) == len(b)
  for x, y in zip(a, b, strict=True):
    assert x.keys() == y.keys()
    for name in x:
      np.testing.assert_array_equal(x[name], y[name])


def segments(row):
  """(start, tokens, mask) of each segment of a row."""
  for k in range(1, row['segment_ids'].max(initial=0) + 1):
    at = np.flatnonzero(row['segment_ids'] == k)
    assert (np.diff(at) == 1).all()
    yield at[0], row['tokens'][at], row['loss_mask'][at], row['positions'][at]


def rows_of(batches):
  for batch in batches:
    for i in range(len(batch['tokens'])):
      yield {name: value[i] for name, value in batch.items()}


@pytest.mark.parametrize('sampled_only', [False, True])
def test_every_session_whole_once_an_epoch(sampled_only):
  """Packing loses, splits and repeats nothing, and masks what it must."""
  sessions = make_sessions()
  stream = iter(dataset(sessions, python_share=0.0, sampled_only=sampled_only))
  seen = []
  for row in rows_of(take(stream, 40)):
    pad = row['segment_ids'] == 0
    assert not row['tokens'][pad].any() and not row['loss_mask'][pad].any()
    for start, tokens, mask, positions in segments(row):
      index = tokens[0] // 1000 - 1
      want, sampled = sessions[index]
      np.testing.assert_array_equal(tokens, want)
      np.testing.assert_array_equal(positions, np.arange(len(want)))
      assert start % ALIGN == 0
      expected = sampled.copy() if sampled_only else np.ones(len(want), bool)
      expected[0] = False
      np.testing.assert_array_equal(mask, expected)
      seen.append(index)
  # 32 rows are open at once, so the order is that of the epochs up to those.
  counts = np.bincount(seen, minlength=len(sessions))
  assert counts.min() >= 1 and counts.max() - counts.min() <= 3


def test_epochs_are_permutations_of_the_sessions():
  sessions = make_sessions(count=64, longest=8)
  stream = iter(
    data.rows(data.SessionSource(sessions), 8, align=8, seed=1, packing_bins=1)
  )
  order = [next(stream)['tokens'][0] // 1000 for _ in range(192)]
  epochs = [order[i : i + 64] for i in (0, 64, 128)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(1, 65))
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_source_text_is_cut_and_covered():
  text = ''.join(f'name_{i} = {i}\n' for i in range(2000))
  source = data.text_source([('a.py', text)], encode)
  assert ''.join(source.pieces) == text
  assert len(source) > 4
  assert all(len(piece) <= 4096 for piece in source.pieces)
  assert all(piece.endswith('\n') for piece in source.pieces)
  stream = iter(data.rows(source, LENGTH, align=ALIGN, seed=0, packing_bins=1))
  pieces = [next(stream) for _ in range(len(text) // LENGTH // 2)]
  for row in pieces:
    tokens = row['tokens'][row['segment_ids'] == 1]
    assert bytes(tokens.astype(np.uint8)).decode() in text
  # A file of one endless line is a piece of its own.
  assert len(data.text_source([('b.py', 'x' * 9000)], encode)) == 1
  assert len(data.text_source([('c.py', '')], encode)) == 0


def test_shares_and_fixed_shapes():
  batches = take(iter(dataset()), 30)
  python = sessions = 0
  for batch in batches:
    assert set(batch) == {'tokens', 'segment_ids', 'positions', 'loss_mask'}
    for name, value in batch.items():
      assert value.shape == (4, LENGTH)
      assert value.dtype == (bool if name == 'loss_mask' else np.int32)
    is_python = (batch['tokens'].max(axis=1) < 1000).sum()
    python, sessions = python + is_python, sessions + 4 - is_python
  assert python == 30 and sessions == 90


@pytest.mark.parametrize('share', [0.0, 1.0])
def test_one_source_alone(share):
  needed = {'sessions': []} if share else {'files': []}
  batch = next(iter(dataset(python_share=share, **needed)))
  assert (batch['tokens'].max() < 1000) == bool(share)


def test_a_function_of_the_seed():
  first = take(iter(dataset()), 12)
  assert_same(first, take(iter(dataset()), 12))
  other = take(iter(dataset(seed=1)), 12)
  assert any(
    (a['tokens'] != b['tokens']).any()
    for a, b in zip(first, other, strict=True)
  )


@hypothesis.settings(deadline=None, max_examples=6)
@hypothesis.given(
  stop=st.integers(0, 40), share=st.sampled_from([0.0, 0.25, 1.0])
)
def test_resumes_where_it_was(stop, share):
  """Case 31: no batch skipped or repeated, epoch ends included."""
  whole = take(iter(dataset(python_share=share)), 50)
  stream = iter(dataset(python_share=share))
  take(stream, stop)
  state = json.loads(json.dumps(stream.get_state()))
  take(stream, 3)  # what the dead process read beyond its checkpoint
  resumed = iter(dataset(python_share=share))
  resumed.set_state(state)
  assert_same(take(resumed, 50 - stop), whole[stop:])
  # And once more, from a resumed one.
  again = iter(dataset(python_share=share))
  again.set_state(state)
  take(again, 2)
  third = iter(dataset(python_share=share))
  third.set_state(json.loads(json.dumps(again.get_state())))
  assert_same(take(third, 4), take(again, 4))


def test_python_source_is_the_standard_library():
  files = data.python_source(200_000)
  assert files == data.python_source(200_000)
  names = [name for name, _ in files]
  assert names == sorted(names) and len(set(names)) == len(names)
  sizes = [len(text.encode()) for _, text in files]
  assert 150_000 < sum(sizes) <= 200_000 and min(sizes) > 0
  banned = {'test', 'tests', 'site-packages', 'dist-packages'}
  assert not any(banned & set(name.split('/')) for name in names)
  top = pathlib.Path(sysconfig.get_paths()['stdlib'])
  name, text = files[0]
  assert (top / name).read_bytes().decode() == text


def test_python_source_skips_what_it_must(tmp_path):
  (tmp_path / 'tests').mkdir()
  (tmp_path / 'tests' / 'a.py').write_text('tested = 1\n')
  (tmp_path / 'latin.py').write_bytes(b'name = "\xe9"\n')
  (tmp_path / 'empty.py').write_text('')
  (tmp_path / 'gone.py').symlink_to(tmp_path / 'nowhere.py')
  (tmp_path / 'big.py').write_text('x = 1\n' * 1000)
  (tmp_path / 'good.py').write_text('y = 2\n')
  (tmp_path / 'notes.txt').write_text('no')
  found = data.python_source(100, root=str(tmp_path))
  assert found == [('good.py', 'y = 2\n')]
  with pytest.raises(ValueError, match='source_bytes=5 bytes'):
    data.python_source(5, root=str(tmp_path))


@pytest.mark.parametrize(
  'changes,named',
  [
    ({'python_share': 1.5}, 'python_share=1.5'),
    ({'python_share': -0.1}, 'python_share=-0.1'),
    ({'sequence_length': 36}, 'sequence_length=36'),
    ({'sequence_length': 24}, 'session of 32 tokens'),
    ({'batch_size': 0}, 'batch_size=0'),
    ({'sessions': []}, 'no documents'),
    ({'files': []}, 'no documents'),
  ],
)
def test_refusals(changes, named):
  if changes.get('sequence_length') == 24:
    changes = {**changes, 'sessions': make_sessions(longest=32) * 2}
  with pytest.raises(ValueError, match=named):
    dataset(**changes)


def test_a_mask_of_another_length_is_refused():
  bad = [(np.arange(1, 9, dtype=np.int32), np.ones(7, bool))]
  with pytest.raises(ValueError, match='session 0 has 8 tokens'):
    next(iter(dataset(bad, python_share=0.0)))


def test_mixture_weights_are_checked():
  packed = data.rows(
    data.SessionSource(make_sessions()), LENGTH, align=ALIGN, seed=0
  )
  for weight in (0.0, -1.0):
    with pytest.raises(ValueError, match='mixture weights'):
      data.mixture({'a': (packed, weight)}, 4)
