"""The MoE layer against one written row by row in float64.

Gradients are compared with central differences of that naive layer at fixed
routes, so neither the values nor the derivatives share a line with the code.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import moe

CONFIG = config_lib.ModelConfig(
  width=12, experts=6, experts_per_token=3, expert_hidden=5, shared_experts=2
)
ROWS = 10
GROUPED = dataclasses.replace(
  CONFIG, experts=8, router_groups=4, router_top_groups=2
)
VARIANTS = {
  'default': CONFIG,
  'not normalised': dataclasses.replace(CONFIG, normalise_gates=False),
  'scaled': dataclasses.replace(CONFIG, router_scale=2.5),
  'no shared expert': dataclasses.replace(CONFIG, shared_experts=0),
  'one expert a token': dataclasses.replace(CONFIG, experts_per_token=1),
  'groups': GROUPED,
  'one group of many': dataclasses.replace(
    GROUPED, router_groups=2, router_top_groups=1
  ),
  'softmax': dataclasses.replace(CONFIG, router='softmax'),
  'softmax, not normalised': dataclasses.replace(
    CONFIG, router='softmax', normalise_gates=False, shared_experts=0
  ),
}
WITH_GRADIENTS = (
  'default',
  'not normalised',
  'scaled',
  'groups',
  'softmax',
  'softmax, not normalised',
)


def make_layer(config, seed=0):
  spec = moe.spec(config, 1)
  p = jax.tree.map(lambda x: x[0], params_lib.init(spec, jax.random.key(seed)))
  rng = np.random.default_rng(seed)
  p['norm'] = jnp.asarray(rng.uniform(0.5, 1.5, p['norm'].shape), jnp.float32)
  bias = rng.normal(size=config.experts) * 0.2
  if config.router == 'sigmoid':
    p['router_bias'] = jnp.asarray(bias, jnp.float32)
  x = jnp.asarray(rng.normal(size=(ROWS, config.width)), jnp.float32)
  return p, x


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def naive_scores(logits, config):
  if config.router == 'sigmoid':
    return sigmoid(logits)
  weights = [np.exp(z) for z in logits]
  return np.array([w / sum(weights) for w in weights])


def naive_groups(selection, config):
  """Experts of the best groups: those whose two best experts add up highest."""
  size = len(selection) // config.router_groups
  groups = [
    range(g * size, g * size + size) for g in range(len(selection) // size)
  ]
  if config.router_groups == 1:
    return groups[0]
  ranked = sorted(
    range(len(groups)),
    key=lambda g: (-sum(sorted(selection[e] for e in groups[g])[-2:]), g),
  )
  return [e for g in ranked[: config.router_top_groups] for e in groups[g]]


def naive_route(logits, bias, config):
  """The top k of s + b, the lower index first among equals."""
  selection = naive_scores(logits, config) + bias
  ranked = sorted(
    naive_groups(selection, config), key=lambda e: (-selection[e], e)
  )
  return ranked[: config.experts_per_token]


def naive_gates(logits, experts, config):
  gates = naive_scores(logits, config)[list(experts)]
  if config.normalise_gates:
    gates = gates / gates.sum()
  return gates * config.router_scale


def naive_gated(x, gate_up):
  return silu(x @ gate_up[:, 0]) * (x @ gate_up[:, 1])


def naive_moe(p, x, config, routes=None):
  """(out [R, D], experts [R][K]); `routes` replays."""
  out, used = np.zeros_like(x), []
  for r, row in enumerate(x):
    h = row / np.sqrt(np.mean(row**2) + config.norm_eps) * p['norm']
    logits = h @ p['router']
    experts = (
      naive_route(logits, p.get('router_bias', 0.0), config)
      if routes is None
      else routes[r]
    )
    out[r] = row
    gates = naive_gates(logits, experts, config)
    for e, gate in zip(experts, gates, strict=True):
      out[r] += gate * (naive_gated(h, p['gate_up'][e]) @ p['down'][e])
    if config.shared_experts:
      out[r] += naive_gated(h, p['shared_gate_up']) @ p['shared_down']
    used.append(list(experts))
  return out, np.array(used)


def wide(tree):
  return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run(config, implementation, plausibility, p, x, replay):
  return moe.moe(p, config, implementation, x, replay, plausibility)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient(config, implementation, p, x, replay, weights):
  def total(p, x):
    out, experts, _ = moe.moe(p, config, implementation, x, replay, 0.0)
    return jnp.sum(out * weights), experts

  return jax.grad(total, argnums=(0, 1), has_aux=True)(p, x)


def native(config):
  return np.full((ROWS, config.experts_per_token), -1, np.int32)


def assert_gradients(config, implementation, p, x, replay, routes, tries=6):
  """Against central differences of the naive layer, at random coordinates."""
  rng = np.random.default_rng(1)
  weights = rng.normal(size=x.shape)
  (grad_p, grad_x), used = gradient(
    config, implementation, p, x, replay, jnp.asarray(weights, jnp.float32)
  )
  np.testing.assert_array_equal(used, routes)
  tree = {**wide(p), 'x': np.asarray(x, np.float64)}
  grads = {**grad_p, 'x': grad_x}

  def total(tree):
    layer = {k: v for k, v in tree.items() if k != 'x'}
    return np.sum(naive_moe(layer, tree['x'], config, routes)[0] * weights)

  for name, value in tree.items():
    if name == 'router_bias':
      assert not np.any(grads[name])
      continue
    assert np.any(grads[name]), name
    for _ in range(tries):
      at = tuple(rng.integers(0, n) for n in value.shape)
      high, low = (value.copy() for _ in range(2))
      high[at] += 1e-5
      low[at] -= 1e-5
      want = total({**tree, name: high}) - total({**tree, name: low})
      np.testing.assert_allclose(
        grads[name][at], want / 2e-5, rtol=2e-3, atol=2e-4, err_msg=name
      )
  return grads


@pytest.mark.parametrize('name', VARIANTS)
@pytest.mark.parametrize('implementation', moe.EXPERTS)
def test_against_the_naive_layer(name, implementation):
  config = VARIANTS[name]
  p, x = make_layer(config)
  out, experts, found = run(config, implementation, 0.0, p, x, native(config))
  want, routes = naive_moe(wide(p), np.asarray(x, np.float64), config)
  np.testing.assert_array_equal(experts, routes)
  np.testing.assert_array_equal(found, routes)
  np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('implementation', moe.EXPERTS)
@pytest.mark.parametrize('name', WITH_GRADIENTS)
def test_gradients(name, implementation):
  config = VARIANTS[name]
  p, x = make_layer(config)
  routes = naive_moe(wide(p), np.asarray(x, np.float64), config)[1]
  assert_gradients(config, implementation, p, x, native(config), routes)


@pytest.mark.parametrize('implementation', moe.EXPERTS)
def test_gradients_under_replay(implementation):
  """Gates come from the full scores: the router learns from drifted experts."""
  config = VARIANTS['default']
  p, x = make_layer(config)
  own = naive_moe(wide(p), np.asarray(x, np.float64), config)[1]
  rng = np.random.default_rng(3)
  routes = np.array([rng.permutation(6)[:3] for _ in range(ROWS)])
  assert np.mean(np.sort(routes) != np.sort(own)) > 0.2
  out, used, found = run(config, implementation, 0.0, p, x, routes)
  want, _ = naive_moe(wide(p), np.asarray(x, np.float64), config, routes)
  np.testing.assert_array_equal(used, routes)
  np.testing.assert_array_equal(found, own)
  np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
  grads = assert_gradients(config, implementation, p, x, routes, routes)
  # Only the replayed experts' columns of the router have a gradient.
  one = np.tile([4, 1, 0], (ROWS, 1))
  grads = assert_gradients(config, implementation, p, x, one, one, 2)
  columns = np.any(np.asarray(grads['router']) != 0, axis=0)
  assert columns.tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize('implementation', moe.EXPERTS)
def test_all_tokens_on_the_same_experts(implementation):
  """No capacity, nothing dropped; idle experts get a gradient of exactly 0."""
  config = CONFIG
  p, x = make_layer(config)
  p['router_bias'] = jnp.asarray([0, 9, 0, 0, 7, 8], jnp.float32)
  routes = np.tile([1, 5, 4], (ROWS, 1))
  out, used, _ = run(config, implementation, 0.0, p, x, native(config))
  np.testing.assert_array_equal(used, routes)
  want, _ = naive_moe(wide(p), np.asarray(x, np.float64), config)
  np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
  grads = assert_gradients(
    config, implementation, p, x, native(config), routes, 3
  )
  for name in ('gate_up', 'down'):
    assert not np.any(np.asarray(grads[name])[np.array([0, 2, 3])])
    assert np.all(np.isfinite(grads[name]))


def test_ties_go_to_the_lower_expert():
  k2 = dataclasses.replace(CONFIG, experts_per_token=2)
  logits = jnp.asarray(
    [[0, 0, 0, 0, 0, 0], [1, 2, 2, 2, 1, 2], [3, 1, 1, 1, 1, 1.0]]
  )
  routed = moe.route(logits, jnp.zeros(6), k2)
  np.testing.assert_array_equal(routed.experts, [[0, 1], [1, 2], [0, 1]])
  bias = jnp.asarray([0, 0, 0.5, 0, 0.5, 0])
  routed = moe.route(jnp.zeros((1, 6)), bias, k2)
  np.testing.assert_array_equal(routed.experts, [[2, 4]])


def test_groups():
  """By hand: groups 0 and 2 win by their two best, though 5 is the best."""
  config = dataclasses.replace(GROUPED, experts_per_token=2)
  bias = jnp.asarray([0.4, 0.4, 0, 0, 0.3, 0.3, -9, 0.9])
  routed = moe.route(jnp.zeros((1, 8)), bias, config)
  # Sums of groups: 1.8, 1.0, 1.6, and -8.1 + 0.9: the best expert is left out.
  np.testing.assert_array_equal(routed.experts, [[0, 1]])
  np.testing.assert_allclose(routed.gates, [[0.5, 0.5]], rtol=1e-6)
  three = dataclasses.replace(config, experts_per_token=3)
  routed = moe.route(jnp.zeros((1, 8)), bias, three)
  np.testing.assert_array_equal(routed.experts, [[0, 1, 4]])


def test_a_kept_group_may_lie_below_zero():
  """What is left out is out, not 0: scores and bias may add up to less."""
  bias = jnp.full(8, -3.0).at[0].set(-1.0).at[4].set(-1.5)
  routed = moe.route(jnp.zeros((1, 8)), bias, GROUPED)
  np.testing.assert_array_equal(routed.experts, [[0, 4, 1]])


def test_ties_go_to_the_lower_group():
  routed = moe.route(jnp.zeros((3, 8)), jnp.zeros(8), GROUPED)
  np.testing.assert_array_equal(routed.experts, [[0, 1, 2]] * 3)
  bias = jnp.asarray([0, 0, 0.1, 0, 0.1, 0, 0.1, 0])
  routed = moe.route(jnp.zeros((1, 8)), bias, GROUPED)
  np.testing.assert_array_equal(routed.experts, [[2, 4, 3]])


@pytest.mark.parametrize('c', (0.0, 0.7, 1.0))
def test_replay_may_leave_the_groups(c):
  """Another machine's groups were others; implausible experts are replaced."""
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(size=(300, 8)) * 2, jnp.float32)
  replay = np.array([rng.permutation(8)[:3] for _ in range(300)])
  routed = moe.route(logits, jnp.zeros(8), GROUPED, jnp.asarray(replay), c)
  used = np.asarray(routed.experts)
  assert all(len(set(row)) == 3 for row in used.tolist())
  if c == 0:
    np.testing.assert_array_equal(used, replay)
    return
  scores = sigmoid(np.asarray(logits, np.float64))
  least = np.take_along_axis(scores, np.asarray(routed.native), -1).min(-1)
  own = np.take_along_axis(scores, replay, -1)
  np.testing.assert_array_equal(used == replay, own >= c * least[:, None])


@pytest.mark.parametrize('implementation', moe.EXPERTS)
@pytest.mark.parametrize('router', ('sigmoid', 'softmax'))
def test_every_token_on_one_expert(implementation, router):
  config = dataclasses.replace(CONFIG, router=router, experts_per_token=1)
  p, x = make_layer(config)
  routes = np.full((ROWS, 1), 4)
  out, used, _ = run(config, implementation, 0.0, p, x, routes)
  np.testing.assert_array_equal(used, routes)
  wide_x = np.asarray(x, np.float64)
  want, _ = naive_moe(wide(p), wide_x, config, routes)
  np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
  (grads, _), _ = gradient(config, implementation, p, x, routes, x)
  others = np.array([0, 1, 2, 3, 5])
  for name in ('gate_up', 'down'):
    assert np.any(grads[name][4]) and not np.any(grads[name][others])


def test_a_softmax_router_has_no_bias():
  spec = moe.spec(dataclasses.replace(CONFIG, router='softmax'), 2)
  assert 'router_bias' not in spec and 'router_bias' in moe.spec(CONFIG, 2)


@pytest.mark.parametrize('implementation', moe.EXPERTS)
def test_bfloat16_keeps_the_routes_in_float32(implementation):
  p, x = make_layer(CONFIG)
  small = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
  p = {n: a if 'router' in n else small[0][n] for n, a in p.items()}
  out, used, _ = run(CONFIG, implementation, 0.0, p, small[1], native(CONFIG))
  assert out.dtype == jnp.bfloat16
  want, routes = naive_moe(wide(p), np.asarray(small[1], np.float64), CONFIG)
  np.testing.assert_array_equal(used, routes)
  np.testing.assert_allclose(
    np.asarray(out, np.float32), want, rtol=0.03, atol=0.03
  )


def test_the_bias_only_selects():
  """It never enters a gate, whether it changes the selection or not."""
  logits = jnp.asarray([[0.3, 1.0, -0.5, 0.2, 0.0, 2.0]])
  for shift in (jnp.zeros(6), jnp.asarray([5.0, 0, 4.0, 0, 0, 3.0])):
    routed = moe.route(logits, shift, CONFIG)
    row = np.asarray(logits[0], np.float64)
    experts = naive_route(row, np.asarray(shift), CONFIG)
    np.testing.assert_array_equal(routed.experts, [experts])
    np.testing.assert_allclose(
      routed.gates[0], naive_gates(row, experts, CONFIG), rtol=1e-6
    )
  assert routed.experts.tolist() == [[0, 2, 5]]


@pytest.mark.parametrize('name', ('default', 'not normalised', 'scaled'))
def test_scale_is_applied_once(name):
  config = VARIANTS[name]
  logits = jax.random.normal(jax.random.key(0), (5, 6))
  total = np.asarray(moe.route(logits, jnp.zeros(6), config).gates).sum(-1)
  if config.normalise_gates:
    np.testing.assert_allclose(total, config.router_scale, rtol=1e-6)
  else:
    top = np.sort(sigmoid(np.asarray(logits, np.float64)))[:, -3:]
    np.testing.assert_allclose(total, top.sum(-1), rtol=1e-6)


def test_an_unknown_row_routes_natively_and_only_that_row():
  logits = jax.random.normal(jax.random.key(0), (4, 6))
  own = np.asarray(moe.route(logits, jnp.zeros(6), CONFIG).experts)
  replay = np.array([[5, 4, 3], [-1, -1, -1], [2, -1, 0], [0, 1, 2]])
  routed = moe.route(logits, jnp.zeros(6), CONFIG, jnp.asarray(replay))
  want = [replay[0], own[1], own[2], replay[3]]
  np.testing.assert_array_equal(routed.experts, want)
  np.testing.assert_array_equal(routed.native, own)
  small = moe.route(
    logits, jnp.zeros(6), CONFIG, jnp.asarray(replay, jnp.int16)
  )
  np.testing.assert_array_equal(small.experts, want)


def naive_plausible(logits, bias, replay, config, c):
  """One slot after another gives way to the best expert not in use."""
  scores = sigmoid(logits)
  own = naive_route(logits, bias, config)
  least, experts = min(scores[e] for e in own), list(replay)
  for slot in range(len(experts)):
    if scores[experts[slot]] < c * least:
      free = [e for e in range(len(logits)) if e not in experts]
      experts[slot] = min(free, key=lambda e: (-(scores[e] + bias[e]), e))
  return experts


@pytest.mark.parametrize('c', (0.3, 0.8, 1.0))
def test_plausibility(c):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(200, 6)).astype(np.float32) * 2
  bias = (rng.normal(size=6) * 0.3).astype(np.float32)
  replay = np.array([rng.permutation(6)[:3] for _ in range(200)])
  routed = moe.route(
    jnp.asarray(logits), jnp.asarray(bias), CONFIG, jnp.asarray(replay), c
  )
  want = [
    naive_plausible(row.astype(np.float64), bias, chosen, CONFIG, c)
    for row, chosen in zip(logits, replay, strict=True)
  ]
  np.testing.assert_array_equal(routed.experts, want)
  changed = np.mean(np.any(replay != np.array(want), axis=1))
  assert 0.1 < changed < 1.0
  assert all(len(set(row)) == 3 for row in want)
  always = moe.route(
    jnp.asarray(logits), jnp.asarray(bias), CONFIG, jnp.asarray(replay), 0.0
  )
  np.testing.assert_array_equal(always.experts, replay)


def test_plausibility_leaves_own_routes_alone():
  logits = jax.random.normal(jax.random.key(0), (50, 6))
  own = moe.route(logits, jnp.zeros(6), CONFIG).experts
  again = moe.route(logits, jnp.zeros(6), CONFIG, own, 1.0)
  np.testing.assert_array_equal(again.experts, own)


def test_unknown_implementation():
  p, x = make_layer(CONFIG)
  with pytest.raises(ValueError, match="'torn'.*'dense', 'sorted'"):
    moe.moe(p, CONFIG, 'torn', x, None, 0.0)


def test_the_router_is_published_in_float32():
  """A bias rounded to bf16 would select other experts elsewhere."""
  spec = moe.spec(CONFIG, 2)
  assert (
    spec['router'].published == spec['router_bias'].published == jnp.float32
  )
  assert not spec['router_bias'].trained and spec['router'].trained
  assert all(spec[n].published == jnp.bfloat16 for n in ('gate_up', 'down'))
