"""Versions of an exchange as checkpoints, and what `ls` says of them."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from small_model import MODEL

from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer
from composer.weights import fetching
from composer.weights import forms
from composer.weights import store
from composer.weights import sync
from composer.weights import telling
from composer.weights import upkeep


def _named(version):
  rng = np.random.default_rng(version)  # much faster than `params.init`
  return {
    name: (0.1 * rng.standard_normal(s.shape)).astype(s.published)
    for name, s in params_lib.named(transformer.spec(MODEL)).items()
  }


def _publish(kv, form, versions, model=True):
  publisher = sync.Publisher(
    kv, form, 3, model=dataclasses.asdict(MODEL) if model else None
  )
  for version in range(versions):
    made = forms.publish(form, _named(version))
    flat = {name: np.asarray(value) for name, value in made.items()}
    publisher.publish(flat, version)


@pytest.fixture(scope='module')
def kv():
  kv = store.open_exchange('memory://')
  _publish(kv, 'bf16', 5)
  _publish(kv, 'nvfp4', 2)
  return kv


@pytest.mark.parametrize('to', ['ours', 'hf'])
def test_a_version_becomes_a_checkpoint_bit_for_bit(kv, tmp_path, to):
  out = tmp_path / 'model'
  said = fetching.fetch(kv, 'bf16', 4, out, to)
  assert 'version 4 of bf16' in said and str(out) in said
  config, params = checkpoints.load(out)
  assert not checkpoints.differences(config, MODEL)
  want = _named(4)
  got = params_lib.named(params)
  assert sorted(got) == sorted(want)
  for name, value in want.items():
    assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name
    assert got[name].dtype == value.dtype


def test_the_quantised_form_becomes_what_it_stands_for(kv, tmp_path):
  out = tmp_path / 'model'
  fetching.fetch(kv, 'nvfp4', None, out)
  _, params = checkpoints.load(out)
  got = params_lib.named(params)
  computed = params_lib.named(
    forms.computed('nvfp4', params_lib.unnamed(_named(1)))
  )
  for name, value in computed.items():
    np.testing.assert_array_equal(
      np.asarray(got[name], np.float32), value, err_msg=name
    )


def test_what_cannot_be_fetched_writes_nothing(kv, tmp_path):
  out = tmp_path / 'model'
  with pytest.raises(ValueError, match='version 9 .*newest is 4'):
    fetching.fetch(kv, 'bf16', 9, out)
  bare = store.open_exchange('memory://')
  _publish(bare, 'bf16', 1, model=False)
  with pytest.raises(ValueError, match='without the configuration'):
    fetching.fetch(bare, 'bf16', 0, out)
  assert list(tmp_path.iterdir()) == []
  assert '.safetensors' in fetching.fetch(
    bare, 'bf16', 0, tmp_path / 'w.safetensors'
  )
  out.mkdir()
  with pytest.raises(ValueError, match='exists already'):
    fetching.fetch(kv, 'bf16', 0, out)


def test_ls_says_chain_changes_and_who_runs_what(kv):
  now = time.time()
  upkeep.announce(kv, upkeep.Reader('lab', 'p1', 'bf16', 3, (), now - 5))
  upkeep.announce(kv, upkeep.Reader('old', 'p2', 'bf16', 1, (), now - 1e5))
  lines = list(telling.listing(kv, now))
  text = '\n'.join(lines)
  bf16 = [line.split() for line in lines if line.startswith('bf16')]
  assert [line[2] for line in bf16] == 'base delta delta base delta'.split()
  assert [line[6] for line in bf16] == ['0', '1', '2', '0', '1']
  assert bf16[0][5] == '-' and bf16[1][5].endswith('%')
  assert bf16[4][-1] == 'HEAD' and bf16[3][-1] == 'lab/p1'
  assert 'lab/p1 runs version 3 of bf16, 1 behind (5 s ago)' in text
  assert 'old/p2 runs version 1 of bf16, 3 behind' in text and 'silent' in text
  assert '7 versions' in text
