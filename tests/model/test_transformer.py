"""The transformer against one that computes token by token in float64.

Gradients of the fixed-order forward are compared with those of the fast one,
and with central differences of the naive model at the routes that were taken.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import presets
from composer.model import transformer

MODEL = presets.TINY
LEADING = 'leading dense, tied'
MODELS = {
  'moe': MODEL,
  LEADING: dataclasses.replace(
    MODEL, layers=3, dense_layers=2, tie_embeddings=True, router_scale=1.5
  ),
  'all dense': dataclasses.replace(MODEL, dense_layers=2),
}
BITWISE = config_lib.NumericsConfig(row_block=8, kv_block=4)
FAST = dataclasses.replace(BITWISE, mode='fast')
SORTED = dataclasses.replace(FAST, moe='sorted')
SIZES = (9, 5, 14, 3)
PLACES = ((0, 0), (0, 12), (1, 0), (1, 16))  # row, first column
LENGTH = 20


@functools.cache
def make_params(name, seed=0):
  model = MODELS[name]
  params = params_lib.init(transformer.spec(model), jax.random.key(seed))
  rng = np.random.default_rng(seed)

  def vary(path, x):  # what is drawn as all ones, or all zeros, hides mistakes
    noise = rng.normal(size=x.shape).astype(np.float32)
    if 'norm' in str(path[-1]):
      return jnp.asarray(1 + 0.2 * noise)
    if 'bias' in str(path[-1]):
      return jnp.asarray(0.1 * noise)
    return 1.7 * x

  return jax.tree_util.tree_map_with_path(vary, params)


def make_batch():
  rng = np.random.default_rng(0)
  arrays = np.zeros((3, 2, LENGTH), np.int32)
  for i, ((row, start), size) in enumerate(zip(PLACES, SIZES, strict=True)):
    span = (row, slice(start, start + size))
    arrays[0][span] = rng.integers(0, 64, size)
    arrays[1][span], arrays[2][span] = i % 2 + 1, np.arange(size)
  temperatures = rng.choice([0.5, 1.0, 2.0], (2, LENGTH)).astype(np.float32)
  return arrays, temperatures


def spans():
  for (row, start), size in zip(PLACES, SIZES, strict=True):
    yield row, slice(start, start + size)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_replay(model, numerics, params, arrays, temperatures, experts):
  out = transformer.forward(params, model, numerics, *arrays, experts)
  logprobs, entropy = transformer.token_logprob(
    params, model, numerics, out.hidden, arrays[0], temperatures
  )
  return out, logprobs, entropy


def run(model, numerics, params, arrays, temperatures, experts=None):
  if experts is None:  # as an array, so that nothing is compiled twice
    shape = (*temperatures.shape, transformer.moe_layers(model), 2)
    experts = np.full(shape, -1, np.int16)
  return run_replay(model, numerics, params, arrays, temperatures, experts)


# --- the naive model ----------------------------------------------------------


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def norm(x, scale):
  return x / np.sqrt(np.mean(x**2) + MODEL.norm_eps) * scale


def gated(x, p):
  a, b = x @ p[:, 0], x @ p[:, 1]
  return a * sigmoid(a) * b


def turn(x, t):
  half = len(x) // 2
  z = (x[:half] + 1j * x[half:]) * np.exp(
    1j * t * 10_000.0 ** (-np.arange(half) / half)
  )
  return np.concatenate([z.real, z.imag])


def naive_attention(p, model, xs):
  h, g, k = model.heads, model.kv_heads, model.head_dim
  heads = [np.einsum('d,dhk->hk', norm(x, p['norm']), p['qkv']) for x in xs]
  out = []
  for t, x in enumerate(xs):
    x = x.copy()
    for n in range(h):
      query, kv = turn(heads[t][n], t), n // (h // g)
      scores = np.array(
        [query @ turn(heads[s][h + kv], s) for s in range(t + 1)]
      ) / np.sqrt(k)
      weights = np.exp(scores - scores.max())
      weights /= weights.sum()
      for s in range(t + 1):
        x += weights[s] * (heads[s][h + g + kv] @ p['out'][n])
    out.append(x)
  return out


def naive_moe(p, model, x, experts):
  h = norm(x, p['norm'])
  scores = sigmoid(h @ p['router'])
  if experts is None:
    order = sorted(
      range(model.experts),
      key=lambda e: (-(scores[e] + p['router_bias'][e]), e),
    )
    experts = order[: model.experts_per_token]
  gates = scores[list(experts)]
  gates = gates / gates.sum() * model.router_scale
  for e, gate in zip(experts, gates, strict=True):
    x = x + gate * (gated(h, p['gate_up'][e]) @ p['down'][e])
  return x + gated(h, p['shared_gate_up']) @ p['shared_down'], experts


def naive(params, model, tokens, temperatures, routes=None):
  """(hidden [T, D], routes [T, L, K], logprobs [T], entropy [T])."""
  xs, used = [params['embed'][t] for t in tokens], []
  for layer in range(model.layers):
    sparse = layer - model.dense_layers
    stack = params['dense'] if sparse < 0 else params['layers']
    p = jax.tree.map(lambda a: a[layer if sparse < 0 else sparse], stack)  # noqa: B023
    xs = naive_attention(p['attention'], model, xs)
    if sparse < 0:
      mlp = p['mlp']
      xs = [
        x + gated(norm(x, mlp['norm']), mlp['gate_up']) @ mlp['down']
        for x in xs
      ]
      continue
    given = [
      None if routes is None else r[sparse]
      for r in (routes if routes is not None else xs)
    ]
    pairs = [
      naive_moe(p['moe'], model, x, r) for x, r in zip(xs, given, strict=True)
    ]
    xs = [x for x, _ in pairs]
    used.append([e for _, e in pairs])
  unembed = params['embed'].T if model.tie_embeddings else params['unembed']
  logprobs, entropy = np.zeros(len(tokens)), np.zeros(len(tokens))
  for t in range(1, len(tokens)):
    z = norm(xs[t - 1], params['final_norm']) @ unembed / temperatures[t]
    z = z - z.max()
    z = z - np.log(np.exp(z).sum())
    logprobs[t], entropy[t] = z[tokens[t]], -np.sum(np.exp(z) * z)
  routes = np.array(used).swapaxes(0, 1) if used else None
  return np.array(xs), routes, logprobs, entropy


def wide(tree):
  return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


# --- values -------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, numerics',
  [(name, FAST) for name in MODELS] + [(LEADING, BITWISE), ('moe', SORTED)],
  ids=str,
)
def test_forward(name, numerics):
  model, params = MODELS[name], make_params(name)
  arrays, temperatures = make_batch()
  out, logprobs, entropy = run(model, numerics, params, arrays, temperatures)
  load = np.zeros((transformer.moe_layers(model), model.experts))
  for span in spans():
    hidden, routes, want, spread = naive(
      wide(params), model, arrays[0][span], temperatures[span]
    )
    np.testing.assert_allclose(out.hidden[span], hidden, atol=1e-3)
    np.testing.assert_allclose(logprobs[span][1:], want[1:], atol=1e-3)
    np.testing.assert_allclose(entropy[span][1:], spread[1:], atol=1e-3)
    if load.size:
      np.testing.assert_array_equal(out.experts[span], routes)
      np.testing.assert_array_equal(out.native[span], routes)
      for layer, row in enumerate(routes.swapaxes(0, 1)):
        load[layer] += np.bincount(row.ravel(), minlength=model.experts)
  assert out.experts.dtype == jnp.int16
  assert out.experts.shape == (2, LENGTH, len(load), 2)
  np.testing.assert_array_equal(out.load, load)  # padding is not counted
  assert load.sum() == len(load) * 2 * sum(SIZES)


def test_packed_segments_equal_separate_ones():
  """Bit for bit in `bitwise`; nothing leaks from a neighbour or padding."""
  model, params = MODELS[LEADING], make_params(LEADING)
  arrays, temperatures = make_batch()
  packed = run(model, BITWISE, params, arrays, temperatures)
  for row, at in spans():
    alone, warm = np.zeros_like(arrays), np.ones_like(temperatures)
    size = at.stop - at.start
    alone[:, 1, 4 : 4 + size] = arrays[:, row, at]
    warm[1, 4 : 4 + size] = temperatures[row, at]
    if 4 + size > LENGTH:
      continue
    single = run(model, BITWISE, params, alone, warm)
    span = (1, slice(4, 4 + size))
    np.testing.assert_array_equal(
      single[0].hidden[span], packed[0].hidden[row, at]
    )
    np.testing.assert_array_equal(single[1][span][1:], packed[1][row, at][1:])
    assert single[0].load.sum() == 2 * size * len(single[0].load)


def test_replay_is_used_and_unknown_positions_are_native():
  model, params = MODELS[LEADING], make_params(LEADING)
  arrays, temperatures = make_batch()
  rng = np.random.default_rng(2)
  replay = np.argsort(rng.random((2, LENGTH, 1, 6)), -1)[..., :2]
  replay[0, 3] = -1  # a token without routes
  replay[0, 2, 0, 1] = -1  # a slot without: the whole row is native
  replay = replay.astype(np.int16)
  known, span = np.all(replay >= 0, -1), (0, slice(0, 9))
  given = [
    [layer.tolist() if np.all(layer >= 0) else None for layer in token]
    for token in replay[span]
  ]
  _, used, want, _ = naive(
    wide(params), model, arrays[0][span], temperatures[span], given
  )
  for numerics in (FAST, BITWISE):
    out, logprobs, _ = run(
      model, numerics, params, arrays, temperatures, replay
    )
    np.testing.assert_array_equal(np.asarray(out.experts)[known], replay[known])
    np.testing.assert_array_equal(out.experts[span], used)
    np.testing.assert_allclose(logprobs[span][1:], want[1:], atol=1e-3)
    assert np.any(np.asarray(out.native)[known] != replay[known])


# --- gradients ----------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient(model, numerics, params, arrays, temperatures, weights, experts):
  def total(params):
    out, logprobs, entropy = run_replay.__wrapped__(
      model, numerics, params, arrays, temperatures, experts
    )
    return jnp.sum(weights[0] * logprobs + weights[1] * entropy), out.experts

  return jax.grad(total, has_aux=True)(params)


def make_weights(arrays):
  rng = np.random.default_rng(5)
  real = (arrays[1] > 0) & (arrays[2] > 0)
  return (rng.normal(size=(2, *real.shape)) * real).astype(np.float32)


def test_gradients():
  model, params = MODELS[LEADING], make_params(LEADING)
  arrays, temperatures = make_batch()
  weights = make_weights(arrays)
  unknown = np.full((2, LENGTH, 1, 2), -1, np.int16)
  fixed, routes = gradient(
    model, BITWISE, params, arrays, temperatures, weights, unknown
  )
  fast, _ = gradient(model, FAST, params, arrays, temperatures, weights, routes)
  grads, tree = params_lib.named(fixed), params_lib.named(wide(params))
  for key, other in params_lib.named(fast).items():
    scale = float(np.max(np.abs(other)))
    np.testing.assert_allclose(
      grads[key], other, atol=2e-4 * scale + 1e-7, err_msg=key
    )

  def total(flat):
    value = 0.0
    for span in spans():
      _, _, logprobs, entropy = naive(
        params_lib.unnamed(flat),
        model,
        arrays[0][span],
        temperatures[span],
        np.asarray(routes)[span],
      )
      value += np.sum(weights[0][span] * logprobs + weights[1][span] * entropy)
    return value

  rng = np.random.default_rng(6)
  for key, value in tree.items():
    if 'router_bias' in key:
      assert not np.any(grads[key])
      continue
    # The largest of the gradient, and one at random.
    largest = np.unravel_index(np.argmax(np.abs(grads[key])), value.shape)
    anywhere = tuple(rng.integers(0, n) for n in value.shape)
    for at in (largest, anywhere):
      high, low = value.copy(), value.copy()
      high[at] += 1e-5
      low[at] -= 1e-5
      want = (total({**tree, key: high}) - total({**tree, key: low})) / 2e-5
      scale = float(np.max(np.abs(grads[key])))
      np.testing.assert_allclose(
        grads[key][at], want, rtol=2e-3, atol=5e-4 * scale, err_msg=key
      )


# --- declaration --------------------------------------------------------------


def test_spec_of_every_model():
  names = {
    name: set(params_lib.named(transformer.spec(m)))
    for name, m in MODELS.items()
  }
  assert 'unembed' in names['moe']
  assert 'unembed' not in names[LEADING]
  assert not any(n.startswith('dense/') for n in names['moe'])
  assert not any(n.startswith('layers/') for n in names['all dense'])
  spec = params_lib.named(transformer.spec(MODELS[LEADING]))
  for name, s in spec.items():
    if '/' in name:
      assert s.axes[0] == 'layers'
      assert s.shape[0] == (2 if name.startswith('dense/') else 1)


def test_count_of_the_moe():
  d, v, e, f = 32, 64, 6, 16
  attention = d + d * 8 * 8 + 4 * 8 * d
  moe = d + d * e + e + (e + 1) * 3 * d * f
  assert params_lib.count(transformer.spec(MODEL)) == (
    2 * v * d + d + 2 * (attention + moe)
  )


def test_segments_must_lie_on_whole_blocks():
  arrays, temperatures = make_batch()
  odd = arrays[:, :, :18].repeat(4, 1)
  with pytest.raises(ValueError, match='18 tokens.*kv_block=4'):
    run(MODEL, BITWISE, make_params('moe'), odd, temperatures[:, :18])


def test_the_first_logprob_of_a_row_is_of_no_context_but_finite():
  arrays, temperatures = make_batch()
  for numerics in (BITWISE, FAST):
    _, logprobs, _ = run(
      MODEL, numerics, make_params('moe'), arrays, temperatures
    )
    assert np.all(np.isfinite(logprobs))
