"""The measurement finds nothing in `bitwise` and something in `fast`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.bench import ahead as ahead_lib
from composer.bench import mismatch
from composer.bench import mismatch_inputs
from composer.model import presets
from composer.model import transformer
from pallas_kernels import dispatch

EXPERIMENT = config_lib.Experiment(
  name='small',
  model=presets.TINY,
  numerics=config_lib.NumericsConfig(row_block=8, kv_block=4),
  engine=config_lib.EngineConfig(
    rows=16, sequences=12, pages=16, max_context=48
  ),
  rl=config_lib.RLConfig(micro_batch=4, sequence_length=48),
)
PLANS = mismatch_inputs.plans(400, presets.TINY.vocab_size, 48)
SAMPLED = sum(plan.sampled for plan in PLANS)


WAVES = mismatch_inputs.waves(len(PLANS))


@pytest.fixture(scope='module')
def params():
  spec = transformer.spec(EXPERIMENT.model)
  drawn = params_lib.init(spec, jax.random.key(0))
  return params_lib.to_published(
    spec, jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)
  )


@pytest.fixture(scope='module')
def sides():
  return mismatch._sides(EXPERIMENT, mismatch.MODES)


@pytest.fixture(scope='module')
def found(params, sides):
  told = []
  found = mismatch.measure_plans(
    EXPERIMENT,
    params,
    PLANS,
    WAVES,
    mismatch.MODES,
    report=told.append,
    sides=sides,
  )
  assert len(told) == len(mismatch.MODES)
  return found


def test_sessions_are_what_makes_engines_disagree(found):
  """Groups, turns that find pages, prompts beyond a step, pages that run out."""
  turns = [len(plan.turns) for plan in PLANS]
  assert min(turns) == 1 and max(turns) > 1
  assert max(len(plan.prompt) for plan in PLANS) > EXPERIMENT.engine.rows
  for plan in PLANS:
    total = sum(n + len(words) for n, words in plan.turns) + len(plan.prompt)
    assert total <= 48
  prompts = {plan.prompt.tobytes() for plan in PLANS}
  assert len(prompts) * mismatch_inputs.GROUP == len(PLANS)
  assert len({plan.seed for plan in PLANS}) == len(PLANS)
  for m in found.values():
    assert m.engine['sampled'] == SAMPLED
    assert m.engine['preempted'] > 0
    assert m.engine['tokens computed again'] > 0
    assert m.engine['prompt tokens reused'] > 0
    assert m.engine['prompts beyond a step'] > 0


def _default(platform, monkeypatch):
  """What `composer bench mismatch` sets there, with a small model."""
  with monkeypatch.context() as there:
    there.setattr(dispatch, 'platform', lambda: platform)
    numerics, rl, _ = mismatch._setting('bfloat16', 'grouped')
  if platform == 'gpu':  # rows in tiles, as its kernels take them
    numerics = dataclasses.replace(numerics, kernels='reference')
  return dataclasses.replace(
    EXPERIMENT,
    model=dataclasses.replace(EXPERIMENT.model, layers=1),
    numerics=dataclasses.replace(numerics, compute='float32'),
    engine=mismatch_inputs.engine_config(rl.sequence_length, numerics),
    rl=rl,
  )


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_the_default_load_asks_everything_of_an_engine(platform, monkeypatch):
  """Preempted, found again, in chunks: with as few sessions as it may have."""
  experiment = _default(platform, monkeypatch)
  plans, waves = mismatch_inputs.load(
    1,
    experiment.model.vocab_size,
    experiment.engine,
    experiment.numerics.kv_block,
  )
  longest = experiment.engine.max_context
  assert [len(range(len(plans))[w]) for w in waves][0] == 1
  assert sum(len(range(len(plans))[w]) for w in waves) == len(plans)
  assert len({plan.seed for plan in plans}) == len(plans)
  assert all(len(p.prompt) + p.sampled <= longest for p in plans[waves[-1]])
  drawn = params_lib.init(transformer.spec(experiment.model), jax.random.key(0))
  with mismatch._serving(experiment, drawn) as engine:
    _, work, _ = mismatch._serve(experiment, engine, plans, waves)
  assert work.sampled == sum(plan.sampled for plan in plans)
  assert work.preempted > 0 and work.recomputed > 0
  assert work.reused > 0 and not work.compilations
  assert max(len(plan.prompt) for plan in plans) > experiment.engine.rows


def test_there_are_more_crowds_the_more_is_sampled():
  numerics = config_lib.NumericsConfig()
  engine = mismatch_inputs.engine_config(384, numerics)
  crowd = mismatch_inputs.crowd(64, engine, numerics.kv_block, 0)
  for tokens, crowds in ((1, 1), (12_000, 1), (102_000, 8)):
    plans, waves = mismatch_inputs.load(tokens, 64, engine, numerics.kv_block)
    sizes = [w.stop - w.start for w in waves]
    assert sizes[-crowds:] == [len(crowd)] * crowds
    assert sizes[:1] == [1] and sum(sizes) == len(plans)
    rest = tokens - crowds * sum(plan.sampled for plan in crowd)
    sampled = sum(plan.sampled for plan in plans[: waves[-crowds].start])
    assert 0 <= sampled - rest < 4 * 384 or rest < 0


def test_what_is_compiled_ahead_measures_the_same(found, params, sides):
  """And nothing is compiled while it is measured."""
  ahead = ahead_lib.ahead(lambda line: None)
  one = {'bitwise': sides['bitwise']}
  try:
    mismatch._start(ahead, one)
    ahead.wait_all()
    again = mismatch.measure_plans(
      EXPERIMENT,
      params,
      PLANS,
      WAVES,
      ['bitwise'],
      timed=(EXPERIMENT.engine, PLANS[:2]),
      sides=one,
      wait=ahead.wait,
    )
  finally:
    ahead.close()
  assert not ahead.found
  m = again['bitwise']
  assert m.replay == found['bitwise'].replay
  assert m.no_replay == found['bitwise'].no_replay
  assert m.engine['sampled'] == SAMPLED and m.engine_tokens_per_s > 0
  parts = 'start sessions batches scores gradients compiling'.split()
  assert list(m.seconds) == parts and m.seconds['compiling'] == 0


def test_waves_cover_all():
  for count in (1, 5, 170, 400):
    covered = [i for x in mismatch_inputs.waves(count) for i in range(400)[x]]
    assert covered == list(range(count))


def test_bitwise_has_none(found):
  m = found['bitwise']
  for row in (m.replay, m.no_replay):
    assert row['audited_tokens'] == SAMPLED
    others = {n: v for n, v in row.items() if n != 'audited_tokens'}
    assert others == dict.fromkeys(others, 0.0) and len(others) == 6


def test_fast_has_some(found):
  m = found['fast']
  for row in (m.replay, m.no_replay):
    assert row['audited_tokens'] == SAMPLED
    assert row['differing'] > 0.05
    assert 0 < row['p99_abs_logprob'] <= row['max_abs_logprob']
  assert m.replay['max_abs_logprob'] < 1e-3  # the same routes: rounding alone


def test_rates_and_cost(found):
  cost = mismatch.as_cost(found)
  for mode in mismatch.MODES:
    m = found[mode]
    assert m.engine_tokens_per_s > 0 and m.trainer_tokens_per_s > 0
    assert m.trainer_replay_tokens_per_s > 0
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


def test_experts_part():
  """The measure of it: 0 for copies, 1 where nothing is shared."""
  same = np.ones((1, 4, 3, 2), np.float32)
  apart = np.eye(4, dtype=np.float32).reshape(1, 4, 4, 1)
  for value, wanted in ((same, 0.0), (apart, np.sqrt(0.75))):
    params = {'layers': {'moe': {'gate_up': value, 'down': value}}}
    assert mismatch_inputs.apart(params) == pytest.approx(wanted)


def test_nothing_to_measure_is_refused():
  with pytest.raises(ValueError, match='at least one'):
    mismatch.measure(dataclasses.replace(EXPERIMENT), None, [])
  with pytest.raises(ValueError, match='10 or more'):
    mismatch_inputs.stages(3, EXPERIMENT.numerics)
  with pytest.raises(ValueError, match='tokens'):
    mismatch.run(tokens=0)
  with pytest.raises(ValueError, match='bfloat16'):
    mismatch.run(compute='float8')
  with pytest.raises(ValueError, match='--mode=quick.*aligned'):
    mismatch.run(mode='quick')
  with pytest.raises(ValueError, match='--attention=linear.*latent'):
    mismatch.run(attention='linear')


def test_an_accelerator_has_an_engine_of_its_own():
  """Where kernels attend: prompts beyond a step, pages for some sessions only,
  and the timed ones fit without another shape."""
  numerics = dataclasses.replace(
    EXPERIMENT.numerics, kv_block=64, kernels='reference'
  )
  engine = mismatch_inputs.engine_config(768, numerics)
  assert engine.sequences < engine.rows < 768 // 2
  assert engine.pages - 1 < engine.sequences * 768 // 64
  for model in mismatch_inputs.WIDE_MODELS.values():
    assert model.layers == model.dense_layers
    assert not model.width % 64 and not model.dense_hidden % 64
