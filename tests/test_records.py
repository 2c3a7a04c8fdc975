"""Records refuse what would be trained on wrongly, and name draws by content."""

import dataclasses

import numpy as np
import pytest

from composer import records


def segment(**changed):
  fields = {
    'tokens': np.arange(5, dtype=np.int32),
    'sampled': np.array([0, 0, 1, 1, 0], bool),
    'logprobs': np.array([0, 0, -1, -2, 0], np.float32),
    'temperatures': np.ones(5, np.float32),
    'versions': np.array([-1, -1, 3, 3, -1], np.int32),
    'experts': np.zeros((5, 2, 2), np.int16),
    'auditable': np.array([0, 0, 1, 1, 0], bool),
    'stop_reason': 'finished',
    'parent': -1,
  }
  return records.Segment(**{**fields, **changed})


ARRAYS = [
  field.name
  for field in dataclasses.fields(records.Segment)
  if field.name not in ('tokens', 'stop_reason', 'parent')
  and not field.name.startswith('kept_')
]


@pytest.mark.parametrize('name', ARRAYS)
@pytest.mark.parametrize('length', [0, 4, 6])
def test_arrays_are_aligned_with_the_tokens(name, length):
  whole = getattr(segment(), name)
  with pytest.raises(ValueError, match=f'{name} has {length} entries for 5'):
    segment(**{name: np.resize(whole, (length, *whole.shape[1:]))})


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('at', [0, 2])
def test_a_sentinel_is_not_a_logprob(value, at):
  logprobs = segment().logprobs.copy()
  logprobs[at] = value
  with pytest.raises(ValueError, match=rf'not finite at positions \[{at}\]'):
    segment(logprobs=logprobs)


@pytest.mark.parametrize(
  'offsets', [[0, 2], [0, 0, 0, 2, 2], [0, 0, 2, 1, 2, 2], [1, 1, 1, 2, 2, 2]]
)
def test_kept_ids_belong_to_tokens(offsets):
  ids = np.array([3, 7], np.int32)
  with pytest.raises(ValueError, match=r'must rise from 0 to the 2 kept ids'):
    segment(kept_ids=ids, kept_offsets=np.array(offsets, np.int32))
  with pytest.raises(ValueError, match='give both or none'):
    segment(kept_ids=ids)
  segment(kept_ids=ids, kept_offsets=np.array([0, 0, 0, 2, 2, 2], np.int32))


def test_records_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    segment().parent = 0


def test_a_group_is_named_by_what_it_is():
  ids = {
    records.group_id(task, epoch, draw)
    for task in ('a', 'b', 'a/1')
    for epoch in range(3)
    for draw in range(30)
  }
  assert len(ids) == 3 * 3 * 30
  assert records.group_id('a', 1, 2) == records.group_id('a', 1, 2)
  assert all(id.isalnum() for id in ids), 'an id is a part of a key'
