"""The benchmark of the engine on small shapes, and what it is counted by."""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.bench import engine as bench
from composer.bench import engine_compare
from composer.bench import engine_load
from composer.bench import engine_roofline
from composer.bench import engine_shapes
from composer.bench import engine_steps
from composer.model import presets
from composer.model import transformer

NUMERICS = config_lib.NumericsConfig(row_block=8, kv_block=4)
CEILINGS = engine_roofline.Ceilings(1e9, 1e12)


def test_parameters_met():
  """Few rows meet few experts; an untied embedding is looked up."""
  model = presets.SMOLLM2_135M
  whole = presets.total_count(model)
  assert engine_roofline.parameters_met(model, 1) == whole
  sparse = presets.QWEN3_MOE_30B_A3B
  met = [engine_roofline.parameters_met(sparse, b) for b in (1, 8, 4096)]
  embedding = sparse.vocab_size * sparse.width
  assert met[0] == pytest.approx(
    presets.active_count(sparse) - embedding + sparse.width
  )
  assert met[0] < met[1] < met[2]
  assert met[2] == pytest.approx(
    presets.total_count(sparse) - embedding + 4096 * sparse.width, rel=1e-6
  )


def test_decode_is_bound_by_bytes_and_then_by_arithmetic():
  model = presets.SMOLLM2_135M
  half = dataclasses.replace(NUMERICS, compute='bfloat16')
  one = engine_roofline.decode_seconds(model, half, 1, 100, CEILINGS)
  token = 30 * 2 * 3 * 64 * 2  # keys and values of 30 layers, bfloat16
  assert engine_roofline.context_bytes(model, half) == token
  want = (2 * presets.total_count(model) + 100 * token) / 1e9
  assert one == pytest.approx(want)
  slow = engine_roofline.Ceilings(1e15, 1e9)
  many = engine_roofline.decode_seconds(model, half, 64, 100, slow)
  assert many == pytest.approx(2 * 64 * presets.active_count(model) / 1e9)


def test_a_trace_is_drawn_and_read(tmp_path):
  trace = engine_load.draw(groups=2, size=3, turns=2, seed=1)
  assert len(trace) == 6 and all(len(session) == 2 for session in trace)
  assert trace == engine_load.draw(groups=2, size=3, turns=2, seed=1)
  first = [session[0] for session in trace]
  assert len({turn.shared for turn in first}) == 2
  path = tmp_path / 'trace.json'
  raw = [[dataclasses.asdict(turn) for turn in session] for session in trace]
  path.write_text(json.dumps(raw))
  assert engine_load.read(path) == trace


@pytest.mark.parametrize(
  ('text', 'message'),
  (
    ('{', 'no trace'),
    ('[]', 'holds no session'),
    ('[[]]', 'session 0 has no turn'),
    ('[[{"at": 0, "prompt": 0, "new": 1}]]', '1 or more'),
    ('[[{"at": 0, "words": 1}]]', 'words'),
  ),
)
def test_a_bad_trace_is_refused(tmp_path, text, message):
  path = tmp_path / 'trace.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    engine_load.read(path)


def test_sessions_are_served_and_measured():
  model = presets.TINY
  trace = engine_load.draw(
    2, 3, turns=2, system=8, task=4, observation=4, new=4, pause=0.01
  )
  params = params_lib.init(transformer.spec(model), jax.random.key(0))
  config = engine_load.engine_config(trace, NUMERICS, 16)
  ready = bench.warm(model, NUMERICS, config, params, 'sessions')
  served = engine_load.measure(model, NUMERICS, trace, CEILINGS, ready.engine)
  assert served.compilations == 0 and served.preempted == 0
  assert 0.2 < served.hit_rate < 1 and served.pages > 0
  assert served.sampled_per_s > 0 and served.roofline > 0
  for times in (served.first_token, served.between_tokens):
    values = list(times.values())
    assert values == sorted(values) and np.all(np.isfinite(values))
  lines = engine_load.table(trace, served).splitlines()
  assert lines[0].split()[2:4] == ['6,', '12']


def test_what_is_shown():
  found = bench.Batch(1, 480.0, 500.0, 0.31, 9e4, 0.5, None, 3, 4.2)
  first, second = (
    bench.batch_line(b)
    for b in (found, dataclasses.replace(found, batch=64, transformers=647.0))
  )
  assert first.split()[:6] == ['1', '480', '500', '31.0%', '90,000', '50.0%']
  assert first.split()[6:] == ['-', '3', 'in', '4', 's']
  assert len(first) == len(second) and second.split()[6] == '647'


def test_shares_of_ceilings_that_were_measured_low():
  """More than all of a ceiling, or one that has moved, is not left unsaid."""
  fine = bench.Batch(1, 480.0, 500.0, 0.31, 9e4, 1.0, None, 3, 4.2)
  before = engine_roofline.Ceilings(1e9, 2e12)
  again = dataclasses.replace(before, bytes_per_s=1.1e9)
  assert bench.doubtful([fine], before, again) == ''
  assert bench.doubtful([], before, again) == ''
  over = dataclasses.replace(fine, roofline=2.3)
  assert 'highest share is 230%' in bench.doubtful([fine, over], before, again)
  for field in ('bytes_per_s', 'flops_per_s'):
    for factor in (0.7, 9.0):
      value = factor * getattr(before, field)
      other = dataclasses.replace(before, **{field: value})
      assert 'Measure again' in bench.doubtful([fine], before, other)
  assert '9 GB/s' in bench.doubtful(
    [fine], before, dataclasses.replace(before, bytes_per_s=9e9)
  )


def test_a_prompt_is_products_and_pairs():
  """Counted by hand for one layer of grouped, and of absorbed, attention."""
  model = dataclasses.replace(presets.TINY, layers=1, dense_layers=1)
  d, h, g, k, f = 32, 4, 2, 8, 24
  products = d * (h + 2 * g) * k + h * k * d + 3 * d * f + 3 * d  # and norms
  pairs = 6 * 7 // 2
  got = engine_roofline.prompt_flops(model, NUMERICS, 6)
  assert got == pytest.approx(2 * 6 * products + 4 * h * k * pairs, rel=0.01)
  latent = presets.TINY_LATENT
  more = [
    engine_roofline.prompt_flops(
      latent, dataclasses.replace(NUMERICS, mla=form), 100
    )
    for form in ('absorbed', 'expanded')
  ]
  pairs, heads = 100 * 101 / 2, latent.layers * latent.heads
  wider = (16 + 4 + 16) - (8 + 4 + 6)
  assert more[0] - more[1] == pytest.approx(2 * heads * wider * pairs)


def test_shapes_are_drawn_as_steps_read_them():
  """By name; float32 stays what must be wide, and nothing is left out."""
  with pytest.raises(ValueError, match='qwen3'):
    engine_shapes.shape('huge')
  half = dataclasses.replace(NUMERICS, compute='bfloat16')
  model = presets.TINY
  drawn = params_lib.named(engine_shapes.draw(model, half))
  spec = params_lib.named(transformer.spec(model))
  assert {n: v.shape for n, v in drawn.items()} == {
    n: s.shape for n, s in spec.items()
  }
  for name, value in drawn.items():
    wide = 'norm' in name or 'router' in name
    assert value.dtype == (np.float32 if wide else 'bfloat16'), name
  stack = np.asarray(drawn['layers/moe/down'], np.float32)
  assert not np.array_equal(stack[0], stack[1])
  assert stack.std() == pytest.approx(16**-0.5, rel=0.1)


def test_an_engine_is_measured():
  shape = engine_shapes.Shape(presets.TINY, 'tiny', (2,), prompt=6, new=5)
  numerics = dataclasses.replace(NUMERICS, row_block=64)  # one shape
  params = params_lib.init(transformer.spec(shape.model), jax.random.key(0))
  ready = bench.warm_batch(shape, numerics, params, 2)
  found = bench.measure_batch(shape, numerics, CEILINGS, 2, ready)
  assert found.compilations == 1 and found.compile_s > 0
  assert found.tokens_per_s > 0 and found.decode_per_s > 0
  assert found.roofline > 0 and found.products > 0 and found.prompt_per_s > 0


def test_steps_are_of_sequences_of_their_own():
  """Each reads and writes its own pages, and draws its own tokens."""
  shape = engine_shapes.Shape(presets.TINY, 'tiny', (3,), prompt=6, new=5)
  params = params_lib.init(transformer.spec(shape.model), jax.random.key(0))
  run, pages = engine_steps.decoding(shape, NUMERICS, 3)
  cache = transformer.init_cache(shape.model, NUMERICS, pages)
  sampled, cache, _ = jax.jit(run, static_argnums=2)(params, cache, True)
  tokens = sampled.answer.tokens[:, :3]  # and then nobody's
  assert len(np.unique(tokens, axis=1).T) == 3
  written = np.flatnonzero(np.any(cache.keys[1:pages] != 0, axis=(1, 2, 3)))
  each = (pages - 1) // 3
  first = shape.prompt // NUMERICS.kv_block
  last = (shape.prompt + engine_steps.STEPS - 1) // NUMERICS.kv_block
  own = [each * n + page for n in range(3) for page in range(first, last + 1)]
  np.testing.assert_array_equal(written, own)


@pytest.fixture
def small(monkeypatch):
  """The command on a tiny model, few turns and ceilings that are given."""
  shape = engine_shapes.Shape(presets.TINY, 'tiny', (2,), prompt=6, new=12)
  trace = engine_load.draw(1, 2, turns=2, system=8, task=4, new=4, pause=0.01)
  monkeypatch.setattr(engine_load, 'DEFAULT', trace)
  monkeypatch.setitem(engine_shapes.SHAPES, 'quickstart', shape)
  monkeypatch.setattr(engine_steps, 'TURNS', 2)
  monkeypatch.setattr(engine_compare, 'TURNS', 2)
  monkeypatch.setattr(bench, 'REPEATS', 1)
  monkeypatch.setattr(engine_roofline, 'measure', lambda numerics: CEILINGS)


def test_the_whole_command(small, tmp_path, capsys):
  """Every part of it runs, is printed, and stands in the file."""
  path = tmp_path / 'engine.json'
  assert bench.run(path, batch='3') == 0
  found = json.loads(path.read_text())
  assert [one['batch'] for one in found['batches']] == [3]
  assert found['recording'] > 0 and found['sessions']['compilations'] == 0
  said = capsys.readouterr()
  lines = said.out.splitlines()
  assert any(line.startswith('recording at batch 3') for line in lines)
  assert re.search(r'^batch 3: 1 of \d+ programs compiled', said.err, re.M)
  assert re.search(r'^sessions: 1 of \d+ programs compiled', said.err, re.M)


def test_modes_are_compared(small, tmp_path, capsys):
  """Decode steps and whole engines, as lines and in the file."""
  path = tmp_path / 'modes.json'
  assert bench.run(path, compare=True) == 0
  found = json.loads(path.read_text())
  lines = capsys.readouterr().out.splitlines()
  for what, line in zip(('modes', 'engines'), lines[-2:], strict=True):
    assert set(found[what]) == {'2'}
    fast, bitwise = found[what]['2']['fast'], found[what]['2']['bitwise']
    assert fast > 0 and bitwise > 0
    ratio = fast / bitwise if what == 'modes' else bitwise / fast
    assert line.split()[-3:] == [f'{ratio:.2f}', 'of', 'fast']
  with pytest.raises(ValueError, match='modes in turns'):
    bench.run(mode='fast', compare=True)
  with pytest.raises(ValueError, match='plays no sessions'):
    bench.run(load='trace.json', compare=True)


def test_engines_are_closed_where_one_of_them_fails(small, monkeypatch):
  made = []

  def warm(*of):
    made.append(bench.warm_batch(*of))
    return made[-1]

  def serve(*of):
    raise KeyboardInterrupt

  fake = types.SimpleNamespace(warm_batch=warm, serve=serve)
  monkeypatch.setattr(engine_compare, 'engine_bench', fake)
  with pytest.raises(KeyboardInterrupt):
    bench.run(compare=True)
  shape = engine_shapes.shape('quickstart')
  assert len(made) == 2
  for one in made:
    with pytest.raises(records.EngineError, match='stopped'):
      bench.serve(shape, one.engine, np.random.default_rng(0), 2, 1)


def test_a_bad_choice_is_refused():
  with pytest.raises(ValueError, match='--mode=quick.*bitwise'):
    bench.run(mode='quick')
  shape = engine_shapes.shape('smollm2')
  assert engine_shapes.with_batches(shape, '1, 16').batches == (1, 16)
  for wrong in ('0', '', '1,,2', '-1', '1.5', 'all', '²'):
    with pytest.raises(ValueError, match=f'--batch={wrong} must be'):
      bench.run(batch=wrong)
  with pytest.raises(ValueError, match='--shape=huge'):
    bench.run(shape='huge')
