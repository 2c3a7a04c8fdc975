"""Few rows routed, sorted and gathered in one launch: as by several."""

import functools

from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels import mosaic
from pallas_kernels import route as ops
from pallas_kernels import warp_interpret
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.route import gpu_few

NAME = {'implementation': 'gpu_interpret'}
CASES = {
  # rows, experts, width, router
  'upcycled': (16, 8, 576, ops.Router(2)),
  'qwen': (
    64,
    128,
    72,
    ops.Router(8, kind='softmax'),
  ),  # as many as there may be
  'kimi': (30, 384, 1160, ops.Router(8, scale=2.827)),
  'groups': (9, 128, 64, ops.Router(6, groups=4, top_groups=2)),
  'odd': (33, 44, 8, ops.Router(3, kind='softmax', normalise=False)),
  'one': (1, 2, 64, ops.Router(2)),
  # Rows that a warp routes at once: four, of which some are not there, and two.
  'many': (200, 8, 72, ops.Router(2)),
  'groups of two rows': (40, 128, 8, ops.Router(6, groups=4, top_groups=2)),
}


def draw(rows, e, width, seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(rows, width)), jnp.bfloat16)
  logits = jnp.asarray(rng.normal(size=(rows, e)), jnp.float32)
  return x, logits, jnp.asarray(0.1 * rng.normal(size=e), jnp.float32)


def tiles_of(sizes, tile):
  """Group, first row, start and end of each tile, one after the other."""
  found, start = [], 0
  for group, size in enumerate(sizes):
    end = start + size
    first = start // groups.ALIGN * groups.ALIGN
    while size and first < end:
      found.append((group, first, start, end))
      first += tile
    start = end
  return found


def three(logits, seed=1):
  """([R, 3 E] and some that are not read, the sums [R, E])."""
  rows, e = logits.shape
  rng = np.random.default_rng(seed)
  more = 0.3 * rng.normal(size=(rows, 2 * e)), np.full((rows, 5), np.nan)
  summands = jnp.concatenate([logits, *more], axis=1, dtype=jnp.float32)
  a, b, c = (np.asarray(summands[:, i * e : (i + 1) * e]) for i in range(3))
  return summands, jnp.asarray(a + (b + c))


def check(
  x, logits, bias, router, replay=None, name='gpu_interpret', summed=False
):
  """`send` against `route` and the sorting of numpy; returns the sizes.

  With `summed`, three are sent that logits are the sums of.
  """
  run, some, given = {'implementation': name}, {}, logits
  if summed:
    some = {'experts': logits.shape[1]}
    given, logits = three(logits)
  sent = ops.send(x, given, bias, router, replay, **run, **some)
  routed = ops.route(logits, bias, router, replay, **run)
  experts = np.asarray(routed.experts)
  np.testing.assert_array_equal(sent.experts, experts)
  np.testing.assert_array_equal(
    np.asarray(sent.gates).view(np.int32),
    np.asarray(routed.gates).view(np.int32),
  )
  slots = np.argsort(experts.reshape(-1), kind='stable')
  np.testing.assert_array_equal(sent.places, np.argsort(slots))
  bits = np.asarray(sent.rows).view(np.int16)
  np.testing.assert_array_equal(
    bits, np.asarray(x).view(np.int16)[slots // router.k]
  )
  sizes = np.bincount(experts.reshape(-1), minlength=logits.shape[1])
  np.testing.assert_array_equal(sent.groups.sizes, sizes)
  assert set(sent.groups.tables) == set(gpu_few.TILES)
  for tile, (table, last) in sent.groups.tables.items():
    want = tiles_of(sizes, tile)
    assert int(last[-1]) == len(want) <= len(table)
    np.testing.assert_array_equal(table[: len(want)], want)
  return sizes


@pytest.mark.parametrize('case', CASES)
def test_at_once_is_as_apart(case):
  rows, e, width, router = CASES[case]
  x, logits, bias = draw(rows, e, width)
  replay = np.stack(
    [np.random.default_rng(i).permutation(e)[: router.k] for i in range(rows)]
  )
  replay[::3, -1] = -1  # not known
  unknown = jnp.full(replay.shape, -1, jnp.int32)
  some = None if router.kind == 'softmax' else bias
  for given in (None, unknown, jnp.asarray(replay, jnp.int16)):
    check(x, logits, some, router, given)
  check(x, logits, some, router, given, summed=True)


def test_all_rows_to_two_experts():
  x, logits, _ = draw(40, 70, 8)
  logits = logits.at[:, 69].set(9).at[:, 3].set(8)
  sizes = check(x, logits, None, ops.Router(2))
  assert sizes[3] == sizes[69] == 40


@pytest.mark.parametrize('missing', range(5))
def test_every_wait_is_missed(missing, monkeypatch):
  """Without one of its waits, warps meet in memory: so none is wanting."""
  wait, calls = warp_interpret.Lanes.sync_block, []

  def all_but_one(w):
    calls.append(len(calls))
    if calls[-1] != missing:
      wait(w)

  monkeypatch.setattr(warp_interpret.Lanes, 'sync_block', all_but_one)
  with pytest.raises(Exception, match='at once'):
    jax.block_until_ready(
      ops.send(*draw(64, 128, 64)[:2], None, ops.Router(8), **NAME)
    )


def apart(x, logits, bias, router, **run):
  """`send` by its parts, of which each is differentiable."""
  experts, gates, _ = ops.route(logits, bias, router, **run)
  order = ops.order(experts, logits.shape[1], **run)
  rows = x[order.slots // router.k]
  return ops.Sent(experts, gates, rows, order.places, order.sizes)


def test_gradients():
  rows, e, width, router = CASES['odd']
  x, logits, _ = draw(rows, e, width)
  weights = jnp.asarray(
    np.random.default_rng(1).normal(size=(rows * router.k, width + 1)),
    jnp.float32,
  )

  def loss(function, x, logits):
    sent = function(x, logits, None, router, **NAME)
    gates = jnp.vdot(sent.gates.reshape(-1), weights[:, -1])
    return gates + jnp.vdot(sent.rows.astype(jnp.float32), weights[:, :-1])

  got, want = (
    jax.grad(functools.partial(loss, f), (0, 1))(x, logits)
    for f in (ops.send, apart)
  )
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-7)
  off = (got[0] - want[0]).astype(jnp.float32)
  assert jnp.linalg.norm(off) < 0.02 * jnp.linalg.norm(want[0])  # in bfloat16


def test_many_are_added_before():
  """By a launch of their own, where all blocks would have to read three each."""
  router, sums = ops.Router(1), []
  for rows in (gpu_few.MOST_ADDED // 512, gpu_few.MOST_ADDED // 512 + 1):
    x, logits, _ = draw(rows, 512, 8)
    check(x, logits, None, router, summed=True)
    traced = jax.make_jaxpr(
      lambda x, z: ops.send(x, z, None, router, experts=512, **NAME).gates
    )(x, three(logits)[0])
    names = [equation.primitive.name for equation in traced.jaxpr.eqns]
    sums.append(names.count('add'))
  assert sums == [0, 2]


def test_gradients_of_three_that_are_added():
  rows, e, width, router = CASES['odd']
  x, logits, _ = draw(rows, e, width)
  summands, whole = three(logits)
  weights = jnp.asarray(
    np.random.default_rng(1).normal(size=(rows, router.k)), jnp.float32
  )

  def loss(logits, **more):
    sent = ops.send(x, logits, None, router, **NAME, **more)
    return jnp.vdot(sent.gates, weights)

  want = jax.grad(loss)(whole)
  got = jax.grad(functools.partial(loss, experts=e))(summands)
  assert jnp.any(want != 0)
  for i in range(3):
    np.testing.assert_array_equal(got[:, i * e : (i + 1) * e], want)
  np.testing.assert_array_equal(got[:, 3 * e :], 0)


def test_none_where_it_is_not_for_one_launch():
  x, logits, bias = draw(9, 8, 64)
  run = lambda k=2, x=x, logits=logits, bias=bias, **more: ops.send(  # noqa: E731
    x, logits, bias, ops.Router(k), **(NAME | more)
  )
  assert run() is not None
  assert run(implementation='reference') is None
  assert run(x=x.astype(jnp.float32)) is None
  assert run(x=x[:, :4]) is None
  most = gpu_few.MOST_SLOTS // 8
  assert run(8, *draw(most, 8, 8)) is not None
  assert run(8, *draw(most + 1, 8, 8)) is None
  assert run(2, *draw(2, gpu_few.MOST_EXPERTS + 1, 8)) is None
  with pytest.raises(ValueError, match='R = 9'):
    run(x=x[1:])
  assert run(logits=jnp.tile(logits, (1, 3)), experts=8) is not None
  for some in (logits, logits[:, :7], logits[0]):
    with pytest.raises(ValueError, match=r'3 E or more\] with experts=8'):
      run(logits=some, experts=8)
  with pytest.raises(ValueError, match='experts'):
    run(experts=0)


def products(name, x, logits, gate_up, down, planned):
  """The experts' two products of rows sent, with their tiles or without."""
  sent = ops.send(x, logits, None, ops.Router(2), **NAME)
  sizes = sent.groups if planned else sent.groups.sizes
  run = {'implementation': name}
  hidden = grouped_matmul.grouped_matmul(
    sent.rows, gate_up, sizes, gated=True, **run
  )
  return grouped_matmul.grouped_matmul(hidden, down, sizes, **run)


def draw_weights(e, d, f):
  rng = np.random.default_rng(2)
  return tuple(
    jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16)
    for shape in ((e, d, 2, f), (e, f, d))
  )


@needs_interpreter
def test_planned_products_have_the_same_bits():
  x, logits, _ = draw(12, 4, 64)
  weights = draw_weights(4, 64, 64)
  got, want = (
    products('gpu_interpret', x, logits, *weights, planned)
    for planned in (True, False)
  )
  np.testing.assert_array_equal(got.view(jnp.int16), want.view(jnp.int16))


def test_gradients_of_planned_products():
  x, logits, _ = draw(12, 4, 64)

  def loss(planned, *weights):
    out = products('reference', x, logits, *weights, planned)
    return jnp.sum(out.astype(jnp.float32))

  got, want = (
    jax.grad(functools.partial(loss, planned), (0, 1))(*draw_weights(4, 64, 64))
    for planned in (True, False)
  )
  for one, other in zip(got, want, strict=True):
    np.testing.assert_array_equal(one, other)


def lowered(case, dtype, summed=False):
  rows, e, _, router = CASES[case]
  more = {'experts': e} if summed else {}
  return mosaic.lower(
    lambda *arrays: ops.send(*arrays[:3], router, arrays[3], **more),
    jax.ShapeDtypeStruct((rows, 2048), dtype),
    jax.ShapeDtypeStruct((rows, 3 * e if summed else e), jnp.float32),
    jax.ShapeDtypeStruct((e,), jnp.float32),
    jax.ShapeDtypeStruct((rows, router.k), jnp.int16),
  )


@pytest.mark.parametrize('case', ['upcycled', 'kimi'])
def test_lowers_for_cuda(case, monkeypatch):
  monkeypatch.setattr(ops.dispatch, 'platform', lambda: 'gpu')
  for summed in (False, True):
    text = lowered(case, jnp.bfloat16, summed)
    assert text.count('@mosaic_gpu') == 1


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
@pytest.mark.parametrize('case', CASES)
def test_on_the_device(case):
  rows, e, width, router = CASES[case]
  x, logits, bias = draw(rows, e, width)
  some = None if router.kind == 'softmax' else bias
  check(x, logits, some, router, name='gpu')
  check(x, logits, some, router, name='gpu', summed=True)
