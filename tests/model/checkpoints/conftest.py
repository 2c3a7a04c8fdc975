"""Small Hugging Face checkpoints on the disk, and what they are in ours.

The tensors and the tree come from `tests/reference`, which knows nothing of the
code under test; `transformers` gave reference logits for the same weights.
"""

import json
import pathlib

import numpy as np
import pytest
import reference_weights
from safetensors.numpy import save_file

from composer import params as params_lib

REFERENCE = pathlib.Path(__file__).parents[2] / 'reference'
CASES = sorted(path.stem for path in REFERENCE.glob('*.npz'))


@pytest.fixture(params=CASES)
def case(request):
  """(config.json, seed) of a reference model."""
  return read_case(request.param)


@pytest.fixture(params=['deepseek_kimi', 'qwen3_raw', 'llama_tied'])
def family(request):
  """One model of each family."""
  return read_case(request.param)


@pytest.fixture
def config_of():
  """Name of a reference model -> its config.json."""
  return lambda name: read_case(name)[0]


@pytest.fixture
def kimi():
  return read_case('deepseek_kimi')


def read_case(name):
  with np.load(REFERENCE / f'{name}.npz') as file:
    return json.loads(str(file['config'])), int(file['seed'])


@pytest.fixture
def write_hf(tmp_path):
  """Writes a checkpoint; (config, seed) -> (directory, tensors by name)."""

  def write(config, seed, dtype=np.float32, name='hf', tensors=None):
    directory = tmp_path / name
    directory.mkdir()
    if tensors is None:
      drawn = reference_weights.tensors(config, seed)
      tensors = {n: v.astype(dtype) for n, v in drawn.items()}
      for n in tensors:  # float32 in every checkpoint of the family
        if n.endswith('e_score_correction_bias'):
          tensors[n] = drawn[n]
    (directory / 'config.json').write_text(json.dumps(config))
    save_file(tensors, directory / 'model.safetensors')
    return directory, tensors

  return write


@pytest.fixture
def expected():
  """The parameters of ours, flat by name, of tensors by Hugging Face's names."""

  def build(config, tensors):
    return params_lib.named(reference_weights.tree(config, tensors))

  return build


@pytest.fixture
def same():
  """Asserts that two trees hold the same bits."""

  def check(got, wanted):
    got, wanted = params_lib.named(got), params_lib.named(wanted)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
      found, value = np.asarray(got[name]), np.asarray(value)
      assert found.dtype == value.dtype, name
      assert found.shape == value.shape, name
      np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8),
        np.ascontiguousarray(value).view(np.uint8),
        err_msg=name,
      )

  return check
