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


YARN = config_lib.YarnConfig(
  factor=32.0, original_context=64, mscale=0.7, mscale_all_dim=1.3
)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones():
  config = dataclasses.replace(CONFIG, head_dim=64, yarn=YARN)
  plain = dataclasses.replace(config, yarn=config_lib.YarnConfig())
  ratio = layers.rope_frequencies(plain) / layers.rope_frequencies(config)
  turns = 64 * layers.rope_frequencies(plain) / (2 * np.pi)
  assert ratio[0] == 1 and np.all(np.diff(ratio) >= -1e-5)
  np.testing.assert_allclose(ratio[turns < 0.5], 32, rtol=1e-5)
  between = (turns < 10) & (turns > 1.5)
  assert np.any(between) and np.all(ratio[between] > 1)
  assert np.all(ratio[between] < 32)


def test_yarn_scales_cos_and_sin_by_the_ratio():
  config = dataclasses.replace(CONFIG, yarn=YARN)
  cos, sin = layers.rope_table(config, 50)
  want = (0.07 * np.log(32) + 1) / (0.13 * np.log(32) + 1)
  np.testing.assert_allclose(np.hypot(cos, sin), want, rtol=1e-6)
  assert layers.yarn_scale(1.0, 0.7) == 1.0
  same = dataclasses.replace(YARN, mscale=1.3)
  cos, sin = layers.rope_table(dataclasses.replace(CONFIG, yarn=same), 50)
  np.testing.assert_allclose(np.hypot(cos, sin), 1.0, rtol=1e-6)


def test_published_models_round_their_angles():
  """By at most half a float32's last place an operation, and they do."""
  published = dataclasses.replace(CONFIG, rope_float32=True)
  exact, rounded = (layers.rope_table(c, 9000) for c in (CONFIG, published))
  angles = np.arange(9000)[:, None] * layers.rope_frequencies(CONFIG)[None, :]
  for a, b in zip(exact, rounded, strict=True):
    gap = np.abs(a - b)
    assert np.all(gap <= 3e-7 * angles + 2e-7) and np.max(gap) > 1e-5


def test_latent_attention_turns_its_rotary_part():
  latent = dataclasses.replace(CONFIG, kv_lora=8, rope_dim=6)
  assert layers.rope_dim(latent) == 6 and layers.rope_dim(CONFIG) == 8
  assert layers.rope_table(latent, 5)[0].shape == (5, 3)


def test_norms_of_bfloat16_are_taken_in_float32():
  x = (normal(0, 4, 12) * 200).astype(jnp.bfloat16)
  out = layers.rms_norm(x, jnp.ones(12), 1e-5)
  wide = np.asarray(x, np.float64)
  want = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5)
  assert out.dtype == jnp.bfloat16
  rounded = jnp.asarray(want, jnp.float32).astype(jnp.bfloat16)
  np.testing.assert_allclose(
    np.asarray(out, np.float32), np.asarray(rounded, np.float32), rtol=2**-7
  )
  heads = layers.rms_norm(normal(1, 4, 3, 12), 2 * jnp.ones(12), 1e-5)
  np.testing.assert_allclose(np.mean(np.square(heads), -1), 4, rtol=1e-4)


def test_what_is_cast_to_the_dtype_of_products():
  p = {'norm': jnp.ones(2), 'kv_norm': jnp.ones(2), 'router': jnp.ones(2)}
  p = {**p, 'router_bias': jnp.ones(2), 'down': jnp.ones(2)}
  half = dataclasses.replace(FAST, compute='bfloat16')
  assert layers.as_compute(FAST, p) is p
  cast = layers.as_compute(half, p)
  assert {n for n, a in cast.items() if a.dtype == jnp.bfloat16} == {'down'}


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


def test_map_rows_leaves_out_blocks_that_nobody_reads():
  weights, x = normal(0, 48, 64), normal(1, 200, 48)

  def product(x, used=None):
    return layers.map_rows(
      lambda rows: jax.nn.log_softmax(rows @ weights), BITWISE, x, used=used
    )

  want, some = np.asarray(jax.jit(product)(x)), jax.jit(product)
  for used in (0, 1, 8, 9, 199, 200):
    got = np.asarray(some(x, np.int32(used)))
    computed = -(-used // 8) * 8
    np.testing.assert_array_equal(got[:computed], want[:computed])
    assert not got[computed:].any()


@pytest.mark.parametrize('rows', (7, 8, 20))
def test_map_rows_refuses_what_it_cannot_fix(rows):
  with pytest.raises(ValueError, match=f'row_block=8.*got {rows}'):
    layers.map_rows(lambda x: x, BITWISE, jnp.zeros((rows, 2)))
  layers.map_rows(lambda x: x, FAST, jnp.zeros((rows, 2)))


@pytest.mark.parametrize('rows', (5, 16, 70))
def test_blocks_take_any_number_of_rows(rows):
  """The rows that fill the last block get no gradient and give no value."""
  weights, x = normal(0, 6, 5), 1 + jnp.abs(normal(1, rows, 6))

  def total(weights, x, map_over):  # not finite at a row of zeros
    return jnp.sum(map_over(lambda part: jnp.log(part) @ weights, x))

  def run(map_over):
    grad = jax.value_and_grad(total, argnums=(0, 1))
    return jax.jit(lambda w, x: grad(w, x, map_over))(weights, x)

  value, grads = run(lambda fn, x: layers.in_blocks(fn, 16, x))
  want, wanted = run(lambda fn, x: fn(x))
  np.testing.assert_allclose(value, want, rtol=1e-5)
  for a, b in zip(grads, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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
