"""Attention: the dense and the paged form against one written key by key."""

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

H, G, K = 6, 2, 8
BLOCK = 4


def normal(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def naive(q, k, v):
  """Causal attention of one sequence: q [T, H, K], k and v [T, G, K]."""
  out = np.zeros(q.shape)
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  for t in range(len(q)):
    for h in range(H):
      g = h // (H // G)
      scores = [q[t, h] @ k[s, g] / math.sqrt(K) for s in range(t + 1)]
      weights = np.exp(np.array(scores) - max(scores))
      weights /= weights.sum()
      for s in range(t + 1):
        out[t, h] += weights[s] * v[s, g]
  return out


def make_sequences(sizes, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  return [
    (scale * normal(rng, n, H, K), normal(rng, n, G, K), normal(rng, n, G, K))
    for n in sizes
  ]


paged = jax.jit(functools.partial(attention.paged, divisor=math.sqrt(K)))
dense = jax.jit(functools.partial(attention.dense, divisor=math.sqrt(K)))


def to_pages(sequences, columns, seed=0, pages=None):
  """Rows of all sequences, and their keys over scattered pages.

  Whatever no sequence wrote is large garbage.
  """
  rng = np.random.default_rng(seed)
  pages = pages or len(sequences) * columns
  tables = rng.permutation(pages)[: len(sequences) * columns]
  tables = tables.reshape(len(sequences), columns).astype(np.int32)
  stores = [1e3 * normal(rng, pages, BLOCK, G, K) for _ in range(2)]
  for table, (_, *written) in zip(tables, sequences, strict=True):
    for store, values in zip(stores, written, strict=True):
      for t, value in enumerate(values):
        store[table[t // BLOCK], t % BLOCK] = value
  sizes = [len(q) for q, _, _ in sequences]
  return (
    np.concatenate([q for q, _, _ in sequences]),
    np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]),
    np.repeat(tables, sizes, axis=0),
    *stores,
  )


@pytest.mark.parametrize('scale', (1.0, 30.0))
def test_dense_over_packed_segments(scale):
  sizes = (5, 7, 1, 10)
  sequences = make_sequences(sizes, scale=scale)
  arrays = [np.zeros((2, 14, h, K), np.float32) for h in (H, G, G)]
  ids, positions = np.zeros((2, 2, 14), np.int32)
  places = ((0, 0), (0, 5), (0, 12), (1, 3))
  for i, ((row, start), sequence) in enumerate(
    zip(places, sequences, strict=True)
  ):
    span = (row, slice(start, start + sizes[i]))
    ids[span], positions[span] = i + 1, np.arange(sizes[i])
    for array, values in zip(arrays, sequence, strict=True):
      array[span] = values
  out = np.asarray(dense(*arrays, ids, positions))
  assert np.all(np.isfinite(out))
  for i, (row, start) in enumerate(places):
    got = out[row, start : start + sizes[i]]
    np.testing.assert_allclose(got, naive(*sequences[i]), atol=2e-5)


@pytest.mark.parametrize('scale', (1.0, 30.0))
def test_paged(scale):
  sequences = make_sequences((1, 4, 5, 17), scale=scale)
  out = np.asarray(paged(*to_pages(sequences, 5)))
  want = np.concatenate([naive(*s) for s in sequences])
  np.testing.assert_allclose(out, want, atol=2e-5)


def test_blocks_beyond_a_position_change_no_bit():
  """Neither garbage in them, nor how many a neighbour makes the loop visit."""
  short, long = make_sequences((6, 39))
  rows, positions, table, keys, values = to_pages([short, long], 10)
  alone = [a[:6] for a in (rows, positions, table)]
  want = np.asarray(paged(*alone, keys, values))
  np.testing.assert_array_equal(
    paged(rows, positions, table, keys, values)[:6], want
  )
  for garbage in (0.0, -1e30, 1e30):
    other_keys, other_values = keys.copy(), values.copy()
    for page in table[0, 2:]:
      other_keys[page], other_values[page] = garbage, garbage
    for store in (other_keys, other_values):  # the block's own later tokens
      store[table[0, 1], 2:] = garbage
    got = paged(rows, positions, table, other_keys, other_values)[:6]
    np.testing.assert_array_equal(got, want)


def test_where_pages_lie_changes_no_bit():
  sequences = make_sequences((6, 19, 30))
  want = paged(*to_pages(sequences, 8))
  for seed in (1, 2):
    np.testing.assert_array_equal(paged(*to_pages(sequences, 8, seed)), want)
  wider = paged(*to_pages(sequences, 12, 3, pages=99))
  np.testing.assert_array_equal(wider, want)


@pytest.mark.parametrize('form', ('dense', 'paged'))
def test_values_that_are_part_of_the_keys(form):
  """`width` numbers of a key stand for its value, as if they were given."""
  width = 5
  sequences = make_sequences((4, 9, 13))
  if form == 'paged':
    rows, positions, table, keys, _ = to_pages(sequences, 4)
    fn = jax.jit(attention.paged, static_argnames=('divisor', 'width'))
    want = fn(rows, positions, table, keys, keys[..., :width], divisor=2.0)
    got = fn(rows, positions, table, keys, None, divisor=2.0, width=width)
  else:
    (q, k, _), fn = sequences[2], attention.dense
    t = len(q)
    where = np.ones((1, t), np.int32), np.arange(t, dtype=np.int32)[None]
    want = fn(q[None], k[None], k[None, ..., :width], *where, divisor=2.0)
    got = fn(q[None], k[None], None, *where, divisor=2.0, width=width)
  assert got.shape[-1] == width
  np.testing.assert_array_equal(got, want)


def test_products_in_bfloat16_are_added_in_float32():
  """4097 equal keys: a sum in bfloat16 would stop at 256."""
  count = 4097
  pages = -(-count // BLOCK)
  keys = jnp.ones((pages, BLOCK, 1, K), jnp.bfloat16)
  rows = jnp.ones((2, 1, K), jnp.bfloat16)
  table = np.tile(np.arange(pages, dtype=np.int32), (2, 1))
  out = paged(rows, np.full(2, count - 1, np.int32), table, keys, 3 * keys)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(out, np.float32), 3.0)


@pytest.mark.parametrize('qk_norm', (False, True))
def test_project_and_combine(qk_norm):
  """Queries and keys are normalised rows, projected and rotated; values not."""
  config = config_lib.ModelConfig(
    width=12, heads=H, kv_heads=G, head_dim=K, qk_norm=qk_norm
  )
  p = jax.tree.map(
    lambda x: x[0],
    params_lib.init(attention.spec(config, 1), jax.random.key(0)),
  )
  rng = np.random.default_rng(0)
  for name in [n for n in p if n.endswith('norm')]:
    p[name] = jnp.asarray(1 + 0.3 * normal(rng, *p[name].shape))
  x, positions = normal(rng, 5, 12), np.array([0, 3, 9, 1, 50])
  cos, sin = (jnp.asarray(a)[positions] for a in layers.rope_table(config, 64))
  q, k, v = attention.project(p, config, 'expanded', jnp.asarray(x), cos, sin)
  wide = np.asarray(x, np.float64)

  def norm(x, scale):
    mean = np.mean(x**2, -1, keepdims=True)
    return x / np.sqrt(mean + 1e-5) * np.asarray(scale, np.float64)

  y, w = norm(wide, p['norm']), np.asarray(p['qkv'], np.float64)
  rates = 10_000.0 ** (-2 * np.arange(K // 2) / K)

  def head(h, turn):
    z = y @ w[:, h]
    if turn and qk_norm:
      z = norm(z, p['q_norm' if h < H else 'k_norm'])
    z = z[:, : K // 2] + 1j * z[:, K // 2 :]
    z = z * np.exp(1j * positions[:, None] * rates) if turn else z
    return np.concatenate([z.real, z.imag], -1)

  for got, heads, turn in (
    (q, range(H), True),
    (k, range(H, H + G), True),
    (v, range(H + G, H + 2 * G), False),
  ):
    want = np.stack([head(h, turn) for h in heads], 1)
    np.testing.assert_allclose(got, want, atol=1e-5)
  out = attention.combine_heads(p, config, 'expanded', jnp.asarray(x), q)
  want = wide + sum(
    np.asarray(q, np.float64)[:, h] @ np.asarray(p['out'], np.float64)[h]
    for h in range(H)
  )
  np.testing.assert_allclose(out, want, atol=1e-5)


def test_the_oracle_is_causal():
  """The naive form itself: a later token changes no earlier row."""
  (sequence,) = make_sequences((9,))
  cut = functools.partial(jax.tree.map, lambda a: a[:5])
  np.testing.assert_array_equal(naive(*sequence)[:5], naive(*cut(sequence)))
