"""Token log-probabilities against log_softmax of whole logits."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels import token_logprob as ops
from pallas_kernels.token_logprob import gpu
from pallas_kernels.token_logprob import gpu_merge
from pallas_kernels.token_logprob import gpu_scored
from pallas_kernels.token_logprob import reference
from pallas_kernels.token_logprob import shapes

D = 64


def draw(t, v=320, seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(t, D)), jnp.bfloat16)
  unembed = jnp.asarray(rng.normal(size=(D, v)) * 0.3, jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, v, t), jnp.int32)
  temperatures = jnp.asarray(rng.uniform(0.3, 2, t), jnp.float32)
  return hidden, unembed, tokens, temperatures


def by_hand(hidden, unembed, tokens, temperatures, inside=None):
  """Whole logits, float32: log-probability and entropy."""
  z = hidden.astype(jnp.float32) @ unembed.astype(jnp.float32)
  z = z / temperatures[:, None]
  if inside is not None:
    z = jnp.where(inside, z, -jnp.inf)
  log_p = jax.nn.log_softmax(z)
  p = jnp.exp(log_p)
  entropy = -jnp.sum(p * jnp.where(p > 0, log_p, 0.0), axis=1)
  return log_p[jnp.arange(len(tokens)), tokens], entropy


@pytest.mark.parametrize('name', NAMES)
def test_values_and_gradients(name, monkeypatch):
  monkeypatch.setattr(reference, 'CHUNK', 192)  # so that there is a rest
  hidden, unembed, tokens, temperatures = draw(70)
  weights = jnp.cos(jnp.arange(70.0)), jnp.sin(jnp.arange(70.0))

  def loss(function):
    def weighed(hidden, unembed):
      found = function(hidden, unembed, tokens, temperatures)
      return sum(jnp.vdot(w, f) for w, f in zip(weights, found, strict=True)), (
        found
      )

    return jax.value_and_grad(weighed, (0, 1), has_aux=True)

  def ours(*arguments):
    return ops.token_logprob(*arguments, implementation=name)

  (_, found), gots = loss(ours)(hidden, unembed)
  (_, want), wants = loss(by_hand)(
    hidden.astype(jnp.float32), unembed.astype(jnp.float32)
  )
  for got, exact in zip(found, want, strict=True):
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
  for got, exact in zip(gots, wants, strict=True):
    assert got.dtype == jnp.bfloat16
    off = np.linalg.norm(np.asarray(got, np.float32) - exact)
    assert off <= 4e-3 * np.linalg.norm(exact)  # bfloat16 rounds to 2^-9


@pytest.mark.parametrize('name', NAMES)
def test_temperatures_without_bounds(name):
  """All words are alike at an endless one; what is none is seen, and alone."""
  hidden, unembed, tokens, _ = draw(5)
  given = jnp.asarray([1.0, np.inf, 3e38, np.nan, 0.5], jnp.float32)
  found = jax.jit(
    lambda *a: jnp.stack(ops.token_logprob(*a, implementation=name))
  )(hidden, unembed, tokens, given)  # traced, so that no value is refused
  alike = np.log(unembed.shape[1]) * np.asarray([-1, 1])
  np.testing.assert_allclose(found[:, 1:3].T, [alike, alike], rtol=1e-6)
  assert np.isnan(found[0, 3])
  rest = np.asarray([0, 4])
  wide = hidden[rest].astype(jnp.float32), unembed.astype(jnp.float32)
  want = by_hand(*wide, tokens[rest], given[rest])
  np.testing.assert_allclose(found[:, rest], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('gradient', [False, True])
def test_logits_are_never_held(gradient):
  """By what XLA sets aside: a tenth of what whole logits take, or less."""
  t, v = 1024, 65536
  arguments = jax.eval_shape(lambda: draw(t, v))

  def memory(function):
    total = lambda *a: sum(map(jnp.sum, function(*a)))  # noqa: E731
    run = jax.jit(jax.grad(total, (0, 1)) if gradient else function)
    compiled = run.lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  ours = lambda *a: ops.token_logprob(*a, implementation='reference')  # noqa: E731
  assert memory(by_hand) >= 4 * t * v
  assert memory(ours) <= memory(by_hand) / 10


def draw_kept(tokens, v, most=6):
  """Ids [T, most] with the token among them; every third row keeps all."""
  rng = np.random.default_rng(1)
  t = len(tokens)
  kept, inside = np.full((t, most), -1), np.zeros((t, v), bool)
  for row in range(t):
    ids = [*rng.permutation(v)[: row % most], int(tokens[row])]
    if row % 3 == 2:
      inside[row] = True
    else:
      kept[row, : len(ids)] = rng.permutation(ids)
      inside[row, ids] = True
  kept[0, 1] = kept[0, 0]  # one twice
  return jnp.asarray(kept), jnp.asarray(inside)


@pytest.mark.parametrize('name', NAMES)
def test_kept_ids(name, monkeypatch):
  """Values and gradients; ids and bits alike; rows that keep all as without."""
  monkeypatch.setattr(reference, 'CHUNK', 192)
  hidden, unembed, tokens, temperatures = draw(70)
  kept, inside = draw_kept(tokens, 320)
  weights = jnp.cos(jnp.arange(70.0)), jnp.sin(jnp.arange(70.0))

  def ours(hidden, unembed, kept):
    return ops.token_logprob(
      hidden, unembed, tokens, temperatures, kept=kept, implementation=name
    )

  def loss(function, last):
    def weighed(hidden, unembed):
      found = function(hidden, unembed, last)
      return sum(map(jnp.vdot, weights, found)), found

    return jax.value_and_grad(weighed, (0, 1), has_aux=True)

  plain = lambda *a: by_hand(a[0], a[1], tokens, temperatures, a[2])  # noqa: E731
  (_, found), gots = loss(ours, kept)(hidden, unembed)
  wide = hidden.astype(jnp.float32), unembed.astype(jnp.float32)
  (_, want), wants = loss(plain, inside)(*wide)
  for got, exact in zip(found, want, strict=True):
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
  for got, exact in zip(gots, wants, strict=True):
    off = np.linalg.norm(np.asarray(got, np.float32) - exact)
    assert off <= 4e-3 * np.linalg.norm(exact)
  packed = np.stack(ours(hidden, unembed, jnp.packbits(inside, axis=1)))
  np.testing.assert_array_equal(packed, ours(hidden, unembed, kept))
  whole = np.stack(ours(hidden, unembed, None))[:, 2::3]
  if name == 'reference':  # which XLA compiles anew
    np.testing.assert_allclose(packed[:, 2::3], whole, rtol=1e-5, atol=1e-5)
  else:
    np.testing.assert_array_equal(packed[:, 2::3], whole)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=20)
@hypothesis.given(
  v=st.integers(1, 200),
  rows=st.lists(
    st.lists(st.integers(0, 199), min_size=1, max_size=9),
    min_size=1,
    max_size=3,
  ),
)
def test_words_of_what_is_kept(v, rows):
  kept = np.full((len(rows), 9), -1)
  inside = np.zeros((len(rows), v), bool)
  for i, ids in enumerate(rows):
    ids = [number % v for number in ids]
    kept[i, : len(ids)] = ids
    inside[i, ids] = True
  for given in (kept, np.packbits(inside, axis=1)):
    words = np.asarray(reference.kept_words(jnp.asarray(given), v))
    found = np.unpackbits(words.view(np.uint8), axis=1, bitorder='little')
    np.testing.assert_array_equal(found[:, :v], inside)
    assert not found[:, v:].any()


@needs_interpreter
@hypothesis.settings(
  max_examples=2,
  deadline=None,
  derandomize=True,
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(
  t=st.integers(1, 100),
  rows=st.integers(1, 100),
  tiles=st.sampled_from(
    [gpu.TILES, gpu.matmul.Tiles(consumers=1, stages=2, panel=1)]
  ),
)
def test_bits_depend_on_the_row_alone(t, rows, tiles):
  # Sums of such products are exact. The CPU's own matmul, which stands for the
  # tensor core here, adds a row in an order that depends on its place.
  hidden, unembed, tokens, temperatures = draw(t, v=600)
  hidden, unembed = (jnp.round(4 * a) / 4 for a in (hidden, unembed))
  arguments = hidden, unembed, tokens, temperatures
  want = np.stack(gpu.statistics(*arguments, interpret=True))
  kept = np.random.default_rng(rows).permutation(t)[:rows]
  got = np.stack(
    gpu.statistics(
      hidden[kept],
      unembed,
      tokens[kept],
      temperatures[kept],
      tiles=tiles,
      waves=1,  # two launches, or three
      interpret=True,
    )
  )
  np.testing.assert_array_equal(
    got.view(np.int32), want[:, kept].view(np.int32)
  )


# Rows of one consumer and of two, that are no whole eight, and no whole tile; of
# the last block of the vocabulary there is one piece.
@needs_interpreter
@pytest.mark.parametrize(
  't, apart',  # 128 are stored from registers
  [(70, False), (5, False), (128, False), (70, True), (5, True)],
)
def test_one_pass_has_the_bits_of_two(t, apart):
  """Logits and logprobs at once, and once more over what is kept."""
  v = 320
  hidden, unembed, tokens, temperatures = draw(t, v)
  hidden, unembed = (jnp.round(4 * a) / 4 for a in (hidden, unembed))
  kept, inside = draw_kept(tokens, v)
  name = {'implementation': 'gpu_interpret'}
  cut = gpu_scored.cut_for(t, hidden.shape[1], v)
  assert cut.apart  # of so few columns
  cut = None if apart else dataclasses.replace(cut, apart=False)
  found = ops.Scored(
    *gpu_scored.scored(hidden, unembed, temperatures, cut=cut, interpret=True)
  )
  z = hidden.astype(jnp.float32) @ unembed.astype(jnp.float32)  # exact
  np.testing.assert_array_equal(found.logits, z * (1 / temperatures)[:, None])
  want = ops.token_logprob(hidden, unembed, tokens, temperatures, **name)
  np.testing.assert_array_equal(
    np.stack([found.logprob(tokens), found.entropy]).view(np.int32),
    np.stack(want).view(np.int32),
  )
  if t != 70 or apart:
    return
  bits = jnp.packbits(inside, axis=1)
  over = ops.renormalised(found, bits, **name)
  want = ops.token_logprob(
    *(hidden, unembed, tokens, temperatures), kept=kept, **name
  )
  np.testing.assert_array_equal(
    np.stack([over.logprob(tokens), over.entropy]).view(np.int32),
    np.stack(want).view(np.int32),
  )
  with pytest.raises(ValueError, match='40 bytes a row'):
    ops.renormalised(found, bits[:, 1:], **name)


def test_tunings_of_one_pass(monkeypatch):
  tuned = {'scored few 576': {'stages': 5, 'slots': 1, 'direct': True}}
  monkeypatch.setattr(gpu_scored.dispatch, 'tuning', {gpu.NAME: tuned}.get)
  cut = gpu_scored.cut_for(16, 576, 49152)
  assert (cut.tiles.stages, cut.tiles.slots, cut.direct) == (5, 1, True)
  assert not gpu_scored.cut_for(16, 2048, 49152).direct
  assert gpu_scored.cut_for(65, 576, 49152).tiles.consumers == 2
  assert [gpu_scored.cut_for(t, 576, 49152).direct for t in (128, 200)] == [
    True,
    False,
  ]
  # Of 132 multiprocessors, half had a block of these 66 and not of these 67; as
  # many blocks of fewer columns are of more rows.
  half = 66 * gpu.BLOCK
  assert gpu_scored.cut_for(64, 576, half).apart
  assert not gpu_scored.cut_for(64, 576, half + 64).apart
  assert gpu_scored.cut_for(65, 576, half // 2).apart
  assert not gpu_scored.cut_for(65, 576, half // 2 + 64).apart
  wide = gpu_scored.Cut(gpu.matmul.Tiles(columns=128))
  hidden, unembed, _, temperatures = draw(3)
  with pytest.raises(ValueError, match='columns must be 256'):
    gpu_scored.scored(hidden, unembed, temperatures, cut=wide)


def test_renormalised_by_name():
  hidden, unembed, tokens, temperatures = draw(9)
  kept, inside = draw_kept(tokens, 320)
  z = reference.logits(hidden, unembed, temperatures)
  nothing = jnp.zeros((9,), jnp.float32)
  whole = ops.Scored(z, nothing, nothing)
  want = by_hand(
    *(a.astype(jnp.float32) for a in (hidden, unembed)),
    *(tokens, temperatures, inside),
  )
  for name in (None, 'reference'):
    found = ops.renormalised(whole, kept, implementation=name)
    got = found.logprob(tokens), found.entropy
    np.testing.assert_allclose(np.stack(got), np.stack(want), atol=2e-5)
  for name, reason in (
    ('tpu_interpret', 'keeps no logits'),
    ('gpu', 'is a cpu'),
    ('cuda', 'unknown'),
  ):
    with pytest.raises(ValueError, match=reason):
      ops.renormalised(whole, kept, implementation=name)
  none = ops.Scored(z[:0], nothing[:0], nothing[:0])
  found = ops.renormalised(none, kept[:0], implementation='gpu_interpret')
  assert found.log.shape == found.entropy.shape == (0,)


def in_order(parts):
  """m, s, u [J, T] float32: merged as `gpu_merge` says, written down again."""
  most = parts[0].max(axis=0)
  total, weighed = np.zeros_like(most), np.zeros_like(most)
  for m, s, u in zip(*parts[:3], strict=True):
    shift = m - most
    factor = np.exp2(shift * np.float32(np.log2(np.e)))
    total += s * factor
    weighed += factor * (u + shift * s)
  log = np.log2(total) * np.float32(np.log(2))
  return most + log, log - weighed / total


# Blocks: fewer than lines, no multiple of them, and more than wait at once.
@pytest.mark.parametrize('blocks', [3, 65, 150])
@pytest.mark.parametrize('some', [None, 2])
def test_blocks_are_merged_in_their_order(blocks, some, monkeypatch):
  monkeypatch.setattr(gpu_merge, 'STEPS', 2)
  rng = np.random.default_rng(blocks)
  rows = 11
  parts = np.full((4, blocks, 64), np.nan, np.float32)
  parts[:, :, :rows] = rng.normal(size=(4, blocks, rows)) * 5
  parts[1] = np.abs(parts[1]) + 1
  parts[0, 1, 0] = gpu.LOWEST  # of this row and block nothing was kept
  parts[3] = np.where(np.arange(blocks)[:, None] == 2, parts[3], 0)
  given = parts[None]
  if some:  # in launches, the last of which has some blocks too many
    count = -(-blocks // some) * some
    given = np.full((4, count, 64), np.nan, np.float32)
    given[:, :blocks] = parts
    given = given.reshape(4, -1, some, 64).swapaxes(0, 1)
  given = jnp.asarray(given)
  log, entropy, chosen = gpu_merge.merged(given, blocks, rows, interpret=True)
  want = in_order(parts[:, :, :rows])
  np.testing.assert_array_equal(log, want[0])
  np.testing.assert_array_equal(entropy, want[1])
  np.testing.assert_array_equal(chosen, parts[3, 2, :rows])
  two = gpu_merge.merged(given[:, :3], blocks, rows, interpret=True)
  np.testing.assert_array_equal(two, [log, entropy])


@pytest.mark.parametrize('name', ['reference', 'tpu_interpret'])
def test_others_give_no_logits(name):
  hidden, unembed, _, temperatures = draw(3)
  assert ops.scored(hidden, unembed, temperatures, implementation=name) is None


@pytest.mark.parametrize(
  ('shape', 'kept'),
  [
    (shapes.TRAINING[0], False),
    (shapes.TRAINING[0], True),
    (shapes.DECODING[0], False),
  ],
)
def test_lowers_for_cuda(shape, kept):
  t, d, v = shape.tokens, shape.depth, shape.vocabulary
  text = mosaic.lower(
    gpu.statistics,
    jax.ShapeDtypeStruct((t, d), jnp.bfloat16),
    jax.ShapeDtypeStruct((d, v), jnp.bfloat16),
    jax.ShapeDtypeStruct((t,), jnp.int32),
    jax.ShapeDtypeStruct((t,), jnp.float32),
    jax.ShapeDtypeStruct((t, -(-v // 32)), jnp.uint32) if kept else None,
  )
  assert text.count('mosaic_gpu') >= 2


@pytest.mark.parametrize(
  'tokens, v, launches',
  [(n, shapes.DECODING[0].vocabulary, 2) for n in (5, 12, 64, 200, 256, 300)]
  + [(5, 320, 3), (12, 512, 3), (64, 512, 3), (200, 4096, 3), (300, 512, 2)],
)
def test_one_pass_lowers_for_cuda(tokens, v, launches):
  d = shapes.DECODING[0].depth
  text = mosaic.lower(
    gpu_scored.scored,
    jax.ShapeDtypeStruct((tokens, d), jnp.bfloat16),
    jax.ShapeDtypeStruct((d, v), jnp.bfloat16),
    jax.ShapeDtypeStruct((tokens,), jnp.float32),
  )
  assert text.count('custom_call @mosaic_gpu') == launches
  text = mosaic.lower(
    gpu_scored.renormalised,
    jax.ShapeDtypeStruct((tokens, v), jnp.float32),
    jax.ShapeDtypeStruct((tokens, -(-v // 32)), jnp.uint32),
  )
  assert text.count('custom_call @mosaic_gpu') == 2


@pytest.mark.parametrize('name', NAMES)
def test_no_rows(name):
  hidden, unembed, tokens, temperatures = draw(0)

  def total(hidden, unembed):
    found = ops.token_logprob(
      *(hidden, unembed, tokens, temperatures), implementation=name
    )
    return jnp.sum(jnp.stack(found))

  dhidden, dunembed = jax.grad(total, (0, 1))(hidden, unembed)
  assert dhidden.shape == hidden.shape and not dunembed.any()


def test_bad_input():
  hidden, unembed, tokens, temperatures = draw(4)

  def call(**change):
    arguments = dict(
      hidden=hidden, unembed=unembed, tokens=tokens, temperatures=temperatures
    )
    ops.token_logprob(**(arguments | change))

  for message, change in {
    'differ in D': dict(unembed=unembed.T),
    'cast one': dict(unembed=unembed.astype(jnp.float32)),
    'must be \\[T\\]': dict(tokens=tokens[:2]),
    'must be in 0..319': dict(tokens=tokens.at[1].set(320)),
    'must be above 0': dict(temperatures=temperatures.at[0].set(0)),
    'must be \\[T, J\\]': dict(kept=tokens),
    '40 bytes a row': dict(kept=jnp.zeros((4, 41), jnp.uint8)),
    'ids of int32': dict(kept=jnp.zeros((4, 2), jnp.float32)),
    'must be below 320': dict(kept=tokens[:, None].at[2].set(320)),
    'default device is a cpu': dict(implementation='gpu'),
  }.items():
    with pytest.raises(ValueError, match=message):
      call(**change)


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_on_the_device():
  rng = np.random.default_rng(0)
  t, d, v = 1000, 2048, 151936
  hidden = jnp.asarray(rng.normal(size=(t, d)), jnp.bfloat16)
  unembed = jnp.asarray(rng.normal(size=(d, v)) * 2 / d**0.5, jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, v, t), jnp.int32)
  temperatures = jnp.asarray(rng.uniform(0.3, 2, t), jnp.float32)
  found = np.stack(ops.token_logprob(hidden, unembed, tokens, temperatures))
  want = by_hand(hidden[:50], unembed, tokens[:50], temperatures[:50])
  np.testing.assert_allclose(found[:, :50], np.stack(want), rtol=2e-3)
  for rows in (1, 64, 777):
    kept = rng.permutation(t)[:rows]
    some = ops.token_logprob(
      hidden[kept], unembed, tokens[kept], temperatures[kept]
    )
    np.testing.assert_array_equal(
      np.stack(some).view(np.int32), found[:, kept].view(np.int32)
    )


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_kept_ids_on_the_device():
  rng = np.random.default_rng(0)
  t, d, v = 300, 1024, 49152
  hidden = jnp.asarray(rng.normal(size=(t, d)), jnp.bfloat16)
  unembed = jnp.asarray(rng.normal(size=(d, v)) * 2 / d**0.5, jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, v, t), jnp.int32)
  temperatures = jnp.asarray(rng.uniform(0.3, 2, t), jnp.float32)
  arguments = hidden, unembed, tokens, temperatures
  kept, inside = draw_kept(tokens, v)
  found = np.stack(ops.token_logprob(*arguments, kept=kept))
  want = by_hand(
    *(x[:50] if x is not unembed else x for x in arguments), inside[:50]
  )
  np.testing.assert_allclose(
    found[:, :50], np.stack(want), rtol=2e-3, atol=2e-3
  )
  whole = np.stack(ops.token_logprob(*arguments))
  np.testing.assert_array_equal(found[:, 2::3], whole[:, 2::3])


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
# In one pass and apart, with whole blocks and without.
@pytest.mark.parametrize('v', [151936, 8192, 512, 320, 256, 64])
@pytest.mark.parametrize('t', [16, 64, 200, 300])
def test_one_pass_on_the_device(t, v):
  rng = np.random.default_rng(t)
  d = 2048
  hidden = jnp.asarray(rng.normal(size=(t, d)), jnp.bfloat16)
  unembed = jnp.asarray(rng.normal(size=(d, v)) * 2 / d**0.5, jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, v, t), jnp.int32)
  temperatures = jnp.asarray(rng.uniform(0.3, 2, t), jnp.float32)
  arguments = hidden, unembed, tokens, temperatures
  kept, inside = draw_kept(tokens, v)
  found = ops.scored(hidden, unembed, temperatures)
  over = ops.renormalised(found, jnp.packbits(inside, axis=1))
  for got, given in ((found, None), (over, kept)):
    want = ops.token_logprob(*arguments, kept=given)
    np.testing.assert_array_equal(
      np.stack([got.logprob(tokens), got.entropy]).view(np.int32),
      np.stack(want).view(np.int32),
    )
