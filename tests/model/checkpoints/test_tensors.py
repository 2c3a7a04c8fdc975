"""Files of tensors, against the safetensors library and by breaking them."""

import json
import struct

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from composer.model.checkpoints import tensors as tensors_lib

DTYPES = [np.float32, np.float16, np.int32, np.uint8, np.int64, np.float64]


def made():
  rng = np.random.default_rng(0)
  out = {
    f't{i}': rng.integers(0, 100, (3, i + 1, 4)).astype(dtype)
    for i, dtype in enumerate(DTYPES)
  }
  out['half'] = rng.standard_normal((5, 6)).astype(ml_dtypes.bfloat16)
  out['vector'] = rng.standard_normal(7).astype(np.float32)
  return out


def test_reads_what_the_library_wrote(tmp_path):
  tensors = made()
  save_file(tensors, tmp_path / 'model.safetensors', {'format': 'pt'})
  found = tensors_lib.read_directory(tmp_path)
  assert found.keys() == tensors.keys()
  for name, value in tensors.items():
    got = found[name].all()
    assert got.dtype == value.dtype and got.shape == value.shape
    np.testing.assert_array_equal(got, value)
    flat = value.reshape(-1, value.shape[-1] if value.ndim > 1 else 1)
    np.testing.assert_array_equal(found[name].rows(1, 3), flat[1:3])


@pytest.mark.parametrize('shard_bytes', [1, 500, 10**9])
def test_the_library_reads_what_is_written(tmp_path, shard_bytes):
  tensors = made()
  outgoing = [
    tensors_lib.Outgoing(
      name, v.dtype, v.shape, lambda v=v: iter([v[:2], v[2:]])
    )
    for name, v in tensors.items()
  ]
  sizes = []
  names = tensors_lib.write_directory(
    tmp_path, outgoing, shard_bytes, sizes.append
  )
  assert sum(sizes) == sum(v.nbytes for v in tensors.values())
  again = {}
  for name in names:
    again |= load_file(tmp_path / name)
  assert again.keys() == tensors.keys()
  for name, value in tensors.items():
    assert again[name].dtype == value.dtype
    np.testing.assert_array_equal(again[name], value)
  found = tensors_lib.read_directory(tmp_path)
  for name, value in tensors.items():
    np.testing.assert_array_equal(found[name].all(), value)
  assert len(names) == {1: len(tensors), 500: 4, 10**9: 1}[shard_bytes]


def test_truncation_at_every_byte(tmp_path):
  path = tmp_path / 'model.safetensors'
  save_file({'a': np.arange(6.0), 'b': np.ones((2, 2), np.float16)}, path)
  data = path.read_bytes()
  for size in range(len(data)):
    path.write_bytes(data[:size])
    with pytest.raises(ValueError, match='truncated|not JSON') as error:
      tensors_lib.read_directory(tmp_path)
    assert str(path) in str(error.value)
  path.write_bytes(data + b'x')
  with pytest.raises(ValueError, match='1 bytes that its header'):
    tensors_lib.read_directory(tmp_path)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
  path = tmp_path_factory.mktemp('any') / 'model.safetensors'
  for header in (data, struct.pack('<Q', len(data)) + data):
    path.write_bytes(header)
    try:
      tensors_lib.read_header(path)
    except ValueError:
      pass


@pytest.mark.parametrize(
  ('about', 'words'),
  [
    ({'dtype': 'F4', 'shape': [2], 'data_offsets': [0, 8]}, "dtype 'F4'"),
    ({'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 4]}, 'takes 8'),
    ({'dtype': 'F32', 'shape': [-2], 'data_offsets': [0, 8]}, 'negative'),
    ({'dtype': 'F32', 'shape': [2], 'data_offsets': [-8, 0]}, 'negative'),
    ({'dtype': 'F32', 'shape': [2]}, 'does not describe a'),
    ([], 'does not describe a'),
    ({'dtype': 'F32', 'shape': ['x'], 'data_offsets': [0, 8]}, 'describe a'),
  ],
)
def test_headers_that_lie(tmp_path, about, words):
  text = json.dumps({'a': about}).encode()
  path = tmp_path / 'model.safetensors'
  path.write_bytes(struct.pack('<Q', len(text)) + text + bytes(8))
  with pytest.raises(ValueError, match=words):
    tensors_lib.read_header(path)


def write_sharded(directory):
  for i in (1, 2):
    name = f'model-0000{i}-of-00002.safetensors'
    save_file({f't{i}': np.ones(i)}, directory / name)
  where = {f't{i}': f'model-0000{i}-of-00002.safetensors' for i in (1, 2)}
  index = directory / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': where}))
  return index


def test_an_index_that_names_absent_shards(tmp_path):
  index = write_sharded(tmp_path)
  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  with pytest.raises(ValueError) as error:
    tensors_lib.read_directory(tmp_path)
  assert '1 of 2 files that are not there' in str(error.value)
  assert 'model-00002-of-00002.safetensors' in str(error.value)
  index.unlink()
  with pytest.raises(ValueError, match='lacks shards 2 of 2'):
    tensors_lib.read_directory(tmp_path)


def test_shards_without_an_index(tmp_path):
  write_sharded(tmp_path).unlink()
  assert tensors_lib.read_directory(tmp_path).keys() == {'t1', 't2'}
  save_file({'t1': np.ones(3)}, tmp_path / 'other.safetensors')
  with pytest.raises(ValueError, match='t1 is in .* and in other.safetensors'):
    tensors_lib.read_directory(tmp_path)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda w: w | {'t3': 'model-00001-of-00002.safetensors'}, 'not in it: t3'),
    (lambda w: w | {'t1': '../model.safetensors'}, 'not in its directory'),
    (lambda w: w | {'t1': 3}, 'no index'),
    (lambda w: None, 'no index'),
  ],
)
def test_a_broken_index(tmp_path, change, words):
  index = write_sharded(tmp_path)
  where = json.loads(index.read_text())['weight_map']
  index.write_text(json.dumps({'weight_map': change(where)}))
  with pytest.raises(ValueError, match=words):
    tensors_lib.read_directory(tmp_path)


def test_pickles_are_never_read(tmp_path):
  (tmp_path / 'pytorch_model.bin').write_bytes(b'x')
  with pytest.raises(ValueError, match='pytorch_model.bin is a pickle'):
    tensors_lib.read_directory(tmp_path)
