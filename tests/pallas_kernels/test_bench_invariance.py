"""The rows of a whole layer, and of the fixed choice against free tuning."""

import jax.numpy as jnp
import pytest

from pallas_kernels import bench
from pallas_kernels import bench_invariance
from pallas_kernels import bench_others
from pallas_kernels import bench_shapes
from pallas_kernels import bench_time
from pallas_kernels import dispatch

CASE = bench_shapes.Invariance('toy', bench.norm_shapes.TRAINING[0])


def make_trial(tilings, others, off=0):
  x = jnp.arange(8.0)
  return bench_invariance.Trial(
    fixed=lambda x: 2 * x,
    arguments=(x,),
    tilings=tilings,
    others=others,
    some=lambda out: (out[::2], 2 * x[::2] + off),
  )


def measure(monkeypatch, trial):
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  monkeypatch.setattr(bench_invariance, 'TRIALS', {'toy': lambda shape: trial})
  return list(bench_invariance.rows(CASE))


def test_the_choice_against_the_best_of_the_others(monkeypatch):
  def broken(x):
    raise ValueError('too large')

  trial = make_trial({'cut': lambda x: x + x, 'broken': broken}, {})
  ours, tuned = measure(monkeypatch, trial)
  assert ours.differing == 0 and ours.seconds > 0
  assert (ours.operation, ours.shape) == ('invariance toy', CASE.name)
  assert tuned.who == 'tuned' and 'of 1 others: cut' in tuned.note
  assert float(tuned.note.split()[1].rstrip(';')) >= 1


@pytest.mark.parametrize('alone', [1e-5, None])
def test_both_are_measured_alike(monkeypatch, alone):
  """A launch that took long once must not be held against one of them."""
  clocks = iter(3 * [9e-4, 1e-4])
  monkeypatch.setattr(bench_time, 'seconds', lambda *_: next(clocks))
  monkeypatch.setattr(bench_time, 'device_seconds', lambda *_: alone)
  got = bench_invariance._in_turns(None, None, ())
  assert got == ((alone, alone) if alone else (9e-4, 1e-4))


@pytest.mark.parametrize('off, want', [(0, 7), (1, 11)])
def test_differing_elements_are_counted(monkeypatch, off, want):
  """A tiling must not change them, nor may rows; other blocks may."""
  tilings = {'wrong': lambda x: 3 * x}  # but for 0
  others = {'elsewhere': lambda x: 2 * x + 1}
  ours, _ = measure(monkeypatch, make_trial(tilings, others, off))
  assert ours.differing == want


def test_there_is_a_trial_for_every_shape():
  for case in bench_shapes.INVARIANCE:
    assert case.operation in bench_invariance.TRIALS


def test_a_layer_on_cpu():
  """A combination that is wrong would show against float32."""
  rows = list(bench._of('bench_moe', 'layer')(bench_shapes.LAYERS[2]))
  assert [row.who for row in rows] == ['ours', 'xla']
  assert rows[0].error < bench.TOLERANCE and rows[1].seconds > 0
  (norm,) = (c for c in bench_shapes.INVARIANCE if c.operation == 'norm')
  (row,) = bench._of('bench_invariance', 'rows')(norm)
  assert row.seconds > 0 and row.differing is None


def test_other_libraries_are_asked_on_accelerators_only():
  assert bench_others.tokamax() is None
  row = bench.Row('attention', 'toy', 'tokamax')
  assert not list(bench_others.attention(row, None, None, None, 1.0))
