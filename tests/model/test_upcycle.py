"""Sparse upcycling: the same function, read in parts, and how copies part."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import __main__ as cli
from composer import config as config_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer
from composer.model import upcycle
from composer.model.checkpoints import names

Upcycling = upcycle.Upcycling
FAST = config_lib.NumericsConfig(mode='fast')

# Dense, with a hidden size that has several divisors.
GROUPED = config_lib.ModelConfig(
  vocab_size=96,
  layers=3,
  dense_layers=3,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  dense_hidden=24,
  tie_embeddings=True,
)
LATENT = dataclasses.replace(
  GROUPED,
  q_lora=12,
  kv_lora=16,
  nope_dim=8,
  rope_dim=4,
  value_dim=6,
  tie_embeddings=False,
)


def drawn(model, seed=0):
  """Random parameters with logits of order 1, norms that are not all one."""
  spec = transformer.spec(model)
  params = params_lib.named(params_lib.init(spec, jax.random.key(seed)))
  rng = np.random.default_rng(seed)
  for name, value in params.items():
    if name == 'embed':
      params[name] = 30 * value
    elif name.endswith('norm'):
      params[name] = jnp.asarray(rng.uniform(0.5, 1.5, value.shape), np.float32)
  return params_lib.unnamed(params)


def logits(model, params, seed=0):
  """(logits [T, V], experts [T, L, K]) of random tokens."""
  tokens = np.random.default_rng(seed).integers(0, model.vocab_size, 48)
  row = jnp.asarray(tokens, jnp.int32)[None, :]
  out = transformer.forward(
    params,
    model,
    FAST,
    row,
    jnp.ones_like(row),
    jnp.arange(48, dtype=jnp.int32)[None, :],
  )
  unembed = transformer.unembedding(params)
  rows = transformer.logits_rows(
    model, params['final_norm'], unembed, out.hidden[0], jnp.ones(48)
  )
  return np.asarray(rows), np.asarray(out.experts[0])


@pytest.fixture
def stored(tmp_path):
  """A dense model on the disk, opened."""
  checkpoints.save(tmp_path / 'dense', GROUPED, drawn(GROUPED))
  return checkpoints.open_source(tmp_path / 'dense')


# --- the same function -------------------------------------------------------


@pytest.mark.parametrize(
  ('model', 'into'),
  [
    (GROUPED, Upcycling(8, 2)),
    (GROUPED, Upcycling(4, 1, router='softmax')),
    (GROUPED, Upcycling(8, 4, granularity=4, keep_dense=1)),
    (GROUPED, Upcycling(9, 6, granularity=3, router='softmax')),
    (GROUPED, Upcycling(1, 1, keep_dense=2)),
    (LATENT, Upcycling(6, 4, granularity=2, keep_dense=1)),
  ],
  ids=lambda x: 'latent' if getattr(x, 'kv_lora', 0) else None,
)
def test_computes_the_same(model, into):
  params = drawn(model)
  wanted, _ = logits(model, params)
  config, sparse = upcycle.upcycle(model, params, into)
  got, experts = logits(config, sparse)
  assert np.std(wanted) > 1
  np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=0)
  assert experts.shape[1] == model.layers - into.keep_dense
  assert np.unique(experts).size == into.experts  # all are in use
  # The experts of a token make up whole copies of the dense layer.
  copies = np.sort(experts // into.granularity, axis=-1)
  _, counts = np.unique(copies[0, 0], return_counts=True)
  assert (counts == into.granularity).all()
  shapes = {
    n: s.shape for n, s in params_lib.named(transformer.spec(config)).items()
  }
  assert shapes == {n: v.shape for n, v in params_lib.named(sparse).items()}


def test_experts_are_slices_of_the_dense_layer():
  params = drawn(GROUPED)
  into = Upcycling(8, 4, granularity=4, keep_dense=1)
  _, sparse = upcycle.upcycle(GROUPED, params, into)
  dense, made = params['dense'], sparse['layers']
  for layer in range(2):
    for expert in range(8):
      units = slice(expert % 4 * 6, expert % 4 * 6 + 6)
      np.testing.assert_array_equal(
        made['moe']['gate_up'][layer, expert],
        dense['mlp']['gate_up'][layer + 1][..., units],
      )
      np.testing.assert_array_equal(
        made['moe']['down'][layer, expert],
        dense['mlp']['down'][layer + 1][units],
      )
  np.testing.assert_array_equal(
    made['attention']['qkv'], dense['attention']['qkv'][1:]
  )
  np.testing.assert_array_equal(
    sparse['dense']['mlp']['norm'], dense['mlp']['norm'][:1]
  )
  assert not made['moe']['router_bias'].any()
  routers = made['moe']['router'].reshape(2, 32, 2, 4)
  assert (routers == routers[..., :1]).all()
  assert len(np.unique(routers)) == 2 * 32 * 2  # layers and copies differ


# --- breaking the symmetry ---------------------------------------------------


def test_noise_gives_the_router_a_gradient():
  """Equal experts: no gate matters, and experts part by their tokens alone."""
  dense = drawn(GROUPED)
  config, equal = upcycle.upcycle(GROUPED, dense, Upcycling(4, 2))
  _, noisy = upcycle.upcycle(GROUPED, dense, Upcycling(4, 2, noise=0.1))
  tokens = jnp.arange(48)[None, :]

  @jax.jit
  @jax.grad
  def gradient(params):
    out = transformer.forward(
      params, config, FAST, tokens, jnp.ones_like(tokens), tokens
    )
    logprobs, _ = transformer.token_logprob(
      params, config, FAST, out.hidden, tokens, jnp.ones(tokens.shape)
    )
    return -jnp.mean(logprobs[:, 1:])

  equal = gradient(equal)['layers']['moe']
  noisy = gradient(noisy)['layers']['moe']
  size = np.linalg.norm(noisy['router'])
  assert np.linalg.norm(equal['router']) < 1e-3 * size
  assert np.abs(equal['down'][:, 0] - equal['down'][:, 1]).max() > 1e-4


def test_noise_is_relative_seeded_and_of_every_expert():
  params = drawn(GROUPED)
  wanted, _ = logits(GROUPED, params)
  moe = {}
  for key, into in {
    'plain': Upcycling(4, 2),
    'noisy': Upcycling(4, 2, noise=0.02),
    'again': Upcycling(4, 2, noise=0.02),
    'other': Upcycling(4, 2, noise=0.02, seed=1),
  }.items():
    config, sparse = upcycle.upcycle(GROUPED, params, into)
    moe[key] = sparse['layers']['moe']
    if key == 'noisy':
      got, _ = logits(config, sparse)
  difference = np.abs(got - wanted)
  assert 1e-3 < difference.max() < 1
  for name in ('gate_up', 'down'):
    factor = np.asarray(moe['noisy'][name] / moe['plain'][name])
    assert abs(np.std(factor) - 0.02) < 0.001 and abs(factor.mean() - 1) < 1e-3
    flat = factor.reshape(12, -1)  # layers and experts
    np.testing.assert_allclose(np.corrcoef(flat), np.eye(12), atol=0.25)
    np.testing.assert_array_equal(moe['noisy'][name], moe['again'][name])
    assert (np.asarray(moe['noisy'][name] != moe['other'][name])).mean() > 0.9
  for name in ('norm', 'router'):
    np.testing.assert_array_equal(moe['noisy'][name], moe['plain'][name])


# --- in parts ----------------------------------------------------------------


@pytest.mark.parametrize('noise', [0.0, 0.1])
def test_any_box_equals_that_of_the_whole(stored, noise):
  into = Upcycling(6, 4, granularity=2, keep_dense=1, noise=noise)
  sparse = upcycle.source(stored, into)
  rng = np.random.default_rng(0)
  for name, s in params_lib.named(transformer.spec(sparse.config)).items():
    whole = sparse.read(name, names.full(s.shape), np.dtype(np.float32))
    assert whole.shape == s.shape
    for _ in range(6):
      starts = [rng.integers(0, n) for n in s.shape]
      box = tuple(
        (int(a), int(rng.integers(a + 1, n + 1)))
        for a, n in zip(starts, s.shape, strict=True)
      )
      part = sparse.read(name, box, np.dtype(np.float32))
      np.testing.assert_array_equal(part, whole[tuple(slice(*b) for b in box)])


def test_reads_no_more_than_a_box_needs(stored):
  """One expert of one layer costs one slice of one dense layer."""
  asked = []

  def read(name, box, dtype):
    asked.append(int(np.prod([stop - start for start, stop in box])))
    return stored.read(name, box, dtype)

  counted = dataclasses.replace(stored, read=read)
  sparse = upcycle.source(counted, Upcycling(64, 4, granularity=4))
  box = ((1, 2), (0, 64), (0, 32), (0, 2), (0, 6))
  sparse.read('layers/moe/gate_up', box, np.dtype(np.float32))
  assert sum(asked) == 32 * 2 * 24  # 16 copies, read once


def test_onto_a_mesh(stored):
  into = Upcycling(8, 2, noise=0.1)
  sparse = upcycle.source(stored, into)
  mesh = jax.make_mesh((8,), ('expert',))
  spread = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(None, 'expert')
  )
  shardings = {'layers/moe/gate_up': spread, 'layers/moe/down': spread}
  params = params_lib.named(checkpoints.read_params(sparse, shardings))
  _, wanted = upcycle.upcycle(GROUPED, drawn(GROUPED), into)
  for name, value in params_lib.named(wanted).items():
    np.testing.assert_array_equal(params[name], value)
  assert len(params['layers/moe/down'].addressable_shards) == 8


def test_keeps_the_dtypes():
  spec = transformer.spec(GROUPED)
  published = params_lib.to_published(spec, drawn(GROUPED))
  _, sparse = upcycle.upcycle(GROUPED, published, Upcycling(4, 2, noise=0.1))
  for name, value in params_lib.named(sparse).items():
    wide = name.startswith('layers/moe/router')
    assert value.dtype == (jnp.float32 if wide else jnp.bfloat16), name


# --- the command -------------------------------------------------------------


def scored(capsys, directory, tokens):
  words = ['score', '--checkpoint', str(directory), '--tokens', str(tokens)]
  assert cli.main(words) == 0
  return json.loads(capsys.readouterr().out)


def test_command(stored, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(cli, 'tune_malloc', lambda: True)
  dense, sparse = tmp_path / 'dense', tmp_path / 'sparse'
  words = ['upcycle', str(dense), str(sparse), '--experts', '6', '--top-k', '4']
  assert cli.main([*words, '--granularity', '2', '--keep-dense', '1']) == 0
  assert 'parameters in our layout' in capsys.readouterr().out
  config = checkpoints.read_config(sparse)
  assert config == upcycle.sparse_config(
    GROUPED, Upcycling(6, 4, granularity=2, keep_dense=1)
  )
  tokens = tmp_path / 'tokens.json'
  tokens.write_text(json.dumps([list(range(20)), [5, 3]]))
  for a, b in zip(
    scored(capsys, dense, tokens), scored(capsys, sparse, tokens), strict=True
  ):
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=2e-5)

  # What is there stays, and nothing is left of what is refused.
  before = sorted(tmp_path.iterdir())
  assert cli.main(words) == 2 and 'exists' in capsys.readouterr().err
  words[2] = str(tmp_path / 'other')
  assert cli.main([*words, '--granularity', '5']) == 2
  assert 'granularity=5' in capsys.readouterr().err
  assert cli.main(['upcycle', str(sparse), words[2]]) == 2
  assert 'only a dense model' in capsys.readouterr().err
  assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
  ('into', 'words'),
  [
    (Upcycling(4, 8), 'experts_per_token=8 exceeds experts=4'),
    (Upcycling(0, 0), 'experts=0'),
    (Upcycling(8, 0), 'experts_per_token=0'),
    (Upcycling(8, 2, granularity=5), 'granularity=5 does not divide the 24'),
    (Upcycling(8, 2, granularity=0), 'granularity=0'),
    (Upcycling(8, 3, granularity=2), 'experts_per_token=3 is no multiple'),
    (Upcycling(9, 4, granularity=2), 'experts=9 is no multiple'),
    (Upcycling(8, 2, keep_dense=3), 'keep_dense=3; 0 to 2'),
    (Upcycling(8, 2, keep_dense=-1), 'keep_dense=-1'),
    (Upcycling(8, 2, noise=-1.0), 'noise=-1.0'),
    (Upcycling(8, 2, noise=float('nan')), 'noise=nan'),
    (Upcycling(8, 2, router='hash'), "unknown router 'hash'; known: sigmoid"),
    (Upcycling(2**15, 2), 'experts=32768 exceeds 32767'),
    (Upcycling(8, 2, seed=-1), 'seed=-1'),
  ],
)
def test_refusals(into, words):
  with pytest.raises(ValueError, match=words):
    upcycle.sparse_config(GROUPED, into)


def test_what_a_dense_model_carried_is_dropped(stored):
  carried = dataclasses.replace(stored, carried={'model_type': 'llama'})
  assert upcycle.source(carried, Upcycling(4, 2)).carried == {}
