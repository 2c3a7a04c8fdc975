"""The layer that drafts in a DeepSeek checkpoint, behind the model's own."""

import dataclasses
import json

import numpy as np
import pytest
import reference_weights

from composer.model import checkpoints
from composer.model.checkpoints import architectures
from composer.model.checkpoints import describing


@pytest.fixture
def published(kimi, write_hf, expected):
  """(directory, what it holds in ours), as DeepSeek-V3 is published."""
  config, seed = kimi
  last, d = config['num_hidden_layers'], config['hidden_size']
  # Its layer is one more of the same kind.
  more = {**config, 'num_hidden_layers': last + 1}
  tensors = reference_weights.tensors(more, seed)
  stacked = expected(more, tensors)
  want = expected(config, tensors)
  for name, value in stacked.items():
    if name.startswith('layers/'):
      want[f'mtp/{name.removeprefix("layers/")}'] = value[-1:]
  rng = np.random.default_rng(0)
  at = f'model.layers.{last}.'
  norms = ('embed_norm', 'enorm'), ('hidden_norm', 'hnorm')
  for ours, theirs in (*norms, ('norm', 'shared_head.norm')):
    tensors[f'{at}{theirs}.weight'] = rng.normal(size=d).astype(np.float32)
    want[f'mtp/{ours}'] = tensors[f'{at}{theirs}.weight'][None]
  join = rng.normal(size=(d, 2 * d)).astype(np.float32)
  tensors[f'{at}eh_proj.weight'] = join  # the embedding's half first
  want['mtp/join'] = np.stack([join[:, :d].T, join[:, d:].T])[None]
  tensors[f'{at}embed_tokens.weight'] = tensors['model.embed_tokens.weight']
  tensors[f'{at}shared_head.head.weight'] = tensors['lm_head.weight']
  document = {**config, 'num_nextn_predict_layers': 1}
  return write_hf(document, seed, tensors=tensors)[0], want


def test_it_is_read_and_written(published, same, tmp_path):
  directory, want = published
  source = checkpoints.open_source(directory)
  assert source.config.mtp_layers == 1
  assert source.skipped == ('copies for model.layers.3.* (2 tensors)',)
  same(checkpoints.load(directory)[1], want)
  checkpoints.convert(directory, tmp_path / 'ours')
  config, loaded = checkpoints.load(tmp_path / 'ours')
  assert config == source.config
  same(loaded, want)
  checkpoints.convert(tmp_path / 'ours', tmp_path / 'theirs', to='hf')
  text = json.loads((tmp_path / 'theirs' / 'config.json').read_text())
  assert text['num_nextn_predict_layers'] == 1
  same(checkpoints.load(tmp_path / 'theirs')[1], want)


@pytest.mark.parametrize('name', ['qwen3_raw', 'llama_tied'])
def test_others_have_no_place_for_it(name, config_of):
  config = architectures.read(config_of(name)).config
  config = dataclasses.replace(config, mtp_layers=1)
  with pytest.raises(ValueError, match='model.mtp_layers=1 has no place'):
    describing.write(config, 'float32')
