"""Routes and their order by kernels, against the plain expressions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer.model import moe
from composer.model import operations
from pallas_kernels.grouped_matmul import groups

SIGMOID = config_lib.ModelConfig(
  experts=40, experts_per_token=3, router_scale=2.5
)
CONFIGS = {
  'sigmoid': SIGMOID,
  'softmax': dataclasses.replace(SIGMOID, router='softmax'),
  'groups': dataclasses.replace(
    SIGMOID,
    experts=128,
    router_groups=4,
    router_top_groups=2,
    normalise_gates=False,
  ),
}
NAMES = ('reference', 'gpu_interpret', 'tpu_interpret')
ROWS = 10
# Compiled in half the time.
QUICK = {'xla_backend_optimization_level': 0}


def make_rows(config):
  """(logits, bias or None, replay): experts of any group, and two unknown."""
  rng = np.random.default_rng(0)
  e, k = config.experts, config.experts_per_token
  logits = jnp.asarray(rng.normal(size=(ROWS, e)), jnp.float32)
  bias = jnp.asarray(0.1 * rng.normal(size=e), jnp.float32)
  replay = np.stack([rng.permutation(e)[:k] for _ in range(ROWS)])
  replay[3], replay[7, 1] = -1, -1
  return (
    logits,
    bias if config.router == 'sigmoid' else None,
    jnp.asarray(replay, jnp.int16),
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), compiler_options=QUICK)
def run(config, name, plausibility, audit, logits, bias, replay):
  """(routed, pull of the gates)."""
  ops = operations.Operations('reference', name)

  def gates(logits):
    routed = moe.route(logits, bias, config, replay, plausibility, audit, ops)
    return routed.gates, routed

  _, pull, routed = jax.vjp(gates, logits, has_aux=True)
  weights = jnp.arange(routed.gates.size, dtype=jnp.float32)
  return routed, pull(weights.reshape(routed.gates.shape))[0]


def assert_same(got, want):
  np.testing.assert_array_equal(got[0].experts, want[0].experts)
  np.testing.assert_array_equal(got[0].native, want[0].native)
  np.testing.assert_allclose(got[0].gates, want[0].gates, rtol=3e-6)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
  assert np.abs(want[1]).max() > 1e-3


@pytest.mark.parametrize(
  'case, name',
  [(case, name) for case in CONFIGS for name in NAMES[1:]]
  + [('groups', 'reference')],
)
def test_routes(case, name):
  """Native ones, replayed ones and implausible ones, and their gradients."""
  config = CONFIGS[case]
  logits, bias, replay = make_rows(config)
  for given, c in ((None, 0.0), (replay, 0.9)):
    arguments = config, c, True, logits, bias, given
    want = run(config, operations.XLA, *arguments[1:])
    assert_same(run(config, name, *arguments[1:]), want)
  assert (want[0].experts != replay)[np.all(replay >= 0, axis=1)].any()


@pytest.mark.parametrize('name', NAMES[1:])
def test_whoever_chose_the_experts_the_gates_have_the_same_bits(name):
  """An engine routes, a trainer replays, and now and then it audits."""
  config = SIGMOID
  logits, bias, _ = make_rows(config)
  native, _ = run(config, name, 0.0, True, logits, bias, None)
  for audit in (False, True):
    given = native.experts.at[4].set(-1)  # which is found again
    replayed, _ = run(config, name, 0.0, audit, logits, bias, given)
    np.testing.assert_array_equal(replayed.experts, native.experts)
    np.testing.assert_array_equal(replayed.gates, native.gates)


@pytest.mark.parametrize('name', NAMES[1:])
def test_without_an_audit_native_experts_are_those_in_use(name):
  logits, bias, replay = make_rows(SIGMOID)
  got, _ = run(SIGMOID, name, 0.0, False, logits, bias, replay)
  np.testing.assert_array_equal(got.native, got.experts)
  known = np.all(replay >= 0, axis=1)
  np.testing.assert_array_equal(got.experts[known], replay[known])


@pytest.mark.parametrize('name', NAMES)
def test_order(name):
  experts = jnp.asarray(make_rows(SIGMOID)[2])
  experts = jnp.where(experts < 0, 39, experts)
  got = operations.order(operations.Operations('xla', name), experts, 40)
  want = operations.order(operations.PLAIN, experts, 40)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
  flat = np.asarray(experts).reshape(-1)
  np.testing.assert_array_equal(want.slots, np.argsort(flat, kind='stable'))
  assert want.sizes.sum() == flat.size


def test_a_kernel_that_cannot_raises():
  """Groups of 10 experts are no whole warps."""
  config = dataclasses.replace(SIGMOID, router_groups=4, router_top_groups=2)
  with pytest.raises(ValueError, match='groups of 10 experts'):
    run(config, 'gpu_interpret', 0.0, True, *make_rows(config)[:2], None)


def test_few_rows_go_at_once_with_the_same_bits(monkeypatch):
  """Routed, sorted and gathered in one launch, or in several; replayed too."""
  change = dict(width=32, expert_hidden=16, shared_experts=0)
  config = dataclasses.replace(SIGMOID, **change)
  rng = np.random.default_rng(0)
  e, d, f = config.experts, config.width, config.expert_hidden
  shapes = {
    'norm': (d,),
    'router': (d, e),
    'router_bias': (e,),
    'gate_up': (e, d, 2, f),
    'down': (e, f, d),
  }
  kinds = {'gate_up': jnp.bfloat16, 'down': jnp.bfloat16}
  p = {
    name: jnp.asarray(rng.normal(size=shape), kinds.get(name, jnp.float32))
    for name, shape in shapes.items()
  }
  x = jnp.asarray(rng.normal(size=(ROWS, d)), jnp.bfloat16)
  replay = make_rows(config)[2]
  ops = operations.Operations(operations.XLA, 'gpu_interpret')
  experts, calls = operations.experts, []

  def by_xla(ops, *arrays):  # which jax 0.10 has
    calls.append(isinstance(arrays[-1], groups.Planned))
    sizes = groups.sizes_of(arrays[-1])
    return experts(operations.PLAIN, *arrays[:-1], sizes)

  def run(x, gate_up):
    arguments = p | {'gate_up': gate_up}, config, 'sorted', x, replay, 0.0
    out, used, _ = moe.moe(*arguments, ops=ops, audit=False)
    return jnp.sum(out.astype(jnp.float32) ** 2), (out, used)

  monkeypatch.setattr(operations, 'experts', by_xla)
  compiled = {'compiler_options': QUICK}
  both = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True), **compiled)
  got = both(x, p['gate_up'])
  monkeypatch.setattr(operations, 'send', lambda *_: None)
  jax.clear_caches()
  want = both(x, p['gate_up'])
  assert calls == [True, False]
  for one, other in zip(got[0][1], want[0][1], strict=True):
    np.testing.assert_array_equal(
      np.asarray(one, np.float32), np.asarray(other, np.float32)
    )
  for one, other in zip(got[1], want[1], strict=True):
    one, other = (np.asarray(g, np.float32) for g in (one, other))
    off = np.linalg.norm(one - other)
    assert off < 0.01 * np.linalg.norm(other)  # a sum of K in bfloat16
