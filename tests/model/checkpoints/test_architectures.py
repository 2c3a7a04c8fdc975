"""Configurations as published, as either version writes them, and refused."""

import copy

import pytest

from composer import config as config_lib
from composer.model import checkpoints
from composer.model import presets
from composer.model.checkpoints import architectures
from composer.model.checkpoints import describing

# What the models were published with, of the fields that shape them.
DEEPSEEK_V3 = {
  'architectures': ['DeepseekV3ForCausalLM'],
  'model_type': 'deepseek_v3',
  'attention_bias': False,
  'attention_dropout': 0.0,
  'aux_loss_alpha': 0.001,
  'bos_token_id': 0,
  'eos_token_id': 1,
  'ep_size': 1,
  'first_k_dense_replace': 3,
  'hidden_act': 'silu',
  'hidden_size': 7168,
  'initializer_range': 0.02,
  'intermediate_size': 18432,
  'kv_lora_rank': 512,
  'max_position_embeddings': 163840,
  'moe_intermediate_size': 2048,
  'moe_layer_freq': 1,
  'n_group': 8,
  'n_routed_experts': 256,
  'n_shared_experts': 1,
  'norm_topk_prob': True,
  'num_attention_heads': 128,
  'num_experts_per_tok': 8,
  'num_hidden_layers': 61,
  'num_key_value_heads': 128,
  'num_nextn_predict_layers': 1,
  'q_lora_rank': 1536,
  'qk_nope_head_dim': 128,
  'qk_rope_head_dim': 64,
  'quantization_config': {
    'activation_scheme': 'dynamic',
    'fmt': 'e4m3',
    'quant_method': 'fp8',
    'weight_block_size': [128, 128],
  },
  'rms_norm_eps': 1e-06,
  'rope_scaling': {
    'beta_fast': 32,
    'beta_slow': 1,
    'factor': 40,
    'mscale': 1.0,
    'mscale_all_dim': 1.0,
    'original_max_position_embeddings': 4096,
    'type': 'yarn',
  },
  'rope_theta': 10000,
  'routed_scaling_factor': 2.5,
  'scoring_func': 'sigmoid',
  'seq_aux': True,
  'tie_word_embeddings': False,
  'topk_group': 4,
  'topk_method': 'noaux_tc',
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.33.1',
  'use_cache': True,
  'v_head_dim': 128,
  'vocab_size': 129280,
}
KIMI_K2_5 = {
  'architectures': ['KimiK25ForConditionalGeneration'],
  'auto_map': {'AutoConfig': 'configuration_kimi_k25.KimiK25Config'},
  'model_type': 'kimi_k25',
  'tie_word_embeddings': False,
  'text_config': {
    **DEEPSEEK_V3,
    'model_type': 'kimi_k2',
    'bos_token_id': 163584,
    'eos_token_id': 163585,
    'first_k_dense_replace': 1,
    'max_position_embeddings': 262144,
    'n_group': 1,
    'n_routed_experts': 384,
    'num_attention_heads': 64,
    'num_key_value_heads': 64,
    'num_nextn_predict_layers': 0,
    'quantization_config': {
      'quant_method': 'compressed-tensors',
      'format': 'pack-quantized',
      'config_groups': {
        'group_0': {
          'targets': ['Linear'],
          'weights': {
            'actorder': None,
            'group_size': 32,
            'num_bits': 4,
            'strategy': 'group',
            'symmetric': True,
            'type': 'int',
          },
        }
      },
    },
    'rms_norm_eps': 1e-05,
    'rope_scaling': {
      **DEEPSEEK_V3['rope_scaling'],
      'beta_fast': 32.0,
      'factor': 64.0,
    },
    'rope_theta': 50000.0,
    'routed_scaling_factor': 2.827,
    'topk_group': 1,
    'vocab_size': 163840,
  },
  'vision_config': {'vt_hidden_size': 1152},
}
QWEN3_30B = {
  'architectures': ['Qwen3MoeForCausalLM'],
  'attention_bias': False,
  'decoder_sparse_step': 1,
  'head_dim': 128,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'intermediate_size': 6144,
  'max_position_embeddings': 40960,
  'max_window_layers': 48,
  'mlp_only_layers': [],
  'model_type': 'qwen3_moe',
  'moe_intermediate_size': 768,
  'norm_topk_prob': True,
  'num_attention_heads': 32,
  'num_experts': 128,
  'num_experts_per_tok': 8,
  'num_hidden_layers': 48,
  'num_key_value_heads': 4,
  'output_router_logits': False,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000.0,
  'router_aux_loss_coef': 0.001,
  'sliding_window': None,
  'tie_word_embeddings': False,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
SMOLLM2 = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'hidden_act': 'silu',
  'hidden_size': 576,
  'intermediate_size': 1536,
  'is_llama_config': True,
  'max_position_embeddings': 8192,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 9,
  'num_hidden_layers': 30,
  'num_key_value_heads': 3,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_interleaved': False,
  'rope_scaling': None,
  'rope_theta': 100000,
  'tie_word_embeddings': True,
  'vocab_size': 49152,
}
PUBLISHED = {
  'deepseek_v3': DEEPSEEK_V3,
  'kimi_k2_5': KIMI_K2_5,
  'qwen3_moe_30b_a3b': QWEN3_30B,
  'smollm2_135m': SMOLLM2,
}


def as_version_5(document):
  """Rotary positions in one dictionary, dtype without the torch."""
  out = copy.deepcopy(document)
  text = out.get('text_config', out)
  rope = dict(text.pop('rope_scaling') or {})
  kind = rope.pop('type', 'default')
  rope |= {'rope_type': kind, 'rope_theta': text.pop('rope_theta')}
  text['rope_parameters'] = rope
  text['dtype'] = text.pop('torch_dtype', 'bfloat16')
  return out


@pytest.mark.parametrize('version', [4, 5])
@pytest.mark.parametrize('name', PUBLISHED)
def test_published_configurations_are_the_presets(name, version):
  document = PUBLISHED[name]
  if version == 5:
    document = as_version_5(document)
  described = architectures.read(document)
  preset = getattr(presets, name.upper())
  assert not checkpoints.differences(described.config, preset)
  latent = name in ('deepseek_v3', 'kimi_k2_5')
  assert described.interleaved == latent
  assert described.nested == (name == 'kimi_k2_5')
  assert described.extra_layers == (1 if name == 'deepseek_v3' else 0)


def test_storage_formats():
  fp8 = architectures.read(DEEPSEEK_V3).quantised
  assert (fp8.kind, fp8.block) == ('fp8', (128, 128))
  int4 = architectures.read(KIMI_K2_5).quantised
  assert (int4.kind, int4.group) == ('int4', 32)


@pytest.mark.parametrize('name', PUBLISHED)
def test_what_is_written_reads_the_same(name):
  described = architectures.read(PUBLISHED[name])
  written = describing.write(described.config, 'bfloat16', described.carried)
  for document in (written, as_version_5(written)):
    again = architectures.read(document)
    assert again.config == described.config
    assert again.carried == described.carried


def changed(base, **fields):
  out = copy.deepcopy(base)
  text = out.get('text_config', out)
  for name, value in fields.items():
    if value is KeyError:
      text.pop(name, None)
    else:
      text[name] = value
  return out


YARN = {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 64}
REFUSED = [
  (SMOLLM2, {'architectures': ['LlamaForCausalLMM']}, 'did you mean Llama'),
  (SMOLLM2, {'architectures': ['GPT2LMHeadModel']}, 'Known: DeepseekV3For'),
  (SMOLLM2, {'attention_bias': True}, 'attention_bias=True'),
  (SMOLLM2, {'mlp_bias': True}, 'mlp_bias=True'),
  (SMOLLM2, {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
  (SMOLLM2, {'sliding_window': 512}, 'sliding_window=512'),
  (SMOLLM2, {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
  (SMOLLM2, {'rope_scaling': {'rope_type': 'llama3'}}, "type 'llama3'"),
  (SMOLLM2, {'rope_scaling': {'type': 'linear', 'factor': 2}}, "'linear'"),
  (SMOLLM2, {'hidden_size': KeyError}, 'hidden_size is missing'),
  (SMOLLM2, {'hidden_size': '576'}, "hidden_size='576' is no whole number"),
  (SMOLLM2, {'num_key_value_heads': 2}, 'model.heads=9'),
  (
    SMOLLM2,
    {'rope_scaling': {**YARN, 'attention_factor': 1.2}},
    'attention_factor=1.2',
  ),
  (SMOLLM2, {'rope_scaling': {**YARN, 'truncate': False}}, 'truncate=False'),
  (SMOLLM2, {'rope_scaling': {**YARN, 'mscale_all_dim': 1}}, 'without mscale'),
  (SMOLLM2, {'rope_scaling': {**YARN, 'ramp': 1}}, 'ramp=1'),
  (QWEN3_30B, {'use_sliding_window': True}, 'use_sliding_window=True'),
  (QWEN3_30B, {'decoder_sparse_step': 2}, 'decoder_sparse_step=2'),
  (QWEN3_30B, {'mlp_only_layers': [3]}, r'mlp_only_layers=\[3\]'),
  (QWEN3_30B, {'layer_types': ['sliding_attention']}, 'sliding_attention'),
  (DEEPSEEK_V3, {'topk_method': 'greedy'}, "topk_method='greedy'"),
  (DEEPSEEK_V3, {'scoring_func': 'softmax'}, "scoring_func='softmax'"),
  (DEEPSEEK_V3, {'index_topk': 2048}, 'index_topk=2048'),
  (DEEPSEEK_V3, {'num_key_value_heads': 8}, 'num_key_value_heads=8'),
  (
    DEEPSEEK_V3,
    {'quantization_config': {'quant_method': 'gptq'}},
    "quantization 'gptq' is not read; known: fp8",
  ),
  (
    DEEPSEEK_V3,
    {'quantization_config': {'quant_method': 'fp8', 'fmt': 'e5m2'}},
    "fmt='e5m2'",
  ),
]


@pytest.mark.parametrize(('base', 'fields', 'words'), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(base, fields, words):
  with pytest.raises(ValueError, match=words):
    architectures.read(changed(base, **fields))


def test_asymmetric_int4_is_refused():
  document = copy.deepcopy(KIMI_K2_5)
  about = document['text_config']['quantization_config']
  about['config_groups']['group_0']['weights']['symmetric'] = False
  with pytest.raises(ValueError, match="'symmetric': False"):
    architectures.read(document)
  about['config_groups']['group_0']['weights']['symmetric'] = True
  about['format'] = 'nvfp4-pack-quantized'
  with pytest.raises(ValueError, match='nvfp4-pack-quantized'):
    architectures.read(document)


def test_an_unknown_field_is_warned_about():
  with pytest.warns(UserWarning, match='not known here: depth_scale'):
    architectures.read(changed(SMOLLM2, depth_scale=2))


def test_a_window_that_is_switched_off_is_none():
  architectures.read(
    changed(QWEN3_30B, sliding_window=4096, use_sliding_window=False)
  )


def test_defaults_are_those_of_the_classes():
  gone = {'norm_topk_prob': KeyError, 'rms_norm_eps': KeyError}
  found = architectures.read(changed(QWEN3_30B, **gone)).config
  assert not found.normalise_gates and found.norm_eps == 1e-6
  found = architectures.read(changed(DEEPSEEK_V3, **gone)).config
  assert found.normalise_gates
  gone = {'head_dim': KeyError, 'num_key_value_heads': KeyError}
  found = architectures.read(changed(SMOLLM2, **gone)).config
  assert (found.head_dim, found.kv_heads) == (64, 9)


def test_yarn_reads_mscale_only_with_mscale_all_dim():
  fields = {'rope_scaling': {**YARN, 'mscale': 0.7}}
  yarn = architectures.read(changed(SMOLLM2, **fields)).config.yarn
  assert (yarn.mscale, yarn.mscale_all_dim) == (1.0, 0.0)
  fields = {'rope_scaling': {**YARN, 'mscale': 0.7, 'mscale_all_dim': 0.3}}
  yarn = architectures.read(changed(SMOLLM2, **fields)).config.yarn
  assert (yarn.mscale, yarn.mscale_all_dim) == (0.7, 0.3)


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'shared_experts': 1}, 'model.shared_experts=1'),
    ({'router_scale': 2.0}, 'model.router_scale=2.0'),
    ({'qk_norm': False}, 'model.qk_norm=False'),
  ],
)
def test_models_without_a_place_are_not_written(fields, words):
  model = config_lib.ModelConfig(
    **({'qk_norm': True, 'router': 'softmax', 'shared_experts': 0} | fields)
  )
  with pytest.raises(ValueError, match=words):
    describing.write(model, 'float32')
