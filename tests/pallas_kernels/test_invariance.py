"""The bits of a row depend on the row alone, for each operation on the token path.

Batches are few static sizes, so that little is compiled; what is in them is drawn:
which rows, in which order, how often, beside which others, of which numbers. Some
of the others are NaN. `attention` has its own such test, in `test_attention`.

Sums that a kernel orders itself are of numbers that round at every step. What is
the tensor core's on a device, 16 products at once, is a matmul of the CPU here,
which adds by the place of a row: these sums are exact, by `stepped` numbers.
"""

import dataclasses
import functools

import hypothesis
from hypothesis import strategies as st
from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import norm
from pallas_kernels import paged_attention
from pallas_kernels import quantize
from pallas_kernels import route
from pallas_kernels import token_logprob
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul import gpu_few

ALL = ('reference', 'gpu_interpret', 'tpu_interpret')  # of lanes: on any jax
MANY, ROWS = 140, 35  # more than a tile of a product; and of others
SEEDS = st.integers(0, 99)


def examples(count):
  return hypothesis.settings(
    max_examples=count,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
  )


@dataclasses.dataclass(frozen=True)
class Batch:
  """Rows of a larger one, in another order; what stands in some is NaN."""

  rows: np.ndarray
  hurt: np.ndarray

  def of(self, array):
    taken = array[self.rows]
    if not jnp.issubdtype(array.dtype, jnp.floating):
      return taken
    hurt = self.hurt.reshape(-1, *[1] * (array.ndim - 1))
    return np.where(hurt, np.asarray(np.nan, array.dtype), taken)

  def check(self, found, whole):
    """Equal bits of all rows that are not hurt."""
    for one, other in zip(found, whole, strict=True):
      assert one.shape == (len(self.rows), *other.shape[1:])
      np.testing.assert_array_equal(
        bits(one)[~self.hurt], bits(other)[self.rows[~self.hurt]]
      )


@st.composite
def batches(draw, rows, *sizes):
  count = draw(st.sampled_from([*sizes, rows]))
  some = st.lists(st.integers(0, rows - 1), min_size=count, max_size=count)
  hurt = draw(st.lists(st.booleans(), min_size=count, max_size=count))
  hurt[draw(st.integers(0, count - 1))] = False
  return Batch(np.asarray(draw(some)), np.asarray(hurt))


def of_lanes(name):
  """Batches of kernels that are not compiled where they are interpreted."""
  return batches(ROWS, 1, *((2, 6, 31) if name == 'gpu_interpret' else ()))


def bits(array):
  array = np.asarray(array)
  return array.view(f'uint{8 * array.dtype.itemsize}')


def normal(rng, *shape, dtype=np.float32):
  return rng.normal(size=shape).astype(dtype)


# --- Products ----------------------------------------------------------------


def stepped(rng, step, groups, *columns, rows=MANY):
  """x [rows, 4 step], w [groups, 4 step, *columns], bfloat16.

  16 products of each step are not 0, and their sum is exact. The steps add up to
  ((P + s) - P) + t, where s loses its last bits beside P, and t does not: another
  order, or a partial sum of some of the steps, has other bits.
  """
  x = np.zeros((rows, 4 * step), np.float32)
  w = rng.integers(-15, 16, (groups, 4 * step, *columns)).astype(np.float32)
  first = 16 * rng.integers(0, step // 16, 4) + step * np.arange(4)
  for start, size in zip(first, (2.0**21, 1, 0, 1), strict=True):
    x[:, start : start + 16] = size * rng.integers(-15, 16, (rows, 16))
  large, less = (slice(start, start + 16) for start in (first[0], first[2]))
  x[:, less], w[:, less] = -x[:, large], w[:, large]
  return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)


STEPS = {'tpu_interpret': 512, 'gpu_interpret': 128}
TILES = (
  gpu.Tiles(consumers=1, columns=64, stages=2),
  gpu.Tiles(columns=64, depth=128, stages=3, panel=1),
  gpu_few.Few(columns=16, depth=16, stages=3),
  gpu_few.Few(columns=64, depth=128, stages=2),
)


@functools.cache
def product(name, tiles):
  return jax.jit(
    functools.partial(matmul.matmul, implementation=name, tiles=tiles)
  )


@pytest.mark.parametrize('name', NAMES[1:])
@examples(6)
@hypothesis.given(
  batch=batches(MANY, 1), tiles=st.sampled_from(TILES), seed=SEEDS
)
def test_matmul(name, batch, tiles, seed):
  x, w = stepped(np.random.default_rng(seed), STEPS[name], 1, 64)
  own = name == 'gpu_interpret'
  whole = product(name, TILES[0] if own else None)(x, w[0])
  some = product(name, tiles if own else None)(batch.of(x), w[0])
  batch.check([some], [whole])


@functools.cache
def grouped(name, gated, tiles):
  return jax.jit(
    functools.partial(
      grouped_matmul.grouped_matmul,
      gated=gated,
      implementation=name,
      tiles=tiles,
    )
  )


@pytest.mark.parametrize(
  ('name', 'gated'),
  [('tpu_interpret', False)]
  + [
    pytest.param('gpu_interpret', gated, marks=needs_interpreter)
    for gated in (False, True)
  ],
)
@examples(6)
@hypothesis.given(
  batch=batches(MANY, 1),
  ends=st.lists(st.integers(0, MANY), min_size=2, max_size=2),
  seed=SEEDS,
)
def test_grouped_matmul(name, gated, batch, ends, seed):
  """In whichever order the rows of a group are, and beside whatever groups."""
  columns = (2, 64) if gated else (64,)
  x, w = stepped(np.random.default_rng(seed), STEPS[name], 3, *columns)
  sizes = np.diff([0, *sorted(ends), MANY])
  owner = np.repeat(np.arange(3), sizes)
  by_group = np.argsort(owner[batch.rows], kind='stable')
  batch = Batch(batch.rows[by_group], batch.hurt[by_group])
  tiles = some = None
  if name == 'gpu_interpret':
    tiles = gpu.Tiles(consumers=1, columns=128, stages=2)
    some = gpu.Tiles(columns=128, depth=128, stages=2, panel=1)
  whole = grouped(name, gated, tiles)(x, w, sizes)
  sizes = np.bincount(owner[batch.rows], minlength=3)
  batch.check([grouped(name, gated, some)(batch.of(x), w, sizes)], [whole])


@functools.cache
def scored(name):
  return jax.jit(
    functools.partial(token_logprob.token_logprob, implementation=name)
  )


@pytest.mark.parametrize('name', NAMES[1:])
@examples(6)
@hypothesis.given(batch=batches(MANY, 100), seed=SEEDS)
def test_token_logprob(name, batch, seed):
  """Over three blocks of the vocabulary, of which some rows keep a part."""
  rng = np.random.default_rng(seed)
  v = 1088
  hidden = np.round(4 * normal(rng, MANY, 64)).astype(jnp.bfloat16)
  unembed = (np.round(4 * normal(rng, 64, v)) / 64).astype(jnp.bfloat16)
  inside = rng.random((MANY, v)) < rng.choice([0.01, 0.5, 1], (MANY, 1))
  tokens = rng.integers(0, v, MANY)
  inside[np.arange(MANY), tokens] = True
  rows = hidden, tokens.astype(np.int32)
  rows += (rng.uniform(0.3, 2, MANY).astype(np.float32),)
  rows += (np.packbits(inside, axis=1),)

  def run(hidden, tokens, temperatures, kept):
    return scored(name)(hidden, unembed, tokens, temperatures, kept=kept)

  batch.check(run(*map(batch.of, rows)), run(*rows))


# --- Rows by themselves ------------------------------------------------------


@functools.cache
def normed(name):
  def both(x, more, scale):
    run = dict(implementation=name)
    return norm.rms_norm(x, scale, **run), *norm.add_rms_norm(
      x, more, scale, **run
    )

  return jax.jit(both)


@pytest.mark.parametrize(
  ('name', 'depth'),
  # By 8, 16 and 32 lanes, some of which have no last vector.
  [('gpu_interpret', depth) for depth in (36, 100, 260)]
  # As plain code, XLA reduces one row otherwise than many.
  + [('tpu_interpret', 260)]
  # By a warpgroup.
  + [pytest.param('gpu_interpret', 77, marks=needs_interpreter)],
)
@examples(6)
@hypothesis.given(data=st.data(), seed=SEEDS)
def test_norm(name, depth, data, seed):
  rng = np.random.default_rng(seed)
  rows = normal(rng, ROWS, depth), normal(rng, ROWS, depth)
  scale = normal(rng, depth)
  run, batch = normed(name), data.draw(of_lanes(name))
  batch.check(run(*map(batch.of, rows), scale), run(*rows, scale))


E = 64
ROUTERS = {
  'softmax': route.Router(3, kind='softmax', scale=2.827),
  'groups': route.Router(5, groups=2, top_groups=1),
}


@functools.cache
def routed(name, router):
  def run(logits, replay, bias):
    run = dict(implementation=name)
    careful = dataclasses.replace(router, plausibility=0.8)
    audited = route.route(logits, bias, careful, replay, audit=True, **run)
    if name != 'gpu_interpret':  # only there is a replay another kernel
      return audited
    given = route.route(logits, bias, router, replay, **run)
    return *audited, *given[:2]

  return jax.jit(run)


@pytest.mark.parametrize('case', ROUTERS)
@pytest.mark.parametrize('name', ALL)
@examples(6)
@hypothesis.given(data=st.data(), ties=st.booleans(), seed=SEEDS)
def test_route(name, case, data, ties, seed):
  """Replayed and audited; where experts are unknown, native."""
  rng, router = np.random.default_rng(seed), ROUTERS[case]
  logits = 2 * normal(rng, ROWS, E)
  logits = np.round(logits) if ties else logits
  bias = np.float32(0.1) * normal(rng, E)
  replay = rng.permuted(np.tile(np.arange(E), (ROWS, 1)), axis=1)[:, : router.k]
  replay[::3, -1] = -1
  rows = logits, replay.astype(np.int16)
  run, batch = routed(name, router), data.draw(of_lanes(name))
  batch.check(run(*map(batch.of, rows), bias), run(*rows, bias))


@functools.cache
def sorted_by(name, count):
  return jax.jit(
    functools.partial(route.order, count=count, implementation=name)
  )


@pytest.mark.parametrize('name', ALL)
@examples(6)
@hypothesis.given(data=st.data(), used=st.integers(1, 70), seed=SEEDS)
def test_order(name, data, used, seed):
  """Slots of an expert stay as they came, beside whatever others there are."""
  rows = data.draw(of_lanes(name)).rows
  experts = np.random.default_rng(seed).integers(0, used, (ROWS, 5))[rows]
  slots, places, sizes = sorted_by(name, 70)(experts.astype(np.int32))
  flat = experts.reshape(-1)
  np.testing.assert_array_equal(slots, np.argsort(flat, kind='stable'))
  np.testing.assert_array_equal(places, np.argsort(slots))
  np.testing.assert_array_equal(sizes, np.bincount(flat, minlength=70))


@functools.cache
def rounded(name):
  return jax.jit(
    lambda x: (
      *quantize.nvfp4(x, implementation=name),
      *quantize.mxfp8(x, implementation=name),
    )
  )


@pytest.mark.parametrize('name', ALL)
@examples(6)
@hypothesis.given(data=st.data(), seed=SEEDS)
def test_quantize(name, data, seed):
  """By row: a square of `fp8`, like `outer='all'`, is of many."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(ROWS, 96)) * np.exp(3 * rng.normal(size=(ROWS, 1)))
  x[rng.integers(ROWS)], x[rng.integers(ROWS), :16] = 0, 0
  lanes = name == 'gpu_interpret'
  x = x.astype(jnp.bfloat16 if lanes and seed % 2 else np.float32)
  run, batch = rounded(name), data.draw(of_lanes(name))
  batch.check(run(batch.of(x)), run(x))


# --- Pages -------------------------------------------------------------------

PAGE, PAGES, CUT = 64, 3, 6
# Heads of queries and of keys, numbers of a key and of a value.
HEADS = {'grouped': (4, 2, 128, 128), 'absorbed': (2, 1, 576, 512)}


@functools.cache
def attends(name, heads):
  """`paged_attention`, and `decode`."""
  _, _, key, width = HEADS[heads]
  run = dict(scale=2 * key**-0.5, implementation=name)
  run['width'] = width if heads == 'absorbed' else 0
  return (
    jax.jit(functools.partial(paged_attention.paged_attention, **run)),
    jax.jit(functools.partial(paged_attention.decode, fused=True, **run)),
  )


def paged(rng, keys, values):
  """Pages in some order, some of nobody, and the table.

  Args:
    rng: of the order, and of what is nobody's.
    keys: [N, PAGES * PAGE, G, K].
    values: [N, PAGES * PAGE, G, W], or None.
  """
  n = len(keys)
  count = n * PAGES + 2
  table = rng.permutation(count)[: n * PAGES]

  def pages(x):
    if x is None:
      return None
    out = rng.normal(size=(count, PAGE, *x.shape[2:])) * 9
    out[table] = x.reshape(n * PAGES, PAGE, *x.shape[2:])
    return out.astype(x.dtype)

  table = table.astype(np.int32)
  return pages(keys), pages(values), table.reshape(n, PAGES)


def several(run, rng, sequences, start):
  """[N, CUT, H, W] of the queries from `start` [N] on; 0 before the first."""
  q, k, v = sequences
  place = start[:, None] + np.arange(CUT)[None]
  own = np.arange(len(q))[:, None], np.maximum(place, 0)
  place = np.maximum(place, -1).astype(np.int32)
  return bits(run(q[own], *paged(rng, k, v), place))


def newest(run, rng, sequences, at):
  """[1, H, W] of the query at `at` of one sequence, whose key comes with it."""
  q, k, v = sequences
  k_pages, v_pages, table = paged(rng, k, v)
  for pages in (k_pages, v_pages):
    if pages is not None:
      pages[table[0, at // PAGE], at % PAGE] = 5
  now = [None if x is None else x[:, at] for x in (q, k, v)]
  place = np.asarray([at], np.int32)
  return bits(run(*now, k_pages, v_pages, table, place)[0])


@pytest.mark.parametrize(
  ('name', 'heads'),
  # With `grouped` heads, the first two are in `test_attention`.
  [('reference', 'absorbed'), ('tpu_interpret', 'absorbed')]
  + [
    pytest.param('gpu_interpret', heads, marks=needs_interpreter)
    for heads in HEADS
  ],
)
@examples(3)
@hypothesis.given(
  first=st.lists(
    st.integers(-CUT, PAGE * PAGES - 2 * CUT), min_size=3, max_size=3
  ),
  later=st.integers(0, CUT - 1),
  order=st.permutations(range(3)),
  absent=st.booleans(),
  seed=SEEDS,
)
def test_paged_attention(name, heads, first, later, order, absent, seed):
  """Cut elsewhere, in other pages, beside other sequences, and decoded."""
  rng = np.random.default_rng(seed)
  h, g, key, width = HEADS[heads]
  sizes = (h, key), (g, key), (g, width)
  sequences = [
    normal(rng, 3, PAGE * PAGES, *size, dtype=jnp.bfloat16) for size in sizes
  ]
  if heads == 'absorbed':
    sequences[2] = None
  if (name, heads) == ('gpu_interpret', 'absorbed'):
    # Scores are exact, and so are sums of a block: weights of 8 bits are within
    # 2^-8 of each other.
    q, k = (rng.integers(-1, 2, x.shape) for x in sequences[:2])
    q *= rng.random(q.shape) < 0.25
    sequences = [x.astype(jnp.bfloat16) for x in (q, k)] + [None]

  def of(rows):
    return [None if x is None else x[rows] for x in sequences]

  run, decode = attends(name, heads)
  start, order = np.asarray(first), np.asarray(order)
  whole = several(run, rng, sequences, start)
  moved = start + later
  moved[order[1]] = -CUT if absent else moved[order[1]]
  some = several(run, rng, of(order), moved[order])
  for found, row in zip(some, order, strict=True):
    if absent and row == order[1]:
      assert not found.any()
    else:  # what is in both: the first of one, the last of the other
      np.testing.assert_array_equal(found[: CUT - later], whole[row, later:])
  row = order[0]
  at = max(start[row], 0) + later
  if at < start[row] + CUT:
    found = newest(decode, rng, of([row]), at)
    np.testing.assert_array_equal(found[0], whole[row, at - start[row]])
