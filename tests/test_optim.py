"""Optimizers against Adam written out in numpy, and what must not move."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer import optim

B1, B2, EPS = 0.9, 0.95, 1e-8


def make_params(seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  return {
    'embedding': normal(5, 3),
    'layers': {
      'attention_norm': normal(2, 3),
      'query': normal(2, 3, 3),
      'query_bias': normal(2, 3),
      'router_bias': normal(2, 4),
    },
  }


def flat(tree):
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path[-1].key: np.asarray(leaf) for path, leaf in leaves}


def naive_adam(params, grads_of_steps, rates, clip, decay):
  """AdamW in float64, one name at a time."""
  params = {k: v.astype(np.float64) for k, v in flat(params).items()}
  moments = {k: (np.zeros_like(v), np.zeros_like(v)) for k, v in params.items()}
  for t, (grads, rate) in enumerate(
    zip(grads_of_steps, rates, strict=True), start=1
  ):
    grads = {k: v.astype(np.float64) for k, v in flat(grads).items()}
    del grads['router_bias']
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    scale = min(1.0, clip / norm) if clip else 1.0
    for name, grad in grads.items():
      mu, nu = moments[name]
      mu = B1 * mu + (1 - B1) * grad * scale
      nu = B2 * nu + (1 - B2) * (grad * scale) ** 2
      moments[name] = (mu, nu)
      step = (mu / (1 - B1**t)) / (np.sqrt(nu / (1 - B2**t)) + EPS)
      if name in ('embedding', 'query'):
        step = step + decay * params[name]
      params[name] = params[name] - rate * step
  return params


def grads_like(params, seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jnp.asarray(scale * rng.normal(size=p.shape), jnp.float32), params
  )


@pytest.mark.parametrize('jit', [False, True])
@pytest.mark.parametrize('clip,decay', [(0.0, 0.0), (0.5, 0.1)])
def test_adam_is_adam(clip, decay, jit):
  rate = optim.schedule('cosine', 1e-2, 2, 10)
  optimizer = optim.adam(rate, max_grad_norm=clip, weight_decay=decay)
  step = functools.partial(optim.apply, optimizer)
  step = jax.jit(step) if jit else step
  params = start = make_params()
  state = optimizer.init(params)
  all_grads = [grads_like(params, seed) for seed in range(5)]
  for grads in all_grads:
    params, state, stats = step(params, state, grads)
    assert stats['skipped'] == 0
  rates = [float(rate(i)) for i in range(5)]
  expected = naive_adam(start, all_grads, rates, clip, decay)
  for name, value in flat(params).items():
    np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-6)


def test_groups_by_name():
  assert flat_labels(make_params()) == {
    'embedding': 'matrix',
    'attention_norm': 'vector',
    'query': 'matrix',
    'query_bias': 'vector',
    'router_bias': 'frozen',
  }
  # 'norm' inside of a name does not make a norm of it.
  assert optim.group((jax.tree_util.DictKey('normal_projection'),)) == 'matrix'


def flat_labels(params):
  leaves, _ = jax.tree_util.tree_flatten_with_path(optim.groups(params))
  return {path[-1].key: label for path, label in leaves}


def test_frozen_bias_has_no_part():
  """It does not move, holds no moments, and does not count in the clip."""
  params = make_params()
  optimizer = optim.adam(optim.schedule('constant', 1.0, 0, 1), max_grad_norm=1)
  state = optimizer.init(params)
  shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
  assert (2, 4) not in shapes
  assert shapes.count((2, 3, 3)) == 2
  grads = grads_like(params, 1)
  huge = jax.tree.map(lambda g: g, grads)
  huge['layers']['router_bias'] = jnp.full((2, 4), 1e6)
  one, _, stats_one = optim.apply(optimizer, params, state, grads)
  two, _, stats_two = optim.apply(optimizer, params, state, huge)
  jax.tree.map(np.testing.assert_array_equal, one, two)
  assert stats_one['grad_norm'] == stats_two['grad_norm']
  np.testing.assert_array_equal(
    one['layers']['router_bias'], params['layers']['router_bias']
  )


@pytest.mark.parametrize('mtp', [False, True])
def test_what_drafts_moves_by_itself_or_not_at_all(mtp):
  params = make_params()
  rate = optim.schedule('constant', 1e-2, 0, 1)
  optimizer = optim.adam(rate, max_grad_norm=0.5, weight_decay=0.1, mtp=mtp)
  grads = grads_like(params, 1)
  beside = {'query': jnp.ones((7, 3)), 'router_bias': jnp.ones(4)}
  both = {**params, 'mtp': beside}
  state = optimizer.init(both)
  shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
  assert shapes.count((7, 3)) == 2 * mtp
  more = {**grads, 'mtp': grads_like(beside, 2, 1e3)}
  moved, _, stats = optim.apply(optimizer, both, state, more)
  plain = optim.adam(rate, max_grad_norm=0.5, weight_decay=0.1)
  alone, _, want = optim.apply(plain, params, plain.init(params), grads)
  own = moved.pop('mtp')
  jax.tree.map(np.testing.assert_array_equal, moved, alone)
  assert stats == want
  assert bool((own['query'] != 1).any()) == mtp
  np.testing.assert_array_equal(own['router_bias'], 1)


@pytest.mark.parametrize('jit', [False, True])
@pytest.mark.parametrize('cause', ['asked', 'zero', 'nan', 'inf'])
def test_skipped_step_moves_nothing(cause, jit):
  """Cases 1 and 2, with momentum and decay that would move it."""
  rate = optim.schedule('constant', 1e-2, 5, 10)
  optimizer = optim.adam(rate, max_grad_norm=1.0, weight_decay=0.1)
  params = make_params()
  state = optimizer.init(params)
  params, state, _ = optim.apply(
    optimizer, params, state, grads_like(params, 1)
  )
  bad = {
    'asked': grads_like(params, 2),
    'zero': jax.tree.map(jnp.zeros_like, params),
    'nan': jax.tree.map(lambda p: p.at[0].set(jnp.nan), params),
    'inf': jax.tree.map(lambda p: p.at[0].set(jnp.inf), params),
  }[cause]
  step = functools.partial(optim.apply, optimizer)
  step = jax.jit(step) if jit else step
  new_params, new_state, stats = step(params, state, bad, cause == 'asked')
  assert stats['skipped'] == 1 and stats['update_norm'] == 0
  jax.tree.map(np.testing.assert_array_equal, params, new_params)
  jax.tree.map(np.testing.assert_array_equal, state, new_state)
  # A good step afterwards is the one that would have come without it.
  good = grads_like(params, 3)
  after, _, _ = step(new_params, new_state, good, False)
  direct, _, _ = step(params, state, good, False)
  jax.tree.map(np.testing.assert_array_equal, after, direct)


def test_only_a_nan_in_the_frozen_bias_is_no_reason_to_skip():
  params = make_params()
  optimizer = optim.adam(
    optim.schedule('constant', 1e-2, 0, 1), max_grad_norm=1
  )
  grads = grads_like(params, 1)
  grads['layers']['router_bias'] = jnp.full((2, 4), jnp.nan)
  _, _, stats = optim.apply(optimizer, params, optimizer.init(params), grads)
  assert stats['skipped'] == 0


def test_moments_are_float32_for_bfloat16_gradients():
  params = make_params()
  optimizer = optim.adam(
    optim.schedule('constant', 1e-2, 0, 1), max_grad_norm=1
  )
  grads = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  new, state, _ = optim.apply(optimizer, params, optimizer.init(params), grads)
  dtypes = {leaf.dtype for leaf in jax.tree.leaves((new, state))}
  assert dtypes == {jnp.dtype('float32'), jnp.dtype('int32')}


def test_schedules():
  constant = optim.schedule('constant', 2.0, 4, 100)
  assert [float(constant(t)) for t in (0, 1, 3, 4, 99)] == [
    0.5,
    1.0,
    2.0,
    2.0,
    2.0,
  ]
  cosine = optim.schedule('cosine', 2.0, 4, 104)
  assert float(cosine(0)) == 0.5
  assert float(cosine(4)) == 2.0
  np.testing.assert_allclose(float(cosine(54)), 1.0, rtol=1e-6)
  np.testing.assert_allclose(float(cosine(104)), 0.0, atol=1e-6)
  np.testing.assert_allclose(float(cosine(500)), 0.0, atol=1e-6)
  no_warmup = optim.schedule('constant', 2.0, 0, 100)
  assert float(no_warmup(0)) == 2.0


@pytest.mark.parametrize(
  'call,named',
  [
    (lambda: optim.schedule('linear', 1.0, 0, 1), 'constant'),
    (lambda: optim.schedule('cosine', 0.0, 0, 1), 'learning_rate=0.0'),
    (lambda: optim.schedule('cosine', 1.0, -1, 1), 'warmup_steps=-1'),
    (lambda: optim.adam(optax.constant_schedule(1), max_grad_norm=-1), '-1'),
  ],
)
def test_refusals(call, named):
  with pytest.raises(ValueError, match=named):
    call()
