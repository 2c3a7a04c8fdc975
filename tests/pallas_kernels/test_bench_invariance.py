"""The rows of a whole layer, of packed segments, and of fixed against tuned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels import bench_invariance
from pallas_kernels import bench_others
from pallas_kernels import bench_rows
from pallas_kernels import bench_shapes
from pallas_kernels import bench_time
from pallas_kernels import dispatch

CASE = bench_shapes.Invariance('toy', bench.norm_shapes.TRAINING[0])


def make_trial(tilings, others, off=0):
  return bench_invariance.Trial(
    draw=lambda seed: (jnp.arange(8.0),),
    fixed=lambda x: 2 * x,
    tilings=tilings,
    others=others,
    some=lambda out, x: (out[::2], 2 * x[::2] + off),
  )


def measure(monkeypatch, trial):
  monkeypatch.setattr(bench_invariance, 'TRIALS', {'toy': lambda shape: trial})
  rows = bench_invariance.rows(CASE)
  assert next(rows) is None  # compiled; and only now is there a device
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  return list(rows)


def test_the_choice_against_the_best_of_the_others(monkeypatch):
  def broken(x):
    raise ValueError('too large')

  trial = make_trial({'cut': lambda x: x + x, 'broken': broken}, {})
  ours, tuned = measure(monkeypatch, trial)
  assert ours.differing == 0 and ours.seconds > 0
  assert (ours.operation, ours.shape) == ('invariance toy', CASE.name)
  assert tuned.who == 'tuned' and 'of 1 others: cut' in tuned.note
  assert float(tuned.note.split()[1].rstrip(';')) >= 1


def test_a_choice_of_one_says_so(monkeypatch):
  (ours,) = measure(monkeypatch, make_trial({}, {}))
  assert ours.note == 'nothing to choose from' and ours.seconds > 0


@pytest.mark.parametrize('off, want', [(0, 7), (1, 11)])
def test_differing_elements_are_counted(monkeypatch, off, want):
  """A tiling must not change them, nor may rows; other blocks may."""
  tilings = {'wrong': lambda x: 3 * x}  # but for 0
  others = {'elsewhere': lambda x: 2 * x + 1}
  ours, _ = measure(monkeypatch, make_trial(tilings, others, off))
  assert ours.differing == want


def test_cost_is_the_median_ratio_of_a_turn(monkeypatch):
  """The device slows down to a half, and the cost is 1.1 all the same."""
  turns = [(1.1 * slow, slow) for slow in (1.0, 2.0, 2.0, 2.0)] + [(9.0, 1.0)]
  monkeypatch.setattr(bench_time, 'in_turns', lambda *_: turns)
  ours, theirs, cost = bench_invariance._in_turns(None, None, ())
  assert (ours, theirs) == (2.2, 2.0) and cost == pytest.approx(1.1)


def kernels(counts, turns, durations, pause=bench_time.PAUSE):
  """Events of calls with so many kernels: once with pauses, then in turns."""
  events, now = [], 0.0
  for singly in (True, *[False] * turns):
    for count, each in zip(counts, durations, strict=True):
      for _ in range(count):
        events.append({'ts': now, 'dur': each})
        now += each + 5.0  # microseconds
      now += pause * 1e6 if singly else 0.0
  return events


def test_kernels_are_told_apart_by_turns():
  events = kernels((2, 3), 4, (10.0, 20.0))
  found = bench_time._by_turn(events, 2, 4)
  assert len(found) == 4
  assert found[0] == pytest.approx((2e-5, 6e-5))
  assert bench_time._by_turn(events[:-1], 2, 4) is None  # one was not seen
  assert bench_time._by_turn([], 2, 4) is None


def test_without_kernels_both_are_clocked(monkeypatch):
  monkeypatch.setattr(bench_time, '_traced', lambda run: run() or [])
  monkeypatch.setattr(bench_time, 'TURNS', (0.0, 3, 3))
  found = bench_time.in_turns([lambda: 0, lambda: 1], lambda out: out)
  assert np.shape(found) == (3, 2)


def test_there_is_a_trial_for_every_shape():
  for case in bench_shapes.INVARIANCE:
    assert case.operation in bench_invariance.TRIALS


def test_a_layer_on_cpu():
  """A combination that is wrong would show against float32."""
  rows = list(bench._of('bench_moe', 'layer')(bench_shapes.LAYERS[2]))
  assert rows[0] is None
  assert [row.who for row in rows[1:]] == ['ours', 'xla']
  assert rows[1].error < bench.TOLERANCE and rows[2].seconds > 0
  number = next(
    i
    for i, case in enumerate(bench_shapes.INVARIANCE)
    if case.operation == 'norm'
  )
  _, row = bench.rows_of('invariance', number)
  assert row.seconds > 0 and row.differing is None


def test_segments_are_uneven_and_start_at_blocks():
  case = bench_shapes.ATTENTION[-1]
  own, ids, starts = case.shape, case.segment_ids(), case.starts()
  assert ids.shape == starts.shape == (own.tokens,)
  assert len(set(np.bincount(ids)[1:])) > 3 and ids[-1] == case.segments
  np.testing.assert_array_equal(starts[1:] > starts[:-1], ids[1:] > ids[:-1])
  assert not (starts % own.block).any()
  assert case.flops < own.flops / 4
  whole = bench_shapes.Attention(own)
  assert whole.flops == own.flops and not whole.starts().any()
  less = dataclasses.replace(bench.small(case), segments=99)
  assert len(set(less.segment_ids())) == less.shape.tokens // less.shape.block


def test_segments_are_checked_and_so_are_their_gradients(monkeypatch):
  """Keys of the segment before, seen too, are an error of both."""
  found, compiled = {}, bench_rows.ahead

  def ahead(programs, untimed=()):
    del programs['alone']  # elements that differ, which a GPU has none of
    # Shapes came from other traces than programs do, as where tracing imports
    # what traces depend on.
    jax.clear_caches()
    found.update(compiled(programs, untimed))
    return found

  monkeypatch.setattr(bench_rows, 'ahead', ahead)
  case = bench.small(bench_shapes.ATTENTION[-1])
  assert next(bench._of('bench_attention', 'packed')(case)) is None
  q, k, v, dout, ids = bench_rows.draw(found['draw'])
  for own, right in ((ids, True), (jnp.ones_like(ids), False)):
    out = found['ours'](q, k, v, own)
    _, saved = found['saved'](q, k, v, own)
    gradients = found['gradient'](saved, dout)
    errors = (
      found['error'](q, k, v, out),
      found['gradient error'](q, k, v, dout, gradients),
    )
    for error in map(float, errors):
      assert (error < bench.TOLERANCE) is right


def test_other_libraries_are_asked_on_accelerators_only():
  assert bench_others.tokamax() is None
  row = bench.Row('attention', 'toy', 'tokamax')
  assert not list(bench_others.attention(row, None, None, None, 1.0))
  assert not bench_others.grouped()
