"""Features of a `config.json` that are common to architectures.

Which fields change nothing and which ask for something that is not computed
here; rotary positions; the storage format of quantised matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any
import warnings

from composer import config as config_lib
from composer.model.checkpoints import tensors as tensors_lib

YarnConfig = config_lib.YarnConfig
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Quantised:
  """How matrices are stored: 'fp8' in blocks, or 'int4' in groups of columns."""

  kind: str
  block: tuple[int, int] = (128, 128)
  group: int = 32


# Field -> values that change nothing. Any other is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
  'attention_bias': (False, None),
  'mlp_bias': (False, None),
  'hidden_act': ('silu', 'swish', None),
  'use_sliding_window': (False, None),
  'partial_rotary_factor': (1, None),
  'rope_interleaved': (False, None),
  'moe_layer_freq': (1, None),
  'decoder_sparse_step': (1, None),
  'topk_method': ('noaux_tc', None),
  'scoring_func': ('sigmoid', None),
  'attn_logit_softcapping': (None,),
  'final_logit_softcapping': (None,),
  'logits_soft_cap': (None,),
  'query_pre_attn_scalar': (None,),
  'attention_multiplier': (None, 1),
  'embedding_multiplier': (None, 1),
  'residual_multiplier': (None, 1),
  'logits_scaling': (None, 1),
  'clip_qkv': (None,),
  'attention_chunk_size': (None,),
  'no_rope_layers': (None, []),
  'index_topk': (None,),
  'index_n_heads': (None,),
  'swiglu_limit': (None,),
  'alibi': (False, None),
  'is_encoder_decoder': (False, None),
  'add_cross_attention': (False, None),
}
# Read below, or of no effect on what the model computes.
HARMLESS = frozenset(
  """
  architectures model_type auto_map torch_dtype dtype transformers_version
  _name_or_path name_or_path use_cache initializer_range attention_dropout
  hidden_dropout pretraining_tp ep_size aux_loss_alpha seq_aux first_k_dense
  num_nextn_predict_layers num_mtp_layers output_router_logits
  router_aux_loss_coef max_window_layers sliding_window return_dict
  output_hidden_states output_attentions chunk_size_feed_forward id2label
  label2id problem_type sep_token_id decoder_start_token_id is_decoder
  cross_attention_hidden_size finetuning_task prefix pruned_heads
  task_specific_params tie_encoder_decoder tokenizer_class torchscript
  transformers.js_config unsloth_fixed unsloth_version qk_head_dim is_llama_config
  num_local_experts rope_theta rope_scaling rope_parameters default_theta
  quantization_config compression_config tie_word_embeddings layer_types
  num_key_value_heads head_dim hidden_size num_attention_heads
  num_hidden_layers intermediate_size vocab_size rms_norm_eps
  max_position_embeddings bos_token_id eos_token_id pad_token_id
  kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
  n_group topk_group n_routed_experts n_shared_experts moe_intermediate_size
  use_qk_norm composer_rope_float32
  num_experts num_experts_per_tok norm_topk_prob routed_scaling_factor
  first_k_dense_replace rope_interleave mlp_only_layers temperature top_p top_k
  do_sample max_length min_length
  """.split()
)


def require_known(text: Fields) -> None:
  """Refuses, by its name, a field that asks for what is not computed here."""
  for name, neutral in NEUTRAL.items():
    if name in text and text[name] not in neutral:
      raise ValueError(
        f'config.json: {name}={text[name]!r} asks for what this model does not'
        f' compute; it reads {" or ".join(map(repr, neutral))}'
      )
  types = set(text.get('layer_types') or ()) - {'full_attention'}
  if types:
    raise ValueError(
      f'config.json: layer_types has {sorted(types)}; every layer of this'
      ' model is of full attention'
    )
  # Qwen's files carry a window that `use_sliding_window` switches off.
  window = text.get('sliding_window')
  if window is not None and 'use_sliding_window' not in text:
    raise ValueError(
      f'config.json: sliding_window={window} asks for windowed attention, which'
      ' this model does not compute; it reads null'
    )


def warn_of_unknown(text: Fields) -> None:
  unknown = sorted(text.keys() - HARMLESS - NEUTRAL.keys())
  if unknown:
    warnings.warn(
      f'config.json has fields that are not known here:'
      f' {tensors_lib.listed(unknown)}; if one of them changes what the model'
      ' computes, what is read is another model',
      stacklevel=3,
    )


def given(text: Fields, name: str, default: Any) -> Any:
  """A field, or `default` where it is absent or null."""
  value = text.get(name)
  return default if value is None else value


def rope(text: Fields) -> tuple[float, YarnConfig]:
  """(theta, YaRN), from either way of writing them."""
  rope = dict(text.get('rope_parameters') or text.get('rope_scaling') or {})
  theta = float(rope.pop('rope_theta', None) or given(text, 'rope_theta', 1e4))
  kind = rope.pop('rope_type', rope.pop('type', 'default')) or 'default'
  rope.pop('type', None)
  if rope.pop('partial_rotary_factor', None) not in (None, 1):
    raise ValueError('config.json: partial_rotary_factor is not 1; all turn')
  if kind == 'default':
    return theta, YarnConfig()
  if kind != 'yarn':
    raise ValueError(
      f'config.json: rotary positions of type {kind!r} are not implemented;'
      ' known: default, yarn'
    )
  return theta, _yarn(rope, text)


def _yarn(rope: dict[str, Any], text: Fields) -> YarnConfig:
  context = given(
    rope,
    'original_max_position_embeddings',
    text.get('max_position_embeddings'),
  )
  if not context:
    raise ValueError(
      'config.json: YaRN without original_max_position_embeddings'
    )
  longest = text.get('max_position_embeddings')
  factor = rope.get('factor') or (longest or 0) / context
  mscale, of_all = rope.get('mscale'), rope.get('mscale_all_dim')
  known = {
    'factor',
    'original_max_position_embeddings',
    'beta_fast',
    'beta_slow',
    'mscale',
    'mscale_all_dim',
    'truncate',
    'attention_factor',
    'finetuned',
  }
  for name, value in rope.items():
    if name not in known or (name, value) == ('truncate', False):
      raise ValueError(f'config.json: YaRN with {name}={value} is not known')
  if rope.get('attention_factor') is not None:
    raise ValueError(
      f'config.json: attention_factor={rope["attention_factor"]} of YaRN is not'
      ' implemented; it follows from mscale and mscale_all_dim'
    )
  if of_all and not mscale:
    raise ValueError(
      f'config.json: mscale_all_dim={of_all} of YaRN without mscale is not'
      ' implemented; give both'
    )
  # transformers reads mscale only where mscale_all_dim is given as well.
  return YarnConfig(
    factor=float(factor),
    original_context=int(context),
    beta_fast=float(rope.get('beta_fast') or 32),
    beta_slow=float(rope.get('beta_slow') or 1),
    mscale=float(mscale) if mscale and of_all else 1.0,
    mscale_all_dim=float(of_all or 0.0),
  )


def quantised(document: Fields, text: Fields) -> Quantised | None:
  for holder in (text, document):
    for name in ('quantization_config', 'compression_config'):
      if holder.get(name):
        return _read_quantised(holder[name])
  return None


def _read_quantised(about: Fields) -> Quantised:
  method = about.get('quant_method')
  if method == 'fp8':
    block = about.get('weight_block_size')
    if not block or len(block) != 2 or about.get('fmt', 'e4m3') != 'e4m3':
      raise ValueError(
        f'config.json: FP8 with weight_block_size={block} and'
        f' fmt={about.get("fmt")!r}; E4M3 with blocks of two sizes is read'
      )
    return Quantised('fp8', block=(int(block[0]), int(block[1])))
  if method == 'compressed-tensors':
    return _read_compressed(about)
  raise ValueError(
    f'config.json: quantization {method!r} is not read; known: fp8 (blocks of'
    ' DeepSeek-V3), compressed-tensors (pack-quantized INT4). Dequantise first'
  )


def _read_compressed(about: Fields) -> Quantised:
  groups = about.get('config_groups') or {}
  sizes = set()
  for group in groups.values():
    weights = group.get('weights') or {}
    wanted = {
      'num_bits': 4,
      'type': 'int',
      'symmetric': True,
      'strategy': 'group',
    }
    got = {name: weights.get(name) for name in wanted}
    if (
      got != wanted or weights.get('actorder') or group.get('input_activations')
    ):
      raise ValueError(
        f'config.json: compressed-tensors with {got}; only symmetric INT4 in'
        ' groups, of weights alone, is read'
      )
    sizes.add(int(weights.get('group_size') or 0))
  if about.get('format') != 'pack-quantized' or len(sizes) != 1 or 0 in sizes:
    raise ValueError(
      f'config.json: compressed-tensors of format {about.get("format")!r} with'
      f' groups of {sorted(sizes)}; pack-quantized with one size is read'
    )
  return Quantised('int4', group=sizes.pop())
