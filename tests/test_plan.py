"""`composer plan`: what it counts, what it says, and what it refuses.

The programs are traced on the eight fake devices; compiling them for a TPU needs
libtpu, and runs where it is installed. The trillion parameters of
`experiments/kimi_k2_5_v5p.py` are compiled by the command in its docstring.
"""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np
import pytest

from composer import __main__ as cli
from composer import config as config_lib
from composer import costs
from composer import plan

ROOT = Path(__file__).resolve().parent.parent
KIMI = ROOT / 'experiments' / 'kimi_k2_5_v5p.py'
LATENT = config_lib.ModelConfig(
  vocab_size=128,
  layers=3,
  dense_layers=1,
  width=32,
  heads=4,
  q_lora=16,
  kv_lora=16,
  nope_dim=8,
  rope_dim=8,
  value_dim=8,
  dense_hidden=64,
  experts=8,
  experts_per_token=2,
  expert_hidden=32,
)
EXPERIMENT = config_lib.Experiment(
  name='tiny',
  model=LATENT,
  numerics=config_lib.NumericsConfig(
    mode='fast', moe='sorted', mla='split', compute='bfloat16'
  ),
  parallel=config_lib.ParallelConfig(expert=2, context=2, rollout_expert=2),
  midtrain=config_lib.MidtrainConfig(steps=1, batch_size=4, sequence_length=64),
  rl=config_lib.RLConfig(micro_batch=4, sequence_length=192),
)


def by_name(experiment):
  return {
    p.name.split(',')[0]: p for p in plan.programs(experiment, jax.devices())
  }


def test_every_stage_has_its_programs():
  found = by_name(EXPERIMENT)
  assert list(found) == [
    'mid-training step',
    'RL gradient of a micro-batch',
    'RL update',
    'decode step',
  ]
  assert found['mid-training step'].tokens == 4 * 64
  assert found['RL gradient of a micro-batch'].tokens == 4 * 192
  short = dataclasses.replace(
    EXPERIMENT, rl=dataclasses.replace(EXPERIMENT.rl, steps=0)
  )
  assert list(by_name(short)) == ['mid-training step']


def test_moments_and_gradients_lie_beside_a_gradient():
  found = by_name(EXPERIMENT)['RL gradient of a micro-batch']
  params = sum(
    np.prod(x.sharding.shard_shape(x.shape)) * 4
    for x in jax.tree.leaves(found.args[0])
  )
  # Two moments and the sum so far; frozen parameters have none, counters do.
  assert abs(found.beside - 3 * params) < 1000


def test_flops_of_the_step_are_those_of_its_products():
  """Against a count by hand, of a model in which every product is known."""
  dense = config_lib.ModelConfig(
    vocab_size=128,
    layers=4,
    dense_layers=4,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    dense_hidden=64,
  )
  experiment = dataclasses.replace(
    EXPERIMENT,
    model=dense,
    parallel=config_lib.ParallelConfig(),
    midtrain=dataclasses.replace(
      EXPERIMENT.midtrain, batch_size=8, sequence_length=64
    ),
    rl=dataclasses.replace(EXPERIMENT.rl, steps=0),
  )
  (program,) = by_name(experiment).values()
  traced = program.function.trace(*program.args)
  found = costs.count(traced.jaxpr, program.mesh_shape)
  tokens = 64  # of a device
  layer = 32 * (4 + 2 * 2) * 8 + 4 * 8 * 32 + 3 * 32 * 64
  head = 32 * 128
  products = 2 * tokens * (4 * layer + head)
  pairs = 4 * 2 * 64 * 64 * 4 * 8  # of one product with all pairs of tokens
  # Forward, most of it again for the backward pass, and twice in it; attention
  # is two products forward, and five in its own backward pass.
  least, most = 3 * products + 7 * pairs, 4 * products + 9 * pairs
  assert least <= found.flops <= most
  assert not found.unknown


def test_experts_travel_and_parameters_are_gathered():
  program = by_name(EXPERIMENT)['mid-training step']
  traced = program.function.trace(*program.args)
  found = costs.count(traced.jaxpr, program.mesh_shape)
  kinds = {name for name, _ in found.wire}
  assert {'all_gather', 'reduce_scatter', 'all_to_all'} <= kinds
  over = {axes for _, axes in found.wire}
  assert ('expert',) in over and ('data', 'context') in over


@pytest.mark.parametrize('held', (1, 2))
def test_the_decode_step_is_the_program_that_an_engine_sends(held):
  """Of every chip: its rows, its draws, its slots; experts travel."""
  parallel = dataclasses.replace(EXPERIMENT.parallel, rollout_expert=held)
  experiment = dataclasses.replace(EXPERIMENT, parallel=parallel)
  program = by_name(experiment)['decode step']
  engine, model = experiment.engine, experiment.model
  assert program.tokens == held * engine.rows
  traced = program.function.trace(*program.args)
  sampled, cache, last = traced.out_info
  assert sampled.answer.tokens.shape == (1, held * engine.rows)
  assert last.shape == (held * (engine.sequences + 1),)
  assert jax.tree.leaves(cache)[0].shape[0] == (
    held * model.layers * engine.pages
  )
  found = costs.count(traced.jaxpr, program.mesh_shape)
  kinds = {name for name, _ in found.wire}
  assert kinds == ({'all_to_all'} if held > 1 else set())
  head = 2 * engine.rows * model.width * model.vocab_size
  assert found.flops > head and found.unknown <= {'while loop'}


def test_the_layer_that_drafts_is_planned_where_it_runs():
  def drafting(held, **stage):
    return dataclasses.replace(
      EXPERIMENT,
      model=dataclasses.replace(LATENT, mtp_layers=1),
      engine=dataclasses.replace(EXPERIMENT.engine, draft='mtp'),
      parallel=dataclasses.replace(EXPERIMENT.parallel, rollout_expert=held),
      midtrain=dataclasses.replace(EXPERIMENT.midtrain, **stage),
    )

  program = by_name(drafting(1, mtp_weight=0))['decode step']
  sampled, caches, _ = program.function.trace(*program.args).out_info
  engine = EXPERIMENT.engine
  assert sampled.proposed.shape == (1, engine.sequences, engine.draft_tokens)
  assert jax.tree.leaves(caches.drafts)[0].shape[0] == engine.pages
  with pytest.raises(ValueError, match='parallel.rollout_expert=1'):
    by_name(drafting(2, mtp_weight=0))
  with pytest.raises(ValueError, match='midtrain.mtp_weight=0'):
    by_name(drafting(1))


def test_the_trillion_parameter_experiment_is_one():
  experiment = config_lib.validate(config_lib.load(KIMI))
  assert experiment.midtrain.sequence_length == 32_768
  assert experiment.rl.sequence_length > 32_768
  parallel = experiment.parallel
  smaller = dataclasses.replace(
    experiment,
    parallel=dataclasses.replace(
      parallel, expert=2, context=2, rollout_expert=8
    ),
  )
  programs = by_name(smaller)
  state = programs['mid-training step'].args[0]
  count = sum(np.prod(x.shape, dtype=float) for x in jax.tree.leaves(state))
  assert abs(count / 3 / 1.026e12 - 1) < 0.01  # masters and two moments


@pytest.mark.parametrize(
  'topology, message',
  [
    ('v9:2x2', "there is no 'v9'; write a generation"),
    ('', "there is no ''"),
    ('cpu', 'known: v4, v5e, v5p, v6e, tpu7x'),
  ],
)
def test_unknown_topologies_are_refused(topology, message, capsys):
  code = cli.main(['plan', str(KIMI), '--topology', topology])
  assert code == 2 and message in capsys.readouterr().err


def test_a_mesh_that_does_not_divide_is_refused():
  for field, value, message in (
    ('expert', 3, 'does not divide 8 devices'),
    ('expert', 16, 'does not divide 8 devices'),
    ('data', 4, 'set parallel.data=2'),
  ):
    parallel = dataclasses.replace(EXPERIMENT.parallel, **{field: value})
    experiment = dataclasses.replace(EXPERIMENT, parallel=parallel)
    with pytest.raises(ValueError, match=message):
      list(plan.programs(experiment, jax.devices()))
  odd = dataclasses.replace(
    EXPERIMENT, model=dataclasses.replace(LATENT, experts=9)
  )
  with pytest.raises(ValueError, match='model.experts=9 does not divide'):
    list(plan.programs(odd, jax.devices()))
  few = dataclasses.replace(
    EXPERIMENT, midtrain=dataclasses.replace(EXPERIMENT.midtrain, batch_size=3)
  )
  with pytest.raises(ValueError, match='choose a multiple of 4'):
    list(plan.programs(few, jax.devices()))


def planned(**changes):
  values = {
    'name': 'mid-training step',
    'fits': True,
    'memory': 60.0 * plan.GIB,
    'shortfall': 0.0,
    'arguments': 20.0 * plan.GIB,
    'temporaries': 40.0 * plan.GIB,
    'beside': 0.0,
    'flops': 4.59e14,
    'wire': {'all_gather over data': 6e11, 'psum over data': 1e6},
    'bounds': {'compute': 1.0, 'network': 1.0 + 1e-6, 'memory': 0.01},
    'binds': 'network',
    'tokens': 1000,
    'compile_s': 3.0,
  }
  return plan.Planned(**(values | changes))


def test_the_table_says_what_binds_and_what_is_short():
  text = plan.table(EXPERIMENT, 'v5p:2x2x1', [planned()])
  assert '60.0 of 95 GiB: fits' in text
  assert 'network binds' in text and '600.000 GB' in text
  short = planned(fits=False, memory=100.0 * plan.GIB, shortfall=5.0 * plan.GIB)
  text = plan.table(EXPERIMENT, 'v5p:2x2x1', [short])
  assert 'SHORT BY 5.0 GiB' in text
  assert 'raise parallel.context=2' in text
  decode = dataclasses.replace(short, name='decode step, 2 chips a replica')
  text = plan.table(EXPERIMENT, 'v5p:2x2x1', [decode])
  assert 'raise parallel.rollout_expert=2' in text
  json.dumps(plan.to_json('v5p:2x2x1', [short]))


def test_the_need_is_read_from_a_refusal():
  text = (
    'RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in'
    ' memory space hbm. Used 180.50G of 95.74G hbm. Exceeded hbm capacity by'
    ' 84.76G.'
  )
  assert plan._memory_of_error(text, 7.0) == 180.5 * 2**30
  text = (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required'
    ' for HLO temporaries (341.97G) exceeds available HBM (95.74G).'
  )
  assert plan._memory_of_error(text, 7.0) == 341.97 * 2**30 + 7
  assert plan._memory_of_error('something else', 7.0) is None


NO_LIBTPU = importlib.util.find_spec('libtpu') is None


@pytest.mark.skipif(not NO_LIBTPU, reason='libtpu is installed')
def test_without_libtpu_the_extra_is_named(capsys):
  code = cli.main(['plan', str(KIMI), '--topology', 'v5p:2x2x1'])
  assert code == 2 and "pip install -e '.[tpu]'" in capsys.readouterr().err


@pytest.mark.skipif(NO_LIBTPU, reason="needs pip install -e '.[tpu]'")
def test_a_small_plan_is_compiled_for_a_tpu(tmp_path):
  path = tmp_path / 'small.py'
  path.write_text(
    'from composer import config\n'
    'def get_config():\n'
    '  return config.Experiment(\n'
    "    name='small',\n"
    "    numerics=config.NumericsConfig(mode='fast', moe='sorted',"
    " compute='bfloat16'),\n"
    '    parallel=config.ParallelConfig(expert=2),\n'
    '    rl=config.RLConfig(steps=0))\n'
  )
  command = [sys.executable, '-m', 'composer', 'plan', str(path)]
  command += ['--topology', 'v5p:2x2x1', '--json', str(tmp_path / 'plan.json')]
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    timeout=600,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr
  assert 'fits' in done.stdout
  (step,) = json.loads((tmp_path / 'plan.json').read_text())['programs']
  assert step['memory'] > step['arguments'] > 0
