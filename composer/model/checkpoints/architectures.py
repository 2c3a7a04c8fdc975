"""`config.json` of `transformers` to our `ModelConfig` (back: `describing`).

Four families are known: DeepSeek-V3 (which Kimi K2 and K2.5 are), Qwen3-MoE,
Llama, and GLM-4-MoE where all of a head rotates: that is what a model of ours
with DeepSeek's router and grouped-query attention is to others. A field that asks for something that this model does not compute is
refused by its name; one that nobody here has heard of is warned about. What a
file leaves out takes the value that the class in `transformers` gives it.

Both ways of writing rotary positions are read: `rope_theta` beside
`rope_scaling` (transformers 4) and `rope_parameters` (5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import difflib
from typing import Any

from composer import checks
from composer import config as config_lib
from composer.model.checkpoints import features

ModelConfig = config_lib.ModelConfig
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Described:
  """What a `config.json` says.

  Attributes:
    config: of the text model.
    architecture: class of the text model.
    nested: whether it is the text part of a model of more kinds of input.
    interleaved: whether pairs of rotating numbers lie side by side.
    extra_layers: layers behind the last, that predict further tokens.
    quantised: None where numbers are plain.
    carried: fields that are handed on when the model is written again.
  """

  config: ModelConfig
  architecture: str
  nested: bool
  interleaved: bool
  extra_layers: int
  quantised: features.Quantised | None
  carried: dict[str, Any]


# A field of ours: false where angles are not rounded as transformers does.
OWN_ANGLES = 'composer_rope_float32'
CARRIED = (
  'max_position_embeddings',
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
)

# --- reading -----------------------------------------------------------------


def read(document: Any) -> Described:
  """What a `config.json` describes.

  Raises:
    ValueError: an architecture that is not known (the known ones are named), a
      feature that is not implemented, or a field that is missing or no size.
  """
  if not isinstance(document, Mapping):
    raise ValueError('config.json is no JSON object')
  nested = isinstance(document.get('text_config'), Mapping)
  text = dict(document['text_config'] if nested else document)
  if nested:
    for name in ('tie_word_embeddings', *CARRIED):
      if name in document and text.get(name) is None:
        text[name] = document[name]
  architecture = _architecture(document, text, nested)
  features.require_known(text)
  config = FAMILIES[architecture](text)
  checks.check_model(config)
  features.warn_of_unknown(text)
  extra = text.get('num_nextn_predict_layers', text.get('num_mtp_layers'))
  latent = bool(config.kv_lora)
  predicts = latent or architecture == 'Glm4MoeForCausalLM'
  return Described(
    config=config,
    architecture=architecture,
    nested=nested,
    interleaved=latent and text.get('rope_interleave') is not False,
    extra_layers=(1 if extra is None else int(extra)) if predicts else 0,
    quantised=features.quantised(document, text),
    carried={n: text[n] for n in CARRIED if text.get(n) is not None},
  )


def _architecture(document: Fields, text: Fields, nested: bool) -> str:
  """Name of the text model's class in `FAMILIES`."""
  outer = list(document.get('architectures') or ())
  named = list(text.get('architectures') or ()) if nested else outer
  by_type = MODEL_TYPES.get(text.get('model_type'))
  if nested and outer and outer[0] not in NESTED:
    known = outer[0]
  elif named:
    known = named[0]
  else:
    known = by_type or text.get('model_type')
  if known in FAMILIES:
    return known
  near = difflib.get_close_matches(str(known), [*FAMILIES, *NESTED], 1)
  raise ValueError(
    f'config.json: architecture {known!r} is not known'
    + (f'; did you mean {near[0]}?' if near else '')
    + f' Known: {", ".join([*FAMILIES, *NESTED])}'
  )


def _size(text: Fields, name: str) -> int:
  if text.get(name) is None:
    raise ValueError(f'config.json: {name} is missing; it has no default')
  value = text[name]
  if isinstance(value, bool) or not isinstance(value, int) or value < 0:
    raise ValueError(f'config.json: {name}={value!r} is no whole number')
  return value


def _common(text: Fields) -> dict[str, Any]:
  theta, yarn = features.rope(text)
  return {
    'vocab_size': _size(text, 'vocab_size'),
    'layers': _size(text, 'num_hidden_layers'),
    'width': _size(text, 'hidden_size'),
    'heads': _size(text, 'num_attention_heads'),
    'rope_theta': theta,
    # YaRN takes angles rounded like this anyway.
    'rope_float32': yarn.factor == 1.0
    and bool(features.given(text, OWN_ANGLES, True)),
    'yarn': yarn,
    'norm_eps': float(features.given(text, 'rms_norm_eps', 1e-6)),
    'tie_embeddings': bool(features.given(text, 'tie_word_embeddings', False)),
  }


def _grouped(text: Fields) -> dict[str, Any]:
  heads = _size(text, 'num_attention_heads')
  head_dim = text.get('head_dim')
  if head_dim is None:
    head_dim = _size(text, 'hidden_size') // heads
  return {
    'kv_heads': int(features.given(text, 'num_key_value_heads', heads)),
    'head_dim': int(head_dim),
    **_common(text),
  }


def _deepseek(text: Fields) -> ModelConfig:
  heads = _size(text, 'num_attention_heads')
  if features.given(text, 'num_key_value_heads', heads) != heads:
    raise ValueError(
      f'config.json: num_key_value_heads={text["num_key_value_heads"]} differs'
      f' from num_attention_heads={heads}; latent attention has no fewer'
    )
  return ModelConfig(
    **_common(text),
    **_sigmoid_experts(text, dense_layers=3, scale=2.5),
    q_lora=features.given(text, 'q_lora_rank', 0),
    kv_lora=_size(text, 'kv_lora_rank'),
    nope_dim=_size(text, 'qk_nope_head_dim'),
    rope_dim=_size(text, 'qk_rope_head_dim'),
    value_dim=_size(text, 'v_head_dim'),
  )


def _sigmoid_experts(
  text: Fields, dense_layers: int, scale: float
) -> dict[str, Any]:
  """DeepSeek's router and experts; the defaults differ between classes."""
  dense = int(features.given(text, 'first_k_dense_replace', dense_layers))
  return {
    'dense_layers': min(dense, _size(text, 'num_hidden_layers')),
    'dense_hidden': _size(text, 'intermediate_size'),
    'experts': _size(text, 'n_routed_experts'),
    'experts_per_token': _size(text, 'num_experts_per_tok'),
    'expert_hidden': _size(text, 'moe_intermediate_size'),
    'shared_experts': features.given(text, 'n_shared_experts', 0),
    'router': 'sigmoid',
    'router_groups': features.given(text, 'n_group', 1),
    'router_top_groups': features.given(text, 'topk_group', 1),
    'router_scale': float(features.given(text, 'routed_scaling_factor', scale)),
    'normalise_gates': bool(features.given(text, 'norm_topk_prob', True)),
  }


def _glm4_moe(text: Fields) -> ModelConfig:
  rope = text.get('rope_parameters') or {}
  turning = rope.get('partial_rotary_factor', text.get('partial_rotary_factor'))
  if turning != 1:
    raise ValueError(
      f'config.json: partial_rotary_factor={turning or 0.5} of a Glm4Moe model'
      ' is not implemented; all of a head must rotate (1.0)'
    )
  return ModelConfig(
    **_grouped(text),
    **_sigmoid_experts(text, dense_layers=1, scale=1.0),
    qk_norm=bool(features.given(text, 'use_qk_norm', False)),
  )


def _qwen3_moe(text: Fields) -> ModelConfig:
  grouped = _grouped(text)
  plain = sorted(features.given(text, 'mlp_only_layers', []))
  if plain != list(range(len(plain))):
    raise ValueError(
      f'config.json: mlp_only_layers={plain}; only the first layers can be'
      ' dense in this model'
    )
  experts = text.get('num_experts', text.get('num_local_experts'))
  dense = {}
  if plain:
    dense = {'dense_hidden': _size(text, 'intermediate_size')}
  return ModelConfig(
    **grouped,
    **dense,
    dense_layers=len(plain),
    qk_norm=True,
    experts=_size({'num_experts': experts}, 'num_experts'),
    experts_per_token=_size(text, 'num_experts_per_tok'),
    expert_hidden=_size(text, 'moe_intermediate_size'),
    shared_experts=0,
    router='softmax',
    normalise_gates=bool(features.given(text, 'norm_topk_prob', False)),
  )


def _llama(text: Fields) -> ModelConfig:
  return ModelConfig(
    **_grouped(text),
    dense_layers=_size(text, 'num_hidden_layers'),
    dense_hidden=_size(text, 'intermediate_size'),
  )


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
  'DeepseekV3ForCausalLM': _deepseek,
  'KimiK2ForCausalLM': _deepseek,
  'Glm4MoeForCausalLM': _glm4_moe,
  'Qwen3MoeForCausalLM': _qwen3_moe,
  'LlamaForCausalLM': _llama,
}
NESTED = (
  'KimiK25ForConditionalGeneration',
  'Kimi_K25ForConditionalGeneration',
  'KimiVLForConditionalGeneration',
)
MODEL_TYPES = {
  'deepseek_v3': 'DeepseekV3ForCausalLM',
  'kimi_k2': 'DeepseekV3ForCausalLM',
  'glm4_moe': 'Glm4MoeForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
  'llama': 'LlamaForCausalLM',
}
