"""Engine and trainer give the same bits: logprobs and routes, whatever runs.

The trainer's forward is called on packed rows, the engine's step on loose rows
over scattered pages, prompts in chunks of random sizes, other sequences beside.
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
LEADING = dataclasses.replace(MODEL, dense_layers=1, tie_embeddings=True)
BITWISE = config_lib.NumericsConfig(row_block=8, kv_block=4)
SORTED = dataclasses.replace(BITWISE, moe='sorted')
EXPANDED = dataclasses.replace(BITWISE, mla='expanded')
HALF = dataclasses.replace(BITWISE, compute='bfloat16')
FAST = dataclasses.replace(BITWISE, mode='fast')
LATENT = presets.TINY_LATENT
COLUMNS = 12  # KV blocks of a sequence, at most


def make_params(model, seed=0):
  """Sharper than at initialisation, so that one bit can change a route."""
  drawn = params_lib.init(transformer.spec(model), jax.random.key(seed))
  return jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)


def make_sequences(count=14, seed=0):
  rng = np.random.default_rng(seed)
  sizes = rng.integers(2, 40, count)
  return [rng.integers(0, 64, n).astype(np.int32) for n in sizes]


def pack(sequences, length, offset=0):
  """First fit, in blocks; `offset` blocks of padding begin every row."""
  block, rows, places = BITWISE.kv_block, [], []
  for sequence in sequences:
    need = -(-len(sequence) // block)
    for row, used in enumerate(rows):  # noqa: B007
      if used + need <= length // block:
        break
    else:
      row, used = len(rows), offset
      rows.append(offset)
    places.append((row, used * block))
    rows[row] = used + need
  arrays = np.zeros((3, len(rows), length), np.int32)
  for number, (sequence, (row, start)) in enumerate(
    zip(sequences, places, strict=True)
  ):
    at = (row, slice(start, start + len(sequence)))
    arrays[0][at] = sequence
    arrays[1][at] = number + 1
    arrays[2][at] = np.arange(len(sequence))
  return arrays, places


@functools.partial(jax.jit, static_argnums=(0, 1))
def score(model, numerics, params, tokens, segment_ids, positions):
  out = transformer.forward(
    params, model, numerics, tokens, segment_ids, positions
  )
  logprobs, _ = transformer.token_logprob(
    params, model, numerics, out.hidden, tokens, jnp.ones(tokens.shape)
  )
  return logprobs, out.experts


def trained(model, numerics, params, sequences, length=40, offset=0):
  """(logprobs [T] but the first, experts [T, L, K]) of every sequence."""
  arrays, places = pack(sequences, length, offset)
  logprobs, experts = map(np.asarray, score(model, numerics, params, *arrays))
  spans = [
    (row, slice(start, start + len(s)))
    for s, (row, start) in zip(sequences, places, strict=True)
  ]
  return [(logprobs[span][1:], experts[span]) for span in spans]


@functools.partial(jax.jit, static_argnums=(0, 1))
def engine_rows(
  model, numerics, params, cache, tokens, positions, table, wanted, used
):
  """As a step of the engine: blocks of rows beyond `used` are left out."""
  hidden, experts, cache = transformer.step(
    params, model, numerics, cache, tokens, positions, table, used=used
  )
  logprobs, _ = transformer.row_logprobs(
    model,
    numerics,
    params['final_norm'],
    transformer.unembedding(params),
    hidden,
    wanted,
    jnp.ones(tokens.shape),
    used=used,
  )
  return logprobs, experts, cache


def served(model, numerics, params, sequences, rows=32, seed=0):
  """The same through steps of `rows` rows, in chunks of random sizes."""
  rng = np.random.default_rng(seed)
  pages = len(sequences) * COLUMNS + 1
  tables = 1 + rng.permutation(pages - 1).reshape(len(sequences), COLUMNS)
  cache = transformer.init_cache(model, numerics, pages)
  cache = jax.tree.map(  # what earlier sequences left behind
    lambda x: jnp.asarray(rng.normal(size=x.shape) * 9, x.dtype), cache
  )
  layers, k = transformer.moe_layers(model), model.experts_per_token
  logprobs = [np.zeros(len(s), np.float32) for s in sequences]
  experts = [np.zeros((len(s), layers, k), np.int16) for s in sequences]
  done = [0] * len(sequences)
  while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
    where, table = [], np.zeros((rows, COLUMNS), np.int32)
    for i in rng.permutation(len(sequences)):
      left = min(rows - len(where), len(sequences[i]) - done[i])
      for _ in range(min(left, int(rng.integers(1, 9)))):
        table[len(where)] = tables[i]
        where.append((i, done[i]))
        done[i] += 1
    tokens, positions, wanted = np.zeros((3, rows), np.int32)
    for row, (i, t) in enumerate(where):
      tokens[row], positions[row] = sequences[i][t], t
      wanted[row] = sequences[i][t + 1] if t + 1 < len(sequences[i]) else 0
    found, used, cache = engine_rows(
      *(model, numerics, params, cache),
      *(tokens, positions, table, wanted, np.int32(len(where))),
    )
    for row, (i, t) in enumerate(where):
      experts[i][t] = used[row]
      if t + 1 < len(sequences[i]):
        logprobs[i][t + 1] = found[row]
  return [(a[1:], b) for a, b in zip(logprobs, experts, strict=True)]


def differing(some, others):
  """Share of logprobs that differ, and of routes."""
  a, b = (np.concatenate([x[0] for x in side]) for side in (some, others))
  e, f = (np.concatenate([x[1] for x in side]) for side in (some, others))
  assert a.size > 200 and np.all(np.isfinite(a))
  return np.mean(a != b), np.mean(e != f) if e.size else 0.0


CASES = {
  'dense experts': (MODEL, BITWISE, 16),
  'leading dense layer, tied': (LEADING, BITWISE, 40),
  'sorted experts': (MODEL, SORTED, 32),
  'softmax router, q and k norms': (presets.TINY_SOFTMAX, BITWISE, 32),
  'latent attention, absorbed': (LATENT, BITWISE, 32),
  'latent attention, expanded': (LATENT, EXPANDED, 40),
  'bfloat16': (MODEL, HALF, 32),
  'latent attention, bfloat16': (LATENT, HALF, 32),
}


@pytest.mark.parametrize('name', CASES)
def test_engine_equals_trainer(name):
  model, numerics, rows = CASES[name]
  sequences, params = make_sequences(), make_params(model)
  want = trained(model, numerics, params, sequences)
  for seed in range(3):
    got = served(model, numerics, params, sequences, rows, seed)
    assert differing(want, got) == (0, 0)


def test_fast_does_not():
  """The comparison above can fail."""
  params, sequences = make_params(MODEL), make_sequences()
  want = trained(MODEL, FAST, params, sequences)
  got = served(MODEL, FAST, params, sequences)
  assert differing(want, got)[0] > 0.01
  flat = [np.concatenate([x[0] for x in side]) for side in (want, got)]
  np.testing.assert_allclose(*flat, atol=2e-4)
  bitwise = trained(MODEL, BITWISE, params, sequences)
  assert differing(want, bitwise)[0] > 0.01


@pytest.mark.parametrize('model', (MODEL, LATENT), ids=('grouped', 'latent'))
def test_packing_does_not_matter(model):
  """Row lengths, offsets, order and neighbours of the packed segments."""
  params, sequences = make_params(model), make_sequences()
  want = trained(model, BITWISE, params, sequences, 40)
  for length, offset in ((48, 2), (80, 9)):
    got = trained(model, BITWISE, params, sequences, length, offset)
    assert differing(want, got) == (0, 0)
  backwards = trained(model, BITWISE, params, sequences[::-1], 48, 2)[::-1]
  assert differing(want, backwards) == (0, 0)


def test_the_forms_of_latent_attention_differ():
  """In last bits, which is why `bitwise` takes one of them on both sides."""
  params, sequences = make_params(LATENT), make_sequences()
  want = trained(LATENT, BITWISE, params, sequences)
  got = served(LATENT, EXPANDED, params, sequences)
  assert differing(want, got)[0] > 0.01
  flat = [np.concatenate([x[0] for x in side]) for side in (want, got)]
  np.testing.assert_allclose(*flat, atol=2e-3)


@pytest.mark.parametrize(
  ('model', 'numerics'),
  ((MODEL, BITWISE), (LATENT, BITWISE)),
  ids=('grouped', 'latent'),
)
def test_forward_equals_forward_under_differentiation(model, numerics):
  params, sequences = make_params(model), make_sequences()
  arrays, _ = pack(sequences, 40)
  real = (arrays[1] > 0) & (arrays[2] > 0)

  @functools.partial(jax.jit, static_argnums=0)
  def differentiated(numerics, params, arrays):
    def loss(p):
      logprobs, experts = score.__wrapped__(model, numerics, p, *arrays)
      return -jnp.sum(jnp.where(real, logprobs, 0)) / 100, (logprobs, experts)

    return jax.value_and_grad(loss, has_aux=True)(params)

  (_, (logprobs, experts)), grads = differentiated(numerics, params, arrays)
  want = score(model, numerics, params, *arrays)
  np.testing.assert_array_equal(np.asarray(logprobs)[real], want[0][real])
  np.testing.assert_array_equal(experts, want[1])
  assert all(
    np.any(g)
    for n, g in params_lib.named(grads).items()
    if 'router_bias' not in n
  )


def test_replaying_the_own_routes_changes_nothing():
  params, sequences = make_params(MODEL), make_sequences()
  arrays, _ = pack(sequences, 40)
  native = score(MODEL, BITWISE, params, *arrays)

  @jax.jit
  def replayed(params, experts, *arrays):
    out = transformer.forward(params, MODEL, BITWISE, *arrays, experts)
    return transformer.token_logprob(
      params, MODEL, BITWISE, out.hidden, arrays[0], jnp.ones(arrays[0].shape)
    )[0]

  np.testing.assert_array_equal(replayed(params, native[1], *arrays), native[0])


def test_one_block_of_rows_is_refused():
  """XLA would compile a loop of one trip in the context of its surroundings."""
  params = make_params(MODEL)
  arrays, _ = pack(make_sequences(1), 40)
  odd = [a[:, :8] for a in arrays]
  with pytest.raises(ValueError, match='row_block=8.*at least two.*got 8'):
    score(MODEL, BITWISE, params, *odd)
