"""What a model and its numerics must satisfy, one fault at a time."""

import dataclasses

import pytest

from composer import checks
from composer import config as config_lib
from composer.model import presets

LATENT = presets.TINY_LATENT
FAULTS = {
  'kv_heads=3': (presets.TINY, {'kv_heads': 3}, 'divisor of heads'),
  'head_dim=7': (presets.TINY, {'head_dim': 7}, 'even number'),
  'rope_dim=4 without': (presets.TINY, {'rope_dim': 4}, 'set kv_lora'),
  'q_lora=8 without': (presets.TINY, {'q_lora': 8}, 'set kv_lora'),
  'dense_layers=4': (LATENT, {'dense_layers': 4}, 'first of all'),
  'nope_dim=0': (LATENT, {'nope_dim': 0}, 'needs it'),
  'value_dim=0': (LATENT, {'value_dim': 0}, 'needs it'),
  'rope_dim=5': (LATENT, {'rope_dim': 5}, 'even number'),
  'qk_norm=true': (LATENT, {'qk_norm': True}, 'false'),
  'experts_per_token=9': (LATENT, {'experts_per_token': 9}, 'twice'),
  'experts=40000': (LATENT, {'experts': 40_000}, 'int16'),
  'router_top_groups=5': (LATENT, {'router_top_groups': 5}, 'exist'),
  "router='softmax'": (LATENT, {'router': 'softmax'}, '1 group'),
  'experts=10': (LATENT, {'experts': 10}, 'one size'),
  'router_groups=8': (LATENT, {'router_groups': 8}, 'two experts or more'),
  'experts_per_token=5': (LATENT, {'experts_per_token': 5}, 'more groups'),
  'yarn.factor=0.5': (
    LATENT,
    {'yarn': config_lib.YarnConfig(factor=0.5)},
    '1 is plain RoPE',
  ),
  'yarn.beta_slow=40': (
    LATENT,
    {'yarn': config_lib.YarnConfig(beta_slow=40.0)},
    'exchange',
  ),
}


@pytest.mark.parametrize('named', FAULTS)
def test_a_model_that_cannot_work(named):
  model, changes, remedy = FAULTS[named]
  checks.check_model(model)
  with pytest.raises(ValueError) as error:
    checks.check_model(dataclasses.replace(model, **changes))
  assert named in str(error.value) and remedy in str(error.value)


def test_experts_of_a_dense_model_are_not_read():
  dense = dataclasses.replace(
    presets.TINY, dense_layers=2, experts=1, experts_per_token=2
  )
  checks.check_model(dense)


def test_bitwise_needs_one_form_of_latent_attention():
  numerics = config_lib.NumericsConfig(mla='split')
  experiment = config_lib.Experiment('x', numerics=numerics)
  with pytest.raises(ValueError, match="mla='split'.*absorbed or expanded"):
    config_lib.validate(experiment)
  fast = dataclasses.replace(numerics, mode='fast')
  config_lib.validate(dataclasses.replace(experiment, numerics=fast))
