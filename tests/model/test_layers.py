"""Row-wise pieces against their equations, and the mapping over rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import layers

CONFIG = config_lib.ModelConfig(width=12, head_dim=8, dense_hidden=20)
BITWISE = config_lib.NumericsConfig(row_block=8)
FAST = dataclasses.replace(BITWISE, mode='fast')


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def test_rms_norm():
  x, scale = normal(0, 5, 12) * 3, np.asarray(1 + normal(1, 12))
  want = np.asarray(x, np.float64)
  want = want / np.sqrt(np.mean(want**2, -1, keepdims=True) + 1e-5) * scale
  np.testing.assert_allclose(layers.rms_norm(x, scale, 1e-5), want, rtol=2e-6)
  zero = layers.rms_norm(jnp.zeros((1, 12)), scale, 1e-5)
  assert not np.any(zero)


def test_rotary_positions_are_complex_rotations():
  """(x_i + i x_{i + K/2}) exp(i t theta^(-2i/K)), for every position."""
  cos, sin = layers.rope_table(CONFIG, 300)
  assert cos.shape == sin.shape == (300, 4) and cos.dtype == np.float32
  positions = np.array([0, 1, 7, 299])
  x = np.asarray(normal(0, 4, 3, 8), np.float64)
  rates = np.array([10_000.0 ** (-2 * i / 8) for i in range(4)])
  turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
    1j * positions[:, None, None] * rates
  )
  got = layers.rotate(
    jnp.asarray(x, jnp.float32), jnp.asarray(cos[positions]), sin[positions]
  )
  want = np.concatenate([turned.real, turned.imag], -1)
  np.testing.assert_allclose(got, want, atol=1e-5)
  np.testing.assert_array_equal(got[0], np.float32(x[0]))


def test_rotary_products_depend_on_the_distance_alone():
  cos, sin = layers.rope_table(CONFIG, 64)
  q, k = normal(0, 1, 1, 8), normal(1, 1, 1, 8)

  def product(a, b):
    turned = (
      layers.rotate(x, jnp.asarray(cos[at : at + 1]), sin[at : at + 1])
      for x, at in ((q, a), (k, b))
    )
    return np.vdot(*map(np.asarray, turned))

  np.testing.assert_allclose(product(9, 4), product(60, 55), rtol=1e-5)
  assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_a_table_of_more_positions_begins_with_the_same():
  short, long = (layers.rope_table(CONFIG, n) for n in (16, 200))
  for a, b in zip(short, long, strict=True):
    np.testing.assert_array_equal(a, b[:16])


def test_feed_forward():
  p = jax.tree.map(
    lambda x: x[0],
    params_lib.init(layers.feed_forward_spec(CONFIG, 1), jax.random.key(0)),
  )
  x = normal(1, 5, 12)
  wide, w = np.asarray(x, np.float64), jax.tree.map(np.float64, p)
  h = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5) * w['norm']
  gate, up = h @ w['gate_up'][:, 0], h @ w['gate_up'][:, 1]
  want = wide + (gate / (1 + np.exp(-gate)) * up) @ w['down']
  got = layers.feed_forward(p, CONFIG, x)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('numerics', (BITWISE, FAST))
def test_map_rows_keeps_rows_in_place(numerics):
  a, b = normal(0, 24, 3), jnp.arange(24)
  total, pair = jax.jit(
    lambda a, b: layers.map_rows(
      lambda a, b: (jnp.sum(a, -1) + b, {'a': 2 * a}), numerics, a, b
    )
  )(a, b)
  np.testing.assert_allclose(
    total, np.sum(np.asarray(a), -1) + np.arange(24), rtol=1e-6
  )
  np.testing.assert_array_equal(pair['a'], 2 * a)


def test_map_rows_gives_a_row_the_same_bits_anywhere():
  """Which a plain product does not."""
  weights, x = normal(0, 48, 64), normal(1, 200, 48)

  def product(numerics):
    return jax.jit(
      lambda x: layers.map_rows(
        lambda rows: jax.nn.log_softmax(rows @ weights), numerics, x
      )
    )

  want = np.asarray(product(BITWISE)(x))
  for start, count in ((0, 16), (13, 24), (100, 96)):
    span = slice(start, start + count)
    np.testing.assert_array_equal(product(BITWISE)(x[span]), want[span])


@pytest.mark.parametrize('rows', (7, 8, 20))
def test_map_rows_refuses_what_it_cannot_fix(rows):
  with pytest.raises(ValueError, match=f'row_block=8.*got {rows}'):
    layers.map_rows(lambda x: x, BITWISE, jnp.zeros((rows, 2)))
  layers.map_rows(lambda x: x, FAST, jnp.zeros((rows, 2)))


@pytest.mark.parametrize('rows', (16, 64, 70))
def test_blocks_in_cache_change_no_value_and_no_gradient(rows):
  """Whether the rows are cut (16 is one trip, 70 no multiple) or not."""
  weights, x = normal(0, 6, 5), normal(1, rows, 6)

  def total(map_over, weights, x):
    out = map_over(lambda part: jnp.tanh(part @ weights), x)
    return jnp.sum(out * jnp.arange(rows)[:, None]), out

  def run(map_over):
    return jax.jit(
      jax.value_and_grad(
        lambda *args: total(map_over, *args), argnums=(0, 1), has_aux=True
      )
    )(weights, x)

  (_, out), grads = run(lambda fn, x: layers.in_cache(fn, 16, x))
  (_, want), wanted = run(lambda fn, x: fn(x))
  np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
  for a, b in zip(grads, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
