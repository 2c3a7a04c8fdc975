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
from composer.model import blockwise
from composer.model import exchange
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
# Model, (data, expert, context), rules.
CASES = [
  ('latent', (8, 1, 1), 'train'),
  ('latent', (1, 8, 1), 'train'),
  ('latent', (1, 1, 8), 'train'),
  ('latent', (2, 2, 2), 'train'),
  ('latent', (2, 1, 4), 'folded'),
  ('grouped', (4, 2, 1), 'train'),
  ('grouped', (1, 2, 4), 'train'),
  ('softmax', (1, 4, 2), 'folded'),
]
# Compiled in half the time.
QUICK = {'xla_backend_optimization_level': 0}


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
    jax.value_and_grad(loss_fn, has_aux=True),
    static_argnums=(2, 3, 4),
    compiler_options=QUICK,
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
  step = jax.jit(step, compiler_options=QUICK)
  return jax.device_get(step(make_params(name), batch))


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


@pytest.mark.parametrize('name, shape, rules', CASES)
def test_equals_one_device(name, shape, rules):
  """One of the models by the kernels' plain expressions, routes to logprobs."""
  kernels = 'reference' if name == 'softmax' else ''
  numerics = dataclasses.replace(FAST, kernels=kernels)
  got = spread(name, make_layout(shape, rules), numerics)
  assert_equal(got, alone(name))


def test_bfloat16_stays_near_float32():
  """Of every parameter's gradient the direction, and most of the length."""
  numerics = dataclasses.replace(FAST, compute='bfloat16', mla='absorbed')
  (loss, _), grads = spread('latent', make_layout((1, 4, 2)), numerics)
  (want_loss, _), want = alone('latent')
  assert abs(loss - want_loss) < 0.05 * abs(want_loss) + 0.5
  want = params_lib.named(want)
  for name, value in params_lib.named(grads).items():
    a, b = value.ravel(), want[name].ravel()
    if b.any():
      assert a @ b > 0.9 * np.linalg.norm(a) * np.linalg.norm(b), name
      assert 0.8 < np.linalg.norm(a) / np.linalg.norm(b) < 1.25, name


# --- the engine ---------------------------------------------------------------


def test_an_engine_step_does_not_depend_on_the_layout():
  """Devices with rows and pages of their own, and experts in common."""
  model, devices, pages, block = MODELS['latent'], 8, 3, 4
  numerics = dataclasses.replace(FAST, mla='absorbed', kv_block=block)
  layout = make_layout((1, 8, 1), 'rollout')
  params = make_params('latent')
  rng = np.random.default_rng(5)
  # Two sequences a device: tokens 0 to 4 of one, and token 0 of the other.
  positions = np.tile(np.asarray([0, 1, 2, 3, 4, 0], np.int32), devices)
  tokens = rng.integers(0, 64, positions.size).astype(np.int32)
  table = np.asarray([[1, 2]] * 5 + [[0, 0]], np.int32)
  rows, held = PartitionSpec('expert'), mesh_lib.partitions
  cache = transformer.init_cache(model, numerics, pages)

  def local(params, tokens, positions, table):
    return transformer.step(
      params, model, numerics, cache, tokens, positions, table, layout
    )[:2]

  got = jax.jit(
    jax.shard_map(
      local,
      mesh=layout.mesh,
      in_specs=(held(transformer.spec(model), layout), rows, rows, rows),
      out_specs=rows,
      check_vma=False,
    ),
    compiler_options=QUICK,
  )(params, tokens, positions, np.tile(table, (devices, 1)))
  whole = np.concatenate([table + device * pages for device in range(devices)])
  step = jax.jit(
    transformer.step, static_argnums=(1, 2), compiler_options=QUICK
  )
  want = step(
    params,
    model,
    numerics,
    transformer.init_cache(model, numerics, devices * pages),
    tokens,
    positions,
    whole,
  )
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-4)  # up to 12
  np.testing.assert_array_equal(got[1], want[1])


# --- the sequence -------------------------------------------------------------


@pytest.mark.parametrize('context', (1, 2, 4, 8))
def test_chunks_of_the_sequence(context):
  """Which tokens a device computes, and that a row comes back in order."""
  layout = make_layout((8 // context, 1, context))
  row = np.arange(32, dtype=np.int32)[None] + 100

  def local(x):
    mine = parallel.own(layout, x)
    return mine, parallel.whole(layout, mine), parallel.spread(layout, mine)

  mine, whole, spread_ = jax.jit(
    jax.shard_map(
      local,
      mesh=layout.mesh,
      in_specs=PartitionSpec(),
      out_specs=(
        PartitionSpec('context'),
        PartitionSpec(),
        PartitionSpec(),
      ),
      check_vma=False,
    )
  )(row)
  np.testing.assert_array_equal(whole, row)
  np.testing.assert_array_equal(spread_, row)
  chunks = row.reshape(2 * context, -1)
  for device in range(context):
    pair = (device, 2 * context - 1 - device) if context > 1 else (0, 1)
    np.testing.assert_array_equal(
      np.asarray(mine)[device], chunks[list(pair)].ravel()
    )


@pytest.mark.parametrize('context', (1, 2, 8))
@pytest.mark.parametrize('queries, keys', ((4, 4), (8, 2), (2, 8), (16, 16)))
def test_pairs_of_blocks(context, queries, keys):
  """Devices have as much to do, and together every visible pair once."""
  size = 16
  shape = blockwise.Shape(presets.TINY, '', context, queries, keys)
  table = blockwise.pairs(shape, size)
  seen = np.zeros((2 * context * size, 2 * context * size), int)
  for device in range(context):
    for block, key in table[device]:
      half, inside = divmod(int(block), size // queries)
      chunk = 2 * context - 1 - device if half else device
      start = chunk * size + inside * queries
      seen[start : start + queries, key * keys : (key + 1) * keys] += 1
  assert seen.max() == 1
  assert np.all(seen[np.tril_indices(len(seen))] == 1)
  # Beyond the diagonal no more than the blocks that it crosses.
  if queries == keys:
    assert seen.sum() == len(seen) * (len(seen) + queries) // 2


# --- the exchange -------------------------------------------------------------

E, K, D, F, R = 16, 3, 8, 5, 64


def naive_experts(gate_up, down, x, experts, gates):
  """Row by row, slot by slot."""
  out = jnp.zeros_like(x)
  for slot in range(K):
    into, back = gate_up[experts[:, slot]], down[experts[:, slot]]
    both = jnp.einsum('rd,rdpf->rpf', x, into)
    hidden = jax.nn.silu(both[:, 0]) * both[:, 1]
    out += gates[:, slot, None] * jnp.einsum('rf,rfd->rd', hidden, back)
  return out


def make_rows(kind):
  rng = np.random.default_rng(3)
  experts = np.argsort(rng.random((R, E)), -1)[:, :K]
  if kind == 'one':  # all rows to the same experts, of one device
    experts[:] = np.arange(K)[None]
  elif kind == 'few':  # most experts get nothing
    experts = np.argsort(rng.random((R, 4)), -1)[:, :K] * 3
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  return (
    draw(E, D, 2, F),
    draw(E, F, D),
    draw(R, D),
    experts.astype(np.int32),
    draw(R, K),
    draw(R, D),
  )


def exchanged(layout, implementation, gate_up, down, x, experts, gates, dy):
  """(values, gradients) of the exchange over the layout's mesh."""
  held = PartitionSpec(layout.expert_axes)
  rows = PartitionSpec(mesh_lib.AXES)

  def local(gate_up, down, x, experts, gates, dy):
    def fn(gate_up, down, x, gates):
      p = {'gate_up': gate_up, 'down': down}
      return exchange.experts_exchanged(
        layout, p, x, experts, gates, implementation
      )

    y, pull = jax.vjp(fn, gate_up, down, x, gates)
    du, dd, dx, dg = pull(dy)
    left = [a for a in mesh_lib.AXES if a not in layout.expert_axes]
    return y, *jax.lax.psum((du, dd), left), dx, dg

  return jax.jit(
    jax.shard_map(
      local,
      mesh=layout.mesh,
      in_specs=(held, held, rows, rows, rows, rows),
      out_specs=(rows, held, held, rows, rows),
      check_vma=False,
    ),
    compiler_options=QUICK,
  )(gate_up, down, x, experts, gates, dy)


@pytest.mark.parametrize(
  'kind, shape, rules, changes',
  (
    ('even', (1, 8, 1), 'train', {}),
    ('even', (2, 4, 1), 'train', {'chunk': 4}),
    ('one', (1, 8, 1), 'train', {'slack': 1.0}),  # many rounds
    ('one', (2, 2, 2), 'folded', {'slack': 1.0, 'chunk': 4}),
    ('few', (1, 4, 2), 'train', {'slack': 1.0, 'chunk': 3}),
    ('few', (8, 1, 1), 'train', {}),
  ),
)
def test_no_row_is_dropped(kind, shape, rules, changes):
  layout = make_layout(shape, rules, **changes)
  *args, dy = make_rows(kind)
  got = exchanged(layout, None, *args, dy)
  gate_up, down, x, experts, gates = args
  want, pull = jax.vjp(
    lambda u, d, x, g: naive_experts(u, d, x, experts, g),
    gate_up,
    down,
    x,
    gates,
  )
  for name, a, b in zip(
    ('y', 'gate_up', 'down', 'x', 'gates'),
    got,
    (want, *pull(dy)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), err_msg=name)


def test_the_number_of_rounds_changes_no_bit():
  *args, dy = make_rows('few')
  one = exchanged(make_layout((1, 8, 1), slack=8.0), None, *args, dy)
  many = exchanged(make_layout((1, 8, 1), slack=1.0), None, *args, dy)
  np.testing.assert_array_equal(one[0], many[0])


@pytest.mark.parametrize('n, groups', ((1, 1), (7, 3), (512, 5), (300, 40)))
def test_counting_sort(n, groups):
  keys = np.random.default_rng(n).integers(0, groups, n).astype(np.int32)
  sort = jax.jit(exchange._counting_sort, static_argnums=1)
  rank, place, order, count = sort(keys, groups)
  want = np.argsort(keys, stable=True)
  np.testing.assert_array_equal(order, want)
  np.testing.assert_array_equal(np.asarray(place)[want], np.arange(n))
  np.testing.assert_array_equal(count, np.bincount(keys, minlength=groups))
  start = np.cumsum(count) - count
  np.testing.assert_array_equal(rank, place - start[keys])


def test_an_unknown_exchange_is_refused():
  *args, dy = make_rows('even')
  with pytest.raises(ValueError, match="no exchange 'pigeon'.*padded, ragged"):
    exchanged(make_layout((1, 8, 1)), 'pigeon', *args, dy)


# --- refusals -----------------------------------------------------------------


def test_experts_that_do_not_divide():
  model = dataclasses.replace(presets.TINY, experts=6)
  layout = make_layout((2, 4, 1))
  with pytest.raises(ValueError, match='experts=6.*4 devices.*1, 2, 3, 6'):
    mesh_lib.check_experts(layout, model.experts)
