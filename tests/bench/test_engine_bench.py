"""The benchmark of the engine on small shapes, and what it is counted by."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.bench import engine as bench
from composer.bench import engine_load
from composer.bench import engine_roofline
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
  served = engine_load.measure(
    model, NUMERICS, params, trace, CEILINGS, rows=16
  )
  assert served.compilations == 0 and served.preempted == 0
  assert 0.2 < served.hit_rate < 1 and served.pages > 0
  assert served.sampled_per_s > 0 and served.roofline > 0
  for times in (served.first_token, served.between_tokens):
    values = list(times.values())
    assert values == sorted(values) and np.all(np.isfinite(values))
  lines = engine_load.table(trace, served).splitlines()
  assert lines[0].split()[2:4] == ['6,', '12']


def test_what_is_shown():
  found = [bench.Batch(1, 480.0, 0.31, None), bench.Batch(64, 9e4, 0.5, 647.0)]
  lines = bench.batch_table(found).splitlines()
  assert len({len(line) for line in lines}) == 1
  assert lines[1].split() == ['1', '480', '31.0%', '-']
