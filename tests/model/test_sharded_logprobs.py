"""Logprobs over an unembedding in parts, against the whole of it."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer.model import sharded_logprobs
from composer.model import transformer

V, D, ROWS = 256, 16, 24
QUICK = {'xla_backend_optimization_level': 0}
MODEL = config_lib.ModelConfig(vocab_size=V, width=D)


def make_rows():
  """(unembed of the published form, hidden, tokens, temperatures, weights)."""
  rng = np.random.default_rng(0)
  unembed = jnp.asarray(rng.normal(size=(D, V)), jnp.bfloat16)
  return (
    unembed.astype(jnp.float32),
    jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32),
    jnp.asarray(rng.integers(0, V, ROWS), jnp.int32),
    jnp.asarray(rng.uniform(0.5, 1.5, ROWS), jnp.float32),
    jnp.asarray(rng.normal(size=(2, ROWS)), jnp.float32),
  )


def naive(unembed, hidden, tokens, temperatures):
  log_p = jax.nn.log_softmax(hidden @ unembed / temperatures[:, None])
  chosen = jnp.take_along_axis(log_p, tokens[:, None], 1)[:, 0]
  return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


def gradient(function, unembed, hidden, weights):
  """(values, gradients) of a weighted sum of logprobs and entropies."""

  def total(unembed, hidden):
    both = function(unembed, hidden)
    return jnp.sum(weights * jnp.stack(both)), both

  (_, both), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(
    unembed, hidden
  )
  return both, grads


@pytest.fixture(scope='module')
def whole():
  unembed, hidden, tokens, temperatures, weights = make_rows()
  run = lambda u, h: naive(u, h, tokens, temperatures)  # noqa: E731
  return jax.jit(functools.partial(gradient, run))(unembed, hidden, weights)


def spread(tied, pieces, monkeypatch):
  """The same over eight devices, three rows of each."""
  monkeypatch.setattr(sharded_logprobs, 'COLUMNS', V * D // pieces)
  parallel = config_lib.ParallelConfig(data=2, expert=2, context=2)
  layout = mesh_lib.layout(mesh_lib.make_mesh(parallel=parallel), parallel)
  specs = transformer.spec(MODEL)
  if tied:
    # Over the vocabulary, of which two dimensions could be cut.
    spec = specs['embed']
  else:
    spec = specs['unembed']
  part = mesh_lib.partition(spec, mesh_lib.RULES['train'], layout.mesh)
  rows = PartitionSpec(mesh_lib.AXES)

  def local(shard, hidden, tokens, temperatures, weights):
    def run(shard, hidden):
      return sharded_logprobs.token_logprob(
        layout, spec, 'reference', shard, hidden, tokens, temperatures
      )

    return gradient(run, shard, hidden, weights)

  step = jax.shard_map(
    local,
    mesh=layout.mesh,
    in_specs=(part, rows, rows, rows, PartitionSpec(None, mesh_lib.AXES)),
    out_specs=(rows, (part, rows)),
    check_vma=False,
  )
  unembed, *rest = make_rows()
  step = jax.jit(step, compiler_options=QUICK)
  values, (dunembed, dhidden) = step(unembed.T if tied else unembed, *rest)
  return part, (values, (dunembed.T if tied else dunembed, dhidden))


@pytest.mark.parametrize('tied, pieces', [(False, 1), (True, 1), (True, 4)])
def test_equals_the_whole(tied, pieces, whole, monkeypatch):
  part, (values, grads) = spread(tied, pieces, monkeypatch)
  assert any(part)
  for a, b in zip(values, whole[0], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  for a, b in zip(grads, whole[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_pieces(monkeypatch):
  monkeypatch.setattr(sharded_logprobs, 'COLUMNS', 2**27)
  # 160 columns of each of 1,024 devices: 16 pieces of 10 are 10,240 columns.
  assert sharded_logprobs._pieces(163840, 160, 7168) == 10
  assert sharded_logprobs._pieces(256, 256, 16) == 1
  assert sharded_logprobs._pieces(163840, 163840, 7168) == 10
  # 151,936 is 128 times 1,187: two pieces are too long, and the next are 1,187.
  assert sharded_logprobs._pieces(151936, 151936 // 8, 2048) == 2
  assert sharded_logprobs._pieces(151936, 151936 // 8, 4096) == 2
  # No lines: 2 times a prime.
  assert sharded_logprobs._pieces(2 * 100003, 2 * 100003, 4096) == 2
  # Fewer than a column of each device there cannot be.
  assert sharded_logprobs._pieces(2**20, 2, 2**12) == 2
