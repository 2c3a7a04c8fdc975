"""Mid-training: the loss, the balance, and a loop that may be killed.

A stand-in with the transformer's interface (one embedding, one router, one
projection) makes the mathematics checkable by hand and the loop quick; the
real transformer is trained at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import checkpoint
from composer import config as config_lib
from composer import data
from composer import mesh as mesh_lib
from composer import midtrain
from composer import optim
from composer import params as params_lib
from composer.model import transformer

ParamSpec = params_lib.ParamSpec
V, D, E = 24, 8, 4
IDENTITY = {'model': 'stand-in'}
EXPERIMENT = config_lib.Experiment(
  name='test',
  model=config_lib.ModelConfig(vocab_size=V, width=D, experts=E),
  midtrain=config_lib.MidtrainConfig(
    steps=12, batch_size=4, sequence_length=16, warmup_steps=2
  ),
  checkpoint=config_lib.CheckpointConfig(every=5, keep=2),
)


def spec(config):
  del config
  return {
    'embedding': ParamSpec((V, D), ('vocab', 'embed')),
    'router': ParamSpec((D, E), ('embed', 'router')),
    'router_bias': ParamSpec((1, E), ('layers', 'router'), trained=False),
    'output': ParamSpec((D, V), ('embed', 'vocab')),
  }


class Output(typing.NamedTuple):
  hidden: jax.Array
  load: jax.Array


def forward(
  params, config, numerics, tokens, segment_ids, positions, layout, audit
):
  del config, positions
  assert layout is None and not audit
  assert numerics.mode == 'fast'
  embedded = params['embedding'][tokens]
  previous = jnp.pad(embedded, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  scores = jax.nn.sigmoid(embedded @ params['router'])
  scores = scores + params['router_bias'][None]
  chosen = jax.nn.one_hot(jnp.argmax(scores, -1), E)  # [B, T, E]
  load = jnp.sum(chosen * (segment_ids > 0)[..., None], (0, 1))
  return Output(previous, load[None])


def token_logprob(
  params, config, numerics, hidden, targets, temperatures, layout
):
  del config, numerics, layout
  logits = hidden @ params['output'] / temperatures[..., None]
  logprobs = jax.nn.log_softmax(logits)
  entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
  taken = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
  return taken, entropy


stand_in_step = functools.cache(midtrain.make_train_step)


@pytest.fixture
def stand_in(monkeypatch):
  module = types.SimpleNamespace(
    spec=spec, forward=forward, token_logprob=token_logprob
  )
  monkeypatch.setattr(midtrain, 'transformer', module)
  # Compiled once for all tests, not once a run.
  monkeypatch.setattr(midtrain, 'make_train_step', stand_in_step)


def make_params(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  return {
    'embedding': jax.random.normal(keys[0], (V, D)),
    'router': jax.random.normal(keys[1], (D, E)),
    'router_bias': jnp.zeros((1, E)),
    'output': jax.random.normal(keys[2], (D, V)) * 0.1,
  }


def make_state(experiment=EXPERIMENT, seed=0):
  return midtrain.init_state(
    make_params(seed), experiment.midtrain, jax.random.key(5)
  )


def make_batches(experiment=EXPERIMENT, seed=0):
  """A grain iterator over sessions that count upwards: easy to learn."""
  rng = np.random.default_rng(1)
  sessions = []
  for n in rng.integers(4, 17, 50):
    tokens = (rng.integers(1, V) + np.arange(n)) % (V - 1) + 1
    sessions.append((tokens.astype(np.int32), rng.random(n) < 0.5))
  config = experiment.midtrain
  return iter(
    data.midtraining(
      sessions,
      [],
      list,
      batch_size=config.batch_size,
      sequence_length=config.sequence_length,
      python_share=0.0,
      align=4,
      seed=seed,
    )
  )


def as_numpy(tree):
  return [
    np.asarray(
      jax.random.key_data(leaf)
      if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
      else leaf
    )
    for leaf in jax.tree.leaves(tree)
  ]


def assert_same(a, b):
  for x, y in zip(as_numpy(a), as_numpy(b), strict=True):
    np.testing.assert_array_equal(x, y)


def run(directory, experiment=EXPERIMENT, batches=None, **arguments):
  return midtrain.run(
    experiment,
    str(directory),
    make_state(experiment),
    make_batches(experiment) if batches is None else batches,
    identity=IDENTITY,
    **arguments,
  )


class Killed(Exception):
  """Stands for SIGKILL: nothing after it runs."""


# --- the loss ---------------------------------------------------------------


class LossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_mean_over_the_mask(self):
    rng = np.random.default_rng(0)
    logprobs = rng.normal(size=(3, 5)).astype(np.float32)
    mask = rng.random((3, 5)) < 0.5
    loss = self.variant(midtrain.next_token_loss)(logprobs, mask)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, -logprobs[mask].mean(), rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_never_reads_outside_of_the_mask(self):
    """Case 7: neither the value nor the gradient."""
    mask = jnp.array([[True, False, True, False]])
    clean = jnp.array([[-1.0, 0.0, -2.0, 0.0]])
    dirty = jnp.array([[-1.0, jnp.nan, -2.0, -jnp.inf]])
    grad = self.variant(jax.value_and_grad(midtrain.next_token_loss))
    loss, gradient = grad(dirty, mask)
    chex.assert_trees_all_equal((loss, gradient), grad(clean, mask))
    np.testing.assert_array_equal(gradient, [[-0.5, 0.0, -0.5, 0.0]])

  def test_empty_mask(self):
    loss, gradient = jax.value_and_grad(midtrain.next_token_loss)(
      jnp.full((2, 3), -1.0), jnp.zeros((2, 3), bool)
    )
    assert loss == 0.0 and not gradient.any()

  def test_low_precision_is_summed_in_float32(self):
    logprobs = jnp.full((1, 4096), -1.0, jnp.bfloat16)
    loss = midtrain.next_token_loss(logprobs, jnp.ones((1, 4096), bool))
    assert loss == 1.0 and loss.dtype == jnp.float32


def test_gradient_does_not_depend_on_sharding(stand_in):
  """Case 6: rows with very different numbers of loss tokens, over devices."""
  del stand_in
  devices = jax.devices()
  rows = 2 * len(devices)
  rng = np.random.default_rng(0)
  batch = {
    'tokens': rng.integers(1, V, (rows, 16)).astype(np.int32),
    'segment_ids': np.ones((rows, 16), np.int32),
    'positions': np.tile(np.arange(16, dtype=np.int32), (rows, 1)),
    'loss_mask': np.arange(16)[None] < rng.integers(1, 16, (rows, 1)),
  }
  params = make_params()
  numerics = config_lib.NumericsConfig(mode='fast')
  gradient = jax.jit(
    jax.grad(lambda p, b: midtrain.loss_fn(p, b, EXPERIMENT.model, numerics)[0])
  )
  whole = gradient(params, batch)
  mesh = jax.sharding.Mesh(np.array(devices), ('data',))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  sharded = gradient(params, jax.device_put(batch, split))
  chex.assert_trees_all_close(whole, sharded, rtol=1e-5, atol=1e-7)
  assert max(np.abs(g).max() for g in as_numpy(whole)) > 1e-3


# --- the balance ------------------------------------------------------------


@pytest.mark.parametrize('jit', [False, True])
def test_balance_by_hand(jit):
  balance = jax.jit(midtrain.balance) if jit else midtrain.balance
  bias = jnp.array([[0.0, 0.5, -0.25, 0.0], [1.0, 1.0, 1.0, 1.0]])
  load = jnp.array([[10, 2, 4, 4], [3, 3, 3, 3]])  # means 5 and 3
  expected = [[-0.1, 0.6, -0.15, 0.1], [1.0, 1.0, 1.0, 1.0]]
  np.testing.assert_allclose(balance(bias, load, 0.1), expected, rtol=1e-6)


def test_balance_evens_out_a_skewed_router():
  """Tokens whose raw scores all favour one expert end up spread."""
  scores = jax.random.uniform(jax.random.key(0), (512, E))
  scores = scores.at[:, 0].add(0.5)
  bias = jnp.zeros((1, E))

  def load(bias):
    chosen = jnp.argmax(scores + bias, -1)
    return jnp.bincount(chosen, length=E)[None]

  before = load(bias)
  for _ in range(200):
    bias = midtrain.balance(bias, load(bias), 0.01)
  after = load(bias)
  assert before.max() > 300
  assert after.max() < 160 and after.min() > 96  # of 128 on average


# --- the step ---------------------------------------------------------------


def test_step_moves_what_it_must(stand_in):
  del stand_in
  experiment = EXPERIMENT
  step = midtrain.make_train_step(
    experiment.model,
    dataclasses.replace(experiment.numerics, mode='fast'),
    experiment.midtrain,
  )
  state, batch = make_state(), next(make_batches())
  before = jax.tree.map(jnp.copy, state)
  numerics = config_lib.NumericsConfig(mode='fast')
  loss, load = midtrain.loss_fn(
    before.params, batch, experiment.model, numerics
  )
  after, metrics = step(state, batch)
  assert state.params['embedding'].is_deleted(), 'the state is donated'
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-6)
  assert metrics['loss_tokens'] == batch['loss_mask'].sum()
  np.testing.assert_allclose(
    metrics['load_max'], load.max() / load.mean(), rtol=1e-6
  )
  assert (int(after.step), int(after.version)) == (1, 0)
  rate = experiment.midtrain.router_bias_rate
  np.testing.assert_allclose(
    after.params['router_bias'],
    rate * np.sign(np.mean(load) - np.asarray(load)),
    rtol=1e-6,
  )
  assert not np.array_equal(after.params['output'], before.params['output'])


@pytest.mark.parametrize('cause', ['no loss tokens', 'nan'])
def test_skipped_step_moves_nothing(stand_in, cause):
  """Case 2, the selection bias and the step counter included."""
  del stand_in
  step = midtrain.make_train_step(
    EXPERIMENT.model,
    dataclasses.replace(EXPERIMENT.numerics, mode='fast'),
    EXPERIMENT.midtrain,
  )
  state, batch = make_state(), next(make_batches())
  state, _ = step(state, batch)
  if cause == 'nan':
    params = {
      **state.params,
      'output': state.params['output'].at[0].set(np.nan),
    }
    state = state.replace(params=params)
  else:
    batch = {**batch, 'loss_mask': np.zeros_like(batch['loss_mask'])}
  before = jax.tree.map(jnp.copy, state)
  after, metrics = step(state, batch)
  assert metrics['skipped'] == 1
  assert_same(before, after)


# --- the loop ---------------------------------------------------------------


def test_loop_learns_and_reports_every_step(stand_in, tmp_path):
  del stand_in
  seen = []
  changed = dataclasses.replace(EXPERIMENT.midtrain, steps=60)
  experiment = dataclasses.replace(EXPERIMENT, midtrain=changed)
  state = run(tmp_path, experiment, report=lambda *pair: seen.append(pair))
  assert [step for step, _ in seen] == list(range(1, 61))
  losses = [scalars['midtrain/loss'] for _, scalars in seen]
  assert losses[0] > 2.8 and np.mean(losses[-5:]) < 0.8 * losses[0]
  for _, scalars in seen:
    assert all(type(value) is float for value in scalars.values())
    assert scalars['midtrain/tokens_per_s'] > 0
  rates = [scalars['midtrain/learning_rate'] for _, scalars in seen]
  np.testing.assert_allclose(rates[:3], [1.5e-3, 3e-3, 3e-3], rtol=1e-6)
  assert int(state.step) == 60
  assert checkpoint.latest(str(tmp_path)) == 60


def test_metrics_are_fetched_one_step_late(stand_in, tmp_path):
  """The batch of step n is asked for before the metrics of n - 1 are."""
  del stand_in
  events = []

  class Watched:
    def __init__(self):
      self.inner = make_batches()
      self.get_state = self.inner.get_state

    def __next__(self):
      events.append('batch')
      return next(self.inner)

  run(
    tmp_path,
    batches=Watched(),
    report=lambda step, _: events.append(step),
    should_stop=lambda: events.count('batch') == 4,
  )
  assert events == ['batch', 'batch', 1, 'batch', 2, 'batch', 3, 4]


@pytest.mark.parametrize('at', [1, 5, 7, 12])
def test_killed_and_resumed_is_the_same_run(stand_in, tmp_path, at):
  """Cases 31 and 32: data, step, schedule, moments and key, bit for bit."""
  del stand_in
  losses = {}

  def note(step, scalars):
    losses.setdefault(step, set()).add(scalars['midtrain/loss'])

  whole = run(tmp_path / 'whole', report=note)
  killed = tmp_path / 'killed'

  def kill(step, scalars):
    if step == at:
      raise Killed
    note(step, scalars)

  with pytest.raises(Killed):
    run(killed, report=kill)
  resumed = run(killed, resume=True, report=note)
  assert_same(whole, resumed)
  assert {step: len(values) for step, values in losses.items()} == {
    step: 1 for step in range(1, 13)
  }


def test_asked_to_stop_it_saves_and_goes_on(stand_in, tmp_path):
  del stand_in
  whole = run(tmp_path / 'whole')
  asked = []
  stopped = run(
    tmp_path / 'part',
    should_stop=lambda: asked.append(None) or len(asked) == 7,
  )
  assert int(stopped.step) == 7
  assert checkpoint.latest(str(tmp_path / 'part')) == 7
  assert_same(whole, run(tmp_path / 'part', resume=True))


def test_a_finished_stage_resumes_to_its_end(stand_in, tmp_path):
  del stand_in
  whole = run(tmp_path)
  never = iter(())  # not one batch is asked for
  batches = types.SimpleNamespace(
    set_state=lambda state: None, __next__=never.__next__
  )
  assert_same(whole, run(tmp_path, batches=batches, resume=True))


def test_a_used_directory_is_refused(stand_in, tmp_path):
  del stand_in
  run(tmp_path)
  with pytest.raises(ValueError, match='step 12 already; continue with --res'):
    run(tmp_path)
  with pytest.raises(ValueError, match='of another model: model'):
    midtrain.run(
      EXPERIMENT,
      str(tmp_path),
      make_state(),
      make_batches(),
      identity={'model': 'other'},
      resume=True,
    )


def test_a_run_that_only_skips_ends_with_a_reason(stand_in, tmp_path):
  del stand_in
  inner = make_batches()

  class Empty:
    get_state = inner.get_state

    def __next__(self):
      batch = next(inner)
      return {**batch, 'loss_mask': np.zeros_like(batch['loss_mask'])}

  with pytest.raises(FloatingPointError, match='10 mid-training steps'):
    run(tmp_path, batches=Empty())


# --- the real transformer ---------------------------------------------------

TINY = config_lib.ModelConfig(
  vocab_size=V,
  layers=2,
  dense_layers=1,
  width=16,
  heads=2,
  head_dim=8,
  dense_hidden=16,
  experts=4,
  expert_hidden=8,
)


def test_groups_agree_with_the_declaration():
  """What is frozen by name is what the declaration says is not trained."""
  declared = params_lib.named(transformer.spec(TINY))
  labels = params_lib.named(
    optim.groups(params_lib.abstract(transformer.spec(TINY)))
  )
  frozen = {name for name, label in labels.items() if label == 'frozen'}
  assert frozen == {n for n, s in declared.items() if not s.trained}
  assert frozen == {'layers/moe/router_bias'}
  vectors = {name for name, label in labels.items() if label == 'vector'}
  assert vectors == {n for n, s in declared.items() if s.init == 'ones'}


def test_a_step_does_not_depend_on_the_layout():
  """Rows with very different numbers of loss tokens; experts and sequence too."""
  config = dataclasses.replace(EXPERIMENT.midtrain, batch_size=8)
  numerics = config_lib.NumericsConfig(mode='fast')
  rng = np.random.default_rng(0)
  batch = {
    'tokens': rng.integers(1, TINY.vocab_size, (8, 16)).astype(np.int32),
    'segment_ids': np.ones((8, 16), np.int32),
    'positions': np.tile(np.arange(16, dtype=np.int32), (8, 1)),
    'loss_mask': np.arange(16)[None] < rng.integers(1, 16, (8, 1)),
  }
  batch['loss_mask'][:, 0] = False
  spec_ = transformer.spec(TINY)
  parallel = config_lib.ParallelConfig(expert=2, context=2)
  mesh = mesh_lib.make_mesh(parallel=parallel)
  layout = mesh_lib.train_layout(numerics, mesh, parallel)

  def start():
    params = params_lib.init(spec_, jax.random.key(0))
    return midtrain.init_state(params, config, jax.random.key(1))

  by_name = mesh_lib.shardings(spec_, mesh_lib.TRAIN_RULES, mesh)
  spread = jax.device_put(
    start(), mesh_lib.like_params(start(), spec_, by_name, mesh)
  )
  over = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(mesh_lib.ROWS)
  )
  alone, want = midtrain.make_train_step(TINY, numerics, config)(start(), batch)
  step = midtrain.make_train_step(TINY, numerics, config, layout)
  after, got = step(spread, jax.device_put(batch, over))
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-4, err_msg=name)
  # The first moment, not the step: Adam blows up what is nearly nothing.
  moments = (jax.tree.leaves(s.opt_state) for s in (after, alone))
  for a, b in zip(*moments, strict=True):
    scale = np.abs(b).max()
    np.testing.assert_allclose(a, b, atol=1e-4 * scale + 1e-12)
  bias = after.params['layers']['moe']['router_bias']
  np.testing.assert_array_equal(
    bias, alone.params['layers']['moe']['router_bias']
  )
  assert np.asarray(bias).any()


def test_the_transformer_learns(tmp_path):
  experiment = dataclasses.replace(
    EXPERIMENT,
    model=TINY,
    midtrain=dataclasses.replace(
      EXPERIMENT.midtrain, steps=30, learning_rate=1e-2, router_bias_rate=0.01
    ),
  )
  key = jax.random.key(0)
  params = jax.jit(lambda: params_lib.init(transformer.spec(TINY), key))()
  losses = []
  state = midtrain.run(
    experiment,
    str(tmp_path),
    midtrain.init_state(params, experiment.midtrain, key),
    make_batches(experiment),
    identity=IDENTITY,
    report=lambda step, scalars: losses.append(scalars['midtrain/loss']),
  )
  assert np.mean(losses[-5:]) < losses[0] - 0.5
  bias = np.asarray(state.params['layers']['moe']['router_bias'])
  assert bias.dtype == np.float32 and bias.any()
  np.testing.assert_allclose(bias, np.round(bias / 0.01) * 0.01, atol=1e-5)
