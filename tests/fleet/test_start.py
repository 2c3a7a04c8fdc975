"""`init_from`: a run that starts from a stored model, and one that cannot."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from composer import checkpoint
from composer import mesh as mesh_lib
from composer import midtrain
from composer import params as params_lib
from composer.fleet import local
from composer.fleet import start
from composer.model import checkpoints
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer

HERE = Path(__file__).parent


def tiny(**fields):
  spec = importlib.util.spec_from_file_location('tiny', HERE / 'tiny.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return dataclasses.replace(module.get_config(), **fields)


@pytest.fixture
def stored(tmp_path):
  """(directory, parameters) of a model of the tiny experiment's kind."""
  model = tiny().model
  params = params_lib.init(transformer.spec(model), jax.random.key(7))
  built_in = Path(tokenizer_lib.__file__).parent / 'tokenizer.json'
  checkpoints.save(
    tmp_path / 'model', model, params, files={'tokenizer.json': built_in}
  )
  return tmp_path / 'model', params


def equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_starts_from_the_stored_parameters(stored):
  directory, params = stored
  experiment = start.resolve(tiny(init_from=str(directory)))
  assert experiment.tokenizer == str(directory / 'tokenizer.json')
  spec = transformer.spec(experiment.model)
  mesh = mesh_lib.make_mesh()
  by_name = mesh_lib.shardings(spec, mesh_lib.TRAIN_RULES, mesh)
  got = start.params(experiment, by_name)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))
  equal(jax.device_get(got), jax.device_get(params))
  # And from nothing where it names nothing.
  fresh = start.resolve(tiny())
  assert fresh == tiny()
  same = params_lib.init(spec, jax.random.key(fresh.seed))
  equal(start.params(fresh, by_name), same)


def test_a_layer_that_drafts_may_be_new_or_be_left_out(stored, tmp_path):
  directory, params = stored
  model = dataclasses.replace(tiny().model, mtp_layers=1)
  experiment = start.resolve(tiny(init_from=str(directory), model=model))
  spec = transformer.spec(model)
  by_name = mesh_lib.shardings(spec, mesh_lib.TRAIN_RULES, mesh_lib.make_mesh())
  got = start.params(experiment, by_name)
  fresh = params_lib.init(spec, jax.random.key(experiment.seed))
  equal(got, {**params, 'mtp': fresh['mtp']})
  checkpoints.save(tmp_path / 'more', model, got)
  without = start.resolve(tiny(init_from=str(tmp_path / 'more')))
  equal(start.params(without, by_name), params)


def test_a_tokenizer_of_the_experiment_counts(stored):
  experiment = tiny(init_from=str(stored[0]), tokenizer='other.json')
  assert start.resolve(experiment).tokenizer == 'other.json'


def test_another_model_is_refused_before_anything_is_made(stored, tmp_path):
  directory, _ = stored
  model = dataclasses.replace(tiny().model, width=64, experts=4)
  other = tiny(init_from=str(directory), model=model)
  with pytest.raises(ValueError) as error:
    local.run(other, workdir=tmp_path / 'run', role='trainer')
  for words in ('width: 32 there, 64 here', 'experts: 2 there, 4 here'):
    assert words in str(error.value)
  assert not (tmp_path / 'run').exists()
  with pytest.raises(ValueError, match='is no model'):
    start.resolve(tiny(init_from=str(tmp_path / 'absent')))


def test_a_run_s_checkpoint_is_a_model(tmp_path):
  """Workdir, stage and checkpoint: all name the newest parameters."""
  experiment = tiny()
  spec = transformer.spec(experiment.model)
  identity = checkpoint.identity(experiment.model, 'x')
  stage = tmp_path / 'run' / 'checkpoints' / 'midtrain'
  mesh = mesh_lib.make_mesh()
  for step in (2, 10):
    params = params_lib.init(spec, jax.random.key(step))
    params = jax.tree.map(
      lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), params
    )
    state = midtrain.init_state(params, experiment.midtrain, jax.random.key(0))
    checkpoint.save(
      str(stage), step, state, {'batches': 0}, identity=identity
    ).wait()
  for path in (tmp_path / 'run', stage, stage / '10'):
    model, got = checkpoints.load(path)
    assert model == experiment.model
    equal(got, jax.device_get(params))
  assert checkpoints.open_source(stage / '2').kind == 'run'
  checkpoints.convert(tmp_path / 'run', tmp_path / 'hf')
  equal(checkpoints.load(tmp_path / 'hf')[1], jax.device_get(params))
