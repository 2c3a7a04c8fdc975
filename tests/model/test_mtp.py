"""The layer that drafts: against one in float64, and beside the model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import midtrain
from composer import params as params_lib
from composer.model import mtp
from composer.model import presets
from composer.model import transformer

MODEL = dataclasses.replace(presets.TINY, mtp_layers=1)
DENSE = dataclasses.replace(MODEL, dense_layers=2, tie_embeddings=True)
FAST = config_lib.NumericsConfig(mode='fast', kv_block=4)
STAGE = config_lib.MidtrainConfig(
  steps=50,
  warmup_steps=2,
  weight_decay=0.1,
  learning_rate=1e-2,
  max_grad_norm=0.5,
  mtp_start=3,
)
START, STEPS = STAGE.mtp_start, 61
SPANS = ((0, 0, 9), (0, 9, 7), (1, 0, 12))  # row, from, tokens
LENGTH = 16


@functools.cache
def make_params(model, seed=0):
  drawn = params_lib.init(transformer.spec(model), jax.random.key(seed))
  rng = np.random.default_rng(seed)

  def vary(path, x):  # what is drawn as all ones hides mistakes
    noise = rng.normal(size=x.shape).astype(np.float32)
    return 1 + 0.3 * noise if 'norm' in str(path[-1]) else 1.7 * x

  return jax.tree_util.tree_map_with_path(vary, drawn)


def make_batch(seed=0):
  rng = np.random.default_rng(seed)
  names = 'tokens', 'segment_ids', 'positions'
  batch = {name: np.zeros((2, LENGTH), np.int32) for name in names}
  batch['loss_mask'] = np.zeros((2, LENGTH), bool)
  for n, (row, start, count) in enumerate(SPANS):
    at = row, slice(start, start + count)
    batch['tokens'][at] = rng.integers(0, 64, count)
    batch['segment_ids'][at] = n + 1
    batch['positions'][at] = np.arange(count)
    batch['loss_mask'][at] = rng.random(count) < 0.7
    batch['loss_mask'][row, start] = False
  return batch


@functools.partial(jax.jit, static_argnums=0)
def distil(model, params, batch):
  """(hidden states, `Distilled`, its gradient by parameters and by those)."""
  out = transformer.forward(
    params,
    model,
    FAST,
    batch['tokens'],
    batch['segment_ids'],
    batch['positions'],
    audit=False,
  )

  def loss(params, hidden):
    found = mtp.distil(params, model, FAST, hidden, batch, 2, detach=False)
    return found.loss, found

  both = jax.grad(loss, argnums=(0, 1), has_aux=True)
  grads, found = both(params, out.hidden)
  return out.hidden, found, grads


# --- in float64 ---------------------------------------------------------------


def norm(x, scale):
  x = np.asarray(x, np.float64)
  mean = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean + MODEL.norm_eps) * np.asarray(scale, np.float64)


def log_softmax(z):
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def turn(x, at):
  half = x.shape[-1] // 2
  angle = at * 10_000.0 ** (-np.arange(half) / half)
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
  return np.concatenate([z.real, z.imag], -1)


def naive_layer(p, xs):
  """A dense layer over the rows of one segment, token by token."""
  attention, mlp = p['attention'], p['mlp']
  h, g = DENSE.heads, DENSE.kv_heads
  qkv = np.einsum(
    'td,dhk->thk', norm(xs, attention['norm'][0]), attention['qkv'][0]
  )
  qkv[:, : h + g] = [turn(x, t) for t, x in enumerate(qkv[:, : h + g])]
  out = []
  for t in range(len(xs)):
    heads = []
    for n in range(h):
      kv = h + n // (h // g)
      z = qkv[: t + 1, kv] @ qkv[t, n] / np.sqrt(DENSE.head_dim)
      heads.append(np.exp(log_softmax(z)) @ qkv[: t + 1, kv + g])
    y = xs[t] + np.einsum('hk,hkd->d', heads, attention['out'][0])
    u = np.einsum('d,dpf->pf', norm(y, mlp['norm'][0]), mlp['gate_up'][0])
    out.append(y + (u[0] / (1 + np.exp(-u[0])) * u[1]) @ mlp['down'][0])
  return np.stack(out)


def naive_distil(params, hidden, batch, depth):
  """(KL, overlap) of each depth, one segment after the other."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  own, head = p['mtp'], p['embed'].T
  kls, overlaps = [[] for _ in range(depth)], [[] for _ in range(depth)]
  for row, start, count in SPANS:
    at = row, slice(start, start + count)
    tokens, mask = batch['tokens'][at], batch['loss_mask'][at]
    teacher = log_softmax(norm(hidden[at], p['final_norm']) @ head)
    g = norm(hidden[at], p['final_norm'])
    for k in range(1, depth + 1):
      left = count - k  # rows whose token k further there is
      embedded = norm(p['embed'][tokens[k:]], own['embed_norm'][0])
      x = embedded @ own['join'][0, 0]
      x += norm(g[:left], own['hidden_norm'][0]) @ own['join'][0, 1]
      g = naive_layer(own, x)
      q = log_softmax(norm(g, own['norm'][0]) @ head)
      for t in range(left - 1):
        if mask[t + k + 1]:
          log_p = teacher[t + k]
          kls[k - 1].append(np.exp(log_p) @ (log_p - q[t]))
          both = np.minimum(np.exp(log_p), np.exp(q[t]))
          overlaps[k - 1].append(both.sum())
  return [np.mean(x) for x in kls], [np.mean(x) for x in overlaps]


def test_against_one_in_float64():
  params, batch = make_params(DENSE), make_batch()
  hidden, found, _ = distil(DENSE, params, batch)
  kl, overlap = naive_distil(params, np.asarray(hidden), batch, 2)
  np.testing.assert_allclose(found.kl, kl, rtol=2e-4)
  np.testing.assert_allclose(found.accept, overlap, rtol=2e-4)
  assert found.loss == pytest.approx(np.mean(kl), rel=2e-4)
  assert found.load.shape == (0, DENSE.experts)
  # What stands behind a segment, and padding, are not read.
  other = {name: x.copy() for name, x in batch.items()}
  other['tokens'][1, 12:] = 7
  again = distil(DENSE, params, other)[1]
  np.testing.assert_array_equal(again.kl, found.kl)


def test_its_gradient_and_what_flows_into_the_model():
  params, batch = make_params(DENSE), make_batch()
  grads, into = distil(DENSE, params, batch)[2]
  assert float(jnp.abs(into).max()) > 1e-4
  assert float(jnp.abs(grads['embed']).max()) > 1e-4
  # Along one direction of a parameter, by central differences.
  rng = np.random.default_rng(1)
  for name in ('join', 'hidden_norm', 'norm'):
    value = params['mtp'][name]
    way = rng.normal(size=value.shape).astype(np.float32)

    def at(size, name=name, value=value, way=way):
      own = {**params['mtp'], name: value + size * way}
      return float(distil(DENSE, {**params, 'mtp': own}, batch)[1].loss)

    slope = (at(3e-3) - at(-3e-3)) / 6e-3
    got = float(jnp.vdot(grads['mtp'][name], way))
    assert got == pytest.approx(slope, rel=0.01, abs=1e-3), name


def test_the_overlap_is_what_rejection_sampling_keeps():
  """sum min(p, q), measured: drawn from q, kept with probability p / q."""
  rng = np.random.default_rng(0)
  d, v = MODEL.width, MODEL.vocab_size
  norms = np.ones((2, d), np.float32)
  head = rng.normal(size=(d, v)).astype(np.float32) / 6
  rows = rng.normal(size=(2, 1, d)).astype(np.float32)
  _, overlap = mtp.rows_distilled(MODEL, *norms, head, *rows)
  p, q = (np.exp(log_softmax(norm(x[0], norms[0]) @ head)) for x in rows)
  drawn = rng.choice(v, 40_000, p=q / q.sum())
  kept = rng.random(40_000) < p[drawn] / q[drawn]
  assert overlap[0] == pytest.approx(kept.mean(), abs=0.01)


# --- beside the model ---------------------------------------------------------


def train(layers):
  """Parameters before and after some steps, and the metrics of each."""
  model = dataclasses.replace(DENSE, mtp_layers=layers)
  drawn = params_lib.init(transformer.spec(model), jax.random.key(2))
  state = midtrain.init_state(drawn, STAGE, jax.random.key(0))
  step, metrics = midtrain.make_train_step(model, FAST, STAGE), []
  before = params_lib.to_host(state.params)
  for n in range(STEPS):
    if n == START:
      waited = params_lib.to_host(state.params)
    state, found = step(state, make_batch(n % 2))
    metrics.append({name: float(x) for name, x in found.items()})
  return before, waited, params_lib.to_host(state.params), metrics


def test_the_model_learns_the_same_bits_without_the_layer():
  _, _, plain, metrics = train(0)
  before, waited, beside, more = train(1)
  for name, value in plain.items():
    np.testing.assert_array_equal(
      value.view(np.uint32), beside[name].view(np.uint32), name
    )
  for a, b in zip(metrics, more, strict=True):
    assert {name: b[name] for name in a} == a
  own = [name for name in beside if name not in plain]
  assert own and all(name.startswith('mtp/') for name in own)
  assert all((waited[n] != beside[n]).any() for n in own)
  # Until it starts it has no gradient; its matrices are decayed.
  for name in ('norm', 'mlp/norm', 'attention/norm', 'hidden_norm'):
    np.testing.assert_array_equal(before[f'mtp/{name}'], waited[f'mtp/{name}'])
  assert [m['mtp_kl'] > 0 for m in more] == [n >= START for n in range(STEPS)]
  # The model comes to know two batches by heart, and the layer follows.
  assert max(m['mtp_kl'] for m in more) > 0.1 > 5 * more[-1]['mtp_kl']
  assert 0.97 < more[-1]['mtp_accept'] < 1


def test_its_experts_are_balanced_by_their_own_load():
  bias = {'moe': {'router_bias': jnp.zeros((1, 3)), 'down': jnp.ones((1, 3))}}
  params = {'layers': bias, 'mtp': bias}
  load, drafts = jnp.asarray([[0.0, 1, 2]]), jnp.asarray([[2.0, 1, 0]])
  moved = midtrain.balance_params(params, load, 0.1, drafts)
  for name, want in (('layers', [0.1, 0, -0.1]), ('mtp', [-0.1, 0, 0.1])):
    np.testing.assert_allclose(moved[name]['moe']['router_bias'], [want])
    np.testing.assert_array_equal(moved[name]['moe']['down'], 1)
  still = midtrain.balance_params(params, load, 0.1)
  np.testing.assert_array_equal(still['mtp']['moe']['router_bias'], 0)


def test_over_several_devices_it_is_refused():
  layout = type('Layout', (), {'mesh': type('Mesh', (), {'size': 8})})
  with pytest.raises(ValueError, match='midtrain.mtp_weight=0'):
    midtrain.make_train_step(MODEL, FAST, STAGE, layout)
