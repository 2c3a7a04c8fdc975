"""Latent attention, in both forms, against one that follows the paper.

The naive form computes token by token and head by head in float64; gradients
are compared with its central differences.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import attention
from composer.model import layers
from composer.model import mla
from composer.model import presets

MODELS = {
  'yarn': presets.TINY_LATENT,
  'no query latent': dataclasses.replace(
    presets.TINY_LATENT, q_lora=0, yarn=config_lib.YarnConfig()
  ),
}
T, BLOCK = 19, 4  # far beyond an original context of 8


def make(model, seed=0):
  spec = mla.spec(model, 1)
  p = jax.tree.map(lambda x: x[0], params_lib.init(spec, jax.random.key(seed)))
  rng = np.random.default_rng(seed)
  for name in p:
    if name.endswith('norm'):
      noise = rng.normal(size=p[name].shape)
      p[name] = jnp.asarray(1 + 0.3 * noise, jnp.float32)
    else:
      p[name] = 1.7 * p[name]
  x = jnp.asarray(rng.normal(size=(T, model.width)), jnp.float32)
  return p, x


# --- the naive form -----------------------------------------------------------


def norm(x, scale, eps):
  return x / np.sqrt(np.mean(x**2) + eps) * scale


def turn(model, x, t):
  """Pairs (i, i + half) as complex numbers, by YaRN's angles, scaled."""
  half, yarn = len(x) // 2, model.yarn
  m = [
    0.1 * s * math.log(yarn.factor) + 1
    for s in (yarn.mscale, yarn.mscale_all_dim)
  ]
  scale = m[0] / m[1] if yarn.factor > 1 else 1.0
  angles = t * np.asarray(layers.rope_frequencies(model), np.float64)
  z = (x[:half] + 1j * x[half:]) * np.exp(1j * angles) * scale
  return np.concatenate([z.real, z.imag])


def naive(p, model, xs):
  """x + attention of one segment, [T, D]."""
  c, nope, rope = model.kv_lora, model.nope_dim, model.rope_dim
  scale = 1 / math.sqrt(nope + rope)
  if model.yarn.factor > 1:
    m = 0.1 * model.yarn.mscale_all_dim * math.log(model.yarn.factor) + 1
    scale *= m * m
  queries, keys, values = [], [], []
  for t, x in enumerate(xs):
    y = norm(x, p['norm'], model.norm_eps)
    if model.q_lora:
      low = norm(y @ p['q_down'], p['q_down_norm'], 1e-6)
      q = np.einsum('q,qhk->hk', low, p['q_up'])
    else:
      q = np.einsum('d,dhk->hk', y, p['q'])
    down = y @ p['kv_down']
    latent = norm(down[:c], p['kv_norm'], 1e-6)
    up = np.einsum('c,chk->hk', latent, p['kv_up'])
    shared = turn(model, down[c:], t)
    queries.append(
      [np.concatenate([z[:nope], turn(model, z[nope:], t)]) for z in q]
    )
    keys.append([np.concatenate([z[:nope], shared]) for z in up])
    values.append(up[:, nope:])
  out = np.array(xs)
  for t in range(len(xs)):
    for h in range(model.heads):
      scores = np.array([queries[t][h] @ keys[s][h] for s in range(t + 1)])
      weights = np.exp(scale * (scores - scores.max()))
      weights /= weights.sum()
      mixed = sum(w * values[s][h] for s, w in enumerate(weights))
      out[t] = out[t] + mixed @ p['out'][h]
  return out


def wide(tree):
  return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


# --- the real ones ------------------------------------------------------------


def packed(p, model, form, x):
  cos, sin = map(jnp.asarray, layers.rope_table(model, T))
  qkv = attention.project(p, model, form, x, cos, sin)
  one = jax.tree.map(lambda a: a[None], qkv)
  heads = attention.dense(
    *one,
    jnp.ones((1, T), jnp.int32),
    jnp.arange(T)[None],
    divisor=mla.divisor(model),
    width=attention.width(model, form),
  )
  return attention.combine_heads(p, model, form, x, heads[0])


def paged(p, model, form, x):
  cos, sin = map(jnp.asarray, layers.rope_table(model, T))
  q, *kv = attention.project(p, model, form, x, cos, sin)
  pages = -(-T // BLOCK)
  order = np.random.default_rng(0).permutation(pages)

  def store(a):
    padded = jnp.pad(a, [(0, pages * BLOCK - T), (0, 0), (0, 0)])
    blocks = padded.reshape(pages, BLOCK, *a.shape[1:])
    return jnp.zeros_like(blocks).at[order].set(blocks)

  heads = attention.paged(
    q,
    jnp.arange(T),
    jnp.asarray(np.tile(order, (T, 1)), jnp.int32),
    *jax.tree.map(store, kv),
    divisor=mla.divisor(model),
    width=attention.width(model, form),
  )
  return attention.combine_heads(p, model, form, x, heads)


RUNS = {'packed': packed, 'paged': paged}


@pytest.mark.parametrize('run', RUNS)
@pytest.mark.parametrize('form', mla.FORMS)
@pytest.mark.parametrize('name', MODELS)
def test_values(name, form, run):
  model = MODELS[name]
  p, x = make(model)
  got = jax.jit(RUNS[run], static_argnums=(1, 2))(p, model, form, x)
  want = naive(wide(p), model, np.asarray(x, np.float64))
  assert np.std(want - x) > 0.1
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=5e-5)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient(model, form, p, x, weights):
  def total(p, x):
    return jnp.sum(packed(p, model, form, x) * weights)

  return jax.grad(total, argnums=(0, 1))(p, x)


@pytest.mark.parametrize('form', mla.FORMS)
@pytest.mark.parametrize('name', MODELS)
def test_gradients(name, form):
  model = MODELS[name]
  p, x = make(model)
  rng = np.random.default_rng(1)
  weights = rng.normal(size=x.shape)
  grads, grad_x = gradient(model, form, p, x, jnp.asarray(weights, 'float32'))
  grads = {**grads, 'x': grad_x}
  tree = {**wide(p), 'x': np.asarray(x, np.float64)}

  def total(tree):
    layer = {k: v for k, v in tree.items() if k != 'x'}
    return np.sum(naive(layer, model, tree['x']) * weights)

  for key, value in tree.items():
    largest = np.unravel_index(np.argmax(np.abs(grads[key])), value.shape)
    anywhere = tuple(rng.integers(0, n) for n in value.shape)
    for at in (largest, anywhere):
      high, low = (value.copy() for _ in range(2))
      high[at] += 1e-5
      low[at] -= 1e-5
      want = total({**tree, key: high}) - total({**tree, key: low})
      scale = float(np.max(np.abs(grads[key])))
      np.testing.assert_allclose(
        grads[key][at], want / 2e-5, rtol=2e-3, atol=5e-4 * scale, err_msg=key
      )


def test_a_cache_holds_latents_or_heads():
  model = presets.TINY_LATENT
  assert attention.cache_shapes(model, 'absorbed') == ((1, 20), None)
  assert attention.cache_shapes(model, 'expanded') == ((4, 12), (4, 6))
  assert attention.cache_shapes(presets.TINY, 'absorbed') == ((2, 8), (2, 8))


@pytest.mark.parametrize(
  ('name', 'training', 'want'),
  (
    ('absorbed', True, 'absorbed'),
    ('absorbed', False, 'absorbed'),
    ('expanded', True, 'expanded'),
    ('expanded', False, 'expanded'),
    ('split', True, 'expanded'),
    ('split', False, 'absorbed'),
  ),
)
def test_which_form_each_side_computes(name, training, want):
  assert mla.form(config_lib.NumericsConfig(mla=name), training) == want


def test_an_unknown_form_is_refused():
  numerics = config_lib.NumericsConfig(mla='folded')
  with pytest.raises(ValueError, match="'folded'.*expanded, absorbed, split"):
    mla.form(numerics, True)


def test_the_divisor_of_published_models():
  """sqrt(192), over (0.1 ln 64 + 1)^2 = 2.005 for Kimi K2.5."""
  kimi = presets.preset('kimi_k2_5')
  want = math.sqrt(192) / (0.1 * math.log(64) + 1) ** 2
  assert mla.divisor(kimi) == pytest.approx(want, rel=1e-12)
  assert math.sqrt(192) / mla.divisor(kimi) == pytest.approx(2.005, abs=1e-3)
