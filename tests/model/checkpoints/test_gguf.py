"""GGUF files: small ones made here byte by byte, and the one of the package."""

import json
import struct

import numpy as np
import pytest
import reference_weights
import tokenizers

from composer import params as params_lib
from composer.model import checkpoints
from composer.model import presets
from composer.model.checkpoints import gguf as gguf_lib
from composer.model.checkpoints import gguf_tokenizer
from composer.model.checkpoints import sources

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
U32, FLOAT, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
SIZES = {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'vocab_size': 60,
  'hidden_size': 64,
  'intermediate_size': 96,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'tie_word_embeddings': True,
}


def text(value):
  return struct.pack('<Q', len(value.encode())) + value.encode()


def value_of(kind, value):
  if kind == STRING:
    return text(value)
  if kind == ARRAY:
    of, items = value
    data = b''.join(value_of(of, x) for x in items)
    return struct.pack('<IQ', of, len(items)) + data
  return struct.pack(
    {U32: '<I', FLOAT: '<f', BOOL: '<?', U64: '<Q'}[kind], value
  )


def write(path, metadata, tensors, version=3):
  """tensors: name -> (type, shape [outputs, inputs], bytes)."""
  out = b'GGUF' + struct.pack('<IQQ', version, len(tensors), len(metadata))
  for name, (kind, value) in metadata.items():
    out += text(name) + struct.pack('<I', kind) + value_of(kind, value)
  offset, data = 0, b''
  for name, (kind, shape, content) in tensors.items():
    out += text(name) + struct.pack('<I', len(shape))
    out += b''.join(struct.pack('<Q', n) for n in reversed(shape))
    out += struct.pack('<IQ', kind, offset)
    data += content + bytes(-len(content) % 32)
    offset = len(data)
  path.write_bytes(out + bytes(-len(out) % 32) + data)


def encode(kind, value):
  """(bytes, the values they stand for), float32."""
  if kind in (F32, F16):
    stored = value.astype({F32: np.float32, F16: np.float16}[kind])
    return stored.tobytes(), stored.astype(np.float32)
  grouped = value.reshape(-1, 32)
  if kind == Q8_0:
    scale = (np.abs(grouped).max(1) / 127).astype(np.float16)
    wide = scale.astype(np.float32)[:, None]
    codes = np.rint(grouped / wide).clip(-128, 127).astype(np.int8)
    data = np.concatenate(
      [scale[:, None].view(np.uint8), codes.view(np.uint8)], 1
    )
    return data.tobytes(), (codes * wide).reshape(value.shape)
  least = grouped.min(1).astype(np.float16)
  scale = ((grouped.max(1) - least) / 15).astype(np.float16)
  wide, low = (x.astype(np.float32)[:, None] for x in (scale, least))
  codes = np.rint((grouped - low) / wide).clip(0, 15).astype(np.uint8)
  halves = codes[:, :16] | codes[:, 16:] << 4
  parts = [scale[:, None].view(np.uint8), least[:, None].view(np.uint8), halves]
  return np.concatenate(parts, 1).tobytes(), (codes * wide + low).reshape(
    value.shape
  )


PLACES = {
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
}


def theirs(name):
  if not name.startswith('model.layers.'):
    return {
      'model.embed_tokens.weight': 'token_embd.weight',
      'model.norm.weight': 'output_norm.weight',
      'lm_head.weight': 'output.weight',
    }[name]
  _, _, layer, *place = name.removesuffix('.weight').split('.')
  return f'blk.{layer}.{PLACES[".".join(place)]}.weight'


def permuted(value, heads):
  """llama.cpp's order of the rows of q and k: pairs side by side."""
  half = value.shape[0] // heads // 2
  return np.stack(
    [
      value[h * 2 * half + side * half + i]
      for h in range(heads)
      for i in range(half)
      for side in range(2)
    ]
  )


def metadata(config, **more):
  return {
    'general.architecture': (STRING, 'llama'),
    'general.name': (STRING, 'tiny'),
    'llama.block_count': (U32, config['num_hidden_layers']),
    'llama.context_length': (U32, 256),
    'llama.embedding_length': (U32, config['hidden_size']),
    'llama.feed_forward_length': (U32, config['intermediate_size']),
    'llama.attention.head_count': (U32, config['num_attention_heads']),
    'llama.attention.head_count_kv': (U32, config['num_key_value_heads']),
    'llama.rope.freq_base': (FLOAT, 100000.0),
    'llama.attention.layer_norm_rms_epsilon': (FLOAT, 1e-5),
    'llama.vocab_size': (U32, config['vocab_size']),
    'llama.rope.dimension_count': (U32, config['head_dim']),
    **{name.replace('__', '.'): value for name, value in more.items()},
  }


def made(path, config, kinds=(Q4_1, Q8_0, F16, F32), **more):
  """Writes a file of every type; the values that it holds, by our HF names."""
  tensors, values = {}, {}
  drawn = reference_weights.tensors(config, 0)
  for i, (name, value) in enumerate(sorted(drawn.items())):
    kind = kinds[i % len(kinds)] if value.ndim == 2 else F32
    heads = {'q': 'num_attention_heads', 'k': 'num_key_value_heads'}
    of = name.rpartition('self_attn.')[2][:1] if '_proj' in name else ''
    if 'self_attn' in name and of in heads:
      content, stood = encode(kind, permuted(value, config[heads[of]]))
      # Every row is coded alone, so the order of rows is all that changes.
      _, values[name] = encode(kind, value)
      assert sorted(stood.sum(1)) == sorted(values[name].sum(1))
    else:
      content, values[name] = encode(kind, value)
    tensors[theirs(name)] = (kind, value.shape, content)
  write(path, metadata(config, **more), tensors)
  return values


@pytest.mark.parametrize('tied', [True, False])
def test_every_type_is_read(tmp_path, expected, same, tied):
  config = {**SIZES, 'tie_word_embeddings': tied}
  values = made(tmp_path / 'tiny.gguf', config)
  model, params = checkpoints.load(tmp_path / 'tiny.gguf')
  assert model.tie_embeddings == tied
  assert (model.rope_theta, model.norm_eps) == (100000.0, 1e-5)
  assert (model.layers, model.kv_heads, model.head_dim) == (2, 2, 16)
  same(params, expected(config, values))


def test_the_gguf_package_reads_the_same_header(tmp_path):
  package = pytest.importorskip('gguf')
  made(tmp_path / 'tiny.gguf', SIZES)
  file = gguf_lib.read_file(tmp_path / 'tiny.gguf')
  reader = package.GGUFReader(tmp_path / 'tiny.gguf')
  assert {t.name for t in reader.tensors} == file.tensors.keys()
  for tensor in reader.tensors:
    lying = file.tensors[tensor.name]
    assert lying.format.name == tensor.tensor_type.name
    assert lying.shape == tuple(tensor.shape)[::-1]
    assert lying.offset == tensor.data_offset


def test_truncation_and_other_files(tmp_path):
  path = tmp_path / 'tiny.gguf'
  made(path, SIZES)
  data = path.read_bytes()
  for size in [*range(0, 1200, 7), len(data) // 2, len(data) - 40]:
    path.write_bytes(data[:size])
    with pytest.raises(ValueError, match='truncated|no GGUF file'):
      checkpoints.load(path)
  path.write_bytes(b'GGML' + data[4:])
  with pytest.raises(ValueError, match="begins with b'GGML'"):
    checkpoints.load(path)


@pytest.mark.parametrize(
  ('more', 'words'),
  [
    ({'general__architecture': (STRING, 'gemma')}, "'gemma' is not known"),
    ({'llama__rope__scaling__type': (STRING, 'linear')}, 'rope.scaling.type'),
    ({'llama__expert_count': (U32, 8)}, 'llama.expert_count'),
    (
      {'tokenizer__ggml__tokens': (ARRAY, (STRING, ['a', 'b']))},
      'a vocabulary of 2 does not match the embedding',
    ),
    ({'llama__block_count': (U32, 3)}, '9 tensors are missing'),
    ({'llama__block_count': (U32, 1)}, '9 tensors are surplus'),
    ({'llama__rope__dimension_count': (U32, 8)}, 'dimension_count is 8'),
  ],
)
def test_what_is_refused(tmp_path, more, words):
  made(tmp_path / 'tiny.gguf', SIZES, **more)
  with pytest.raises(ValueError, match=words):
    checkpoints.load(tmp_path / 'tiny.gguf')


def test_other_types_are_named(tmp_path):
  made(tmp_path / 'tiny.gguf', SIZES)
  data = (tmp_path / 'tiny.gguf').read_bytes()
  at = data.index(b'blk.0.attn_q.weight') + len('blk.0.attn_q.weight') + 4 + 16
  for kind, name in ((12, 'Q4_K'), (99, '99')):
    changed = data[:at] + struct.pack('<I', kind) + data[at + 4 :]
    (tmp_path / 'other.gguf').write_bytes(changed)
    with pytest.raises(ValueError, match=f'is of type {name}; known: F32, F16'):
      checkpoints.load(tmp_path / 'other.gguf')


def test_a_tokenizer_comes_along(tmp_path):
  letters = [chr(c) for c in range(ord('a'), ord('z') + 1)]
  tokens = ['<|end|>', *letters, 'ab', 'abc', 'Ġ', '<tool>']
  tokens += [f'[{i}]' for i in range(60 - len(tokens))]
  types = [3, *[1] * 29, 4, *[1] * (60 - 31)]
  made(
    tmp_path / 'tiny.gguf',
    SIZES,
    tokenizer__ggml__model=(STRING, 'gpt2'),
    tokenizer__ggml__pre=(STRING, 'smollm'),
    tokenizer__ggml__tokens=(ARRAY, (STRING, tokens)),
    tokenizer__ggml__token_type=(ARRAY, (U32, types)),
    tokenizer__ggml__merges=(ARRAY, (STRING, ['a b', 'ab c'])),
    tokenizer__ggml__eos_token_id=(U32, 0),
    tokenizer__chat_template=(STRING, 'hello'),
  )
  checkpoints.convert(tmp_path / 'tiny.gguf', tmp_path / 'ours')
  checkpoints.convert(tmp_path / 'ours', tmp_path / 'hf')
  for name in ('ours', 'hf'):
    path = tmp_path / name / 'tokenizer.json'
    built = tokenizers.Tokenizer.from_file(str(path))
    ids = built.encode('abc abd<|end|><tool>').ids
    assert [tokens[i] for i in ids] == [
      *('abc', 'Ġ', 'ab', 'd', '<|end|>', '<tool>')
    ]
    assert built.decode(ids, skip_special_tokens=False) == (
      'abc abd<|end|><tool>'
    )
    about = json.loads((tmp_path / name / 'tokenizer_config.json').read_text())
    assert about['eos_token'] == '<|end|>'
    assert about['chat_template'] == 'hello'
  document = json.loads((tmp_path / 'hf' / 'config.json').read_text())
  assert document['eos_token_id'] == 0
  assert document['max_position_embeddings'] == 256


def test_other_tokenizers_are_left_out(tmp_path):
  made(tmp_path / 'tiny.gguf', SIZES, tokenizer__ggml__model=(STRING, 'llama'))
  file = gguf_lib.read_file(tmp_path / 'tiny.gguf')
  assert gguf_tokenizer.tokenizer_files(file) == {}


# --- the model of the package ------------------------------------------------


@pytest.fixture(scope='module')
def smollm2():
  try:
    return sources.smollm2_file()
  except ValueError as error:
    pytest.skip(str(error))


def test_smollm2_is_the_preset(smollm2):
  model = checkpoints.read_config('smollm2')
  assert not checkpoints.differences(model, presets.SMOLLM2_135M)


def test_smollm2_values_equal_those_of_the_gguf_package(smollm2):
  package = pytest.importorskip('gguf')
  source = checkpoints.open_source(smollm2)
  reader = package.GGUFReader(smollm2)
  found = {t.name: t for t in reader.tensors}

  def wanted(name):
    tensor = found[name]
    return package.dequantize(tensor.data, tensor.tensor_type)

  def read(name, *box):
    return source.read(name, box, np.dtype(np.float32))

  np.testing.assert_array_equal(
    read('embed', (100, 200), (0, 576)), wanted('token_embd.weight')[100:200]
  )
  down = read('dense/mlp/down', (7, 8), (0, 1536), (0, 576))[0]
  np.testing.assert_array_equal(down.T, wanted('blk.7.ffn_down.weight'))
  qkv = read('dense/attention/qkv', (3, 4), (0, 576), (0, 15), (0, 64))[0]
  q = wanted('blk.3.attn_q.weight').reshape(9, 32, 2, 576)
  got = qkv[:, :9].transpose(1, 2, 0).reshape(9, 2, 32, 576)
  np.testing.assert_array_equal(got, q.swapaxes(1, 2))
  v = wanted('blk.3.attn_v.weight').reshape(3, 64, 576)
  np.testing.assert_array_equal(qkv[:, 12:].transpose(1, 2, 0), v)


def test_count_of_smollm2(smollm2):
  from composer.model import transformer

  spec = transformer.spec(checkpoints.read_config(smollm2))
  assert params_lib.count(spec) == 134_515_008
