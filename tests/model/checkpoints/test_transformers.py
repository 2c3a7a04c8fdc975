"""What is written loads in `transformers`, which computes the same with it.

Skipped without torch and transformers. Where they are installed, every
reference model goes from Hugging Face's layout to ours and back, and the class
in `transformers` must load the result without a missing or an unexpected
tensor and give the very logits that it gives for the original.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')


def logits(directory, tokens):
  model, about = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, output_loading_info=True
  )
  for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not about[kind], (kind, about[kind])
  with torch.no_grad():
    return model(torch.as_tensor(tokens)[None]).logits[0].numpy()


@pytest.mark.filterwarnings('ignore')
def test_the_same_logits(case, write_hf, tmp_path):
  config, seed = case
  directory, _ = write_hf(config, seed)
  checkpoints.convert(directory, tmp_path / 'ours')
  checkpoints.convert(tmp_path / 'ours', tmp_path / 'back', shard_bytes=100_000)
  tokens = np.random.default_rng(0).integers(0, config['vocab_size'], 80)
  wanted = logits(directory, tokens)
  assert np.abs(wanted).max() > 0.1
  np.testing.assert_array_equal(logits(tmp_path / 'back', tokens), wanted)


@pytest.mark.filterwarnings('ignore')
def test_what_transformers_saves_is_read(case, write_hf, tmp_path, same):
  config, seed = case
  directory, _ = write_hf(config, seed)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32
  )
  model.save_pretrained(tmp_path / 'saved', max_shard_size='200KB')
  document = json.loads((tmp_path / 'saved' / 'config.json').read_text())
  assert 'rope_parameters' in document or 'rope_theta' in document
  found, params = checkpoints.load(tmp_path / 'saved')
  wanted, original = checkpoints.load(directory)
  assert not checkpoints.differences(found, wanted)
  same(params, original)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
  'fields',
  [
    {},
    {'qk_norm': True, 'rope_float32': True, 'dense_layers': 1},
    {'router_groups': 4, 'router_top_groups': 2, 'router_scale': 1.7},
  ],
)
def test_models_of_our_own(tmp_path, fields):
  """The quick start's family: DeepSeek's router over grouped-query attention."""
  model = config_lib.ModelConfig(vocab_size=96, width=48, **fields)
  spec = transformer.spec(model)
  params = params_lib.named(params_lib.init(spec, jax.random.key(0)))
  for name, value in params.items():  # logits of order 1, routes far from ties
    params[name] = value * (20 if name == 'embed' else 1.5)
  if 'layers/moe/router_bias' in params:
    shape = params['layers/moe/router_bias'].shape
    noise = jax.random.normal(jax.random.key(1), shape)
    params['layers/moe/router_bias'] = 0.3 * noise
  checkpoints.save(tmp_path / 'hf', model, params, to='hf')
  assert checkpoints.read_config(tmp_path / 'hf') == model
  tokens = np.random.default_rng(0).integers(0, 96, 64)
  wanted = logits(tmp_path / 'hf', tokens)
  nested = params_lib.unnamed(params)
  numerics = config_lib.NumericsConfig(mode='fast')
  row = jnp.asarray(tokens, jnp.int32)[None]
  out = transformer.forward(
    nested, model, numerics, row, jnp.ones_like(row), jnp.arange(64)[None]
  )
  got = transformer.logits_rows(
    model,
    nested['final_norm'],
    transformer.unembedding(nested),
    out.hidden[0],
    jnp.ones(64),
  )
  np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)
