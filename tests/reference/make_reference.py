"""Writes the reference values: logits and routes that `transformers` gives.

Run: python tests/reference/make_reference.py
It needs torch and transformers, the tests do not: they read the `.npz` files
beside this script. Each holds the `config.json` of a small random model, the
seed of its weights (`reference_weights.tensors`), tokens, and for some of the
positions the logits in float32; for all of them the experts of every MoE layer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile

import numpy as np
import reference_weights
from safetensors.numpy import save_file
import torch
import transformers

HERE = pathlib.Path(__file__).parent

DEEPSEEK = {
  'model_type': 'deepseek_v3',
  'architectures': ['DeepseekV3ForCausalLM'],
  'vocab_size': 96,
  'hidden_size': 40,
  'intermediate_size': 56,
  'moe_intermediate_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 4,
  'n_shared_experts': 1,
  'n_routed_experts': 16,
  'routed_scaling_factor': 2.5,
  'kv_lora_rank': 20,
  'q_lora_rank': 24,
  'qk_rope_head_dim': 16,
  'v_head_dim': 12,
  'qk_nope_head_dim': 10,
  'n_group': 1,
  'topk_group': 1,
  'num_experts_per_tok': 3,
  'first_k_dense_replace': 1,
  'norm_topk_prob': True,
  'hidden_act': 'silu',
  'max_position_embeddings': 4096,
  'rms_norm_eps': 1e-6,
  'rope_theta': 10_000.0,
  'rope_scaling': None,
  'rope_interleave': True,
  'attention_bias': False,
  'tie_word_embeddings': False,
}

QWEN = {
  'model_type': 'qwen3_moe',
  'architectures': ['Qwen3MoeForCausalLM'],
  'vocab_size': 96,
  'hidden_size': 40,
  'intermediate_size': 56,
  'moe_intermediate_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 6,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'num_experts': 12,
  'num_experts_per_tok': 3,
  'norm_topk_prob': True,
  'decoder_sparse_step': 1,
  'mlp_only_layers': [],
  'hidden_act': 'silu',
  'max_position_embeddings': 4096,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1_000_000.0,
  'attention_bias': False,
  'tie_word_embeddings': False,
}

LLAMA = {
  'model_type': 'llama',
  'architectures': ['LlamaForCausalLM'],
  'vocab_size': 96,
  'hidden_size': 48,
  'intermediate_size': 80,
  'num_hidden_layers': 3,
  'num_attention_heads': 6,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'hidden_act': 'silu',
  'max_position_embeddings': 4096,
  'rms_norm_eps': 1e-5,
  'rope_theta': 100_000.0,
  'attention_bias': False,
  'mlp_bias': False,
  'tie_word_embeddings': False,
}


def yarn(factor, original, mscale, mscale_all_dim, fast=32.0, slow=1.0):
  return {
    'type': 'yarn',
    'factor': factor,
    'original_max_position_embeddings': original,
    'beta_fast': fast,
    'beta_slow': slow,
    'mscale': mscale,
    'mscale_all_dim': mscale_all_dim,
  }


# name -> (config.json, tokens, seed of weights and tokens)
CASES = {
  'deepseek_plain': (DEEPSEEK | {'num_hidden_layers': 2}, 40, 1),
  'deepseek_kimi': (
    DEEPSEEK
    | {
      'rope_theta': 50_000.0,
      'rms_norm_eps': 1e-5,
      'routed_scaling_factor': 2.827,
      'rope_scaling': yarn(64.0, 16, 1.0, 1.0),
    },
    768,
    2,
  ),
  'deepseek_groups': (
    DEEPSEEK
    | {
      'n_group': 4,
      'topk_group': 2,
      'first_k_dense_replace': 2,
      'num_hidden_layers': 4,
      'rope_scaling': yarn(40.0, 32, 1.0, 1.0),
    },
    512,
    3,
  ),
  'deepseek_no_q_lora': (
    DEEPSEEK
    | {
      'q_lora_rank': None,
      'n_shared_experts': 2,
      'norm_topk_prob': False,
      'routed_scaling_factor': 1.0,
      'rope_scaling': yarn(8.0, 64, 0.707, 1.3, 16.0, 2.0),
    },
    400,
    4,
  ),
  'deepseek_half_split': (
    DEEPSEEK
    | {
      'rope_interleave': False,
      'n_group': 2,
      'topk_group': 1,
      'first_k_dense_replace': 0,
      'num_hidden_layers': 2,
      'rope_scaling': yarn(16.0, 16, 1.4, 0.6),
    },
    200,
    5,
  ),
  'qwen3_normalised': (QWEN, 80, 6),
  'qwen3_raw': (
    QWEN | {'norm_topk_prob': False, 'tie_word_embeddings': True},
    80,
    7,
  ),
  'qwen3_yarn': (
    QWEN
    | {
      'num_hidden_layers': 2,
      'rope_scaling': {
        'rope_type': 'yarn',
        'factor': 4.0,
        'original_max_position_embeddings': 32,
      },
    },
    300,
    8,
  ),
  'llama_untied': (LLAMA, 120, 9),
  'llama_tied': (LLAMA | {'tie_word_embeddings': True}, 600, 10),
}


def load(config: dict, drawn: dict[str, np.ndarray]):
  """The model of these tensors, through the files that a user would have."""
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory)
    (path / 'config.json').write_text(json.dumps(config))
    save_file(drawn, path / 'model.safetensors', {'format': 'pt'})
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
      path,
      dtype=torch.float32,
      attn_implementation='eager',
      output_loading_info=True,
    )
  for name in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not found[name], (name, found[name])
  return model.eval()


def values(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
  """(logits [T, V], experts [T, L, K] sorted, the closest choice of any)."""
  routes, gaps = [], []

  def record(module, _, output):
    logits, _, chosen = output
    scores = logits.float()
    if hasattr(module, 'e_score_correction_bias'):
      scores = scores.sigmoid() + module.e_score_correction_bias
    routes.append(np.sort(chosen.numpy(), -1))
    # Between the least chosen and the best left, those of other groups too.
    least = scores.gather(1, chosen).min(-1).values
    left = scores.scatter(1, chosen, -1e9).max(-1).values
    gaps.append(float((least - left).abs().min()))

  for name, module in model.named_modules():
    if name.endswith('mlp.gate'):
      module.register_forward_hook(record)
  with torch.no_grad():
    logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
  if not routes:
    return logits, np.zeros((len(tokens), 0, 0), np.int16), np.inf
  return logits, np.stack(routes, 1).astype(np.int16), min(gaps)


def rows(count: int) -> np.ndarray:
  """Positions whose logits are kept: some early, many late, spread between."""
  spread = np.linspace(0, count - 1, 24).astype(int)
  late = np.arange(count - 8, count)
  return np.unique(np.concatenate([np.arange(8), spread, late]))


def make(name: str) -> None:
  config, count, seed = CASES[name]
  drawn = reference_weights.tensors(config, seed)
  model = load(config, drawn)
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, config['vocab_size'], count)
  logits, experts, gap = values(model, tokens)
  kept = rows(count)
  rotary = model.model.rotary_emb
  np.savez_compressed(
    HERE / f'{name}.npz',
    config=json.dumps(config),
    seed=seed,
    digest=reference_weights.digest(drawn),
    tokens=tokens.astype(np.int32),
    rows=kept.astype(np.int32),
    logits=logits[kept],
    experts=experts,
    frequencies=rotary.inv_freq.numpy(),
    rotary_scale=np.float32(rotary.attention_scaling),
  )
  size = (HERE / f'{name}.npz').stat().st_size
  print(
    f'{name}: {count} tokens, logits of std {logits.std():.2f}, closest choice'
    f' {gap:.1e}, {size} bytes'
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('names', nargs='*', choices=[*CASES, []], default=[])
  names = parser.parse_args().names or list(CASES)
  print(f'torch {torch.__version__}, transformers {transformers.__version__}')
  for name in names:
    make(name)


if __name__ == '__main__':
  main()
