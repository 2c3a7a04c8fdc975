"""Published models as configurations, and how many parameters they have.

Sources: the `config.json` that each model was released with. Numbers that this
code does not read (the context that a model was trained on) are left out.
"""

from __future__ import annotations

import dataclasses
import math

from composer import config as config_lib
from composer import params as params_lib
from composer.model import transformer

ModelConfig = config_lib.ModelConfig

DEEPSEEK_V3 = ModelConfig(
  vocab_size=129_280,
  layers=61,
  dense_layers=3,
  width=7168,
  heads=128,
  q_lora=1536,
  kv_lora=512,
  nope_dim=128,
  rope_dim=64,
  value_dim=128,
  dense_hidden=18_432,
  experts=256,
  experts_per_token=8,
  expert_hidden=2048,
  shared_experts=1,
  router='sigmoid',
  router_groups=8,
  router_top_groups=4,
  router_scale=2.5,
  normalise_gates=True,
  rope_theta=10_000.0,
  yarn=config_lib.YarnConfig(
    factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0
  ),
  norm_eps=1e-6,
)

KIMI_K2_5 = ModelConfig(
  vocab_size=163_840,
  layers=61,
  dense_layers=1,
  width=7168,
  heads=64,
  q_lora=1536,
  kv_lora=512,
  nope_dim=128,
  rope_dim=64,
  value_dim=128,
  dense_hidden=18_432,
  experts=384,
  experts_per_token=8,
  expert_hidden=2048,
  shared_experts=1,
  router='sigmoid',
  router_scale=2.827,
  normalise_gates=True,
  rope_theta=50_000.0,
  yarn=config_lib.YarnConfig(
    factor=64.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0
  ),
  norm_eps=1e-5,
)

QWEN3_MOE_30B_A3B = ModelConfig(
  vocab_size=151_936,
  layers=48,
  width=2048,
  heads=32,
  kv_heads=4,
  head_dim=128,
  qk_norm=True,
  experts=128,
  experts_per_token=8,
  expert_hidden=768,
  shared_experts=0,
  router='softmax',
  normalise_gates=True,
  rope_theta=1_000_000.0,
  rope_float32=True,
  norm_eps=1e-6,
)

QWEN3_MOE_235B_A22B = dataclasses.replace(
  QWEN3_MOE_30B_A3B, layers=94, width=4096, heads=64, expert_hidden=1536
)

SMOLLM2_135M = ModelConfig(
  vocab_size=49_152,
  layers=30,
  dense_layers=30,
  width=576,
  heads=9,
  kv_heads=3,
  head_dim=64,
  dense_hidden=1536,
  rope_theta=100_000.0,
  rope_float32=True,
  norm_eps=1e-5,
  tie_embeddings=True,
)

# Small models with every part of the large ones, for tests and trials on a CPU.
TINY = ModelConfig(
  vocab_size=64,
  layers=2,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  dense_hidden=24,
  experts=6,
  experts_per_token=2,
  expert_hidden=16,
)

TINY_LATENT = ModelConfig(
  vocab_size=64,
  layers=3,
  dense_layers=1,
  width=32,
  heads=4,
  q_lora=12,
  kv_lora=16,
  nope_dim=8,
  rope_dim=4,
  value_dim=6,
  dense_hidden=24,
  experts=8,
  experts_per_token=2,
  expert_hidden=16,
  router_groups=4,
  router_top_groups=2,
  router_scale=1.5,
  yarn=config_lib.YarnConfig(
    factor=8.0, original_context=8, mscale=0.7, mscale_all_dim=1.0
  ),
)

TINY_SOFTMAX = ModelConfig(
  vocab_size=64,
  layers=2,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  qk_norm=True,
  experts=6,
  experts_per_token=2,
  expert_hidden=16,
  shared_experts=0,
  router='softmax',
  norm_eps=1e-6,
)

PRESETS: dict[str, ModelConfig] = {
  'kimi_k2_5': KIMI_K2_5,
  'deepseek_v3': DEEPSEEK_V3,
  'qwen3_moe_30b_a3b': QWEN3_MOE_30B_A3B,
  'qwen3_moe_235b_a22b': QWEN3_MOE_235B_A22B,
  'smollm2_135m': SMOLLM2_135M,
  'quickstart': ModelConfig(),
  'tiny': TINY,
  'tiny_latent': TINY_LATENT,
  'tiny_softmax': TINY_SOFTMAX,
}


def preset(name: str) -> ModelConfig:
  """The configuration of that name.

  Raises:
    ValueError: there is none; lists the known ones.
  """
  if name not in PRESETS:
    raise ValueError(
      f'unknown preset {name!r}; choose one of {", ".join(PRESETS)}'
    )
  return PRESETS[name]


def total_count(config: ModelConfig) -> int:
  """All parameters."""
  return params_lib.count(transformer.spec(config))


def active_count(config: ModelConfig) -> int:
  """Parameters that a token meets: K of the E experts, and all else.

  Embedding and unembedding count whole, as in the published figures.
  """
  named = params_lib.named(transformer.spec(config))
  routed = sum(math.prod(s.shape) for s in named.values() if 'expert' in s.axes)
  idle = config.experts - config.experts_per_token
  return total_count(config) - routed * idle // config.experts
