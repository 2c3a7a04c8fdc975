"""Our `ModelConfig` as a `config.json`, as `transformers` 4 and 5 read it.

Rotary positions are written as version 4 does (`rope_theta`, `rope_scaling`),
which version 5 reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from composer import config as config_lib
from composer.model.checkpoints import architectures

ModelConfig = config_lib.ModelConfig
YarnConfig = config_lib.YarnConfig
Fields = Mapping[str, Any]


def write(
  config: ModelConfig, dtype: str, carried: Fields | None = None
) -> dict[str, Any]:
  """The `config.json` of a model, as `transformers` 4 and 5 read it.

  Args:
    config: of the model.
    dtype: name of the dtype of its matrices.
    carried: what `architectures.read` gave, if the model was read.

  Raises:
    ValueError: none of the known architectures computes this model.
  """
  carried = dict(carried or {})
  yarn = config.yarn
  stretched = int(yarn.original_context * yarn.factor)
  longest = stretched if yarn.factor > 1 else 1 << 15
  common = {
    'vocab_size': config.vocab_size,
    'hidden_size': config.width,
    'num_hidden_layers': config.layers,
    'num_attention_heads': config.heads,
    'hidden_act': 'silu',
    'attention_bias': False,
    'rms_norm_eps': config.norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': None,
    'tie_word_embeddings': config.tie_embeddings,
    'torch_dtype': dtype,
    'max_position_embeddings': carried.pop('max_position_embeddings', longest),
    **carried,
  }
  if yarn.factor > 1:
    common['rope_scaling'] = _write_yarn(yarn)
  elif not config.rope_float32:
    common[architectures.OWN_ANGLES] = False
  return _family(config)(config) | common


def _family(config: ModelConfig) -> Callable[[ModelConfig], dict[str, Any]]:
  if config.kv_lora:
    return _write_deepseek
  if config.dense_layers == config.layers and not config.qk_norm:
    return _write_llama
  return _write_glm4_moe if config.router == 'sigmoid' else _write_qwen3_moe


def _write_yarn(yarn: YarnConfig) -> dict[str, Any]:
  out = {
    'type': 'yarn',
    'rope_type': 'yarn',
    'factor': yarn.factor,
    'original_max_position_embeddings': yarn.original_context,
    'beta_fast': yarn.beta_fast,
    'beta_slow': yarn.beta_slow,
  }
  if yarn.mscale_all_dim:
    out |= {'mscale': yarn.mscale, 'mscale_all_dim': yarn.mscale_all_dim}
  elif yarn.mscale != 1.0:
    raise ValueError(
      f'model.yarn.mscale={yarn.mscale} with mscale_all_dim=0: transformers'
      ' reads the two only together; keep the model in our own layout (--to ours)'
    )
  return out


def _refuse(config: ModelConfig, needs: dict[str, Any], family: str) -> None:
  for name, value in needs.items():
    if getattr(config, name) != value:
      raise ValueError(
        f'model.{name}={getattr(config, name)!r} has no place in {family},'
        f' which is what is nearest to this model (it needs {value!r}); keep'
        ' the model in our own layout (--to ours)'
      )


def _write_deepseek(config: ModelConfig) -> dict[str, Any]:
  sparse = config.layers > config.dense_layers
  needs = {'qk_norm': False} | ({'router': 'sigmoid'} if sparse else {})
  _refuse(config, needs, 'DeepseekV3ForCausalLM')
  return {
    'architectures': ['DeepseekV3ForCausalLM'],
    'model_type': 'deepseek_v3',
    'num_key_value_heads': config.heads,
    'q_lora_rank': config.q_lora or None,
    'kv_lora_rank': config.kv_lora,
    'qk_nope_head_dim': config.nope_dim,
    'qk_rope_head_dim': config.rope_dim,
    'v_head_dim': config.value_dim,
    'rope_interleave': True,
    **_write_sigmoid_experts(config),
  }


def _write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
  return {
    'architectures': ['Glm4MoeForCausalLM'],
    'model_type': 'glm4_moe',
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_dim,
    'partial_rotary_factor': 1.0,
    'use_qk_norm': config.qk_norm,
    **_write_sigmoid_experts(config),
  }


def _write_sigmoid_experts(config: ModelConfig) -> dict[str, Any]:
  return {
    'intermediate_size': config.dense_hidden,
    'first_k_dense_replace': config.dense_layers,
    'moe_layer_freq': 1,
    'n_routed_experts': config.experts,
    'num_experts_per_tok': config.experts_per_token,
    'moe_intermediate_size': config.expert_hidden,
    'n_shared_experts': config.shared_experts,
    'scoring_func': 'sigmoid',
    'topk_method': 'noaux_tc',
    'n_group': config.router_groups,
    'topk_group': config.router_top_groups,
    'routed_scaling_factor': config.router_scale,
    'norm_topk_prob': config.normalise_gates,
    'num_nextn_predict_layers': config.mtp_layers,
  }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
  needs = {
    'mtp_layers': 0,
    'qk_norm': True,
    'router': 'softmax',
    'shared_experts': 0,
    'router_scale': 1.0,
    'router_groups': 1,
  }
  _refuse(config, needs, 'Qwen3MoeForCausalLM')
  return {
    'architectures': ['Qwen3MoeForCausalLM'],
    'model_type': 'qwen3_moe',
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_dim,
    'intermediate_size': config.dense_hidden,
    'mlp_only_layers': list(range(config.dense_layers)),
    'decoder_sparse_step': 1,
    'num_experts': config.experts,
    'num_experts_per_tok': config.experts_per_token,
    'moe_intermediate_size': config.expert_hidden,
    'norm_topk_prob': config.normalise_gates,
    'use_sliding_window': False,
    'sliding_window': None,
  }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
  _refuse(config, {'mtp_layers': 0}, 'LlamaForCausalLM')
  return {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_dim,
    'intermediate_size': config.dense_hidden,
    'mlp_bias': False,
  }
