"""Packing: every token once, aligned, and back again."""

import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from composer.records import Segment
from composer.rl import pack as p

LAYERS, EXPERTS = 2, 3
FIELDS = {
  'tokens': 'tokens',
  'sampled': 'loss_mask',
  'logprobs': 'behaviour_logprobs',
  'temperatures': 'temperatures',
  'versions': 'versions',
  'experts': 'experts',
  'auditable': 'auditable',
}


def make_segment(rng, size, share=0.4):
  sampled = rng.uniform(size=size) < share

  def at(values, other):
    return np.where(sampled, values, other)

  return Segment(
    tokens=rng.integers(1, 1000, size, np.int32),
    sampled=sampled,
    logprobs=at(-rng.uniform(0.1, 3, size), 0).astype(np.float32),
    temperatures=at(0.7, 1.0).astype(np.float32),
    versions=at(rng.integers(0, 9, size), -1).astype(np.int32),
    experts=rng.integers(-1, 8, (size, LAYERS, EXPERTS)).astype(np.int16),
    auditable=sampled & (rng.uniform(size=size) < 0.5),
    stop_reason='finished',
    parent=-1,
  )


def make_items(seed, sizes, with_reference=False):
  rng = np.random.default_rng(seed)
  return [
    p.Item(
      make_segment(rng, size),
      float(rng.normal()),
      rng.normal(size=size).astype(np.float32) if with_reference else None,
      ('g', i, 0),
    )
    for i, size in enumerate(sizes)
  ]


def do_pack(items, rows=3, length=32, block=8, **kwargs):
  return p.pack(items, rows, length, block, LAYERS, EXPERTS, **kwargs)


sizes_strategy = st.lists(st.integers(1, 32), max_size=30)


@settings(max_examples=40, deadline=None)
@given(
  sizes_strategy,
  st.integers(1, 4),
  st.sampled_from([1, 4, 8, 16, 32]),
  st.booleans(),
  st.integers(0, 99),
)
def test_round_trip_of_every_array(sizes, rows, block, with_reference, seed):
  items = make_items(seed, sizes, with_reference)
  batches, placements = do_pack(items, rows=rows, block=block)
  assert len(placements) == len(items)
  for source, target in FIELDS.items():
    values = [getattr(batch, target) for batch in batches]
    for item, got in zip(items, p.unpack(values, placements), strict=True):
      np.testing.assert_array_equal(got, getattr(item.segment, source))
  for name in ('advantages', 'reference_logprobs', 'positions', 'weights'):
    values = [getattr(batch, name) for batch in batches]
    for item, got in zip(items, p.unpack(values, placements), strict=True):
      segment = item.segment
      want = {
        'advantages': np.where(segment.sampled, np.float32(item.advantage), 0),
        'reference_logprobs': item.reference_logprobs
        if with_reference
        else segment.logprobs,
        'positions': np.arange(len(segment.tokens)),
        'weights': np.where(
          segment.sampled,
          np.float32(1 / sum(i.segment.sampled.sum() for i in items))
          if segment.sampled.any()
          else 0,
          0,
        ),
      }[name]
      np.testing.assert_array_equal(got, want)


@settings(max_examples=60, deadline=None)
@given(sizes_strategy, st.integers(1, 4), st.sampled_from([1, 4, 8, 16]))
def test_geometry(sizes, rows, block):
  items = make_items(0, sizes)
  batches, placements = do_pack(items, rows=rows, block=block)
  owner = np.full((len(batches), rows, 32), -1)
  for index, place in enumerate(placements):
    assert place.start % block == 0
    assert place.length == sizes[index]
    assert place.start + place.length <= 32  # never past its row
    cells = owner[place.batch, place.row, place.start :][: place.length]
    assert (cells == -1).all()  # every cell belongs to one segment
    cells[:] = index
  ids = np.array([b.segment_ids for b in batches]).reshape(owner.shape)
  assert ((ids == 0) == (owner == -1)).all()
  for batch, row in np.ndindex(owner.shape[:2]):
    mine, owners = ids[batch, row], owner[batch, row]
    assert len(set(mine[mine > 0])) == len(set(owners[owners >= 0]))
    numbers = mine[np.flatnonzero(np.diff(mine, prepend=0) * (mine > 0))]
    # Counted from 1 in the order of the columns.
    np.testing.assert_array_equal(numbers, np.arange(1, len(numbers) + 1))
  # First fit: but for the last, no batch could be done without.
  assert len(batches) <= max(1, -(-len(sizes) // rows)) * bool(sizes)


@pytest.mark.parametrize('sizes', [[32] * 3, [8] * 12, [1, 7, 8, 24, 31, 16]])
def test_exact_fit_wastes_no_block(sizes):
  batches, placements = do_pack(make_items(0, sizes))
  assert len(batches) == 1
  spans = [(x.row, x.start) for x in placements]
  assert len(set(spans)) == len(spans)


def test_padding_is_inert():
  batches, _ = do_pack(make_items(0, [5, 9]), rows=4)
  (batch,) = batches
  pad = batch.segment_ids == 0
  assert pad.sum() == 4 * 32 - 14
  assert not batch.weights[pad].any() and not batch.loss_mask[pad].any()
  assert not batch.auditable[pad].any() and not batch.tokens[pad].any()
  assert (batch.experts[pad] == -1).all() and (batch.versions[pad] == -1).all()
  assert (batch.temperatures[pad] == 1).all()


def test_shapes_and_types_are_fixed():
  few, _ = do_pack(make_items(0, [5]), max_kept=4)
  many, _ = do_pack(make_items(1, [30] * 7), max_kept=4)
  assert len(few) == 1 and len(many) == 3
  for batch in many + few:
    for field in dataclasses.fields(batch):
      array, other = getattr(batch, field.name), getattr(few[0], field.name)
      assert array.shape == other.shape and array.dtype == other.dtype
  assert few[0].tokens.shape == (3, 32)
  assert few[0].experts.shape == (3, 32, LAYERS, EXPERTS)
  dtypes = {
    f.name: str(getattr(few[0], f.name).dtype)
    for f in dataclasses.fields(few[0])
  }
  assert dtypes == {
    'tokens': 'int32', 'segment_ids': 'int32', 'positions': 'int32',
    'loss_mask': 'bool', 'behaviour_logprobs': 'float32',
    'reference_logprobs': 'float32', 'temperatures': 'float32',
    'advantages': 'float32', 'experts': 'int16', 'versions': 'int32',
    'weights': 'float32', 'auditable': 'bool', 'kept': 'int32',
  }  # fmt: skip


def test_weights_sum_to_one_or_are_a_constant():
  items = make_items(2, [20, 31, 8, 17])
  sampled = sum(i.segment.sampled.sum() for i in items)
  batches, _ = do_pack(items, rows=1)
  assert len(batches) > 1
  total = sum(b.weights.sum() for b in batches)
  assert total == pytest.approx(1.0, rel=1e-5)
  batches, _ = do_pack(items, rows=1, loss_tokens=2048)
  total = sum(b.weights.sum() for b in batches)
  assert total == pytest.approx(sampled / 2048, rel=1e-5)


def test_a_tool_span_does_not_end_the_episode():
  rng = np.random.default_rng(0)
  segment = make_segment(rng, 20)
  sampled = np.zeros(20, bool)
  sampled[[2, 3, 17, 18]] = True  # two acts around an observation
  segment = dataclasses.replace(segment, sampled=sampled)
  (batch,), _ = do_pack([(segment, 1.5, None)])
  assert np.flatnonzero(batch.loss_mask[0]).tolist() == [2, 3, 17, 18]
  assert (batch.segment_ids[0, :20] == 1).all()
  assert batch.advantages.sum() == pytest.approx(6.0)


def test_nothing_to_pack():
  assert do_pack([]) == ([], [])
  assert p.unpack([], []) == []
  assert p.fill([], 3, 32) == 0.0


def test_same_items_same_batches():
  items = make_items(3, [7, 7, 30, 2, 16, 7])
  (a, places), (b, again) = do_pack(items), do_pack(items)
  assert places == again
  np.testing.assert_array_equal(a[0].tokens, b[0].tokens)


def test_refusals():
  (item,) = make_items(0, [33])
  with pytest.raises(ValueError, match='33 tokens.*rl.sequence_length is 32'):
    do_pack([item])
  with pytest.raises(ValueError, match='multiple of the block'):
    do_pack([], length=30)
  with pytest.raises(ValueError, match='loss_tokens=0'):
    do_pack([], loss_tokens=0)
  (item,) = make_items(0, [4])
  with pytest.raises(ValueError, match='another model'):
    p.pack([item], 3, 32, 8, LAYERS, EXPERTS + 1)
  with pytest.raises(ValueError, match='reference_logprobs'):
    do_pack([item._replace(reference_logprobs=np.zeros(5))])
  with pytest.raises(ValueError, match='not finite'):
    do_pack([item._replace(advantage=float('nan'))])
  empty = make_items(0, [0])
  with pytest.raises(ValueError, match='no tokens'):
    do_pack(empty)


def test_a_step_is_packed_densely():
  rng = np.random.default_rng(0)
  items = make_items(4, rng.integers(40, 150, 150).tolist())
  args = (items, 16, 256, 16, LAYERS, EXPERTS, 2048)
  _, placements = p.pack(*args)
  assert p.fill(placements, 16, 256) > 0.75


@pytest.mark.parametrize(
  ('row', 'message'),
  (
    ((0, 1, 8), 'routes from .* to 8 and the model has 8 experts'),
    ((0, -2, 1), 'routes from -2 '),
    (
      (5, 2, 5),
      r'names an expert twice at token 3 of MoE layer 1: \[5, 2, 5\]',
    ),
  ),
)
def test_routes_that_no_router_chose_are_refused(row, message):
  rng = np.random.default_rng(0)
  segment = make_segment(rng, 6)
  segment.experts[:] = [0, 3, 7]
  segment.experts[2, 0] = -1  # unknown is no expert named three times
  assert do_pack([p.Item(segment, 0.0)], experts=8)[1]
  segment.experts[3, 1] = row
  with pytest.raises(ValueError, match=message):
    do_pack([p.Item(segment, 0.0)], experts=8)


def test_kept_ids_go_with_their_tokens():
  rng = np.random.default_rng(3)
  items, want = [], []
  for size in (5, 17, 9):
    counts = rng.integers(0, 4, size)
    ids = rng.integers(0, 50, counts.sum()).astype(np.int32)
    offsets = np.r_[0, np.cumsum(counts)].astype(np.int32)
    segment = make_segment(rng, size)
    ids[offsets[1:][counts > 0] - 1] = segment.tokens[counts > 0]
    segment = dataclasses.replace(segment, kept_ids=ids, kept_offsets=offsets)
    items.append(p.Item(segment, 0.0))
    want.append(np.split(ids, offsets[1:-1]))
  items.append(p.Item(make_segment(rng, 4), 0.0))  # nothing was cut
  want.append([np.zeros(0, np.int32)] * 4)
  batches, placements = do_pack(items, max_kept=3)
  for lists, got in zip(
    want, p.unpack([b.kept for b in batches], placements), strict=True
  ):
    assert got.shape == (len(lists), 3)
    for ids, row in zip(lists, got, strict=True):
      np.testing.assert_array_equal(row, np.r_[ids, [-1] * (3 - len(ids))])
  assert do_pack(items[-1:])[0][0].kept is None
  with pytest.raises(
    ValueError, match=r'among 3 kept ids and rl.max_kept is 2'
  ):
    do_pack(items, max_kept=2)


def test_a_token_outside_of_its_kept_ids_is_refused():
  segment = dataclasses.replace(
    make_segment(np.random.default_rng(0), 3),
    tokens=np.array([7, 8, 9], np.int32),
    kept_ids=np.array([8, 3, 8], np.int32),
    kept_offsets=np.array([0, 0, 2, 3], np.int32),
  )
  with pytest.raises(ValueError, match='token 9 at 2 that is not among'):
    do_pack([p.Item(segment, 0.0)], max_kept=2)
