"""Routing and the order of dispatch, against loops in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels import route as ops
from pallas_kernels.route import shapes

NAMES = ('reference', 'gpu_interpret', 'tpu_interpret')
ROUTERS = {
  'kimi': (384, ops.Router(8, scale=2.827)),
  'softmax': (44, ops.Router(3, kind='softmax')),
  'groups': (128, ops.Router(6, groups=4, top_groups=2, normalise=False)),
}


def draw(rows, e, ties=False, seed=0):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(rows, e)).astype(np.float32)
  bias = (0.1 * rng.normal(size=e)).astype(np.float32)
  return (np.round(logits), np.zeros_like(bias)) if ties else (logits, bias)


def loops(logits, bias, router, replay=None):
  """Row by row, and expert by expert; scores in float64."""
  rows, e = logits.shape
  wide = logits.astype(np.float64)
  scores = 1 / (1 + np.exp(-wide))
  if router.kind == 'softmax':
    scores = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
  used, gates, native = [], [], []
  for row in range(rows):
    allowed = set(range(e))
    choice = scores[row] + bias
    if router.groups > 1:
      size = e // router.groups
      sums = [
        sum(sorted(choice[g * size : (g + 1) * size])[-2:])
        for g in range(router.groups)
      ]
      best = sorted(range(router.groups), key=lambda g: (-sums[g], g))
      allowed = {
        g * size + i for g in best[: router.top_groups] for i in range(size)
      }
    own = sorted(allowed, key=lambda i: (-choice[i], i))[: router.k]
    now = list(own)
    if replay is not None and (replay[row] >= 0).all():
      now = [int(i) for i in replay[row]]
      least = min(scores[row, i] for i in own)
      for slot in range(router.k):
        if scores[row, now[slot]] < router.plausibility * least:
          rest = allowed - set(now)
          now[slot] = min(rest, key=lambda i: (-choice[i], i))
    gate = scores[row, now]
    gate = gate / gate.sum() if router.normalise else gate
    used.append(now)
    gates.append(gate * router.scale)
    native.append(own)
  return np.array(used), np.array(gates), np.array(native)


def replayed(native, e, seed=1):
  """Some rows as they would be, some other ones, one unknown."""
  rng = np.random.default_rng(seed)
  out = np.array(native)
  for row in range(1, len(out), 2):
    out[row] = rng.permutation(e)[: out.shape[1]]
  out[-1, 0] = -1
  return out.astype(np.int16)


def same(got, want):
  for one, other in zip(got, want, strict=True):
    if other.dtype.kind == 'f':
      np.testing.assert_allclose(one, other, rtol=3e-6)
    else:
      np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('case', ROUTERS)
def test_routing(name, case):
  e, router = ROUTERS[case]
  logits, bias = draw(9, e)
  want = loops(logits, bias, router)
  run = {'implementation': name}
  same(ops.route(jnp.asarray(logits), jnp.asarray(bias), router, **run), want)
  replay = replayed(want[2], e)
  if case != 'groups':  # which do not matter to replayed experts
    found = ops.route(
      jnp.asarray(logits), jnp.asarray(bias), router, jnp.asarray(replay), **run
    )
    assert found.native is None
    same(found[:2], loops(logits, bias, router, replay)[:2])
  careful = dataclasses.replace(router, plausibility=0.8)
  want = loops(logits, bias, careful, replay)
  assert (want[0][:-1] != replay[:-1]).any()  # some were not plausible
  found = ops.route(
    jnp.asarray(logits),
    jnp.asarray(bias),
    careful,
    jnp.asarray(replay),
    audit=True,
    **run,
  )
  same(found, want)


@pytest.mark.parametrize('name', NAMES[:2])
def test_ties_go_to_the_lower_expert(name):
  e, router = 40, ops.Router(5)
  logits, bias = draw(12, e, ties=True)
  found = ops.route(
    jnp.asarray(logits), jnp.asarray(bias), router, implementation=name
  )
  same(found, loops(logits, bias, router))


def test_a_row_does_not_depend_on_others():
  e, router = ROUTERS['softmax']
  logits, bias = (jnp.asarray(one) for one in draw(9, e))
  whole = ops.route(logits, bias, router, implementation='gpu_interpret')
  kept = jnp.asarray([7, 2, 5])
  some = ops.route(logits[kept], bias, router, implementation='gpu_interpret')
  for one, other in zip(some, whole, strict=True):
    np.testing.assert_array_equal(
      np.asarray(one).view(np.int32), np.asarray(other[kept]).view(np.int32)
    )


def test_the_gradient_reaches_replayed_experts(name='gpu_interpret'):
  e, router = 24, ops.Router(3, kind='softmax')
  logits, bias = (jnp.asarray(one) for one in draw(4, e))
  replay = jnp.asarray([[5, 1, 9], [0, 2, 3], [7, 8, 4], [11, 3, 6]], jnp.int32)
  weight = jnp.asarray(
    np.random.default_rng(2).normal(size=(4, 3)), jnp.float32
  )

  def ours(z):
    return jnp.sum(
      weight * ops.route(z, bias, router, replay, implementation=name).gates
    )

  def plain(z):
    chosen = jnp.take_along_axis(jax.nn.softmax(z), replay, 1)
    return jnp.sum(weight * chosen / chosen.sum(1, keepdims=True))

  np.testing.assert_allclose(
    jax.grad(ours)(logits), jax.grad(plain)(logits), rtol=1e-4, atol=1e-7
  )


def check_order(rows, count, name):
  rng = np.random.default_rng(rows)
  experts = rng.integers(0, count, (rows, 5))
  experts[experts == 1] = 0  # an expert that no row goes to
  slots = np.argsort(experts.reshape(-1), kind='stable')
  found = ops.order(jnp.asarray(experts, jnp.int32), count, implementation=name)
  np.testing.assert_array_equal(found.slots, slots)
  np.testing.assert_array_equal(found.places, np.argsort(slots))
  np.testing.assert_array_equal(
    found.sizes, np.bincount(experts.reshape(-1), minlength=count)
  )


@pytest.mark.parametrize('name', NAMES)
def test_order(name):
  check_order(300, 70, name)


@pytest.mark.parametrize('rows', [1, 31, 103])
def test_order_of_few_and_odd_rows(rows):
  check_order(rows, 3, 'gpu_interpret')


@pytest.mark.parametrize('shape', shapes.TRAINING)
def test_lowers_for_cuda(shape):
  logits = jax.ShapeDtypeStruct((shape.rows, shape.experts), jnp.float32)
  bias = jax.ShapeDtypeStruct((shape.experts,), jnp.float32)
  replay = jax.ShapeDtypeStruct((shape.rows, shape.k), jnp.int16)

  def both(logits, bias, replay):
    routed = ops.route(logits, bias, shape.router, replay, implementation='gpu')
    order = ops.order(routed.experts, shape.experts, implementation='gpu')
    return routed[:2], order

  assert mosaic.lower(both, logits, bias, replay).count('mosaic_gpu') >= 3


def test_bad_input():
  logits = jnp.zeros((2, 8), jnp.float32)
  router = ops.Router(2)
  replay = jnp.asarray([[0, 1], [2, -1]], jnp.int32)

  def call(replay=None, **change):
    settings = {'logits': logits, 'bias': None, 'router': router} | change
    ops.route(**settings, replay=replay)

  for message, change in {
    'must be float32': dict(logits=logits.astype(jnp.bfloat16)),
    'k=9 of 8': dict(router=ops.Router(9)),
    'do not divide': dict(router=ops.Router(2, groups=3)),
    'leave no k=2': dict(router=ops.Router(2, groups=8, top_groups=1)),
    "kind='relu'": dict(router=ops.Router(2, kind='relu')),
    'must be \\[E\\]': dict(bias=jnp.zeros(3)),
    'int16 or int32': dict(replay=replay[:1]),
    'has expert 8': dict(replay=replay.at[0, 0].set(8)),
    'twice in a row': dict(replay=replay.at[0, 0].set(1)),
    'give audit=True': dict(
      replay=replay, router=ops.Router(2, plausibility=0.5)
    ),
  }.items():
    with pytest.raises(ValueError, match=message):
      call(**change)
  with pytest.raises(ValueError, match='must be in 0..3'):
    ops.order(jnp.asarray([[0, 4]]), 4)
  with pytest.raises(ValueError, match='multiples of 32'):
    ops.route(
      logits,
      None,
      ops.Router(2, groups=2, top_groups=1),
      implementation='gpu_interpret',
    )


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('shape', shapes.TRAINING)
def test_on_the_device(shape):
  logits, bias = (
    jnp.asarray(one) for one in draw(4096, shape.experts, ties=True)
  )
  found = ops.route(logits, bias, shape.router, implementation='gpu')
  plain = ops.route(logits, bias, shape.router, implementation='reference')
  same(found, [np.asarray(one) for one in plain])
  few = ops.route(logits[5:12], bias, shape.router, implementation='gpu')
  np.testing.assert_array_equal(few.gates, found.gates[5:12])
  for one, other in zip(
    ops.order(found.experts, shape.experts, implementation='gpu'),
    ops.order(found.experts, shape.experts, implementation='reference'),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)
