"""Candidates for tunings: how they are tried, and which one is written."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench
from pallas_kernels import bench_rows
from pallas_kernels import bench_tune
from pallas_kernels import dispatch
from pallas_kernels import mosaic
from pallas_kernels.bench_rows import Row
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import gpu_few
from pallas_kernels.token_logprob import gpu as logprob_gpu
from pallas_kernels.token_logprob import gpu_scored

A, B = dict(stages=2), dict(stages=3)


def case(name='64 rows', candidates=(A, B), most=0, **changes):
  def draw(seed):
    return (jnp.full((8, 8), seed, jnp.float32),)

  made = bench_tune.Case(
    'matmul', 'few 8 8', name, draw, lambda x: x + 1, candidates, most
  )
  return dataclasses.replace(made, **changes)


def label(entry):
  return bench_tune.words(entry)


def test_an_entry_holds_while_it_is_tried(monkeypatch):
  table = {'matmul': {'kept': A, 'few 8 8': A}}
  monkeypatch.setattr(dispatch, 'tunings', lambda: table)
  with dispatch.tuned('matmul', 'few 8 8', B):
    assert dispatch.tuning('matmul') == {'kept': A, 'few 8 8': B}
    assert dispatch.tuning('attention') == {}
    with dispatch.tuned('matmul', 'few 8 8', None):
      assert dispatch.tuning('matmul') == {'kept': A}
    assert dispatch.tuning('matmul')['few 8 8'] == B
  assert dispatch.tuning('matmul') == table['matmul']


def test_tunings_are_those_of_the_device_that_is_lowered_for():
  """Whatever was asked before, in the same process, for another one."""
  seen = []

  def run(x):
    seen.append(dispatch.tunings())
    return x

  before = dispatch.tunings()
  mosaic.lower(run, jax.ShapeDtypeStruct((8,), jnp.float32))
  path = dispatch.TUNINGS / 'h100.json'
  assert seen == [json.loads(path.read_text(encoding='utf-8'))]
  assert dispatch.tunings() == before


def test_candidates_are_traced_and_compared(monkeypatch):
  """Each under its own entry, the present one too; what differs is said."""
  monkeypatch.setattr(dispatch, 'tunings', lambda: {'matmul': {'few 8 8': B}})

  def run(x):
    own = dispatch.tuning('matmul').get('few 8 8', {})
    if own.get('stages') == 9:
      raise ValueError('nine stages do not fit')
    # The second adds something that the others do not.
    return x + (2.0 if own.get('stages') == 2 else 1.0)

  nine = dict(stages=9)
  one = case(run=run, candidates=(A, nine))
  rows = [row for row in bench_tune.rows(one) if row is not None]
  found = {row.who: row for row in rows}
  assert set(found) == {bench_tune.DEFAULT, label(A), label(B), label(nine)}
  assert 'do not fit' in found[label(nine)].note
  assert found[label(nine)].seconds is None
  assert found[label(A)].differing == 64
  assert found[label(B)].differing == 0
  assert found[bench_tune.DEFAULT].seconds > 0
  assert bench.fault(found[label(A)]) and not bench.fault(found[label(B)])
  assert bench.fault(found[label(nine)]) is None  # it is only not taken


def choice(sizes, ratios, now=None, most=True):
  cases = [case(f'{n} rows', most=n if most else 0) for n in sizes]
  return bench_tune.choose(cases, ratios, now)


def test_the_best_is_taken_as_far_as_it_gains():
  both = [{label(A): 0.5, label(B): 0.6}, {label(A): 1.5, label(B): 0.7}]
  assert choice((16, 64), both) == B | dict(most=64)
  far = [{label(A): 0.5, label(B): 0.9}, {label(A): 1.5, label(B): 0.97}]
  assert choice((16, 64), far) == A | dict(most=16)
  assert choice((16, 64), [{label(A): 0.99, label(B): 1.2}] * 2) is None
  # One that failed at a size is not for it.
  assert choice((16, 64), [{label(A): 0.5}, {}]) == A | dict(most=16)


def test_what_is_there_stays_unless_it_is_beaten():
  now = A | dict(most=16)
  close = [{label(A): 0.5, label(B): 0.499}]
  assert choice((16,), close, now) == now
  assert choice((16,), [{label(A): 0.5, label(B): 0.4}], now)['stages'] == 3
  assert choice((16,), [{label(A): 1.1, label(B): 1.0}], now) is None
  assert choice((16,), [{label(B): 0.5}], most=False) == B


def rows_of(one, **seconds):
  return [
    Row('tune matmul', f'{one.key} | {one.name}', who, seconds=value)
    for who, value in seconds.items()
  ]


def test_tunings_change_where_something_was_measured(monkeypatch):
  before = {'matmul': {'few 8 8': A, 'other': A}, 'norm': {'kept': B}}
  monkeypatch.setattr(dispatch, 'tunings', lambda: before)
  one, other = case(), case(key='few 16 8')
  found = rows_of(one, **{'default': 1.0, label(A): 0.9, label(B): 0.5})
  after = bench_tune.tunings(found, [one, other])
  assert after == {
    'matmul': {'few 8 8': B, 'other': A},
    'norm': {'kept': B},
  }
  assert before['matmul']['few 8 8'] == A  # not changed in place
  slow = rows_of(one, **{'default': 1.0, label(A): 1.1})
  assert bench_tune.tunings(slow, [one])['matmul'] == {'other': A}
  # What differs is never taken, however fast; without a default nothing is.
  wrong = [
    dataclasses.replace(row, differing=3 if row.who == label(B) else 0)
    for row in found
  ]
  assert bench_tune.tunings(wrong, [one])['matmul']['few 8 8'] == A
  assert bench_tune.tunings(found[1:], [one]) == before
  assert json.loads(bench_tune.text(after)) == after


def test_files_are_written_as_the_tuner_writes():
  for path in dispatch.TUNINGS.glob('*.json'):
    text = path.read_text()
    assert bench_tune.text(json.loads(text)) == text, path


def test_every_case_says_what_it_is():
  names = set()
  for operation, cases in bench_tune.cases().items():
    for one in cases:
      assert operation == bench_tune.PREFIX + one.operation
      name = one.operation, one.key, one.name
      assert name not in names
      names.add(name)
      assert len(one.labelled()) > 1
      arguments = jax.eval_shape(one.draw, bench_rows.SEED)
      size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
      assert size * bench_tune.COPIES >= bench_tune.CACHE
      if one.most:
        assert len(arguments[0]) == one.most


@pytest.mark.parametrize(
  ('operation', 'module', 'name'),
  [
    ('grouped_matmul', gpu_few, 'grouped_matmul'),
    ('token_logprob', gpu_scored, '_launch'),
  ],
)
def test_an_entry_is_what_is_lowered(operation, module, name, monkeypatch):
  """So that candidates are not timings of one and the same kernel.

  The text of a module would not show it: two of the same kernel differ.
  """
  taken = []
  launch = getattr(module, name)

  def spy(*arguments, **options):
    taken.append(options.get('tiles', arguments[0]))
    return launch(*arguments, **options)

  monkeypatch.setattr(module, name, spy)
  one = bench_tune.cases()[bench_tune.PREFIX + operation][0]
  arguments = jax.eval_shape(one.draw, bench_rows.SEED)
  for candidate in one.candidates[:4]:
    taken.clear()
    mosaic.lower(bench_tune._with(one, candidate), *arguments)
    (cut,) = map(dataclasses.asdict, taken)
    cut |= cut.pop('tiles', {})
    assert {key: cut[key] for key in candidate} == candidate


def test_candidates_fit_into_shared_memory():
  """One that never does would be tried, and refused, at every size."""
  for candidate in bench_tune.SCORED:
    change = {k: v for k, v in candidate.items() if k != 'direct'}
    tiles = dataclasses.replace(logprob_gpu.TILES, **change)
    cut = gpu_scored.Cut(tiles, candidate['direct'])
    gpu_scored._launch(cut, (256, 576, 4096), jnp.bfloat16, False)
  for candidate in bench_tune.MANY:
    work = gpu.Work(gpu.Tiles(**candidate), 7168, 2048, 132)
    gpu._scratch(work, jnp.bfloat16, jnp.bfloat16)
  for candidate in (*bench_tune.FEW, *bench_tune.FEW_OF_GROUPS):
    few = gpu_few.Few(**candidate)
    assert gpu_few.Work(few, 64, 7168, 2048, True).stages >= 2


def test_a_bad_request_is_refused(tmp_path, monkeypatch):
  path = tmp_path / 'tunings.json'
  with pytest.raises(ValueError, match='the default device is a cpu'):
    bench.tune(path)
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  with pytest.raises(ValueError, match="'norm' has no tunings; grouped_matmul"):
    bench.tune(path, ['norm'])
  with pytest.raises(ValueError, match='no such folder'):
    bench.tune(tmp_path / 'none' / 'tunings.json')
  assert not path.exists()


def test_what_was_found_is_written(tmp_path, monkeypatch, capsys):
  one = case()
  monkeypatch.setattr(bench_tune, 'cases', lambda: {'tune matmul': (one,)})
  monkeypatch.setattr(dispatch, 'tunings', lambda: {})
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  found = rows_of(one, **{'default': 1.0, label(A): 0.5, label(B): 0.6})

  def run(names, json_path, *, resume, keep, seed):
    assert names == ['tune matmul'] and not resume and seed == 3
    keep += found
    return 0

  monkeypatch.setattr(bench, 'run', run)
  path = tmp_path / 'tunings.json'
  assert bench.tune(path, ['matmul'], seed=3) == 0
  assert json.loads(path.read_text()) == {'matmul': {'few 8 8': A}}
  assert f'wrote {path}' in capsys.readouterr().out
