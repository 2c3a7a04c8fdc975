"""Rules from logical to mesh axes, and where a state's arrays lie."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import presets
from composer.model import transformer
from composer.rl import trainer

Parallel = config_lib.ParallelConfig
Spec = params_lib.ParamSpec
RULES = {'embed': 'data', 'mlp': 'data', 'heads': None}
ALL = mesh_lib.AXES


@pytest.fixture(scope='module')
def mesh():
  assert len(jax.devices()) == 8, 'tests/conftest.py asks for eight'
  return mesh_lib.make_mesh()


@pytest.mark.parametrize(
  'shape, axes, want',
  (
    ((16, 3), ('embed', 'heads'), PartitionSpec('data', None)),
    (
      (12, 3),
      ('embed', 'heads'),
      PartitionSpec(None, None),
    ),  # 8 does not divide
    ((16, 24), ('embed', 'mlp'), PartitionSpec('data', None)),  # used once
    ((12, 24), ('embed', 'mlp'), PartitionSpec(None, 'data')),
    ((5, 24), ('heads', 'mlp'), PartitionSpec(None, 'data')),
  ),
)
def test_partition(mesh, shape, axes, want):
  assert mesh_lib.partition(Spec(shape, axes), RULES, mesh) == want


@pytest.mark.parametrize(
  'shape, axes, want',
  (
    ((16, 6), ('embed', 'heads'), (ALL, None)),  # all on one dimension
    ((12, 6), ('embed', 'heads'), (('data', 'expert'), 'context')),
    ((6, 5), ('embed', 'heads'), ('data', None)),  # 6 takes 2 and not 4
    ((5, 8), ('embed', 'heads'), (None, ALL)),
    (
      (4, 16, 8),
      ('expert', 'embed', 'mlp'),
      ('expert', ('data', 'context'), None),
    ),
    ((3, 16), ('layers', 'embed'), (None, ALL)),
  ),
)
def test_partition_over_three_axes(shape, axes, want):
  mesh = mesh_lib.make_mesh(parallel=Parallel(expert=2, context=2))
  found = mesh_lib.partition(Spec(shape, axes), mesh_lib.TRAIN_RULES, mesh)
  assert found == PartitionSpec(*want)


def test_folded_experts_take_both_axes():
  mesh = mesh_lib.make_mesh(parallel=Parallel(expert=2, context=2))
  spec = Spec((8, 16, 4), ('expert', 'embed', 'mlp'))
  found = mesh_lib.partition(spec, mesh_lib.FOLDED_RULES, mesh)
  assert found == PartitionSpec(('expert', 'context'), 'data', None)
  layout = mesh_lib.layout(mesh, Parallel(rules='folded'))
  assert layout.expert_axes == ('expert', 'context')
  assert mesh_lib.check_experts(layout, 8) == 2


def test_the_largest_model_leaves_little_whole():
  """What 1,024 devices do not share is a ten-thousandth of the parameters."""
  spec = transformer.spec(presets.KIMI_K2_5)
  mesh = jax.sharding.AbstractMesh((4, 32, 8), ALL)
  held = 0
  for s in params_lib.named(spec).values():
    parts = mesh_lib.partition(s, mesh_lib.TRAIN_RULES, mesh)
    shard = jax.sharding.NamedSharding(mesh, parts).shard_shape(s.shape)
    held += np.prod(shard, dtype=float)
  assert held * mesh.size < 1.0001 * params_lib.count(spec)


@pytest.mark.parametrize(
  'devices, parallel, expert, want',
  (
    (8, Parallel(), None, (8, 1, 1)),
    (8, Parallel(expert=2, context=4), None, (1, 2, 4)),
    (8, Parallel(data=2, expert=4), None, (2, 4, 1)),
    (64, Parallel(data=2, expert=2, context=16), 8, (8, 8, 1)),  # an engine's
  ),
)
def test_shape_of_the_mesh(devices, parallel, expert, want):
  assert mesh_lib.mesh_shape(devices, parallel, expert) == want


@pytest.mark.parametrize(
  'parallel, message',
  (
    (
      Parallel(expert=3),
      'parallel.expert=3 x parallel.context=1 does not divide 8 devices',
    ),
    (
      Parallel(data=4, expert=4),
      'parallel.data=4 x parallel.expert=4.*set parallel.data=2',
    ),
  ),
)
def test_a_mesh_that_does_not_divide(parallel, message):
  with pytest.raises(ValueError, match=message):
    mesh_lib.make_mesh(parallel=parallel)


@pytest.mark.parametrize(
  'rows, length, message',
  (
    (6, 16, 'here=6 rows do not divide over 2 x 2.*a multiple of 4'),
    (8, 18, 'rows of 18 tokens.*2 x parallel.context = 4.*a multiple of 4'),
  ),
)
def test_a_batch_that_does_not_divide(rows, length, message):
  mesh = mesh_lib.make_mesh(parallel=Parallel(expert=2, context=2))
  mesh_lib.check_batch(mesh, 'here', 8, 16)
  with pytest.raises(ValueError, match=message):
    mesh_lib.check_batch(mesh, 'here', rows, length)


def test_unknown_rules_are_refused(mesh):
  with pytest.raises(ValueError, match="no rules 'ring'.*train, folded"):
    mesh_lib.layout(mesh, Parallel(), 'ring')


def test_bitwise_and_one_device_have_no_layout(mesh):
  fast = config_lib.NumericsConfig(mode='fast')
  assert mesh_lib.train_layout(fast, mesh, Parallel()) is not None
  bitwise = config_lib.NumericsConfig(mode='bitwise')
  assert mesh_lib.train_layout(bitwise, mesh, Parallel()) is None
  one = mesh_lib.make_mesh(jax.devices()[:1])
  assert mesh_lib.train_layout(fast, one, Parallel()) is None


def test_an_axis_without_a_rule_is_refused(mesh):
  with pytest.raises(ValueError, match="'width' has no rule.*'embed'"):
    mesh_lib.partition(Spec((16,), ('width',)), RULES, mesh)


@pytest.mark.parametrize('dense_layers', (0, 1, 2))
def test_every_axis_of_the_model_has_a_rule(mesh, dense_layers):
  spec = transformer.spec(
    config_lib.ModelConfig(layers=2, dense_layers=dense_layers)
  )
  rollout = mesh_lib.shardings(spec, mesh_lib.ROLLOUT_RULES, mesh)
  assert all(s.is_fully_replicated for s in jax.tree.leaves(rollout))
  train = params_lib.named(mesh_lib.shardings(spec, mesh_lib.TRAIN_RULES, mesh))
  whole = {n for n, s in train.items() if s.is_fully_replicated}
  assert whole <= {'layers/moe/router_bias'}  # all else is fully sharded


def test_moments_follow_their_parameters(mesh):
  model = config_lib.ModelConfig(width=32, layers=2, vocab_size=32)
  spec = transformer.spec(model)
  by_name = mesh_lib.shardings(spec, mesh_lib.TRAIN_RULES, mesh)
  state = jax.eval_shape(
    lambda: trainer.init_state(
      params_lib.init(spec, jax.random.key(0)),
      config_lib.RLConfig(),
      0,
      jax.random.key(1),
    )
  )
  placed = mesh_lib.like_params(state, spec, by_name, mesh)
  want = params_lib.named(by_name)
  assert params_lib.named(placed.params) == want
  seen = {name: 0 for name in want}
  leaves = jax.tree_util.tree_leaves_with_path(placed.opt_state)
  shapes = jax.tree.leaves(state.opt_state)
  for (path, sharding), leaf in zip(leaves, shapes, strict=True):
    keys = [str(p.key) for p in path if hasattr(p, 'key')]
    name = '/'.join(keys[-3:] if keys[-3:][0] == 'layers' else keys[-1:])
    if name in want:
      assert sharding == want[name], path
      seen[name] += 1
    else:
      assert leaf.shape == () and sharding.is_fully_replicated, path
  frozen = {n for n, count in seen.items() if count == 0}
  assert frozen == {'layers/moe/router_bias'}
  assert all(count == 2 for n, count in seen.items() if n not in frozen)
  for scalar in (placed.step, placed.version, placed.rng):
    assert scalar.is_fully_replicated


def test_a_leaf_of_another_shape_does_not_follow(mesh):
  spec = {'w': Spec((16, 8), ('embed', 'heads'))}
  rules = {**RULES}
  by_name = mesh_lib.shardings(spec, rules, mesh)
  state = {
    'mu': {'w': jax.ShapeDtypeStruct((16, 8), jnp.float32)},
    'factored': {'w': jax.ShapeDtypeStruct((16,), jnp.float32)},
  }
  placed = mesh_lib.like_params(state, spec, by_name, mesh)
  assert not placed['mu']['w'].is_fully_replicated
  assert placed['factored']['w'].is_fully_replicated


def test_placed_values_are_unchanged(mesh):
  spec = {'w': Spec((16, 8), ('embed', 'heads'))}
  sharding = mesh_lib.shardings(spec, RULES, mesh)['w']
  value = np.arange(128, dtype=np.float32).reshape(16, 8)
  placed = jax.device_put(value, sharding)
  assert {s.data.shape for s in placed.addressable_shards} == {(2, 8)}
  np.testing.assert_array_equal(placed, value)


def test_a_mesh_of_chosen_devices():
  one = mesh_lib.make_mesh(jax.devices()[:1])
  assert dict(one.shape) == {'data': 1, 'expert': 1, 'context': 1}
