"""The training step: gradients that depend on nothing but the tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer import records
from composer.model import presets
from composer.model import transformer
from composer.rl import pack
from composer.rl import trainer

MODEL = presets.TINY
SPEC = transformer.spec(MODEL)
BITWISE = config_lib.NumericsConfig(row_block=8, kv_block=4)
FAST = dataclasses.replace(BITWISE, mode='fast')
CONFIG = config_lib.RLConfig(
  micro_batch=8,
  sequence_length=16,
  loss_tokens=100,
  learning_rate=1e-2,
  warmup_steps=1,
  weight_decay=0.1,
)


@functools.cache
def make_params():
  drawn = params_lib.init(SPEC, jax.random.key(0))
  bias = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6)) * 0.1)
  drawn['layers']['moe']['router_bias'] = bias.astype(jnp.float32)
  return jax.tree.map(lambda x: x * jnp.float32(1.3), drawn)


def make_segment(rng, size):
  """A segment of known routes and behaviour logprobs of about 1/V."""
  sampled = rng.uniform(size=size) < 0.5
  sampled[0] = False
  experts = np.argsort(rng.random((size, 2, 6)), -1)[..., :2]
  experts[-1] = records.UNKNOWN_EXPERT

  def at(values, other):
    return np.where(sampled, values, other)

  return records.Segment(
    tokens=rng.integers(0, 64, size).astype(np.int32),
    sampled=sampled,
    logprobs=at(rng.uniform(-4.5, -3.5, size), 0).astype(np.float32),
    temperatures=at(0.8, 1.0).astype(np.float32),
    versions=at(0, -1).astype(np.int32),
    experts=experts.astype(np.int16),
    auditable=sampled,
    stop_reason='finished',
    parent=-1,
  )


def make_items(count=14, seed=0):
  rng = np.random.default_rng(seed)
  return [
    pack.Item(make_segment(rng, int(rng.integers(4, 17))), float(rng.normal()))
    for _ in range(count)
  ]


def pack_items(items, config=CONFIG):
  return pack.pack(
    items,
    config.micro_batch,
    config.sequence_length,
    4,
    2,
    2,
    config.loss_tokens,
  )[0]


@functools.cache
def make_step(config=CONFIG, devices=1, numerics=BITWISE):
  mesh = mesh_lib.make_mesh(jax.devices()[:devices])
  return trainer.make_step(MODEL, numerics, config, mesh)


def assert_close(tree, other, rtol=1e-4):
  """Leaf by leaf, by each leaf's own largest value."""
  other = params_lib.named(other)
  for name, value in params_lib.named(tree).items():
    want = np.asarray(other[name])
    np.testing.assert_allclose(
      value, want, atol=rtol * np.abs(want).max() + 1e-9, err_msg=name
    )


def assert_sums(sums, other):
  assert set(sums) == set(other)
  for name in sums:
    np.testing.assert_allclose(
      sums[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name
    )


def fresh_state(step=None, config=CONFIG):
  params = jax.tree.map(jnp.array, make_params())  # it will be donated
  state = trainer.init_state(params, config, 5, jax.random.key(3))
  return jax.device_put(state, step.state_shardings(state)) if step else state


# --- invariances --------------------------------------------------------------


@pytest.mark.parametrize('size', (1, 5))
def test_the_gradient_does_not_depend_on_micro_batching(size):
  """All items packed at once, against `size` a micro-batch, in reverse."""
  items = make_items()
  want, sums = trainer.accumulate(make_step(), make_params(), pack_items(items))
  assert sums['count'] == sum(int(i.segment.sampled.sum()) for i in items)
  batches = []
  for start in range(0, len(items), size):
    batches += pack_items(items[::-1][start : start + size])
  assert len(batches) > len(pack_items(items))
  got, other = trainer.accumulate(make_step(), make_params(), batches)
  assert_close(got, want)
  assert_sums(other, sums)


def shards(tree):
  """Shape of a device's part of every leaf that is spread."""
  return {
    name: leaf.sharding.shard_shape(leaf.shape)
    for name, leaf in params_lib.named(tree).items()
    if not leaf.sharding.is_fully_replicated
  }


def test_the_gradient_does_not_depend_on_sharding():
  """Eight devices, parameters and moments fully sharded, against one."""
  batches = pack_items(make_items())
  one, eight = make_step(), make_step(devices=8)
  want, sums = trainer.accumulate(one, make_params(), batches)
  state = fresh_state(eight)
  before = shards(state.params)
  assert len(before) == len(params_lib.named(SPEC)) - 1  # all but the bias
  got, other = trainer.accumulate(eight, state.params, batches)
  assert_close(got, want)
  assert_sums(other, sums)
  assert shards(got) == before
  # The same gradient, so that Adam cannot blow up what is nearly nothing.
  same = jax.device_put(want, jax.tree.map(lambda g: g.sharding, got))
  moved, stats = eight.update(state, same)
  plain, plain_stats = one.update(fresh_state(one), want)
  assert_close(moved.params, plain.params, 1e-5)
  assert_sums(stats, plain_stats)
  assert shards(moved.params) == before
  parts = {
    leaf.addressable_shards[0].data.size / leaf.size
    for leaf in jax.tree.leaves(moved.opt_state)
    if leaf.size > 100
  }
  assert parts == {1 / 8}, 'moments are sharded as their parameters'
  sent = eight.publishable(moved.params)
  assert shards(sent) == before, 'every device publishes what it holds'
  jax.tree.map(
    np.testing.assert_array_equal,
    trainer.on_host(sent),
    trainer.on_host(params_lib.to_published(SPEC, moved.params)),
  )


@pytest.mark.parametrize('loss', ('clip', 'gspo'))
def test_the_gradient_does_not_depend_on_the_layout(loss):
  """Experts and the sequence over devices too; a loss over whole segments."""
  config = dataclasses.replace(CONFIG, loss=loss)
  batches = pack_items(make_items(), config)
  one = make_step(config, 1, FAST)
  parallel = config_lib.ParallelConfig(expert=2, context=2)
  mesh = mesh_lib.make_mesh(parallel=parallel)
  many = trainer.make_step(MODEL, FAST, config, mesh, parallel)
  assert one.layout is None and many.layout is not None
  want, sums = trainer.accumulate(one, make_params(), batches)
  state = fresh_state(many, config)
  got, other = trainer.accumulate(many, state.params, batches)
  assert_close(got, want)
  assert_sums(other, sums)
  assert other['replayed'] > 0 and other['not_replayed'] == 0
  assert shards(got) == shards(state.params)
  experts = got['layers']['moe']['gate_up'].sharding
  assert experts.spec[1] == 'expert'


def test_scores_do_not_depend_on_the_layout():
  (batch, *_) = pack_items(make_items())
  one = make_step(CONFIG, 1, FAST)
  parallel = config_lib.ParallelConfig(expert=2, context=4)
  mesh = mesh_lib.make_mesh(parallel=parallel)
  many = trainer.make_step(MODEL, FAST, CONFIG, mesh, parallel)
  params = params_lib.to_published(SPEC, make_params())
  for replay in (True, False):
    want = one.score(params, trainer.place(one, batch), replay)
    got = many.score(params, trainer.place(many, batch), replay)
    real = batch.positions > 0  # a first token has no logprob
    for name in ('logprobs', 'entropy'):
      a, b = (np.asarray(getattr(x, name)) for x in (got, want))
      np.testing.assert_allclose(a[real], b[real], atol=2e-5, err_msg=name)
    for name in ('experts', 'native'):
      a, b = (np.asarray(getattr(x, name)) for x in (got, want))
      np.testing.assert_array_equal(a, b, err_msg=name)


def test_rows_that_do_not_divide_over_the_devices_are_refused():
  few = dataclasses.replace(CONFIG, micro_batch=4)
  (batch, *_) = pack_items(make_items(2), few)
  with pytest.raises(ValueError, match='rl.micro_batch=4 .* 8 devices'):
    trainer.place(make_step(devices=8), batch)


def test_no_micro_batches_is_no_step():
  with pytest.raises(ValueError, match='skip it'):
    trainer.accumulate(make_step(), make_params(), [])


# --- the gradient itself ------------------------------------------------------


def score_items(items, params):
  """What `score` says of every item at the published form of `params`."""
  step = make_step()
  published = step.publishable(params)
  batches, placements = pack.pack(items, 8, 16, 4, 2, 2, 100)
  scored = [
    step.score(published, trainer.place(step, b), np.True_) for b in batches
  ]
  return pack.unpack([np.asarray(s.logprobs) for s in scored], placements)


def put_on_policy(items, params):
  """The behaviour logprobs are those of `params`."""
  return [
    item._replace(
      segment=dataclasses.replace(
        item.segment,
        logprobs=np.where(item.segment.sampled, logprobs, 0).astype(np.float32),
      )
    )
    for item, logprobs in zip(items, score_items(items, params), strict=True)
  ]


def test_ratio_is_exactly_one_on_policy():
  """Masters are rounded as they are published; behaviour is `score` of that."""
  step, params = make_step(), make_params()
  batches = pack_items(put_on_policy(make_items(), params))
  _, sums = trainer.accumulate(step, params, batches)
  assert sums['count'] > 50
  assert sums['ratio'] == sums['count']
  assert sums['k1'] == sums['max_abs_logprob'] == sums['clipped_high'] == 0
  # One that moved is told from it.
  other = jax.tree.map(lambda x: x * jnp.float32(1.01), params)
  _, sums = trainer.accumulate(step, other, batches)
  assert sums['ratio'] != sums['count'] and sums['max_abs_logprob'] > 0


def test_the_gradient_equals_finite_differences():
  """Between two sets of parameters that the published form can hold.

  The forward rounds its masters, so a smaller step would change nothing. Every
  route is known, so none changes in between, and no ratio is near a bound.
  """
  known = [
    item._replace(
      segment=dataclasses.replace(
        item.segment,
        experts=np.maximum(item.segment.experts, np.int16([[[0, 1]]])),
      )
    )
    for item in make_items()
  ]
  params = params_lib.as_computed(SPEC, make_params())
  batches = pack_items(put_on_policy(known, params))
  one_loss = jax.jit(
    lambda p, b: trainer.loss_fn(p, b, MODEL, BITWISE, CONFIG)[0]
  )

  rounded = jax.jit(lambda p: params_lib.as_computed(SPEC, p))

  def loss(p):
    return sum(float(one_loss(p, b)) for b in batches)

  grads, sums = trainer.accumulate(make_step(), params, batches)
  np.testing.assert_allclose(loss(params), sums['loss'], rtol=1e-5)
  flat = params_lib.named(params)
  for name, slope in params_lib.named(grads).items():
    if 'router_bias' in name:
      assert not np.any(slope)
      continue
    # The loss moves by some 0.02: far from a kink, far above rounding.
    scale = np.float32(0.01 / np.sum(np.square(slope)))
    high, low = (
      rounded(
        params_lib.unnamed({**flat, name: flat[name] + sign * scale * slope})
      )
      for sign in (1, -1)
    )
    moved = params_lib.named(high)[name] - params_lib.named(low)[name]
    want = np.sum(np.asarray(slope, np.float64) * np.asarray(moved))
    assert 0.002 < want < 0.04, name
    np.testing.assert_allclose(
      loss(high) - loss(low), want, rtol=0.05, err_msg=name
    )


def test_what_was_rewarded_becomes_likelier():
  items = [
    item._replace(advantage=1.0 if n % 2 else -1.0)
    for n, item in enumerate(make_items())
  ]
  step, state = make_step(), fresh_state()
  before = score_items(items, state.params)
  grads, _ = trainer.accumulate(step, state.params, pack_items(items))
  state, stats = step.update(state, grads)
  assert stats['skipped'] == 0 and state.step == 6
  gain = [0.0, 0.0]
  after = score_items(items, state.params)
  for n, (item, a, b) in enumerate(zip(items, before, after, strict=True)):
    gain[n % 2] += float(np.sum((b - a)[item.segment.sampled]))
  assert gain[0] < -1 and gain[1] > 1


# --- what must not move -------------------------------------------------------


def test_the_router_bias_stays_where_mid_training_left_it():
  """It cannot act under replay; no gradient, decay or momentum may move it."""
  step, state = make_step(), fresh_state()
  bias = np.asarray(state.params['layers']['moe']['router_bias'])
  router = np.asarray(state.params['layers']['moe']['router'])
  assert np.any(bias)
  for seed in range(3):
    grads, _ = trainer.accumulate(
      step, state.params, pack_items(make_items(seed=seed))
    )
    assert not np.any(grads['layers']['moe']['router_bias'])
    state, _ = step.update(state, grads)
  moe = state.params['layers']['moe']
  np.testing.assert_array_equal(moe['router_bias'], bias)
  assert np.any(np.asarray(moe['router']) != router)
  published = step.publishable(state.params)['layers']['moe']['router_bias']
  assert published.dtype == jnp.float32
  np.testing.assert_array_equal(published, bias)


def test_a_step_without_advantages_moves_nothing():
  step = make_step()
  state, _ = step.update(
    fresh_state(),
    trainer.accumulate(step, make_params(), pack_items(make_items()))[0],
  )  # so that there is momentum
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  level = [i._replace(advantage=0.0) for i in make_items(seed=1)]
  grads, sums = trainer.accumulate(step, state.params, pack_items(level))
  assert sums['count'] > 0 and sums['loss'] == 0
  state, stats = step.update(state, grads)
  assert stats['skipped'] == 1 and state.step == 6
  jax.tree.map(
    np.testing.assert_array_equal, (state.params, state.opt_state), before
  )


def test_init_state():
  state = fresh_state()
  assert (int(state.step), int(state.version)) == (5, -1)
  assert all(
    not np.any(leaf)
    for leaf in jax.tree.leaves(state.opt_state)
    if leaf.dtype == jnp.float32
  )


# --- replay -------------------------------------------------------------------


def token_layers(items):
  return 2 * sum(len(i.segment.tokens) - 1 for i in items)  # the last unknown


def test_every_known_route_is_replayed():
  items = make_items()
  _, sums = trainer.accumulate(make_step(), make_params(), pack_items(items))
  assert sums['replayed'] == token_layers(items)
  assert sums['not_replayed'] == 0


@pytest.mark.parametrize(
  'changed', ({'router_replay': False}, {'plausibility': 0.9}), ids=str
)
def test_routes_that_are_not_replayed_are_counted(changed):
  items = make_items()
  config = dataclasses.replace(CONFIG, **changed)
  one = jax.jit(
    lambda b: trainer.loss_fn(make_params(), b, MODEL, FAST, config)
  )
  sums = [one(batch)[1] for batch in pack_items(items)]
  replayed, other = (
    sum(float(s[name]) for s in sums) for name in ('replayed', 'not_replayed')
  )
  assert replayed + other == token_layers(items)
  assert 0.2 < other / token_layers(items) < 1


def test_score_replays_or_routes_natively():
  (batch, *_) = pack_items(make_items())
  step, params = make_step(), make_params()
  published = step.publishable(params)
  placed = trainer.place(step, batch)
  replayed = step.score(published, placed, np.True_)
  native = step.score(published, placed, np.False_)
  known = np.all(batch.experts >= 0, -1)
  np.testing.assert_array_equal(
    np.asarray(replayed.experts)[known], batch.experts[known]
  )
  np.testing.assert_array_equal(native.experts, native.native)
  sampled = batch.loss_mask
  gap = np.asarray(replayed.logprobs - native.logprobs)[sampled]
  assert np.abs(gap).max() > 1e-3
  assert np.all(np.asarray(native.entropy)[sampled] > 0)
