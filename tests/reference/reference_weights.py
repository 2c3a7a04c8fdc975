"""Checkpoints in Hugging Face's format, drawn from a seed without PyTorch.

`tensors` gives every tensor of a small model under the name, and in the shape,
that Hugging Face stores it. `make_reference.py` writes them to a file that
`transformers` loads; the tests put the same values into the parameter tree by
`tree`, so a reference file holds results alone.
"""

from __future__ import annotations

import zlib

import numpy as np

EMBEDDING = 0.3  # standard deviation
GAIN = 1.6  # of products: sharper attention than at initialisation


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
  """Name -> shape of every tensor of a checkpoint with this `config.json`."""
  d, v = config['hidden_size'], config['vocab_size']
  out = {'model.embed_tokens.weight': (v, d), 'model.norm.weight': (d,)}
  if not config['tie_word_embeddings']:
    out['lm_head.weight'] = (v, d)
  for layer in range(config['num_hidden_layers']):
    at = f'model.layers.{layer}'
    out[f'{at}.input_layernorm.weight'] = (d,)
    out[f'{at}.post_attention_layernorm.weight'] = (d,)
    if config['model_type'] == 'deepseek_v3':
      found = _latent_attention(config)
    else:
      found = _grouped_attention(config)
    found = {f'self_attn.{name}': shape for name, shape in found.items()}
    found |= {f'mlp.{n}': s for n, s in _feed_forward(config, layer).items()}
    out |= {f'{at}.{name}.weight': shape for name, shape in found.items()}
    if 'mlp.gate' in found and config['model_type'] == 'deepseek_v3':
      experts = (config['n_routed_experts'],)
      out[f'{at}.mlp.gate.e_score_correction_bias'] = experts
  return out


def _latent_attention(config: dict) -> dict[str, tuple[int, ...]]:
  d, h = config['hidden_size'], config['num_attention_heads']
  q, c = config['q_lora_rank'], config['kv_lora_rank']
  nope, rope = config['qk_nope_head_dim'], config['qk_rope_head_dim']
  value = config['v_head_dim']
  out = {
    'kv_a_proj_with_mqa': (c + rope, d),
    'kv_a_layernorm': (c,),
    'kv_b_proj': (h * (nope + value), c),
    'o_proj': (d, h * value),
  }
  if q is None:
    return out | {'q_proj': (h * (nope + rope), d)}
  return out | {
    'q_a_proj': (q, d),
    'q_a_layernorm': (q,),
    'q_b_proj': (h * (nope + rope), q),
  }


def _grouped_attention(config: dict) -> dict[str, tuple[int, ...]]:
  d, k = config['hidden_size'], config['head_dim']
  h, g = config['num_attention_heads'], config['num_key_value_heads']
  out = {
    'q_proj': (h * k, d),
    'k_proj': (g * k, d),
    'v_proj': (g * k, d),
    'o_proj': (d, h * k),
  }
  if config['model_type'] == 'qwen3_moe':
    out |= {'q_norm': (k,), 'k_norm': (k,)}
  return out


def _gated(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
  return {
    f'{prefix}gate_proj': (hidden, width),
    f'{prefix}up_proj': (hidden, width),
    f'{prefix}down_proj': (width, hidden),
  }


def experts(config: dict) -> int:
  """E; 0 for a dense model."""
  name = {'deepseek_v3': 'n_routed_experts', 'qwen3_moe': 'num_experts'}
  return config.get(name.get(config['model_type']), 0)


def dense_layers(config: dict) -> int:
  """Leading layers without experts."""
  if not experts(config):
    return config['num_hidden_layers']
  return config.get('first_k_dense_replace', 0)


def _feed_forward(config: dict, layer: int) -> dict[str, tuple[int, ...]]:
  d = config['hidden_size']
  if layer < dense_layers(config):
    return _gated('', d, config['intermediate_size'])
  f = config['moe_intermediate_size']
  out = {'gate': (experts(config), d)}
  for e in range(experts(config)):
    out |= _gated(f'experts.{e}.', d, f)
  if config.get('n_shared_experts'):
    out |= _gated('shared_experts.', d, f * config['n_shared_experts'])
  return out


def tensors(config: dict, seed: int) -> dict[str, np.ndarray]:
  """Every tensor, float32; what is drawn depends on its name and the seed."""
  out = {}
  for name, shape in shapes(config).items():
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape, np.float32)
    if 'norm' in name:
      out[name] = 1 + 0.2 * noise
    elif 'bias' in name:
      out[name] = 0.4 * noise
    elif 'embed' in name:
      out[name] = EMBEDDING * noise
    else:
      out[name] = GAIN * noise / np.float32(np.sqrt(shape[-1]))
  return out


def digest(drawn: dict[str, np.ndarray]) -> int:
  """Tells whether two machines drew the same tensors."""
  value = 0
  for name in sorted(drawn):
    value = zlib.crc32(np.ascontiguousarray(drawn[name]).tobytes(), value)
  return value


# --- into the parameter tree --------------------------------------------------


def tree(config: dict, drawn: dict[str, np.ndarray]) -> dict:
  """The tensors as parameters of `composer.model.transformer`."""
  first, last = dense_layers(config), config['num_hidden_layers']
  out = {
    'embed': drawn['model.embed_tokens.weight'],
    'final_norm': drawn['model.norm.weight'],
  }
  if 'lm_head.weight' in drawn:
    out['unembed'] = drawn['lm_head.weight'].T
  if first:
    rows = [_layer(config, drawn, i) for i in range(first)]
    out['dense'] = _stack(rows)
  if first < last:
    rows = [_layer(config, drawn, i) for i in range(first, last)]
    out['layers'] = _stack(rows)
  return out


def _stack(rows):
  if isinstance(rows[0], dict):
    return {name: _stack([row[name] for row in rows]) for name in rows[0]}
  return np.stack(rows)


def _layer(config, drawn, layer):
  at = f'model.layers.{layer}.'
  p = {
    name.removeprefix(at).removesuffix('.weight'): value
    for name, value in drawn.items()
    if name.startswith(at)
  }
  latent = config['model_type'] == 'deepseek_v3'
  attention = (_latent_tree if latent else _grouped_tree)(config, p)
  attention['norm'] = p['input_layernorm']
  norm = p['post_attention_layernorm']
  if layer < dense_layers(config):
    mlp = {'norm': norm, 'gate_up': _pair(p, 'mlp.'), 'down': _down(p, 'mlp.')}
    return {'attention': attention, 'mlp': mlp}
  numbers = [f'mlp.experts.{e}.' for e in range(experts(config))]
  moe = {
    'norm': norm,
    'router': p['mlp.gate'].T,
    'gate_up': np.stack([_pair(p, at) for at in numbers]),
    'down': np.stack([_down(p, at) for at in numbers]),
  }
  if latent:
    moe['router_bias'] = p['mlp.gate.e_score_correction_bias']
  if config.get('n_shared_experts'):
    moe['shared_gate_up'] = _pair(p, 'mlp.shared_experts.')
    moe['shared_down'] = _down(p, 'mlp.shared_experts.')
  return {'attention': attention, 'moe': moe}


def _pair(p, at):
  """[D, 2, F]"""
  return np.stack([p[f'{at}gate_proj'].T, p[f'{at}up_proj'].T], axis=1)


def _down(p, at):
  return p[f'{at}down_proj'].T


def _heads(weight, heads):
  """[heads * K, D] -> [D, heads, K]"""
  return weight.T.reshape(weight.shape[1], heads, -1)


def _grouped_tree(config, p):
  h, g = config['num_attention_heads'], config['num_key_value_heads']
  sides = (('q', h), ('k', g), ('v', g))
  out = {
    'qkv': np.concatenate(
      [_heads(p[f'self_attn.{n}_proj'], count) for n, count in sides], axis=1
    ),
    'out': p['self_attn.o_proj'].T.reshape(h, -1, config['hidden_size']),
  }
  for name in ('q_norm', 'k_norm'):
    if f'self_attn.{name}' in p:
      out[name] = p[f'self_attn.{name}']
  return out


def _halves(weight, rope):
  """Interleaved rotary pairs, the last `rope` of the last axis, to halves."""
  rest, turned = weight[..., :-rope], weight[..., -rope:]
  parts = [rest, turned[..., 0::2], turned[..., 1::2]]
  return np.concatenate(parts, axis=-1)


def _latent_tree(config, p):
  h, rope = config['num_attention_heads'], config['qk_rope_head_dim']
  ordered = _halves if config['rope_interleave'] else lambda w, _: w
  p = {n.removeprefix('self_attn.'): v for n, v in p.items()}
  out = {
    'kv_down': ordered(p['kv_a_proj_with_mqa'].T, rope),
    'kv_norm': p['kv_a_layernorm'],
    'kv_up': _heads(p['kv_b_proj'], h),
    'out': p['o_proj'].T.reshape(h, -1, config['hidden_size']),
  }
  if config['q_lora_rank'] is None:
    return out | {'q': ordered(_heads(p['q_proj'], h), rope)}
  return out | {
    'q_down': p['q_a_proj'].T,
    'q_down_norm': p['q_a_layernorm'],
    'q_up': ordered(_heads(p['q_b_proj'], h), rope),
  }
