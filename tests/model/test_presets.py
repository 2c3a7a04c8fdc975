"""Presets: their sizes are the published ones, and all of them are valid."""

import dataclasses

import jax
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import presets
from composer.model import transformer

# Name -> (all, active), as each model's makers give them, and how far from that
# the declaration may be: they round, and Moonshot's 1.04T is more than the
# tensors which it released hold (1.026T without the vision tower).
PUBLISHED = {
  'kimi_k2_5': (1.04e12, 32e9, 0.03),
  'deepseek_v3': (671e9, 37e9, 0.02),
  'qwen3_moe_30b_a3b': (30.5e9, 3.3e9, 0.02),
  'qwen3_moe_235b_a22b': (235e9, 22e9, 0.01),
  'smollm2_135m': (134.5e6, 134.5e6, 0.001),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_sizes(name):
  model, (total, active, near) = presets.preset(name), PUBLISHED[name]
  assert presets.total_count(model) == pytest.approx(total, rel=near)
  assert presets.active_count(model) == pytest.approx(active, rel=near)


def test_exact_sizes():
  """Summed by hand from the shapes of the released tensors."""
  d, h = 7168, 64
  attention = (
    d * 1536 + 1536 + 1536 * h * 192 + d * 576 + 512 + 512 * h * 256
  ) + h * 128 * d
  expert = 3 * d * 2048
  sparse = 385 * expert + 384 * d + 384
  layers = 61 * (attention + 2 * d) + 3 * d * 18_432 + 60 * sparse
  want = layers + 2 * 163_840 * d + d
  kimi = presets.preset('kimi_k2_5')
  assert presets.total_count(kimi) == want
  assert presets.active_count(kimi) == want - 60 * (384 - 8) * expert
  assert presets.total_count(presets.preset('smollm2_135m')) == 134_515_008


@pytest.mark.parametrize('name', presets.PRESETS)
def test_every_preset_is_valid(name):
  experiment = config_lib.Experiment('x', model=presets.preset(name))
  config_lib.validate(experiment)


def test_unknown_preset():
  with pytest.raises(ValueError, match="'kimi'.*kimi_k2_5, deepseek_v3"):
    presets.preset('kimi')


def test_61_layers_trace_as_two():
  """Layers are scanned: the program does not grow with their number."""
  counts = []
  numerics = config_lib.NumericsConfig(mode='fast')
  for layers in (2, 61):
    model = dataclasses.replace(presets.preset('kimi_k2_5'), layers=layers)
    params = params_lib.abstract(transformer.spec(model))
    tokens = jax.ShapeDtypeStruct((1, 64), 'int32')
    traced = jax.jit(transformer.forward, static_argnums=(1, 2)).trace(
      params, model, numerics, tokens, tokens, tokens
    )
    counts.append(len(str(traced.jaxpr).splitlines()))
  assert counts[0] == counts[1]
