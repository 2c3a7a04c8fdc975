"""The measurement finds nothing in `bitwise` and something in `fast`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.bench import mismatch
from composer.model import presets
from composer.model import transformer

EXPERIMENT = config_lib.Experiment(
  name='small',
  model=presets.TINY,
  numerics=config_lib.NumericsConfig(row_block=8, kv_block=4),
  engine=config_lib.EngineConfig(
    rows=32, sequences=12, pages=160, max_context=48
  ),
  rl=config_lib.RLConfig(micro_batch=4, sequence_length=48),
)
NEW = 9


@pytest.fixture(scope='module')
def found():
  spec = transformer.spec(EXPERIMENT.model)
  drawn = params_lib.init(spec, jax.random.key(0))
  params = params_lib.to_published(
    spec, jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)
  )
  rng = np.random.default_rng(0)
  contexts = [
    rng.integers(0, 64, n).astype(np.int32) for n in rng.integers(1, 38, 30)
  ]
  return mismatch.measure(EXPERIMENT, params, contexts, NEW)


def test_bitwise_has_none(found):
  m = found['bitwise']
  for row in (m.replay, m.no_replay):
    assert row['audited_tokens'] == 30 * NEW
    others = {n: v for n, v in row.items() if n != 'audited_tokens'}
    assert others == dict.fromkeys(others, 0.0) and len(others) == 6


def test_fast_has_some(found):
  m = found['fast']
  for row in (m.replay, m.no_replay):
    assert row['audited_tokens'] == 30 * NEW
    assert row['differing'] > 0.05
    assert 0 < row['p99_abs_logprob'] <= row['max_abs_logprob']
  assert m.replay['max_abs_logprob'] < 1e-3  # the same routes: rounding alone


def test_rates_and_cost(found):
  cost = mismatch.as_cost(found)
  for mode in mismatch.MODES:
    m = found[mode]
    assert m.engine_tokens_per_s > 0 and m.trainer_tokens_per_s > 0
    assert cost[f'{mode} engine tokens/s'] == m.engine_tokens_per_s
  ratio = (
    found['bitwise'].trainer_tokens_per_s / found['fast'].trainer_tokens_per_s
  )
  assert cost['trainer bitwise / fast'] == ratio


def test_what_is_shown(found):
  lines = mismatch.table(found).splitlines()
  assert len(lines) == 5 and len({len(line) for line in lines}) == 1
  assert lines[1].split()[:3] == ['bitwise', 'yes', '0.0000%']
  assert lines[4].split()[:2] == ['fast', 'no']
  summary = mismatch.as_summary(found)
  assert summary['bitwise']['no replay'] == found['bitwise'].no_replay
  assert set(summary) == set(mismatch.MODES)


def test_nothing_to_measure_is_refused():
  with pytest.raises(ValueError, match='at least one'):
    mismatch.measure(dataclasses.replace(EXPERIMENT), None, [])
