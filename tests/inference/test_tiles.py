"""Prompts in tiles: how steps are laid out, and that it changes no answer.

The whole engine runs, but its two programs are a device of the test's own: it
keeps tokens in pages for keys and values, and what a row draws is a number made
of all it sees by its table. So an answer is right only if every row had its
token, position, slot and pages, at the right time, and each result was recorded
where it belongs. The same of the model itself, by interpreted kernels, stands
at the end.
"""

import asyncio
import dataclasses
import functools
import zlib

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.inference import batches
from composer.inference import engine as engine_lib
from composer.inference import planning
from composer.inference import programs
from composer.inference import sampling
from composer.inference import sequence as sequence_lib
from composer.model import layers
from composer.model import presets
from composer.model import transformer
from pallas_kernels import dispatch

MODEL = dataclasses.replace(presets.TINY, vocab_size=50)
TILED = config_lib.NumericsConfig(
  mode='fast', kv_block=32, kernels='reference', moe='sorted'
)
CONFIG = config_lib.EngineConfig(
  rows=200, sequences=6, pages=80, max_context=640, run_ahead=3
)
TILE = transformer.TILE
SECONDS = 60.0


def drawn(context, seed):
  """What the test's device draws behind a context."""
  data = np.asarray([seed, len(context), *context], np.int64).tobytes()
  return zlib.crc32(data) % MODEL.vocab_size


def expected(request):
  """The answer to a request by itself."""
  context = request.tokens.tolist()
  for _ in range(request.max_tokens):
    context.append(drawn(context, request.seed))
    if context[-1] in request.stop_tokens:
      break
  return context[len(request.tokens) :]


class Device:
  """`programs.mixed` and `ahead` in numpy; notes what each mixed step was of."""

  def __init__(self, monkeypatch, numerics, config):
    self.numerics, self.config = numerics, config
    shape = config.pages, numerics.kv_block
    self.pages = np.full(shape, -1)
    self.steps = []
    monkeypatch.setattr(programs, 'mixed', self.mixed)
    monkeypatch.setattr(programs, 'ahead', self.ahead)

  def _row(self, table, position, token):
    block = self.numerics.kv_block
    self.pages[table[position // block], position % block] = token

  def _seen(self, table, position):
    block = self.numerics.kv_block
    seen = self.pages[table[: position // block + 1]].reshape(-1)
    return seen[: position + 1].tolist()

  def _routes(self, tokens):
    shape = len(tokens), MODEL.layers, MODEL.experts_per_token
    return np.broadcast_to(tokens[:, None, None], shape).astype(np.int16)

  def mixed(
    self, model, numerics, params, cache, last, rows, which, into, *rest
  ):
    draws, cuts = rest
    assert cuts is None
    last = np.array(last)
    of = transformer.sequences_of(len(rows.tokens), len(rows.slots))
    of = np.arange(len(rows.tokens)) if of is None else of
    slots = rows.slots[of]
    self._check(rows, of)
    tokens = np.where(rows.tokens < 0, last[slots], rows.tokens)
    nobody = self.config.sequences
    for slot, position, token in zip(
      slots, rows.positions, tokens, strict=True
    ):
      if slot != nobody and position >= 0:
        self._row(rows.tables[slot], position, token)
    answers = np.zeros(len(which), np.int32)
    for n, (row, slot, seed) in enumerate(
      zip(which, into, draws.seeds, strict=True)
    ):
      if slot != nobody:
        assert slots[row] == slot
        position = rows.positions[row]
        context = self._seen(rows.tables[slot], position)
        answers[n] = last[slot] = drawn(context, int(seed))
    answer = sampling.Answer(answers[None], -answers[None] / 8, None)
    sampled = programs.Sampled(answer, self._routes(tokens)[None])
    return jax.tree.map(jnp.asarray, (sampled, cache, last))

  def _check(self, rows, of):
    numerics, config, n = self.numerics, self.config, len(rows.tokens)
    assert n in programs.step_sizes(numerics, config)
    tiles = programs.tiles_of(numerics, config, n)
    alone = n - TILE * tiles
    assert np.all(rows.positions[:alone] >= 0)
    in_tiles = rows.positions[alone:].reshape(tiles, TILE)
    for tile in in_tiles:
      real = tile >= 0
      # At an absolute multiple of the rows, without holes.
      np.testing.assert_array_equal(
        tile[real] % TILE, np.flatnonzero(real), 'a tile is anchored'
      )
      assert len(set(tile[real] // TILE)) <= 1
      assert np.all(np.diff(np.flatnonzero(real)) == 1)
    self.steps.append((rows, alone, tiles))

  def ahead(self, model, numerics, steps, params, cache, last, rows, *rest):
    ends, draws, _ = rest
    last, nobody = np.array(last), self.config.sequences
    answers = np.zeros((steps, len(ends)), np.int32)
    routes = np.zeros((steps, len(ends)), np.int64)
    for n, slot in enumerate(rows.slots):
      if slot == nobody:
        continue
      token, table = rows.tokens[n], rows.tables[slot]
      token = last[slot] if token < 0 else token
      for step in range(ends[n] - rows.positions[n]):
        position = rows.positions[n] + step
        self._row(table, position, token)
        routes[step, n] = token
        context = self._seen(table, position)
        token = answers[step, n] = drawn(context, int(draws.seeds[n]))
      last[slot] = token
    answer = sampling.Answer(answers, -answers / 8, None)
    routes = np.stack([self._routes(r) for r in routes])
    sampled = programs.Sampled(answer, routes)
    return jax.tree.map(jnp.asarray, (sampled, cache, last))


def serve(config, arrivals, numerics=TILED, pages=None):
  """(answers, stats, the device) of requests in waves, each a list."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    device = Device(monkeypatch, numerics, config)
    engine = engine_lib.Engine(MODEL, numerics, config)
    if pages is not None:
      engine._pool.allocate(config.pages - 1 - pages)
    try:
      engine.activate(0, {})

      async def go():
        tasks = []
        for wave in arrivals:
          tasks += [asyncio.create_task(engine.sample(r)) for r in wave]
          await asyncio.sleep(0.002)
        return await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

      return asyncio.run(go()), engine.stats, device
    finally:
      engine.close()


def assert_right(requests, answers):
  for request, answer in zip(requests, answers, strict=True):
    want = expected(request)
    assert answer.tokens.tolist() == want
    np.testing.assert_array_equal(answer.logprobs, -np.asarray(want) / 8)
    context = [*request.tokens.tolist(), *want]
    # Routes are those of the row that read the token; the last was never read.
    np.testing.assert_array_equal(answer.experts[:-1, 0, 0], context[:-1])


def prompts(sizes, max_tokens=5, seed=0, stop=()):
  """Half of them begin alike, so that later ones find pages."""
  rng = np.random.default_rng(seed)
  shared = rng.integers(0, MODEL.vocab_size, 640).astype(np.int32)
  found = []
  for n, size in enumerate(sizes):
    tokens = rng.integers(0, MODEL.vocab_size, size).astype(np.int32)
    if n % 2:
      tokens[: size // 2] = shared[: size // 2]
    found.append(records.SampleRequest(tokens, max_tokens, tuple(stop), 1.0, n))
  return found


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
  waves=strategies.lists(
    strategies.lists(strategies.integers(1, 300), min_size=1, max_size=8),
    min_size=1,
    max_size=4,
  ),
  rows=strategies.sampled_from((64, 130, 330, 900)),
  sequences=strategies.sampled_from((1, 3, 8)),
  block=strategies.sampled_from((16, 64, 128)),
  draft=strategies.sampled_from(('', 'ngram')),
  pages=strategies.sampled_from((None, 1)),
  seed=strategies.integers(0, 99),
)
def test_answers_over_arrivals(
  waves, rows, sequences, block, draft, pages, seed
):
  """Of any arrivals, with few pages (some start again) and many."""
  numerics = dataclasses.replace(TILED, kv_block=block)
  most = -(-640 // block)
  config = dataclasses.replace(
    CONFIG, rows=rows, sequences=sequences, pages=8 * most + 1, draft=draft
  )
  arrivals, number = [], 0
  for wave in waves:
    arrivals.append(prompts(wave, 1 + seed % 7, seed + number, stop=(3,)))
    number += 1
  few = None if pages is None else most
  answers, stats, device = serve(config, arrivals, numerics, few)
  assert_right(sum(arrivals, []), answers)
  assert stats.requests == len(answers)
  for _, alone, tiles in device.steps:
    least = -(-rows // (programs.PREFILL_SHARE * TILE))
    assert alone + TILE * tiles <= max(rows, alone + TILE * least)


def test_prompts_and_decoding_have_rows_of_their_own():
  """Chunks end at multiples of a tile; a sequence of 70 starts within one."""
  config = dataclasses.replace(CONFIG, rows=6 + 8 * TILE)
  rules = planning.rules(TILED, config)
  assert (rules.rows, rules.tiles) == (6, (8,))
  running = [
    sequence_lib.Sequence(r, None, MODEL.layers, 2)
    for r in prompts([20, 30, 130, 600])
  ]
  for slot, sequence in enumerate(running):
    sequence.slot, sequence.pages = slot, list(range(1, 20))
  for sequence, sent in zip(running, (19, 29, 70, 0), strict=True):
    sequence.sent = sent
  parts, ahead = planning.plan(rules, running, 0, None)
  assert not ahead
  assert [part[1:4] + part[5:] for part in parts] == [
    (19, 1, 1, 0),
    (29, 1, 1, 1),
    (70, 60, 1, 6 + 70 % TILE),
    (0, 3 * TILE, 0, 6 + 5 * TILE),
  ]
  rows, which, into, *_ = batches.Maker(MODEL, TILED, config).mixed(parts)
  assert rows.slots.tolist() == [0, 1, *4 * [6], *5 * [2], *3 * [3]]
  assert which[:3].tolist() == [0, 1, 6 + 70 % TILE + 59]
  assert into.tolist() == [0, 1, 2, 6, 6, 6]


def test_more_sequences_than_rows_take_turns():
  config = dataclasses.replace(CONFIG, rows=4, sequences=20, run_ahead=1)
  requests = prompts([3] * 30, max_tokens=12)
  answers, _, device = serve(config, [requests])
  assert_right(requests, answers)
  assert {alone for _, alone, _ in device.steps} == {4}
  assert {tiles for _, _, tiles in device.steps} == {0, 1}


def test_tiles_are_not_half_empty():
  counts = (16, 64, 256, 400)
  for wanted in range(1, 900):
    found = planning.tiles_for(counts, wanted)
    assert found in counts
    assert found < 2 * wanted or found == counts[0]
    if wanted >= counts[-1]:
      assert found == counts[-1]


def test_few_programs_on_an_accelerator(monkeypatch):
  """Sequences, context and rows of a real engine: how many are compiled."""
  config = config_lib.EngineConfig(
    rows=2048, sequences=256, pages=2**17, max_context=2**15
  )
  numerics = config_lib.NumericsConfig(mode='aligned', kv_block=64)

  def count(device):
    monkeypatch.setattr(dispatch, 'platform', lambda: device)
    steps = programs.step_sizes(numerics, config)
    ahead = programs.ahead_sizes(numerics, config)
    columns = programs.column_sizes(numerics, config)
    return steps, ahead, columns

  steps, ahead, columns = count('gpu')
  assert steps == [32, 256, 256 + 256, 256 + 1024, 2048]
  assert ahead == [8, 64, 256] and columns == [512]
  assert count('tpu')[2] == [8, 64, 512]


def test_rows_of_a_step():
  assert transformer.sequences_of(5, 5) is None
  np.testing.assert_array_equal(
    transformer.sequences_of(2 + 2 * TILE, 4),
    [0, 1] + TILE * [2] + TILE * [3],
  )
  for rows, sequences in ((TILE + 1, 4), (4, 5), (10 * TILE, 9)):
    with pytest.raises(ValueError, match='a step takes R1'):
      transformer.sequences_of(rows, sequences)


def test_flat_rows_where_no_kernel_attends():
  numerics = config_lib.NumericsConfig()
  assert not programs.tiled(numerics) and programs.tiled(TILED)
  maker = batches.Maker(MODEL, numerics, CONFIG)
  rows = maker.blank(128, 12, False, False)[0]
  assert len(rows.slots) == len(rows.positions) == 128


# --- the model itself ---------------------------------------------------------

INTERPRETED = config_lib.NumericsConfig(
  mode='bitwise',
  kv_block=64,
  row_block=64,
  moe='sorted',
  compute='bfloat16',
  kernels='tpu_interpret',
)
SMALL = config_lib.ModelConfig(
  vocab_size=64,
  width=128,
  layers=1,
  dense_layers=1,
  heads=2,
  kv_heads=1,
  head_dim=64,
  dense_hidden=64,
)


def test_a_row_has_the_same_bits_in_a_tile():
  """Of two tiles on two pages, the second not full, and of one that decodes."""
  params = params_lib.init(transformer.spec(SMALL), jax.random.key(0))
  rng = np.random.default_rng(0)
  alone, count = 2, TILE + 4
  rows = alone + 2 * TILE
  tokens = np.zeros(rows, np.int32)
  tokens[1 : alone + count] = rng.integers(0, 64, 1 + count)
  positions = np.full(rows, -1, np.int32)
  positions[:alone] = 0, 70
  positions[alone : alone + count] = 64 - TILE + np.arange(count)
  table = np.asarray([[0, 0], [2, 4], [3, 1], [3, 1]], np.int32)

  @jax.jit
  def step(params, cache, rows, turns):
    return transformer.step(
      params, SMALL, INTERPRETED, cache, *rows, turns=turns
    )

  cache = transformer.init_cache(SMALL, INTERPRETED, 5)
  cache = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache
  )
  real = np.arange(1, alone + count)
  flat = table[transformer.sequences_of(rows, len(table))[real]]
  flat = tokens[real], positions[real], flat
  hidden, _, tiled = step(params, cache, (tokens, positions, table), None)
  turns = layers.rope_table(SMALL, 128)
  again, _, loose = step(params, cache, flat, turns)
  np.testing.assert_array_equal(hidden[real], again)
  assert np.all(np.isfinite(np.asarray(hidden, np.float32)))
  for one, other in zip(
    jax.tree.leaves(tiled), jax.tree.leaves(loose), strict=True
  ):
    np.testing.assert_array_equal(one[1:], other[1:])  # page 0 is scratch


def test_rows_alone_have_the_same_bits():
  """Of steps whose every row is its sequence's only one; the last is nobody's."""
  numerics = dataclasses.replace(INTERPRETED, kernels='reference')
  params = params_lib.init(transformer.spec(SMALL), jax.random.key(0))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, 3).astype(np.int32)
  positions = np.asarray([5, 70, 0], np.int32)
  table = np.asarray([[1, 0], [2, 4], [0, 0]], np.int32)
  cache = transformer.init_cache(SMALL, numerics, 5)
  cache = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache
  )
  (one, _, written), (other, _, before) = (
    jax.jit(
      functools.partial(transformer.step, alone=alone), static_argnums=(1, 2)
    )(params, SMALL, numerics, cache, tokens, positions, table)
    for alone in (True, False)
  )
  np.testing.assert_array_equal(one[:2], other[:2])
  for new, old, start in zip(
    *map(jax.tree.leaves, (written, before, cache)), strict=True
  ):
    np.testing.assert_array_equal(new[1:], old[1:])  # page 0 is scratch
    assert np.any(np.asarray(new != start), axis=(1, 2, 3)).tolist() == [
      *(False, True, False, False, True)
    ]
