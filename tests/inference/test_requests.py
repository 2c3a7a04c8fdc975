"""What a request may ask for: cut distributions, masks, stops, streaming."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
from serving import CONFIG
from serving import MODEL
from serving import NUMERICS
from serving import SECONDS
from serving import answer
from serving import assert_equal_answers
from serving import log_softmax
from serving import logits_of
from serving import one_by_one
from serving import random_requests
from serving import request
from serving import whole

from composer import records
from composer.inference import sampling
from composer.model import transformer
from composer.rl import pack
from composer.rollout import recorder as recorder_lib


@pytest.fixture
def start():
  with serving.starting() as go:
    yield go


def but(r, **changed):
  return dataclasses.replace(r, **changed)


def kept_of(c):
  """Ids that each token was drawn among; where none are kept, it was all."""
  every = np.arange(MODEL.vocab_size)
  kept = np.split(c.kept_ids, c.kept_offsets[1:-1])
  return [ids if len(ids) else every for ids in kept]


# --- cut distributions --------------------------------------------------------


def naive_kept(z, top_k=0, top_p=1.0, min_p=0.0):
  """The definition, one row of logits at a time, in float64."""
  order = np.argsort(-z, kind='stable')
  if top_k:
    order = order[:top_k]
  p = np.exp(z[order] - z.max())
  share = np.cumsum(p) / p.sum()
  kept = [
    token
    for n, token in enumerate(order)
    if n == 0 or ((top_p == 1 or share[n - 1] < top_p) and p[n] / p[0] >= min_p)
  ]
  return np.sort(kept)


CUTS = (
  {'top_k': 1},
  {'top_k': 7},
  {'top_p': 0.6},
  {'min_p': 0.2},
  {'top_k': 20, 'top_p': 0.8, 'min_p': 0.02},
  {'top_k': 1000, 'top_p': 1.0},
)


@pytest.mark.parametrize('cuts', CUTS, ids=str)
def test_kept_sets_and_logprobs(start, cuts):
  r = but(request([9, 8, 7, 1, 2], 4, 16, temperature=1.3), **cuts)
  (c,) = answer(start(), r)
  z, _ = logits_of(serving.weights()[0], whole(r, c))
  assert c.kept_offsets[0] == 0 and len(c.kept_offsets) == 17
  for s, kept in enumerate(kept_of(c)):
    row = z[len(r.tokens) + s - 1] / 1.3
    np.testing.assert_array_equal(kept, naive_kept(row, **cuts))
    want = log_softmax(row[kept])[np.flatnonzero(kept == c.tokens[s])[0]]
    np.testing.assert_allclose(c.logprobs[s], want, atol=1e-4)


@jax.jit
def trained(params, tokens, segments, positions, temperatures, kept):
  """The trainer's own logprobs over the kept ids, [T]."""
  out = transformer.forward(
    params, MODEL, NUMERICS, tokens, segments, positions
  )
  logprobs, _ = transformer.token_logprob(
    params, MODEL, NUMERICS, out.hidden, tokens, temperatures, kept=kept
  )
  return logprobs[0]


def test_the_trainer_finds_the_same_bits_over_what_was_kept(start):
  """`bitwise`, from the ids and offsets of the completion."""
  requests = [
    but(request([9, 8, n], n, 16, temperature=1.3), **cuts)
    for n, cuts in enumerate(CUTS)
  ]
  for r, c in zip(requests, answer(start(), *requests), strict=True):
    size, first = len(whole(r, c)), len(r.tokens)
    arrays = np.zeros((3, 1, 48), np.int32)
    arrays[:, 0, :size] = whole(r, c), np.ones(size), np.arange(size)
    kept = np.full((1, 48, 64), -1, np.int32)
    for s, ids in enumerate(kept_of(c)):
      kept[0, first + s, : len(ids)] = ids
    temperatures = np.full((1, 48), 1.3, np.float32)
    got = trained(serving.weights()[0], *arrays, temperatures, kept)
    np.testing.assert_array_equal(got[first:size], c.logprobs)


def test_the_trainer_finds_the_same_bits_of_greedy_answers(start):
  """A segment tells of temperature 0; nothing is divided by it."""
  params, r = serving.weights()[0], request([9, 8, 7], 0, 16, temperature=0.0)
  (c,) = answer(start(), r)
  layers, experts = c.experts.shape[1:]
  recorder = recorder_lib.Recorder(layers, experts)
  recorder.record(r.tokens, c, r.temperature)
  (segment,) = recorder.finish('finished')
  assert segment.temperatures.tolist() == [1] * 3 + [0] * 16
  ((batch,), _) = pack.pack(
    [pack.Item(segment, 1.0)], 1, 48, 4, layers, experts, max_kept=64
  )
  got = trained(
    params, batch.tokens, batch.segment_ids, batch.positions,
    batch.temperatures, batch.kept,
  )  # fmt: skip
  np.testing.assert_array_equal(got[3:19], c.logprobs)


def test_ties_go_to_the_lower_id():
  z = jnp.asarray([[1.0, 3.0, 3.0, 3.0, 2.0, 3.0], [5.0] * 6])
  cuts = sampling.Cuts(
    some=np.ones(2, bool),
    top_k=np.asarray([2, 0], np.int32),
    top_p=np.asarray([1.0, 0.5], np.float32),
    min_p=np.zeros(2, np.float32),
    allowed=np.asarray([[255]], np.uint8),
  )
  kept = sampling.cut(z, jnp.ones(2), cuts)
  np.testing.assert_array_equal(
    kept, np.asarray([[0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]], bool)
  )


def test_what_neighbours_cut_changes_no_bit(start):
  """Whole and cut requests side by side, and each alone."""
  plain = random_requests(12, 3)
  mixed = [
    but(r, **CUTS[n % len(CUTS)]) if n % 2 else r for n, r in enumerate(plain)
  ]
  crowd = answer(start(), *mixed)
  assert_equal_answers(one_by_one(start(), mixed), crowd)
  whole_ones = answer(start(), *plain)[::2]
  assert_equal_answers(whole_ones, crowd[::2])
  assert all(c.kept_ids is None for c in crowd[::2])


def test_cut_draws_have_the_right_frequencies(start):
  """2,000 seeds; chi-square over the kept tokens, beside the naive set."""
  r = but(request([5, 9, 1], 0, 1), top_p=0.7)
  engine = start()
  drawn = [
    int(c.tokens[0])
    for c in answer(engine, *(but(r, seed=s) for s in range(2000)))
  ]
  z, _ = logits_of(serving.weights()[0], np.asarray([5, 9, 1, 0]))
  kept = naive_kept(z[2], top_p=0.7)
  want = np.exp(log_softmax(z[2][kept])) * 2000
  seen = np.asarray([drawn.count(k) for k in kept])
  assert seen.sum() == 2000 and want.min() > 5
  # Mean and deviation of chi-square of n - 1 degrees, five deviations off.
  n = len(kept) - 1
  assert np.sum((seen - want) ** 2 / want) < n + 5 * np.sqrt(2 * n)


@pytest.mark.parametrize('most', [0, 7, 8])
def test_more_kept_ids_than_are_wanted_are_not_kept(start, most):
  """None of the answer's, rather than some: it draws what it draws anyway."""
  told = []
  r = but(request([9, 8, 7], 4, 12), top_k=8, on_tokens=told.append)
  whole_one, few = answer(start(), r, but(r, max_kept=most))
  np.testing.assert_array_equal(few.tokens, whole_one.tokens)
  np.testing.assert_array_equal(few.logprobs, whole_one.logprobs)
  assert (few.kept_ids is None) == (few.kept_offsets is None) == (most < 8)
  free = but(r, top_k=0, mask=lambda _: np.ones(64, bool), max_kept=0)
  (c,) = answer(start(), free)
  assert c.kept_ids.tolist() == [] and c.kept_offsets.tolist() == [0] * 13


def test_what_was_kept_before_there_was_too_much_is_told(start):
  """Who wants no more than that has all of it."""
  told = []
  r = but(request([9, 8, 1], 4, 12), top_p=0.5, on_tokens=told.append)
  (c,) = answer(start(), r)
  sizes = np.diff(c.kept_offsets)
  most = int(sizes[0])
  first = int(np.argmax(sizes > most))
  assert first > 0
  told.clear()
  (c,) = answer(start(), but(r, max_kept=most))
  assert c.kept_ids is None
  assert [len(i) for p in told for i in p.kept] == sizes[:first].tolist()


# --- the likeliest ---------------------------------------------------------------


@pytest.mark.parametrize('cuts', [{}, {'top_k': 7}, {'top_p': 0.6}], ids=str)
@pytest.mark.parametrize('temperature', [0.7, 0.0])
def test_top_logprobs(start, cuts, temperature):
  """Of the distribution that was sampled from; asking changes no token."""
  told = []
  r = but(request([9, 8, 7, 1, 2], 4, 9, temperature=temperature), **cuts)
  asked = but(r, top_logprobs=True, on_tokens=told.append)
  plain, c = answer(start(), r, asked)
  for name in ('tokens', 'logprobs', 'kept_ids', 'experts'):
    np.testing.assert_array_equal(getattr(c, name), getattr(plain, name), name)
  assert plain.top_ids is None and c.top_ids.shape == (9, records.TOP_LOGPROBS)
  for name in ('top_ids', 'top_logprobs'):
    pieces = np.concatenate([getattr(p, name) for p in told])
    np.testing.assert_array_equal(pieces, getattr(c, name))
  z, _ = logits_of(serving.weights()[0], whole(r, c))
  for s in range(9):
    row = z[len(r.tokens) + s - 1] / (temperature or 1.0)
    drawn = cuts if temperature else {}
    kept = naive_kept(row, **drawn)
    want = log_softmax(row[kept])
    order = np.argsort(-want, kind='stable')[: records.TOP_LOGPROBS]
    count = len(order)
    np.testing.assert_array_equal(c.top_ids[s, :count], kept[order])
    np.testing.assert_allclose(
      c.top_logprobs[s, :count], want[order], atol=1e-4
    )
    assert np.all(np.isneginf(c.top_logprobs[s, count:]))


# --- masks --------------------------------------------------------------------


def test_mask(start):
  """Only even tokens, then only those above the last; greedy ones too."""
  seen = []

  def mask(sampled):
    seen.append(sampled.tolist())
    allowed = np.arange(64) % 2 == 0
    return allowed if not len(sampled) else np.arange(64) > sampled[-1] % 32

  for temperature in (1.0, 0.0):
    seen.clear()
    r = but(request([1, 2, 3], 3, 8, temperature=temperature), mask=mask)
    others = random_requests(6, 8)
    engine = start()
    c, *rest = answer(engine, r, *others)
    assert seen == [c.tokens[:n].tolist() for n in range(8)]
    assert c.tokens[0] % 2 == 0
    assert np.all(c.tokens[1:] > c.tokens[:-1] % 32)
    for s, kept in enumerate(kept_of(c)):
      np.testing.assert_array_equal(
        kept, np.flatnonzero(mask(c.tokens[:s])), str(s)
      )
    assert_equal_answers(rest, answer(start(), *others))


@pytest.mark.parametrize(
  ('mask', 'error', 'message'),
  (
    (lambda s: np.zeros(64, bool), ValueError, '0.*allowed.*at least one'),
    (lambda s: np.ones(63, bool), ValueError, r'\(63,\).*bool \(64,\)'),
    (lambda s: [][0], IndexError, 'range'),
    (lambda s: next(iter(())), RuntimeError, 'raised StopIteration'),
  ),
)
def test_a_bad_mask_ends_its_own_request(start, mask, error, message):
  engine, others = start(), random_requests(5, 9)

  async def go():
    bad = engine.sample(but(request([1, 2]), mask=mask))
    waits = [bad, *(engine.sample(r) for r in others)]
    return await asyncio.wait_for(
      asyncio.gather(*waits, return_exceptions=True), SECONDS
    )

  failed, *rest = asyncio.run(go())
  assert isinstance(failed, error)
  with pytest.raises(error, match=message):
    raise failed
  assert_equal_answers(rest, answer(start(), *others))
  assert engine.pages_held == 0


# --- stops --------------------------------------------------------------------


@pytest.mark.parametrize('more', [{}, {'run_ahead': 3}, {'draft': 'ngram'}])
def test_stop_sequences(start, more):
  """Of rows one by one, of runs ahead, and of drafts: across their ends too."""
  engine = start(dataclasses.replace(CONFIG, **more))
  (free,) = answer(engine, request([1, 2, 3], 0, 20))
  tokens = free.tokens.tolist()
  for at, size in ((6, 2), (9, 3), (1, 1)):
    stop = tuple(tokens[at : at + size])
    end = next(
      n for n in range(size, 21) if tuple(tokens[n - size : n]) == stop
    )
    r = but(request([1, 2, 3], 0, 20), stop_sequences=((60, 60, 60), stop))
    (c,) = answer(engine, r)
    assert c.stop_reason == 'stop'
    np.testing.assert_array_equal(c.tokens, free.tokens[:end])
    np.testing.assert_array_equal(c.logprobs, free.logprobs[:end])
  # One that begins in the prompt is not sampled, and does not stop.
  across = but(request([1, 2, 3], 0, 20), stop_sequences=((3, tokens[0]),))
  assert len(answer(engine, across)[0].tokens) == 20


# --- streaming ----------------------------------------------------------------


def test_pieces_join_to_the_answer(start):
  """In order, on the requester's loop, all before the answer."""
  requests, told = random_requests(10, 4), {}
  requests[0] = but(requests[0], top_k=5)

  async def go(engine):
    loop = asyncio.get_running_loop()

    async def one(n, r):
      def tell(piece):
        assert asyncio.get_running_loop() is loop
        told.setdefault(n, []).append(piece)

      c = await engine.sample(but(r, on_tokens=tell))
      assert sum(len(p.tokens) for p in told[n]) == len(c.tokens)
      return c

    waits = [one(n, r) for n, r in enumerate(requests)]
    return await asyncio.wait_for(asyncio.gather(*waits), SECONDS)

  answers = asyncio.run(go(start()))
  for n, c in enumerate(answers):
    for name in ('tokens', 'logprobs', 'versions'):
      got = np.concatenate([getattr(p, name) for p in told[n]])
      np.testing.assert_array_equal(got, getattr(c, name), name)
    kept = [ids for p in told[n] for ids in p.kept or ()]
    assert bool(kept) == (c.kept_ids is not None)
    some = np.split(c.kept_ids, c.kept_offsets[1:-1]) if kept else ()
    for got, want in zip(kept, some, strict=True):
      np.testing.assert_array_equal(got, want)
  assert max(len(pieces) for pieces in told.values()) > 5
  assert_equal_answers(answers, answer(start(), *requests))


def enough_after(engine, r, count):
  """The answer to a request that has enough once it is told `count` tokens."""
  told = []

  def tell(piece):
    told.extend(piece.tokens)
    return count if len(told) >= count else None

  (c,) = answer(engine, but(r, on_tokens=tell))
  return c, told


def test_a_requester_that_has_enough_ends_its_request(start):
  """A real answer: routes and versions, of the last token that it wanted too."""
  engine = start()
  r = request([9, 8, 7, 1], 4, 40)
  (free,) = answer(engine, r)
  serving.in_step(engine)
  for count in (1, 2, 7, 8, 39, 40):
    c, told = enough_after(engine, r, count)
    size = len(c.tokens)
    assert count <= size <= min(count + 3, 40)  # it did not go on to the end
    assert c.stop_reason == ('length' if size == 40 else 'stop')
    assert told == c.tokens.tolist()
    first = slice(4 + count)
    for name in ('tokens', 'logprobs', 'versions'):
      got, want = getattr(c, name), getattr(free, name)
      np.testing.assert_array_equal(got, want[:size], name)
    for name in ('experts', 'computed_versions'):
      got, want = getattr(c, name), getattr(free, name)
      np.testing.assert_array_equal(got[first], want[first], name)
      assert count == 40 or np.all(got[first] >= 0)
    assert engine.pages_held == 0
  assert not engine._running and not engine._waiting
  (again,) = answer(engine, r)
  assert_equal_answers([again], [free])


def test_enough_that_is_no_number_ends_its_own_request(start):
  engine = start()
  with pytest.raises(TypeError, match='integer'):
    answer(engine, but(request([1, 2], 0, 30), on_tokens=lambda _: 'x'))
  (c,) = answer(engine, request([1, 2], 0, 3))
  assert len(c.tokens) == 3


def test_a_callback_that_fails_ends_its_own_request(start):
  engine = start()

  def tell(piece):
    raise RuntimeError('no more')

  with pytest.raises(RuntimeError, match='no more'):
    answer(engine, but(request([1, 2], 0, 30), on_tokens=tell))
  assert len(answer(engine, request([1]))[0].tokens) == 6


@pytest.mark.parametrize(
  ('changed', 'message'),
  (
    ({'top_p': 0.0}, r'top_p 0.0.*\(0, 1\]'),
    ({'top_p': 1.5}, 'top_p 1.5'),
    ({'top_k': -1}, 'top_k -1.*0 keeps all'),
    ({'min_p': float('nan')}, 'min_p nan'),
    ({'stop_sequences': ((1,), ())}, 'empty sequence'),
    ({'temperature': float('inf')}, 'not finite'),
    ({'temperature': 1e-7}, 'temperature 1e-07 is between 0 and 1e-06; give 0'),
  ),
)
def test_bad_values_are_refused(start, changed, message):
  with pytest.raises(ValueError, match=message):
    answer(start(), but(request([1]), **changed))


def test_a_request_of_the_old_kind_has_nothing_new():
  r = records.SampleRequest(np.asarray([1]), 1, (), 1.0, 0)
  assert (r.top_p, r.top_k, r.min_p, r.mask) == (1.0, 0, 0.0, None)
  assert not any(CONFIG.draft)
