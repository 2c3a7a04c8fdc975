"""Logits and routes equal those that Hugging Face's `transformers` gives.

The references are the files that `tests/reference/make_reference.py` wrote;
their weights are drawn again here, so PyTorch is not needed. Every case runs as
packed training rows and as steps over a paged cache, latent attention in both
of its forms.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_weights

from composer import config as config_lib
from composer import params as params_lib
from composer.model import layers
from composer.model import transformer

HERE = pathlib.Path(__file__).parent.parent / 'reference'
CASES = sorted(path.stem for path in HERE.glob('*.npz'))
LATENT = [name for name in CASES if name.startswith('deepseek')]
TOLERANCE = 1e-4  # largest difference of a logit
FAST = config_lib.NumericsConfig(mode='fast', kv_block=16)
ROWS = 64  # of an engine step


@dataclasses.dataclass(frozen=True)
class Case:
  model: config_lib.ModelConfig
  params: dict
  stored: dict


@functools.cache
def read(name):
  with np.load(HERE / f'{name}.npz') as file:
    stored = dict(file)
  config = json.loads(str(stored['config']))
  drawn = reference_weights.tensors(config, int(stored['seed']))
  assert reference_weights.digest(drawn) == int(stored['digest']), (
    'numpy draws other weights than when the reference was made; make it again'
  )
  model = to_model(config)
  params = reference_weights.tree(config, drawn)
  declared = params_lib.named(transformer.spec(model))
  found = params_lib.named(params)
  assert {n: s.shape for n, s in declared.items()} == {
    n: v.shape for n, v in found.items()
  }
  return Case(model, jax.tree.map(jnp.asarray, params), stored)


def to_model(config):
  """The `ModelConfig` of a `config.json`, of the fields that the cases use."""
  scaling = config.get('rope_scaling')
  yarn = config_lib.YarnConfig()
  if scaling:
    yarn = config_lib.YarnConfig(
      factor=scaling['factor'],
      original_context=scaling['original_max_position_embeddings'],
      beta_fast=scaling.get('beta_fast', 32.0),
      beta_slow=scaling.get('beta_slow', 1.0),
      mscale=scaling.get('mscale', 1.0),
      mscale_all_dim=scaling.get('mscale_all_dim', 0.0),
    )
  latent = config['model_type'] == 'deepseek_v3'
  experts = reference_weights.experts(config)
  given = {
    'vocab_size': config['vocab_size'],
    'layers': config['num_hidden_layers'],
    'dense_layers': reference_weights.dense_layers(config),
    'width': config['hidden_size'],
    'heads': config['num_attention_heads'],
    'dense_hidden': config['intermediate_size'],
    'rope_theta': config['rope_theta'],
    'rope_float32': True,
    'yarn': yarn,
    'norm_eps': config['rms_norm_eps'],
    'tie_embeddings': config['tie_word_embeddings'],
    'shared_experts': config.get('n_shared_experts', 0),
  }
  if experts:
    given |= {
      'experts': experts,
      'experts_per_token': config['num_experts_per_tok'],
      'expert_hidden': config['moe_intermediate_size'],
      'normalise_gates': config['norm_topk_prob'],
      'router': 'sigmoid' if latent else 'softmax',
      'router_groups': config.get('n_group', 1),
      'router_top_groups': config.get('topk_group', 1),
      'router_scale': config.get('routed_scaling_factor', 1.0),
    }
  if latent:
    return config_lib.ModelConfig(
      **given,
      q_lora=config['q_lora_rank'] or 0,
      kv_lora=config['kv_lora_rank'],
      nope_dim=config['qk_nope_head_dim'],
      rope_dim=config['qk_rope_head_dim'],
      value_dim=config['v_head_dim'],
    )
  return config_lib.ModelConfig(
    **given,
    kv_heads=config['num_key_value_heads'],
    head_dim=config['head_dim'],
    qk_norm=config['model_type'] == 'qwen3_moe',
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def packed(model, numerics, params, tokens):
  """(logits [T, V], experts [T, L, K]) of one segment of a packed row."""
  t = tokens.shape[0]
  out = transformer.forward(
    params,
    model,
    numerics,
    tokens[None],
    jnp.ones((1, t), jnp.int32),
    jnp.arange(t, dtype=jnp.int32)[None],
  )
  return to_logits(model, params, out.hidden[0]), out.experts[0]


def to_logits(model, params, hidden):
  return transformer.logits_rows(
    model,
    params['final_norm'],
    transformer.unembedding(params),
    hidden,
    jnp.ones(hidden.shape[0]),
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def one_step(model, numerics, params, cache, tokens, positions, table):
  hidden, experts, cache = transformer.step(
    params, model, numerics, cache, tokens, positions, table
  )
  return to_logits(model, params, hidden), experts, cache


def paged(model, numerics, params, tokens):
  """The same in steps of `ROWS` rows over pages in a random order."""
  count, block = len(tokens), numerics.kv_block
  columns = -(-count // block)
  pages = np.random.default_rng(0).permutation(columns) + 1
  table = np.tile(pages.astype(np.int32), (ROWS, 1))
  cache = transformer.init_cache(model, numerics, columns + 1)
  logits, experts = [], []
  for start in range(0, count, ROWS):
    size = min(ROWS, count - start)
    row_tokens, positions = np.zeros((2, ROWS), np.int32)
    row_tokens[:size] = tokens[start : start + size]
    positions[:size] = np.arange(start, start + size)
    rows = np.where(np.arange(ROWS)[:, None] < size, table, 0)  # scratch
    found, used, cache = one_step(
      model, numerics, params, cache, row_tokens, positions, rows
    )
    logits.append(np.asarray(found)[:size])
    experts.append(np.asarray(used)[:size])
  return np.concatenate(logits), np.concatenate(experts)


RUNS = {'packed': packed, 'paged': paged}


@pytest.mark.parametrize('run', RUNS)
@pytest.mark.parametrize(
  ('name', 'form'),
  [(name, 'expanded') for name in CASES]
  + [(name, 'absorbed') for name in LATENT],
)
def test_parity(name, form, run):
  case = read(name)
  numerics = dataclasses.replace(FAST, mla=form)
  logits, experts = RUNS[run](
    case.model, numerics, case.params, case.stored['tokens']
  )
  got = np.asarray(logits)[case.stored['rows']]
  difference = np.max(np.abs(got - case.stored['logits']))
  assert difference <= TOLERANCE
  assert np.std(case.stored['logits']) > 1  # of a size that says something
  want = case.stored['experts']
  assert want.size or not transformer.moe_layers(case.model)
  if want.size:
    np.testing.assert_array_equal(np.sort(experts, axis=-1), want)


@pytest.mark.parametrize('name', CASES)
def test_rotary_frequencies(name):
  case = read(name)
  got = layers.rope_frequencies(case.model)
  np.testing.assert_array_equal(got, case.stored['frequencies'])
  cos, _ = layers.rope_table(case.model, 1)
  np.testing.assert_allclose(
    cos, np.full_like(cos, case.stored['rotary_scale']), rtol=1e-6
  )
