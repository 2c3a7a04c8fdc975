"""A model on many devices against the same on one: values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import parallel
from composer.model import presets
from composer.model import transformer

FAST = config_lib.NumericsConfig(mode='fast', moe='sorted', mla='expanded')
ROWS, LENGTH = 8, 16
MODELS = {
  'grouped': dataclasses.replace(presets.TINY, experts=8, dense_layers=1),
  'latent': presets.TINY_LATENT,
  'softmax': dataclasses.replace(
    presets.TINY_SOFTMAX, experts=8, tie_embeddings=True
  ),
}
# (data, expert, context), rules
MESHES = [
  ((8, 1, 1), 'train'),
  ((1, 8, 1), 'train'),
  ((1, 1, 8), 'train'),
  ((2, 2, 2), 'train'),
  ((4, 2, 1), 'train'),
  ((1, 2, 4), 'train'),
  ((2, 1, 4), 'folded'),
  ((1, 4, 2), 'folded'),
]


def make_layout(shape, rules='train', **changes):
  parallel_config = config_lib.ParallelConfig(
    *shape, **{'rules': rules, **changes}
  )
  mesh = mesh_lib.make_mesh(parallel=parallel_config)
  return mesh_lib.layout(mesh, parallel_config)


@functools.cache
def make_params(name):
  """Masters that are not of the published form, and a bias that selects."""
  params = params_lib.init(transformer.spec(MODELS[name]), jax.random.key(0))
  moe = params['layers']['moe']
  if 'router_bias' in moe:
    noise = np.random.default_rng(0).normal(size=moe['router_bias'].shape)
    moe['router_bias'] = jnp.asarray(0.1 * noise, jnp.float32)
  return jax.tree.map(lambda x: x * jnp.float32(1.3), params)


def make_batch(model, seed=0, replayed=True):
  """Packed rows with segments that end inside of chunks, and padding."""
  rng = np.random.default_rng(seed)
  shape = (ROWS, LENGTH)
  segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  for row in range(ROWS):
    start = 0
    for segment in range(1, 4):
      size = min(int(rng.integers(1, 10)), LENGTH - start)
      segments[row, start : start + size] = segment
      positions[row, start : start + size] = np.arange(size)
      start += size
    positions[row, start:] = np.arange(LENGTH - start)
  layers = transformer.moe_layers(model)
  experts = np.argsort(rng.random((*shape, layers, model.experts)), -1)
  experts = experts[..., : model.experts_per_token].astype(np.int16)
  experts[rng.random(shape) < (0.3 if replayed else 2.0)] = -1
  return {
    'tokens': rng.integers(0, model.vocab_size, shape).astype(np.int32),
    'segment_ids': segments,
    'positions': positions,
    'experts': experts,
    'temperatures': rng.uniform(0.5, 1.5, shape).astype(np.float32),
    'weights': np.where(positions > 0, rng.normal(size=shape), 0).astype(
      np.float32
    ),
  }


def loss_fn(params, batch, model, numerics, layout):
  """A weighted sum of logprobs and entropies, and all else that comes out."""
  if layout is None:
    spec = transformer.spec(model)
    params = params_lib.as_computed(spec, params)
  out = transformer.forward(
    params,
    model,
    numerics,
    batch['tokens'],
    batch['segment_ids'],
    batch['positions'],
    batch['experts'],
    0.0,
    layout,
  )
  logprobs, entropy = transformer.token_logprob(
    params,
    model,
    numerics,
    out.hidden,
    batch['tokens'],
    batch['temperatures'],
    layout,
  )
  loss = jnp.sum(batch['weights'] * (logprobs + 0.3 * entropy))
  return loss, (logprobs, entropy, out.experts, out.native, out.load)


@functools.cache
def alone(name, numerics=FAST, seed=0):
  """Loss, outputs and gradient on one device."""
  model = MODELS[name]
  step = jax.jit(
    jax.value_and_grad(loss_fn, has_aux=True), static_argnums=(2, 3, 4)
  )
  batch = make_batch(model, seed)
  return jax.device_get(step(make_params(name), batch, model, numerics, None))


def spread(name, layout, numerics=FAST, batch=None):
  """The same over the layout's mesh."""
  model = MODELS[name]
  spec = transformer.spec(model)
  rows = PartitionSpec(mesh_lib.ROWS)
  by_name = mesh_lib.partitions(spec, layout)

  def local(params, batch):
    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      params, batch, model, numerics, layout
    )
    logprobs, entropy, experts, native, load = aux
    experts, native = (parallel.whole(layout, a) for a in (experts, native))
    loss = parallel.sum_rows(loss)
    return (loss, (logprobs, entropy, experts, native, load)), grads

  step = jax.shard_map(
    local,
    mesh=layout.mesh,
    in_specs=(by_name, rows),
    out_specs=(
      (PartitionSpec(), (rows, rows, rows, rows, PartitionSpec())),
      by_name,
    ),
    check_vma=False,
  )
  if batch is None:
    batch = make_batch(model)
  return jax.device_get(jax.jit(step)(make_params(name), batch))


def assert_equal(got, want, tolerance=1e-5):
  (loss, outputs), grads = got
  (want_loss, want_outputs), want_grads = want
  np.testing.assert_allclose(loss, want_loss, rtol=1e-4, atol=1e-4)
  for name, value, wanted in zip(
    ('logprobs', 'entropy', 'experts', 'native', 'load'),
    outputs,
    want_outputs,
    strict=True,
  ):
    if name in ('logprobs', 'entropy'):  # the first has no meaning
      value, wanted = value[:, 1:], wanted[:, 1:]
    np.testing.assert_allclose(
      value, wanted, rtol=tolerance, atol=tolerance, err_msg=name
    )
  want_grads = params_lib.named(want_grads)
  for name, value in params_lib.named(grads).items():
    if name.endswith('router_bias'):
      assert not value.any()
      continue
    wanted = want_grads[name]
    assert np.abs(wanted).max() > 0, name
    np.testing.assert_allclose(
      value, wanted, atol=1e-4 * np.abs(wanted).max(), err_msg=name
    )


CASES = [('latent', *mesh) for mesh in MESHES] + [
  ('grouped', (1, 2, 4), 'train'),
  ('grouped', (2, 2, 2), 'folded'),
  ('softmax', (4, 2, 1), 'train'),
  ('softmax', (2, 1, 4), 'train'),
]


@pytest.mark.parametrize('name, shape, rules', CASES)
def test_equals_one_device(name, shape, rules):
  assert_equal(spread(name, make_layout(shape, rules)), alone(name))
