"""Costs counted from jaxprs, against what can be counted by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import costs

ONE = {'x': 1}
P = jax.sharding.PartitionSpec


def abstract(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def test_a_product_is_two_flops_a_term():
  found = costs.of_function(
    jnp.matmul, abstract(3, 5), abstract(5, 7), mesh_shape=ONE
  )
  assert found.flops == 2 * 3 * 5 * 7 and not found.wire


def test_batches_and_several_contracted_dimensions():
  found = costs.of_function(
    functools.partial(jnp.einsum, 'bijk,bjkn->bin'),
    abstract(2, 3, 5, 7),
    abstract(2, 5, 7, 11),
    mesh_shape=ONE,
  )
  assert found.flops == 2 * 2 * 3 * 5 * 7 * 11


def test_loops_count_every_turn():
  def f(x, ws):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

  found = costs.of_function(
    f, abstract(3, 5), abstract(61, 5, 5), mesh_shape=ONE
  )
  assert found.flops == 61 * 2 * 3 * 5 * 5


def test_rematerialised_gradients_cost_four_forward_passes():
  """A product is computed, computed again, and twice in the backward pass."""

  def layer(x, w):
    return jnp.sin(x @ w)

  def f(x, ws):
    body = jax.checkpoint(layer)
    return jnp.sum(jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0])

  found = costs.of_function(
    jax.grad(f, (0, 1)), abstract(4, 8), abstract(6, 8, 8), mesh_shape=ONE
  )
  assert found.flops == 4 * 6 * 2 * 4 * 8 * 8


def test_ragged_products_count_rows_once():
  def f(x, w, sizes):
    return jnp.sum(jax.lax.ragged_dot(x, w, sizes))

  args = abstract(12, 5), abstract(3, 5, 7), abstract(3, dtype=jnp.int32)
  once = 2 * 12 * 5 * 7
  assert costs.of_function(f, *args, mesh_shape=ONE).flops == once
  both = costs.of_function(jax.grad(f, (0, 1)), *args, mesh_shape=ONE)
  assert both.flops in (2 * once, 3 * once)  # with the value, or without


def test_a_branch_counts_as_the_dearest_and_a_free_loop_is_named():
  def f(x, w):
    y = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
    return jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ w, y)

  found = costs.of_function(f, abstract(4, 4), abstract(4, 4), mesh_shape=ONE)
  assert found.flops == 3 * 2 * 4 * 4 * 4
  assert found.unknown == {'while loop'}


def test_collectives_of_a_device():
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ('a', 'b'))

  def f(x):  # [2, 16] on every device
    whole = jax.lax.all_gather(x, 'b', axis=1, tiled=True)  # [2, 64]
    part = jax.lax.psum_scatter(
      whole, ('a', 'b'), scatter_dimension=1, tiled=True
    )
    swapped = jax.lax.all_to_all(x, 'b', 1, 1, tiled=True)
    return part + jax.lax.psum(jnp.sum(swapped @ x.T), 'a')

  def looped(x):
    def turn(y, _):
      mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=P('a', 'b'),
        out_specs=P('a', 'b'),
        check_vma=False,
      )
      return y, mapped(y)

    return jax.lax.scan(turn, x, None, length=3)[1]

  found = costs.of_function(looped, abstract(4, 64), mesh_shape=mesh.shape)
  assert found.wire == {
    ('all_gather', ('b',)): 3 * 3 / 4 * 2 * 64 * 4,
    ('reduce_scatter', ('a', 'b')): 3 * 7 / 8 * 2 * 64 * 4,
    ('all_to_all', ('b',)): 3 * 3 / 4 * 2 * 16 * 4,
    ('psum', ('a',)): 3 * 2 * 1 / 2 * 4,
  }
  assert set(found.calls.values()) == {3}
  assert found.flops == 3 * 2 * 2 * 16 * 2  # those of one device


def test_products_outside_of_a_map_are_shared_by_the_devices():
  found = costs.of_function(
    jnp.matmul, abstract(8, 8), abstract(8, 8), mesh_shape={'a': 4}
  )
  assert found.flops == 2 * 8**3 / 4


@pytest.mark.parametrize('layers', [2, 61])
def test_flops_of_the_model_grow_with_its_layers(layers):
  from composer import config
  from composer import params
  from composer.model import transformer

  model = config.ModelConfig(layers=layers, dense_layers=layers, width=16)
  spec = params.abstract(transformer.spec(model))

  def f(weights, tokens):
    ones = jnp.ones_like(tokens)
    return transformer.forward(
      weights, model, config.NumericsConfig(mode='fast'), tokens, ones, ones
    ).hidden

  found = costs.of_function(
    f, spec, abstract(1, 8, dtype=jnp.int32), mesh_shape=ONE
  )
  flat = params.named(spec)
  used = sum(
    v.size
    for n, v in flat.items()
    if n.startswith('dense/') and 'norm' not in n
  )
  scores = 2 * 2 * layers * model.heads * 8 * 8 * model.head_dim
  assert found.flops == 2 * 8 * used + scores


def test_only_kernels_of_experts_skip_empty_rows():
  from pallas_kernels import grouped_matmul
  from pallas_kernels import route
  from pallas_kernels import token_logprob

  run = {'implementation': 'tpu_interpret'}

  def products(x, w, sizes):
    return grouped_matmul.grouped_matmul(x, w, sizes, **run)

  def scored(x, w, tokens):
    return token_logprob.token_logprob(x, w, tokens, **run)

  def routed(logits):
    found = route.route(logits, None, route.Router(2), **run)
    return route.order(found.experts, 4, **run)

  half = functools.partial(abstract, dtype=jnp.bfloat16)
  x, tokens = half(128, 64), abstract(128, dtype=jnp.int32)
  for f, args, flops in (
    (products, (x, half(4, 64, 128), abstract(4, dtype=jnp.int32)), 0.5),
    (products, (x, half(1, 64, 128), abstract(1, dtype=jnp.int32)), 1),
    (scored, (x, half(64, 128), tokens), 1),
    (routed, (abstract(128, 4),), 0),
  ):
    found = costs.count(jax.make_jaxpr(f)(*args), ONE, kernel_load=0.5)
    assert not found.unknown
    if flops:
      assert found.flops == flops * 2 * 128 * 64 * 128
