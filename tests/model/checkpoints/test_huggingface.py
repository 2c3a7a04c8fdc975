"""Checkpoints as they are really published, and as they are really broken."""

import json

import ml_dtypes
import numpy as np
import pytest
import reference_weights
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from composer import params as params_lib
from composer.model import checkpoints

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
INT4 = {
  'quant_method': 'compressed-tensors',
  'format': 'pack-quantized',
  'ignore': ['lm_head', 're:.*self_attn.*', 're:.*shared_experts.*'],
  'config_groups': {
    'group_0': {
      'input_activations': None,
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
}
FP8 = {
  'quant_method': 'fp8',
  'fmt': 'e4m3',
  'activation_scheme': 'dynamic',
  'weight_block_size': [16, 16],
}


def to_int4(weight):
  """(packed, scale, shape) and the bfloat16 values that they stand for."""
  rows, columns = weight.shape
  groups = -(-columns // 32)
  wide = np.zeros((rows, groups * 32), np.float32)
  wide[:, :columns] = weight
  grouped = wide.reshape(rows, groups, 32)
  scale = (np.abs(grouped).max(-1) / 7 + 1e-9).astype(BFLOAT16)
  codes = (
    np.clip(np.rint(grouped / scale.astype(np.float32)[..., None]), -8, 7) + 0.0
  )
  values = (codes * scale.astype(np.float32)[..., None]).reshape(rows, -1)
  codes = codes.reshape(rows, -1)[:, :columns].astype(np.int64) + 8
  packed = np.zeros((rows, -(-columns // 8)), np.int64)
  for j in range(columns):
    packed[:, j // 8] |= codes[:, j] << (4 * (j % 8))
  packed = packed.astype(np.uint32).view(np.int32)
  shape = np.array([rows, columns], np.int64)
  return (packed, scale, shape), values[:, :columns].astype(BFLOAT16)


def to_fp8(weight, block=16):
  """(codes, scales) and the bfloat16 values that they stand for."""
  rows, columns = weight.shape
  r, c = -(-rows // block), -(-columns // block)
  wide = np.zeros((r * block, c * block), np.float32)
  wide[:rows, :columns] = weight
  tiles = wide.reshape(r, block, c, block)
  scale = np.abs(tiles).max((1, 3)) / 448
  by = np.where(scale > 0, scale, 1)[:, None, :, None]
  codes = (tiles / by).astype(E4M3)
  values = codes.astype(np.float32) * scale[:, None, :, None]
  crop = lambda x: x.reshape(r * block, -1)[:rows, :columns]  # noqa: E731
  return (np.ascontiguousarray(crop(codes)), scale), crop(values).astype(
    BFLOAT16
  )


def half(config, seed):
  """bfloat16 tensors with the selection bias in float32, as published."""
  drawn = reference_weights.tensors(config, seed)
  return {
    n: v if 'e_score' in n else v.astype(BFLOAT16) for n, v in drawn.items()
  }


def nested(config, tensors):
  """As Kimi K2.5 ships: text_config, prefixed names, a vision tower."""
  text = {**config, 'model_type': 'kimi_k2', 'num_nextn_predict_layers': 0}
  document = {
    'architectures': ['KimiK25ForConditionalGeneration'],
    'model_type': 'kimi_k25',
    'tie_word_embeddings': False,
    'text_config': text,
    'vision_config': {'hidden_size': 8},
  }
  named = {f'language_model.{n}': v for n, v in tensors.items()}
  named['vision_tower.encoder.blocks.0.wo.weight'] = np.ones((2, 2))
  named['vision_tower.patch_embed.proj.bias'] = np.ones(2)
  named['mm_projector.proj.0.weight'] = np.ones((2, 2))
  return document, named


def test_kimi_k2_5_as_it_is_published(kimi, write_hf, expected, same, tmp_path):
  config, seed = kimi
  tensors = half(config, seed)
  values = dict(tensors)
  for name in list(tensors):
    if '.mlp.experts.' in name:
      parts, values[name] = to_int4(tensors.pop(name).astype(np.float32))
      for suffix, part in zip(('packed', 'scale', 'shape'), parts, strict=True):
        tensors[f'{name}_{suffix}'] = part
  document, named = nested({**config, 'quantization_config': INT4}, tensors)
  directory, _ = write_hf(document, seed, tensors=named)
  source = checkpoints.open_source(directory)
  assert source.skipped == (
    'mm_projector.* (1 tensor)',
    'vision_tower.* (2 tensors)',
  )
  found, params = checkpoints.load(directory)
  assert found.yarn.factor == config['rope_scaling']['factor']
  same(params, expected(config, values))
  # Unrounded where the wide dtype is asked for.
  wide = params_lib.named(checkpoints.load(directory, dtype=np.float32)[1])
  rounded = np.asarray(wide['layers/moe/down']).astype(BFLOAT16)
  np.testing.assert_array_equal(rounded, params['layers']['moe']['down'])
  assert (np.asarray(wide['layers/moe/down']) != rounded).any()
  # And what was skipped is noted in what is written.
  checkpoints.convert(directory, tmp_path / 'ours')
  text = json.loads((tmp_path / 'ours' / 'model.json').read_text())
  assert text['skipped'] == list(source.skipped)
  same(checkpoints.load(tmp_path / 'ours')[1], params)


def test_deepseek_v3_as_it_is_published(kimi, write_hf, expected, same):
  config, seed = kimi
  tensors = half(config, seed)
  tensors['model.layers.1.mlp.experts.3.up_proj.weight'][:] = 0
  values = dict(tensors)
  for name in list(tensors):
    if '_proj' in name:
      parts, values[name] = to_fp8(tensors[name].astype(np.float32))
      tensors[name], tensors[f'{name}_scale_inv'] = parts
  last = config['num_hidden_layers']
  tensors[f'model.layers.{last}.eh_proj.weight'] = np.ones((2, 4))
  tensors[f'model.layers.{last}.self_attn.o_proj.weight'] = np.ones((2, 4))
  document = {
    **config,
    'quantization_config': FP8,
    'num_nextn_predict_layers': 1,
  }
  directory, _ = write_hf(document, seed, tensors=tensors)
  source = checkpoints.open_source(directory)
  assert source.skipped == (f'model.layers.{last}.* (2 tensors)',)
  same(checkpoints.load(directory)[1], expected(config, values))


@pytest.mark.parametrize('name', ['deepseek_kimi', 'qwen3_raw'])
def test_fused_experts(name, config_of, write_hf, expected, same):
  config = config_of(name)
  tensors = half(config, 0)
  plain = dict(tensors)
  first = config.get('first_k_dense_replace', 0)
  for layer in range(first, config['num_hidden_layers']):
    at = f'model.layers.{layer}.mlp.experts.'
    count = reference_weights.experts(config)
    pop = lambda e, n, at=at: tensors.pop(f'{at}{e}.{n}_proj.weight')  # noqa: E731
    both = [
      np.concatenate([pop(e, 'gate'), pop(e, 'up')]) for e in range(count)
    ]
    tensors[f'{at}gate_up_proj'] = np.stack(both)
    tensors[f'{at}down_proj'] = np.stack([pop(e, 'down') for e in range(count)])
  directory, _ = write_hf(config, 0, tensors=tensors)
  same(checkpoints.load(directory)[1], expected(config, plain))


def test_an_output_matrix_beside_tied_embeddings(config_of, write_hf):
  config = config_of('llama_tied')
  tensors = half(config, 0)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(3)
  directory, _ = write_hf(config, 0, tensors=tensors)
  assert checkpoints.load(directory)[0].tie_embeddings
  tensors['lm_head.weight'][-1, -1] += 1
  directory, _ = write_hf(config, 0, tensors=tensors, name='other')
  with pytest.raises(ValueError, match='lm_head.weight differs'):
    checkpoints.load(directory)


# --- what is refused ---------------------------------------------------------


def broken(write_hf, kimi, change, name='hf'):
  """The error that a checkpoint gives after `change(config, tensors)`."""
  config, seed = kimi
  tensors = half(config, seed)
  change(config, tensors)
  directory, _ = write_hf(config, seed, tensors=tensors, name=name)
  with pytest.raises(ValueError) as error:
    checkpoints.load(directory)
  return str(error.value)


def test_missing_surplus_and_misshapen_tensors(kimi, write_hf):
  lost = 'model.layers.1.mlp.experts.2.down_proj.weight'
  odd = 'model.layers.0.self_attn.o_proj.weight'

  def change(config, tensors):
    del tensors[lost], tensors['model.norm.weight']
    tensors['model.layers.0.self_attn.q_proj.bias'] = np.ones(3)
    tensors[odd] = np.ascontiguousarray(tensors[odd].T)
    tensors['model.embed_tokens.weight'] = np.ones((7, 40))
    tensors['lm_head.weight'] = np.ones((96, 40), np.int32)

  text = broken(write_hf, kimi, change)
  assert '2 tensors are missing: ' in text
  assert lost in text and 'model.norm.weight' in text
  assert '1 tensors are surplus: model.layers.0.self_attn.q_proj.bias' in text
  assert f'{odd} has shape [48, 40], expected [40, 48]' in text
  assert (
    'model.embed_tokens.weight has shape [7, 40], expected [96, 40]'
    ' (a vocabulary of 96)' in text
  )
  assert 'lm_head.weight has dtype int32, expected floats' in text


def test_missing_tensors_of_a_nested_model_have_their_own_names(kimi, write_hf):
  config, seed = kimi
  document, named = nested(config, half(config, seed))
  del named['language_model.model.norm.weight']
  directory, _ = write_hf(document, seed, tensors=named)
  with pytest.raises(ValueError, match=r'language_model\.model\.norm\.weight'):
    checkpoints.load(directory)


NAME = 'model.layers.1.mlp.experts.0.up_proj.weight'


def test_half_a_packed_tensor(kimi, write_hf):
  def without_scale(config, tensors):
    (packed, _, shape), _ = to_int4(tensors.pop(NAME).astype(np.float32))
    tensors[f'{NAME}_packed'], tensors[f'{NAME}_shape'] = packed, shape

  text = broken(write_hf, kimi, without_scale)
  assert f'{NAME}_packed is there without {NAME}_scale' in text

  def other_group(config, tensors):
    (packed, scale, shape), _ = to_int4(tensors.pop(NAME).astype(np.float32))
    tensors[f'{NAME}_packed'], tensors[f'{NAME}_shape'] = packed, shape
    tensors[f'{NAME}_scale'] = scale[:, :1].copy()

  text = broken(write_hf, kimi, other_group, 'other')
  assert 'INT4 in groups of 32 has [24, 5] and [24, 2]' in text


def test_fp8_with_other_scales(kimi, write_hf):
  def change(config, tensors):
    (codes, scale), _ = to_fp8(tensors[NAME].astype(np.float32))
    tensors[NAME], tensors[f'{NAME}_scale_inv'] = codes, scale[:, :1].copy()

  assert 'in blocks of [128, 128] has [1, 1]' in broken(write_hf, kimi, change)


def test_codes_without_scales(kimi, write_hf):
  def change(config, tensors):
    (tensors[NAME], _), _ = to_fp8(tensors[NAME].astype(np.float32))

  text = broken(write_hf, kimi, change)
  assert f'{NAME} has dtype float8_e4m3fn, expected floats' in text


def test_a_tokenizer_of_another_model(kimi, write_hf, tmp_path):
  directory, _ = write_hf(*kimi)
  document = {
    'model': {'vocab': {'a': 0, 'b': 95}},
    'added_tokens': [{'id': 96, 'content': '<end>'}],
  }
  (directory / 'tokenizer.json').write_text(json.dumps(document))
  with pytest.raises(ValueError, match='ids up to 96 and the embedding 96'):
    checkpoints.convert(directory, tmp_path / 'x')
  assert not list(tmp_path.glob('x*'))


def test_what_is_no_model(tmp_path):
  with pytest.raises(ValueError, match='is no model: give a directory'):
    checkpoints.load(tmp_path)
  with pytest.raises(ValueError, match='is no model'):
    checkpoints.load(tmp_path / 'absent')
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='config.json is not JSON'):
    checkpoints.load(tmp_path)
  (tmp_path / 'x.safetensors').write_text('')
  with pytest.raises(ValueError, match='give the directory'):
    checkpoints.load(tmp_path / 'x.safetensors')


# --- our own layout ----------------------------------------------------------


def ours(write_hf, kimi, tmp_path, name='ours'):
  directory, _ = write_hf(*kimi, BFLOAT16, name=f'{name}_hf')
  checkpoints.convert(directory, tmp_path / name)
  return tmp_path / name


def test_our_layout_broken(kimi, write_hf, tmp_path):
  directory = ours(write_hf, kimi, tmp_path)
  model = directory / 'model.json'
  text = model.read_text()
  for changed, words in (
    (text[:-3], 'is not JSON'),
    (text.replace('"format": 1', '"format": 9'), 'format 9, this version'),
    (text.replace('"width": 40', '"width": 44'), r'has shape \[96, 40\]'),
    (text.replace('"layers": 3', '"layers": 3, "depth": 1'), 'depth'),
  ):
    assert changed != text
    model.write_text(changed)
    with pytest.raises(ValueError, match=words):
      checkpoints.load(directory)
  model.write_text(text)
  (directory / 'params' / '_METADATA').rename(directory / 'params' / 'x')
  with pytest.raises(ValueError, match='no _METADATA'):
    checkpoints.load(directory)


def test_a_flipped_byte_and_a_lost_chunk(kimi, write_hf, tmp_path):
  directory = ours(write_hf, kimi, tmp_path)
  chunks = directory / 'params' / 'layers.moe.down' / 'c'
  path = max(p for p in chunks.rglob('*') if p.is_file())
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  with pytest.raises(ValueError, match='layers/moe/down'):
    checkpoints.load(directory)
  path.unlink()
  with pytest.raises(ValueError, match='layers/moe/down'):
    checkpoints.load(directory)


def test_fields_added_later_take_defaults(kimi, write_hf, tmp_path):
  directory = ours(write_hf, kimi, tmp_path)
  found = checkpoints.read_config(directory)
  document = json.loads((directory / 'model.json').read_text())
  del document['model']['rope_float32'], document['model']['yarn']['mscale']
  (directory / 'model.json').write_text(json.dumps(document))
  assert checkpoints.read_config(directory) == found


def test_written_files_hold_no_more_than_the_tensors(kimi, write_hf, tmp_path):
  directory = ours(write_hf, kimi, tmp_path)
  checkpoints.convert(directory, tmp_path / 'hf', dtype='float32')
  tensors = load_file(tmp_path / 'hf' / 'model.safetensors')
  assert tensors.keys() == reference_weights.shapes(kimi[0]).keys()
  save_file(tensors, tmp_path / 'hf' / 'model.safetensors')
  checkpoints.load(tmp_path / 'hf')
