"""The upcycled model computes what the dense one did."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer
from composer.model import upcycle

DENSE = config_lib.ModelConfig(
  vocab_size=48,
  layers=3,
  dense_layers=3,
  width=24,
  heads=2,
  kv_heads=1,
  head_dim=8,
  dense_hidden=36,
)
FAST = config_lib.NumericsConfig(mode='fast')
TOKENS = np.arange(40).reshape(2, 20) * 7 % 48


def dense_params(seed=0):
  params = params_lib.init(transformer.spec(DENSE), jax.random.key(seed))
  # Norms that are not ones, so that a lost one shows.
  return jax.tree.map(
    lambda p: p + 0.01 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params
  )


def logprobs(params, config, numerics=FAST):
  ones = np.ones(TOKENS.shape)
  positions = np.broadcast_to(np.arange(20), TOKENS.shape)
  output = transformer.forward(
    params, config, numerics, TOKENS, ones.astype(np.int32), positions
  )
  found, _ = transformer.token_logprob(
    params, config, numerics, output.hidden, TOKENS, ones.astype(np.float32)
  )
  return found[:, 1:], output.experts


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(
  m=st.sampled_from([1, 2, 3]),
  copies=st.integers(2, 4),
  chosen=st.integers(1, 2),
  keep=st.integers(0, 2),
  seed=st.integers(0, 9),
  moe=st.sampled_from(['dense', 'sorted']),
)
def test_computes_the_same(m, copies, chosen, keep, seed, moe):
  params = dense_params()
  into = upcycle.Upcycling(copies * m, chosen * m, m, keep, 0.0, seed)
  config, sparse = upcycle.upcycle(DENSE, params, into)
  assert config.dense_layers == keep
  numerics = dataclasses.replace(FAST, moe=moe)
  want, _ = logprobs(params, DENSE)
  got, experts = logprobs(sparse, config, numerics)
  np.testing.assert_allclose(got, want, atol=2e-5)
  # Slices of a copy are chosen together.
  copy = np.sort(np.asarray(experts) // m, axis=-1)
  slots = copy.reshape(*copy.shape[:-1], chosen, m)
  assert (np.ptp(slots, axis=-1) == 0).all()


def test_tree_is_that_of_the_declaration():
  config, sparse = upcycle.upcycle(
    DENSE, dense_params(), upcycle.Upcycling(4, 2, 2, 1)
  )
  want = params_lib.named(params_lib.abstract(transformer.spec(config)))
  got = params_lib.named(sparse)
  assert {n: v.shape for n, v in got.items()} == {
    n: v.shape for n, v in want.items()
  }


def test_tokens_use_different_experts():
  config, sparse = upcycle.upcycle(
    DENSE, dense_params(), upcycle.Upcycling(8, 2)
  )
  _, experts = logprobs(sparse, config)
  assert len(np.unique(np.asarray(experts))) == 8


def test_noise_breaks_the_symmetry_of_experts_and_is_drawn_again():
  into = upcycle.Upcycling(4, 2, noise=0.1)
  config, sparse = upcycle.upcycle(DENSE, dense_params(), into)
  _, again = upcycle.upcycle(DENSE, dense_params(), into)
  gate_up = np.asarray(sparse['layers']['moe']['gate_up'])
  np.testing.assert_array_equal(gate_up, again['layers']['moe']['gate_up'])
  dense = np.asarray(dense_params()['dense']['mlp']['gate_up'])
  moved = gate_up - dense[:, None]
  scale = 0.1 / np.sqrt(DENSE.width)
  assert abs(moved.std() / scale - 1) < 0.05
  assert abs(np.corrcoef(moved[0, 0].ravel(), moved[0, 1].ravel())[0, 1]) < 0.1
  want, _ = logprobs(dense_params(), DENSE)
  got, _ = logprobs(sparse, config)
  assert 1e-4 < np.abs(got - want).max() < 2.0


def test_written_in_boxes_equals_what_is_made_in_memory(tmp_path, monkeypatch):
  from composer.model.checkpoints import store

  params = dense_params()
  checkpoints.save(tmp_path / 'dense', DENSE, params)
  into = upcycle.Upcycling(4, 2, 2, 1, noise=0.05, seed=3)
  source = upcycle.source(checkpoints.open_source(tmp_path / 'dense'), into)
  monkeypatch.setattr(store, 'CHUNK', 64)
  checkpoints.convert(source, tmp_path / 'sparse', 'ours')
  config, loaded = checkpoints.load(tmp_path / 'sparse')
  want_config, want = upcycle.upcycle(DENSE, params, into)
  assert config == want_config
  for name, value in params_lib.named(want).items():
    np.testing.assert_array_equal(params_lib.named(loaded)[name], value)


@pytest.mark.parametrize(
  'into, message',
  [
    (upcycle.Upcycling(4, 8), 'exceeds experts=4'),
    (upcycle.Upcycling(4, 2, granularity=5), 'granularity=5 does not divide'),
    (upcycle.Upcycling(5, 2, granularity=2), 'experts=5 is no multiple'),
    (upcycle.Upcycling(4, 2, keep_dense=3), 'keep_dense=3'),
    (upcycle.Upcycling(4, 2, noise=-1.0), 'noise=-1.0'),
    (upcycle.Upcycling(0, 0), 'experts=0'),
  ],
)
def test_what_does_not_fit_is_refused(into, message):
  with pytest.raises(ValueError, match=message):
    upcycle.sparse_config(DENSE, into)


def test_a_sparse_model_is_refused():
  config = dataclasses.replace(DENSE, dense_layers=1)
  with pytest.raises(ValueError, match='2 of 3 layers are sparse already'):
    upcycle.sparse_config(config, upcycle.Upcycling())
