"""Which implementation runs, what it warns of, and the benchmark's table."""

import dataclasses
import json
import warnings

import pytest

from pallas_kernels import bench
from pallas_kernels import bench_time
from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import gpu


def test_a_named_one_runs_or_says_why_not():
  assert dispatch.choose('op', 'reference', gpu='never') == 'reference'
  assert dispatch.choose('op', 'gpu_interpret', gpu=None) == 'gpu_interpret'
  with pytest.raises(ValueError, match="op cannot run as 'gpu': odd size"):
    dispatch.choose('op', 'gpu', gpu='odd size')
  with pytest.raises(ValueError, match='default device is a cpu'):
    dispatch.choose('op', 'gpu', gpu=None)
  with pytest.raises(ValueError, match='there are reference, gpu, tpu'):
    dispatch.choose('op', 'triton', gpu=None)


def test_none_takes_the_best_and_warns_once_of_a_slow_one(monkeypatch):
  assert dispatch.choose('op', None, gpu='odd size') == 'reference'
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  monkeypatch.setattr(dispatch, '_missing', lambda device: None)
  assert dispatch.choose('op', None, gpu=None) == 'gpu'
  with pytest.warns(UserWarning, match='op runs through XLA.*: odd size'):
    assert dispatch.choose('op', None, gpu='odd size') == 'reference'
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert dispatch.choose('op', None, gpu='odd size') == 'reference'


def test_tunings_are_tiles_that_fit():
  for path in dispatch.TUNINGS.glob('*.json'):
    for key, values in json.loads(path.read_text())['grouped_matmul'].items():
      tiles = gpu.Tiles(**values)
      gpu._scratch(gpu.Work(tiles, 7168, 2048, 132), 'bfloat16', 'bfloat16')
      assert key.split()[0] in ('rows', 'weights')


def test_bench_on_cpu(tmp_path, capsys):
  path = tmp_path / 'kernels.json'
  assert bench.run(['matmul', 'norm', 'delta'], path) == 0
  rows = json.loads(path.read_text())['rows']
  assert {row['who'] for row in rows} == {'ours', 'xla'}
  assert all(row['seconds'] > 0 for row in rows)
  printed = capsys.readouterr().out
  assert 'square-8192' in printed and 'error' in printed
  with pytest.raises(ValueError, match='no operation'):
    bench.run(['sort'])


def test_a_wrong_result_fails_the_benchmark(monkeypatch, capsys):
  wrong = [bench.Row('op', 'shape', 'ours', seconds=1.0, error=0.1)]
  case = (lambda shape: iter(wrong), bench.norm_shapes.TRAINING[:1])
  monkeypatch.setattr(bench, 'CASES', {'op': case})
  assert bench.run() == 1
  assert 'wrong: op at shape' in capsys.readouterr().out


def test_what_was_measured_stays(monkeypatch, capsys, tmp_path):
  def rows(shape):
    yield bench.Row('op', shape.name, 'ours', seconds=1.0)
    raise KeyboardInterrupt

  path = tmp_path / 'kernels.json'
  case = (rows, bench.norm_shapes.TRAINING[:1])
  monkeypatch.setattr(bench, 'CASES', {'op': case})
  with pytest.raises(KeyboardInterrupt):
    bench.run(None, path)
  assert [row['who'] for row in json.loads(path.read_text())['rows']] == [
    'ours'
  ]
  assert 'op' in capsys.readouterr().out


def test_device_time_is_that_of_kernels_on_streams():
  def named(kind, name, pid, tid=0):
    return {'name': kind, 'args': {'name': name}, 'pid': pid, 'tid': tid}

  events = [
    named('process_name', '/device:GPU:0', 1),
    named('process_name', '/host:CPU', 2),
    named('thread_name', 'Stream #7(compute)', 1, 5),
    named('thread_name', 'Steps', 1, 6),
    named('thread_name', 'Stream of a host', 2, 5),
  ]
  for pid, tid, took in ((1, 5, 3.0), (1, 5, 4.0), (1, 6, 9.0), (2, 5, 9.0)):
    events.append(dict(ph='X', name='k', pid=pid, tid=tid, dur=took))
  found = bench_time._on_streams(events)
  assert [one['dur'] for one in found] == [3.0, 4.0]
  assert bench_time.device_seconds(lambda: 0, lambda out: out) is None


def test_every_shape_cuts_down():
  for _, cases in bench.CASES.values():
    for shape in cases:
      less = bench.small(shape)
      assert dataclasses.asdict(less).keys() == dataclasses.asdict(shape).keys()
      assert less.name == shape.name
