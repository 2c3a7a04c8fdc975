"""The operations that a model runs: their choice, and kernels in their place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.inference import engine
from composer.model import operations
from composer.model import transformer
from pallas_kernels import dispatch
from pallas_kernels import mosaic

Operations = operations.Operations
XLA = operations.XLA
GQA = config_lib.ModelConfig(
  vocab_size=256,
  width=128,
  layers=2,
  dense_layers=1,
  heads=4,
  kv_heads=2,
  head_dim=64,
  dense_hidden=128,
  experts=4,
  expert_hidden=64,
)
MANY = dataclasses.replace(GQA, experts=256)
MLA = dataclasses.replace(
  GQA, q_lora=64, kv_lora=64, nope_dim=64, rope_dim=64, value_dim=64
)


@pytest.mark.parametrize(
  'device, mode, want',
  [
    ('cpu', 'fast', Operations(XLA, XLA)),
    ('cpu', 'aligned', Operations(XLA, XLA)),
    ('cpu', 'bitwise', Operations(XLA, XLA)),
    ('gpu', 'fast', Operations(XLA, None)),
    ('gpu', 'aligned', Operations(None, None)),
    ('gpu', 'bitwise', Operations('gpu', 'gpu')),
    ('tpu', 'bitwise', Operations('tpu', 'tpu')),
  ],
)
def test_choice(monkeypatch, device, mode, want):
  monkeypatch.setattr(dispatch, 'platform', lambda: device)
  numerics = config_lib.NumericsConfig(mode=mode)
  assert operations.of(numerics) == want
  named = dataclasses.replace(numerics, kernels='reference')
  assert operations.of(named) == Operations('reference', 'reference')


def test_fixed():
  assert not operations.PLAIN.fixed
  assert not Operations(XLA, None).fixed
  assert Operations('gpu', 'gpu').fixed


@pytest.mark.parametrize(
  ('dense', 'rows'), [('tpu_interpret', 5), (XLA, operations.MANY)]
)
def test_a_router_by_products_of_16_bits(dense, rows):
  """Three products of bfloat16 are a product of float32, and its gradients."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(rows, 128)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(128, 6)), jnp.float32)
  dy = jnp.asarray(rng.normal(size=(rows, 6)), jnp.float32)
  want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  ops = Operations(dense, 'tpu_interpret')
  text = jax.make_jaxpr(lambda x, w: operations.wide_matmul(ops, x, w))(x, w)
  assert 'reduce_precision' in str(text)  # w is split
  got, pull = jax.vjp(lambda x, w: operations.wide_matmul(ops, x, w), x, w)
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
  dx, dw = pull(dy)
  np.testing.assert_allclose(
    dw,
    np.asarray(x, np.float64).T @ np.asarray(dy),
    rtol=0,
    atol=2e-5 * (rows / 5) ** 0.5,  # the numbers are so much greater
  )
  wide = np.asarray(dy, np.float64) @ np.asarray(w, np.float64).T
  np.testing.assert_allclose(np.asarray(dx, np.float32), wide, rtol=0.01)


def test_parts_at_hand_are_added_as_they_are_routed(monkeypatch):
  """With the bits of logits that were added before."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(9, 128)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(128, 8)), jnp.float32)
  ops = Operations('tpu_interpret', 'gpu_interpret')
  config = dataclasses.replace(GQA, experts=8)
  send, given = operations.route_lib.send, []

  def spied(*arrays, **more):
    given.append(more.get('experts'))
    return send(*arrays, **more)

  monkeypatch.setattr(operations.route_lib, 'send', spied)
  split = operations.parts(w, x.dtype)
  got, want = (
    operations.send(ops, x, w, some, None, config, None)
    for some in (split, None)
  )
  assert given == [8, None]
  assert len(np.unique(want.experts)) > 2
  for one, other in zip(
    jax.tree.leaves(got), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_array_equal(one, other)
  many = jnp.tile(x, (60, 1))  # more than go in one launch
  assert operations.send(ops, many, w, split, None, config, None) is None
  # A product that no kernel makes leaves no parts to be added.
  plain = Operations('reference', 'gpu_interpret')
  whole = operations.send(plain, x, w, split, None, config, None)
  assert given == [8, None, None]
  np.testing.assert_allclose(whole.gates, want.gates, rtol=1e-4)


def _scored(model, numerics):
  """Logprobs, and the gradient of their sum, of two packed segments."""
  rng = np.random.default_rng(1)
  spec = transformer.spec(model)
  params = params_lib.init(spec, jax.random.key(0))
  tokens = jnp.asarray(rng.integers(0, model.vocab_size, (1, 64)), jnp.int32)
  ids = jnp.asarray([[1] * 32 + [2] * 20 + [0] * 12])
  positions = jnp.asarray([[*range(32), *range(20), *[0] * 12]])
  routes = jnp.asarray(rng.integers(0, 2, (1, 64, 1, 2)), jnp.int16)
  routes = routes.at[..., 1].set(3 - routes[..., 0])

  def total(params):
    out = transformer.forward(
      params, model, numerics, tokens, ids, positions, routes
    )
    logprobs, _ = transformer.token_logprob(
      params, model, numerics, out.hidden, tokens, jnp.ones((1, 64))
    )
    return jnp.sum(jnp.where(ids > 0, logprobs, 0.0)), logprobs

  found = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
  (_, logprobs), gradients = found
  return np.where(ids > 0, logprobs, 0), gradients


@pytest.mark.parametrize(
  'model, form, mode',
  [
    (GQA, 'absorbed', 'fast'),
    (GQA, 'absorbed', 'aligned'),
    (MLA, 'absorbed', 'aligned'),
    (MLA, 'expanded', 'fast'),
  ],
)
def test_kernels_in_place_of_the_plain_expressions(model, form, mode):
  numerics = config_lib.NumericsConfig(mode='fast', moe='sorted', mla=form)
  want, gradients = _scored(model, numerics)
  kernels = dataclasses.replace(numerics, mode=mode, kernels='reference')
  got, more = _scored(model, kernels)
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
  for a, b in zip(
    jax.tree.leaves(gradients), jax.tree.leaves(more), strict=True
  ):
    scale = max(float(jnp.max(jnp.abs(a))), 1e-3)
    np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=2e-4)


def _rows(model, seed=0):
  rng = np.random.default_rng(seed)
  params = params_lib.init(transformer.spec(model), jax.random.key(0))
  x = jnp.asarray(rng.normal(size=(128, model.width)), jnp.float32)
  kept = np.full((128, 5), -1)
  for row in range(0, 128, 2):  # every other row is not cut
    count = rng.integers(1, 6)
    kept[row, :count] = rng.choice(model.vocab_size, count, replace=False)
  among = np.where(kept.max(1) < 0, 17, kept[:, 0])
  return params, x, jnp.asarray(kept, jnp.int32), jnp.asarray(among, jnp.int32)


@pytest.mark.parametrize('mode', ['fast', 'bitwise'])
def test_logprobs_among_kept_ids(mode):
  """Either way to say what was kept, against the definition in float64."""
  params, x, kept, target = _rows(GQA)
  numerics = config_lib.NumericsConfig(mode=mode)
  temperature = jnp.linspace(0.5, 2.0, 128)
  norm, unembed = params['final_norm'], params['unembed']

  def run(kept):
    return transformer.row_logprobs(
      GQA, numerics, norm, unembed, x, target, temperature, kept
    )

  logprob, entropy = jax.jit(run)(kept)
  z = transformer.logits_rows(GQA, norm, unembed, x, temperature)
  bits = np.zeros((128, GQA.vocab_size), bool)
  for row, ids in enumerate(np.asarray(kept)):
    ids = ids[ids >= 0] if ids.max() >= 0 else np.arange(GQA.vocab_size)
    bits[row, ids] = True
    log = np.asarray(z[row], np.float64)[ids]
    log -= np.log(np.sum(np.exp(log)))
    want = log[list(ids).index(int(target[row]))]
    np.testing.assert_allclose(logprob[row], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
      entropy[row], -np.sum(np.exp(log) * log), rtol=1e-5, atol=1e-5
    )
  packed, _ = jax.jit(run)(jnp.asarray(np.packbits(bits, axis=-1)))
  np.testing.assert_array_equal(packed, logprob)


@pytest.mark.parametrize(
  ('model', 'changes', 'rows', 'want'),
  [
    (GQA, {'mode': 'fast', 'kernels': ''}, 64, True),
    (GQA, {'kernels': ''}, 64, False),  # XLA would fuse the two passes
    (GQA, {}, 64, True),
    (GQA, {'mode': 'aligned'}, 64, True),
    (GQA, {}, 2**24, False),  # tens of gigabytes
    (MANY, {}, 2**19, False),  # all of whose experts compute every token
    (MANY, {'moe': 'sorted'}, 2**19, True),
    (MLA, {}, 64, False),  # the expanded form's derivative is cheaper
    (MLA, {'mla': 'expanded'}, 64, True),
  ],
)
def test_what_the_backward_pass_reads(model, changes, rows, want):
  numerics = config_lib.NumericsConfig(kernels='reference')
  numerics = dataclasses.replace(numerics, **changes)
  assert transformer._keeps(model, numerics, rows) is want


TINY = dataclasses.replace(
  GQA, head_dim=128, dense_layers=0, experts_per_token=2
)
FIXED = config_lib.NumericsConfig(
  mode='bitwise',
  kv_block=64,
  row_block=64,
  moe='sorted',
  compute='bfloat16',
  kernels='tpu_interpret',
)
STARTS = (0, 128)  # columns of the two sequences, each on whole pages
# Rows of either in each step: chunks that end within pages, then decoding.
CHUNKS = ((37, 11), (32, 28), (1, 1), (1, 0))


def _sequences():
  """(tokens, kept) of each; every other token was not cut."""
  rng = np.random.default_rng(2)
  found = []
  for size in np.sum(CHUNKS, axis=0):
    tokens = rng.integers(0, TINY.vocab_size, size).astype(np.int32)
    kept = rng.integers(0, TINY.vocab_size, (size, 5)).astype(np.int32)
    kept[:, 0] = tokens
    kept[::2] = -1
    found.append((tokens, kept))
  return found


def _packed(params, sequences):
  """(hidden, experts, logprob) of all columns, as the trainer has them."""
  shape = (1, 192)
  tokens, ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
  kept = np.full((*shape, 5), -1, np.int32)
  for i, (start, (own, among)) in enumerate(
    zip(STARTS, sequences, strict=True)
  ):
    at = 0, slice(start, start + len(own))
    tokens[at], kept[at] = own, among
    ids[at], positions[at] = i + 1, np.arange(len(own))

  @jax.jit
  def run(params):
    out = transformer.forward(params, TINY, FIXED, tokens, ids, positions)
    logprob, _ = transformer.token_logprob(
      params, TINY, FIXED, out.hidden, tokens, jnp.ones(shape), kept=kept
    )
    return out.hidden[0], out.experts[0], logprob[0]

  return [np.asarray(a) for a in run(params)]


def _stepped(params, sequences):
  """The same of each sequence, in chunks and row by row, over pages.

  As an engine does: without a loop over layers. Logprobs are those among all, and those over what was kept.
  """
  rows, page = 66, np.array([[3, 1], [2, 4]])

  @jax.jit
  def run(params, cache, tokens, positions, table, following, bits):
    hidden, experts, cache = transformer.step(
      params, TINY, FIXED, cache, tokens, positions, table
    )
    norm, unembed = params['final_norm'], transformer.unembedding(params)
    scores = [
      transformer.row_logprobs(
        TINY, FIXED, norm, unembed, hidden, following, jnp.ones(rows), among
      )[0]
      for among in (None, bits)
    ]
    return cache, hidden, experts, *scores

  cache = transformer.init_cache(TINY, FIXED, 5)
  cache = jax.tree.map(lambda a: a + 7, cache)  # what others left there
  done, found = [0, 0], ([], [])
  for counts in CHUNKS:
    tokens, positions, following = (np.zeros(rows, np.int32) for _ in range(3))
    table = np.zeros((rows, 2), np.int32)
    among = np.ones((rows, TINY.vocab_size), bool)
    places, row = [], 5  # rows before are padding
    for i, count in enumerate(counts):
      own, kept = sequences[i]
      for at in range(done[i], done[i] + count):
        tokens[row], positions[row], table[row] = own[at], at, page[i]
        after = min(at + 1, len(own) - 1)
        following[row] = own[after]
        if kept[after, 0] >= 0:
          among[row] = np.isin(np.arange(TINY.vocab_size), kept[after])
        places.append((row, i))
        row += 1
      done[i] += count
    bits = np.packbits(among, axis=-1)
    cache, *got = run(params, cache, tokens, positions, table, following, bits)
    got = [np.asarray(a) for a in got]
    for row, i in places:
      found[i].append([a[row] for a in got])
  return [[np.stack(a) for a in zip(*one, strict=True)] for one in found]


@pytest.mark.slow
def test_trainer_and_engine_have_the_same_bits_by_kernels():
  """Packed rows and loose ones, whether their distribution was cut or not."""
  params = params_lib.init(transformer.spec(TINY), jax.random.key(0))
  sequences = _sequences()
  whole = _packed(params, sequences)
  stepped = _stepped(engine.prepare(FIXED, params, split=True), sequences)
  for start, (own, kept), got in zip(STARTS, sequences, stepped, strict=True):
    at = slice(start, start + len(own))
    hidden, experts, logprob = [a[at] for a in whole]
    np.testing.assert_array_equal(got[0], hidden)
    np.testing.assert_array_equal(got[1], experts)
    # As the engine takes them: of rows that are not cut, those among all.
    among_all, cut = got[2][:-1], got[3][:-1]
    some = kept[1:, 0] >= 0
    np.testing.assert_array_equal(np.where(some, cut, among_all), logprob[1:])
    assert (cut != among_all)[some].all()


@pytest.mark.skipif(
  not mosaic.interprets(), reason='jax 0.10 cannot interpret these kernels'
)
@pytest.mark.parametrize(
  'qk_norm', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_attention_that_turns_has_the_same_bits(monkeypatch, qk_norm):
  """A step of sequences that decode, by either way to its attention."""
  model = dataclasses.replace(GQA, layers=1, qk_norm=qk_norm)
  numerics = dataclasses.replace(FIXED, kernels='gpu_interpret')
  params = params_lib.init(transformer.spec(model), jax.random.key(0))
  n, found = 3, []
  for turning in (False, True):
    tuned = {'decode': {'fused': True, 'turning': turning}}
    monkeypatch.setattr(dispatch, 'tuning', lambda _, tuned=tuned: tuned)
    cache = transformer.init_cache(model, numerics, n + 1)
    cache = jax.tree.map(lambda a: a + 7, cache)
    table = 1 + np.arange(n, dtype=np.int32)[:, None]
    step = jax.jit(
      lambda *a: transformer.step(params, model, numerics, *a, alone=True)
    )
    some = cache, np.arange(n), np.asarray([5, 0, 63]), table
    lowered = step.lower(*some)
    found.append((lowered.compile()(*some), lowered.as_text()))
  (one, before), (two, after) = found
  assert before != after
  for x, y in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    np.testing.assert_array_equal(x, y)
