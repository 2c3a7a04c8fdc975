"""Which implementation runs, what it warns of, and the benchmark's table."""

import dataclasses
import functools
import io
import json
import warnings

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench
from pallas_kernels import bench_processes
from pallas_kernels import bench_rows
from pallas_kernels import bench_time
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import mosaic
from pallas_kernels.attention import gpu_tiles
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import gpu_few
from pallas_kernels.token_logprob import gpu as logprob_gpu
from pallas_kernels.token_logprob import gpu_scored


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


def test_tunings_are_tiles_that_fit(monkeypatch):
  for path in dispatch.TUNINGS.glob('*.json'):
    table = json.loads(path.read_text())
    monkeypatch.setattr(
      dispatch, 'tuning', lambda name, table=table: table.get(name, {})
    )
    for name, entries in table.items():
      for key, values in entries.items():
        _check_tuning(name, key, values)


def _check_tuning(name, key, values):
  kind, *rest = key.split()
  sizes = [int(part) for part in rest if part.isdigit()]
  if name == 'token_logprob' and kind == 'depth':
    tiles = logprob_gpu.tuned(*sizes)
    assert (tiles.columns, tiles.rows) == (logprob_gpu.BLOCK, 64)
  elif name == 'token_logprob':
    assert kind == 'scored' and rest[0] in ('few', 'whole')
    rows = 64 if rest[0] == 'few' else 128
    cut = gpu_scored.cut_for(rows, *sizes, 49152)
    gpu_scored._launch(cut, (128, *sizes, 4096), jnp.bfloat16, False)
  elif kind == 'few':
    few = gpu_few.Few(**values)
    assert few and len(sizes) == 2
  elif name == 'grouped_matmul':
    gpu._scratch(
      gpu.Work(gpu.Tiles(**values), 7168, 2048, 132), 'bfloat16', 'bfloat16'
    )
    assert kind in ('rows', 'weights')
  elif name == 'attention':
    assert kind == 'forward' and len(sizes) == 3
    assert rest[-1] in ('long', 'short')
    gpu_tiles.Tiles(**values)
  else:
    assert (name, key) in {
      ('paged_attention', 'decode'),
      ('paged_attention', 'chunk'),
    }


def test_tunings_go_by_rows_a_group(monkeypatch):
  table = {
    'rows many 128 64': dict(stages=3),
    'rows few': dict(stages=5),
    'rows scarce 128 64': dict(stages=6),
  }
  monkeypatch.setattr(dispatch, 'tuning', lambda name: table)
  for rows, stages in ((1024, 3), (1023, 5), (9, 5), (8, 6)):
    assert grouped_matmul._tuned('rows', rows, 128, 64, 4).stages == stages
  assert grouped_matmul._tuned('rows', 8, 128, 128, 4).stages == 5
  assert grouped_matmul._tuned('rows', 8, 128, 64, 4, gated=True).stages == 5
  table['rows many 128 64'] = dict(columns=192, stages=3)
  assert grouped_matmul._tuned('rows', 1024, 128, 64, 4).columns == 192
  gated = grouped_matmul._tuned('rows', 1024, 128, 64, 4, gated=True)
  assert gated.columns % 128 == 0  # half of them are gates


@pytest.mark.parametrize('rows', [1, 64])
def test_tuned_sizes_lower_gated_as_well(monkeypatch, rows):
  """A few rows of Kimi's experts: tiles of plain products may be too narrow."""
  table = json.loads((dispatch.TUNINGS / 'h100.json').read_text())
  monkeypatch.setattr(dispatch, 'tuning', lambda name: table[name])
  some = lambda *size: jax.ShapeDtypeStruct(size, jnp.bfloat16)  # noqa: E731
  sizes = {tuple(map(int, key.split()[-2:])) for key in table['grouped_matmul']}
  for k, n in sizes:
    text = mosaic.lower(
      functools.partial(grouped_matmul.grouped_matmul, gated=True),
      *(some(rows, k), some(rows, k, 2, n)),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    assert 'mosaic_gpu' in text


def test_bench_on_cpu(tmp_path, capsys):
  path = tmp_path / 'kernels.json'
  assert bench.run(['norm'], path) == 0
  table = json.loads(path.read_text())
  assert {row['who'] for row in table['rows']} == {'ours', 'xla'}
  assert all(row['seconds'] > 0 for row in table['rows'])
  assert all(row['took'] > 0 for row in table['rows'])
  assert 'norm 2' in table['finished']
  printed = capsys.readouterr().out
  assert 'kimi-16k' in printed and 'error' in printed
  with pytest.raises(ValueError, match='no operation'):
    bench.run(['sort'])
  with pytest.raises(ValueError, match='no such folder'):
    bench.run(['norm'], tmp_path / 'nowhere' / 'kernels.json')


def test_delta_moves_both_arrays_and_says_weights_once():
  compiled, ours, *_ = bench.rows_of('delta', 0)
  shape = bench.small(bench.CASES['delta'][1][0])
  once, changed = 2 * shape.words, int(shape.changed * shape.words)
  assert compiled is None and ours.differing == 0
  assert ours.bytes == 2 * once + 6 * changed
  assert ours.note == f'{once / ours.seconds / 1e12:.2f} TB/s of weights'


def toy(monkeypatch, rows, shapes=bench.norm_shapes.TRAINING[:1]):
  monkeypatch.setattr(bench, 'CASES', {'op': (rows, shapes)})


def test_what_is_wrong_with_a_row():
  row = bench.Row('op', 'shape', 'ours', seconds=1.0)
  assert bench.fault(row) is None
  for change, why in (
    (dict(error=float('nan')), 'relative error nan'),
    (dict(differing=3), '3 elements differ'),
    (dict(seconds=None, note='OSError: no'), 'OSError: no'),
  ):
    wrong = dataclasses.replace(row, **change)
    assert bench.fault(wrong) == why
    assert bench.fault(dataclasses.replace(wrong, who='xla')) is None

  def check():
    raise OSError('too large')

  unchecked = bench_rows.checked(row, error=check)
  assert bench.fault(unchecked) == 'not checked, error: OSError: too large'


def test_a_wrong_result_fails_the_benchmark(monkeypatch, capsys):
  wrong = [None, bench.Row('op', 'shape', 'ours', seconds=1.0, error=0.1)]
  toy(monkeypatch, lambda shape: iter(wrong))
  assert bench.run() == 1
  assert 'wrong: op at shape' in capsys.readouterr().out


def test_a_shape_that_fails_ends_no_other(monkeypatch, capsys):
  def rows(shape):
    yield None
    if shape.depth > 2048 or shape.depth == 128:  # as a CPU cuts it down
      raise RuntimeError('it is too wide')
    yield bench.Row('op', shape.name, 'ours', seconds=1.0)

  toy(monkeypatch, rows, bench.norm_shapes.TRAINING[:1])
  assert bench.run() == 1
  assert 'wrong: op at kimi-16k, ended: RuntimeError: it is too wide' in (
    capsys.readouterr().out
  )


def test_what_was_measured_stays_and_is_gone_on_with(
  monkeypatch, capsys, tmp_path
):
  path, stop = tmp_path / 'kernels.json', [True]

  def rows(shape):
    yield None
    yield bench.Row('op', shape.name, 'ours', seconds=1.0)
    if stop[0] and shape.name.startswith('qwen3'):
      raise KeyboardInterrupt
    yield bench.Row('op', shape.name, 'xla', seconds=2.0)

  toy(monkeypatch, rows, bench.norm_shapes.TRAINING)
  with pytest.raises(KeyboardInterrupt):
    bench.run(None, path)
  first = json.loads(path.read_text())
  assert [row['who'] for row in first['rows']] == ['ours', 'xla', 'ours']
  assert first['finished'] == ['op 0']
  stop[0] = False
  assert bench.run(None, path, resume=True) == 0
  second = json.loads(path.read_text())
  assert [row['case'] for row in second['rows']] == [
    f'op {i}' for i in (0, 0, 1, 1, 2, 2)
  ]
  for name in (*bench.LIMITS, 'seed'):  # of one table
    assert first[name] == second[name]
  path.write_text(json.dumps(second | {'device': 'an abacus'}))
  with pytest.raises(ValueError, match="device='an abacus'"):
    bench.run(None, path, resume=True)
  path.write_text(json.dumps(second | {'seed': 5}))
  assert bench.run(None, path, resume=True, seed=5) == 0
  with pytest.raises(ValueError, match='has seed=5, and here it is 6'):
    bench.run(None, path, resume=True, seed=6)
  for text in ('{"rows": [', '[]', '{}', '{"rows": [{"who": "ours"}]}', '\xff'):
    path.write_text(text, encoding='latin-1')
    with pytest.raises(ValueError, match='kernels.json is no table'):
      bench.run(None, path, resume=True)
  with pytest.raises(ValueError, match='give json_path'):
    bench.run(None, resume=True)


def test_each_run_draws_from_a_seed_of_its_own(monkeypatch, tmp_path, capsys):
  """The table says which; one that is named draws the same again."""
  path, drawn = tmp_path / 'kernels.json', []
  seed_of = lambda: int(bench_rows.draw(lambda seed: seed))  # noqa: E731

  def rows(shape):
    yield None
    drawn.append(seed_of())
    yield bench.Row('op', shape.name, 'ours', seconds=1.0)

  toy(monkeypatch, rows, bench.norm_shapes.TRAINING[:2])
  outside, seeds = seed_of(), []
  for _ in range(2):
    assert bench.run(None, path) == 0
    seeds.append(json.loads(path.read_text())['seed'])
    assert f', seed {seeds[-1]}: copies' in capsys.readouterr().out
  assert seeds[0] != seeds[1]
  assert bench.main(['--seed', str(seeds[0]), '--json', str(path)]) == 0
  assert json.loads(path.read_text())['seed'] == seeds[0]
  assert drawn == [seeds[i] for i in (0, 0, 1, 1, 0, 0)]
  assert seed_of() == outside
  for wrong in (-1, 2**32):
    with pytest.raises(ValueError, match=f'seed={wrong} must be 0 to'):
      bench.run(seed=wrong)


def test_processes_are_given_the_seed(monkeypatch):
  """And draw from it what they measure."""
  seeds, said = [], []

  def start(stack, operation, numbers, seed):
    seeds.append(seed)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(bench_processes, '_start', start)
    with pytest.raises(KeyboardInterrupt):
      bench.run(['norm'], apart=True, seed=11)
  assert seeds == [11]

  def rows(shape):
    yield None
    seed = bench_rows.draw(int)
    yield bench.Row('op', shape.name, 'ours', seconds=1.0, differing=seed)

  toy(monkeypatch, rows)
  monkeypatch.setattr(bench_processes, '_say', said.append)
  monkeypatch.setattr('sys.stdin', io.StringIO('go\n'))
  showwarning = warnings.showwarning
  monkeypatch.setattr(warnings, 'showwarning', showwarning)
  bench_processes.main('op', '11', '0')
  ready, row, ended = said
  assert ready is None and ended == ['op', 0] and row['differing'] == 11


def test_what_measures_ends_with_the_report(monkeypatch, tmp_path):
  """Else processes would live as long as somebody looks at the error."""
  closed = []

  def source(wanted, limits, seed):
    try:
      yield dict.fromkeys(bench.LIMITS, 1.0)
    finally:
      closed.append(True)

  def full(*_):
    raise OSError('no space left')

  monkeypatch.setattr(bench, '_here', source)
  monkeypatch.setattr(bench, '_write', full)
  with pytest.raises(OSError, match='no space') as held:
    bench.run(['norm'], tmp_path / 'kernels.json', apart=False)
  assert closed and held


def test_both_shares_are_printed():
  row = bench.Row('op', 'a', 'ours', seconds=1e-3, flops=10**12, bytes=10**9)
  limits = dict(copy_bytes_per_s=2e12, matmul_flops_per_s=4e15)
  half = dataclasses.replace(row, who='xla', seconds=2e-3)
  assert bench.describe(row, [row], limits).split()[3:] == (
    '1.000 1000.0 1.00 0.25 0.50'.split()
  )
  assert bench.describe(half, [row, half], limits).split()[-1] == '2.00'


def test_processes_take_turns(monkeypatch, tmp_path, capsys):
  """One measures the ceilings, one three shapes; one knows no fourth shape."""
  path, (function, shapes) = tmp_path / 'kernels.json', bench.CASES['norm']
  monkeypatch.setattr(bench, 'CASES', {'norm': (function, shapes + shapes[:1])})
  monkeypatch.setattr(bench_processes, 'TOGETHER', {'norm': 3})
  assert bench.run(None, path, apart=True) == 1
  table = json.loads(path.read_text())
  assert table['finished'] == ['norm 0', 'norm 1', 'norm 2']
  assert set(bench.LIMITS) < set(table)
  *rows, ended = table['rows']
  assert [row['who'] for row in rows] == 3 * ['ours', 'xla']
  assert all(row['seconds'] > 0 for row in rows)
  why = 'its process ended: code 1, IndexError: tuple index out of range'
  assert ended['note'] == f'ended: {why}'
  assert why in capsys.readouterr().out


def test_processes_are_given_few_shapes_each():
  wanted = [('norm', i) for i in range(3)] + [
    ('attention', i) for i in range(5)
  ]
  assert bench_processes.parts(wanted) == [
    ('norm', (0, 1, 2)),
    ('attention', (0, 1)),
    ('attention', (2, 3)),
    ('attention', (4,)),
  ]


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
