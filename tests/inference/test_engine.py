"""The engine: the same answers in any crowd, pages, versions, ends, failures."""

import asyncio
import dataclasses
import threading

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
from serving import pause
from serving import random_requests
from serving import request
from serving import until
from serving import whole

from composer import records
from composer.inference import engine as engine_lib
from composer.inference import programs
from composer.inference import replies


@pytest.fixture
def weights():
  return serving.weights()


@pytest.fixture
def start():
  with serving.starting() as go:
    yield go


# --- answers ------------------------------------------------------------------


def test_alone_and_in_a_crowd(start):
  requests = random_requests(40)
  crowd = answer(start(), *requests)
  quiet = start()
  assert_equal_answers(one_by_one(quiet, requests), crowd)
  assert_equal_answers(one_by_one(quiet, requests), crowd)  # all from the cache
  narrow = dataclasses.replace(CONFIG, rows=16, sequences=3)
  assert_equal_answers(answer(start(narrow), *requests[::-1])[::-1], crowd)
  lengths = [len(c.tokens) for c in crowd]
  assert len(set(lengths)) > 5 and {'stop', 'length'} == {
    c.stop_reason for c in crowd
  }


def test_seeds_decide(start):
  engine = start()
  some = answer(engine, *(request([5, 6], seed) for seed in range(30)))
  assert len({tuple(c.tokens) for c in some}) > 25
  a, b = answer(engine, request([5, 6], -1), request([5, 6], 2**32 - 1))
  assert_equal_answers([a], [b])  # seeds are taken modulo 2^32


@pytest.mark.parametrize('temperature', (0.5, 1.0, 1.7))
def test_logprob_is_of_the_distribution_sampled_from(
  start, weights, temperature
):
  """log_softmax(logits / T): divided once, and of the token drawn."""
  r = request([9, 8, 7, 1, 2], 4, 16, temperature=temperature)
  (c,) = answer(start(), r)
  z, experts = logits_of(weights[0], whole(r, c))
  at = np.arange(len(r.tokens), len(r.tokens) + len(c.tokens))
  want = log_softmax(z[at - 1] / temperature)[np.arange(len(at)), c.tokens]
  np.testing.assert_allclose(c.logprobs, want, atol=1e-4)
  np.testing.assert_array_equal(c.experts[:-1], experts[:-1])
  assert np.all(c.experts[-1] == records.UNKNOWN_EXPERT)


def test_greedy(start, weights):
  """Takes the argmax; the logprob is that of the model itself."""
  r = request([9, 8, 7], 4, 12, temperature=0.0)
  engine = start()
  (c,) = answer(engine, r)
  z, _ = logits_of(weights[0], whole(r, c))
  z = z[len(r.tokens) - 1 : -1]
  np.testing.assert_array_equal(c.tokens, z.argmax(-1))
  np.testing.assert_allclose(c.logprobs, log_softmax(z).max(-1), atol=1e-4)
  (other,) = answer(engine, dataclasses.replace(r, seed=99))
  np.testing.assert_array_equal(c.tokens, other.tokens)


def test_stop_and_length(start):
  engine = start()
  (free,) = answer(engine, request([1, 2, 3], 0, 20))
  assert free.stop_reason == 'length' and len(free.tokens) == 20
  last = int(free.tokens[7])
  first = int(np.flatnonzero(free.tokens == last)[0])
  (cut,) = answer(engine, request([1, 2, 3], 0, 20, stop=(last,)))
  assert cut.stop_reason == 'stop'
  np.testing.assert_array_equal(cut.tokens, free.tokens[: first + 1])
  (both,) = answer(engine, request([1, 2, 3], 0, first + 1, stop=(last,)))
  assert both.stop_reason == 'stop'  # the token decides, not the count
  (one,) = answer(engine, request([last], 0, 1))
  assert len(one.tokens) == 1 and one.stop_reason == 'length'
  assert len(answer(engine, request([1] * 47, 0, 1))[0].experts) == 48


def test_a_continued_turn_equals_one_long_answer(start):
  """A partial rollout, continued from its tokens, is the same rollout."""
  engine = start()
  (long,) = answer(engine, request([1, 2, 3], 8, 20))
  (head,) = answer(engine, request([1, 2, 3], 8, 9))
  (tail,) = answer(engine, request([1, 2, 3, *head.tokens], 8, 11))
  np.testing.assert_array_equal([*head.tokens, *tail.tokens], long.tokens)
  np.testing.assert_array_equal([*head.logprobs, *tail.logprobs], long.logprobs)
  np.testing.assert_array_equal(tail.experts, long.experts)


@pytest.mark.parametrize(
  'changed, message',
  (
    ({'prompt': []}, 'empty.*at least one'),
    ({'max_tokens': 0}, 'max_tokens is 0; ask for at least 1'),
    ({'prompt': [1] * 43}, '43 tokens plus max_tokens 6.*max_context=48'),
    ({'prompt': [1, 64]}, r'\[0, 64\); got 1 to 64'),
    ({'prompt': [-1, 5]}, r'\[0, 64\); got -1 to 5'),
    ({'temperature': -0.1}, 'temperature -0.1'),
    ({'temperature': float('nan')}, 'temperature nan'),
  ),
)
def test_bad_requests_are_refused(start, changed, message):
  engine = start()
  with pytest.raises(ValueError, match=message):
    answer(engine, request(**{'prompt': [1], **changed}))
  assert len(answer(engine, request([1]))[0].tokens) == 6  # and it lives on


def test_an_engine_too_small_for_a_request_is_refused():
  """Page 0 is scratch: 12 pages hold 11 blocks, and a context needs 12."""
  small = dataclasses.replace(CONFIG, pages=12)
  with pytest.raises(ValueError, match='engine.pages=12.*13'):
    engine_lib.Engine(MODEL, NUMERICS, small)


# --- pages --------------------------------------------------------------------


def test_prefix_reuse(start):
  engine, prompt = start(), np.arange(21) % 64
  (a,) = answer(engine, request(prompt, 1))
  assert engine.stats.reused == 0
  (b,) = answer(engine, request(prompt, 2))
  assert engine.stats.reused == 20  # whole blocks before the last token
  (short,) = answer(engine, request(prompt[:20], 2))
  assert engine.stats.reused == 20 + 16  # its last token must be run
  np.testing.assert_array_equal(a.experts[:21], b.experts[:21])
  assert_equal_answers(
    [b, short],
    one_by_one(start(), [request(prompt, 2), request(prompt[:20], 2)]),
  )
  other = prompt.copy()
  other[5] += 1  # in the second block: the first is shared, no more
  (c,) = answer(engine, request(other, 2))
  assert engine.stats.reused == 20 + 16 + 4
  assert_equal_answers([c], answer(start(), request(other, 2)))
  # What was sampled is found again by the next turn.
  turn = np.concatenate([prompt, a.tokens, [1, 2, 3]])
  (d,) = answer(engine, request(turn, 3))
  assert engine.stats.reused == 20 + 16 + 4 + 24
  assert_equal_answers([d], answer(start(), request(turn, 3)))


def test_a_group_computes_its_prompt_once(start):
  engine, prompt = start(), np.arange(25) % 64
  answers = answer(engine, *(request(prompt, seed, 4) for seed in range(8)))
  assert engine.stats.reused == 7 * 24
  assert engine.stats.rows == 25 + 7 + 8 * 3
  assert_equal_answers(
    answers, one_by_one(start(), [request(prompt, s, 4) for s in range(8)])
  )


def test_who_has_an_answer_finds_it_counted(start, monkeypatch):
  engine, seen = start(), []
  deliver = replies.deliver

  def counting(answers):
    seen.append(engine.stats)
    deliver(answers)

  monkeypatch.setattr(replies, 'deliver', counting)
  answer(engine, request(np.arange(5), 0, 3))
  (stats,) = seen
  assert (stats.requests, stats.rows, stats.sampled) == (1, 5 + 2, 3)
  assert stats.steps == 3


def test_pages_return_and_nothing_compiles_while_serving(start):
  sizes = programs.step_sizes(NUMERICS, CONFIG)
  assert sizes == [16, 32]
  engine = start()
  answer(engine, *random_requests(40, 1))
  compiled = programs.compiled()
  for seed in range(2, 8):
    answer(engine, *random_requests(40, seed))
  assert programs.compiled() == compiled
  pool = engine._pool
  until(lambda: not engine._running, 'sequences end')
  assert pool.held == 0 and pool.available == CONFIG.pages - 1
  everything = pool.allocate(CONFIG.pages - 1)
  assert sorted(everything) == list(range(1, CONFIG.pages))
  assert engine.stats.requests == 7 * 40


def test_admission_waits_for_pages_and_loses_nothing(start, weights):
  """Thirteen pages hold one long request, or a few short ones."""
  requests = random_requests(40, 5)
  engine = start(activate=False)
  engine._pool.allocate(CONFIG.pages - 1 - 13)  # held by nobody here
  seen, plan = [], engine._plan

  def watched():
    seen.append((len(engine._running), engine._pool.available))
    return plan()

  engine._plan = watched
  engine.activate(0, weights[0])
  assert_equal_answers(answer(engine, *requests), answer(start(), *requests))
  assert 1 < max(running for running, _ in seen) < CONFIG.sequences
  assert min(available for _, available in seen) >= 0
  assert engine._pool.available == 13


def test_cancelled_requests_give_their_pages_back(start):
  engine = start()
  reached, proceed = pause(engine, 30)

  async def go():
    tasks = [
      asyncio.create_task(engine.sample(request([i], i, 40))) for i in range(20)
    ]
    await asyncio.to_thread(reached.wait, SECONDS)
    assert len(engine._running) == 12 and engine._pool.held > 12
    for task in tasks[2:]:
      task.cancel()
    await asyncio.sleep(0)
    proceed.set()
    done = await asyncio.wait_for(
      asyncio.gather(*tasks, return_exceptions=True), SECONDS
    )
    assert all(isinstance(d, asyncio.CancelledError) for d in done[2:])
    return done[:2]

  kept = asyncio.run(go())
  alone = one_by_one(start(), [request([i], i, 40) for i in range(2)])
  assert_equal_answers(kept, alone)
  answer(engine, request([1]))  # a turn later
  assert engine._pool.held == 0 and not engine._running and not engine._waiting


# --- versions -----------------------------------------------------------------


def test_pages_of_an_older_version_are_never_used(start, weights):
  engine, r = start(), request(np.arange(21), 3)
  (old,) = answer(engine, r)
  engine.activate(1, weights[1])
  engine.wait_active(1, SECONDS)
  (new,) = answer(engine, r)
  assert engine.stats.reused == 0
  assert np.all(new.versions == 1) and np.all(new.computed_versions[:-1] == 1)
  fresh = start(activate=False)
  fresh.activate(1, weights[1])
  assert_equal_answers([new], answer(fresh, r))
  assert np.any(old.logprobs != new.logprobs)
  answer(engine, r)
  assert engine.stats.reused == 20  # of the new version


def test_a_swap_between_two_decode_steps(start, weights):
  """Every token has the version that sampled it; pages keep their own."""
  engine = start()
  reached, proceed = pause(engine, 9)

  async def go():
    running = asyncio.create_task(engine.sample(request([1, 2, 3], 5, 40)))
    await asyncio.to_thread(reached.wait, SECONDS)
    engine.activate(7, weights[1])
    proceed.set()
    return await asyncio.wait_for(running, SECONDS)

  c = asyncio.run(go())
  at = int(np.argmax(c.versions == 7))
  # One step was on the device, one was about to be sent, and then the swap.
  assert at == 11
  assert np.all(c.versions[:at] == 0) and np.all(c.versions[at:] == 7)
  # The token sampled at the swap was sampled at 7 from a prefix computed at 0,
  # but for the last token of it, which that very step computed.
  computed = c.computed_versions
  assert np.all(computed[: 3 + at - 1] == 0)
  assert np.all(computed[3 + at - 1 : -1] == 7) and computed[-1] == -1
  (before,) = answer(start(), request([1, 2, 3], 5, 40))
  np.testing.assert_array_equal(c.tokens[:at], before.tokens[:at])
  np.testing.assert_array_equal(c.logprobs[:at], before.logprobs[:at])
  assert np.any(c.logprobs[at:] != before.logprobs[at:])
  # Its mixed pages are not offered to others.
  answer(engine, request([1, 2, 3, *c.tokens[:30]], 5, 4))
  assert engine.stats.reused == 0
  assert engine._pool.held == 0


def test_requests_wait_for_the_first_weights(start, weights):
  engine = start(activate=False)

  async def go():
    waiting = asyncio.create_task(engine.sample(request([1])))
    await asyncio.sleep(0.05)
    assert not waiting.done() and engine.version == -1
    engine.activate(3, weights[0])
    return await asyncio.wait_for(waiting, SECONDS)

  assert np.all(asyncio.run(go()).versions == 3)
  with pytest.raises(records.EngineError, match='version 4.*runs version 3'):
    engine.wait_active(4, 0.01)


# --- ends ---------------------------------------------------------------------


def gather_failures(engine, act, count=15):
  """What requests raise that run or wait when `act` is called."""
  reached, proceed = pause(engine, 12)

  async def go():
    tasks = [
      asyncio.create_task(engine.sample(request([i], i, 40)))
      for i in range(count)
    ]
    await asyncio.to_thread(reached.wait, SECONDS)
    act()
    proceed.set()
    return await asyncio.wait_for(
      asyncio.gather(*tasks, return_exceptions=True), SECONDS
    )

  failures = asyncio.run(go())
  assert len(failures) == count
  assert all(isinstance(f, records.EngineError) for f in failures)
  return failures


def test_when_the_loop_dies_every_waiter_learns(start, monkeypatch):
  engine = start()

  def broken(*args):
    raise FloatingPointError('broken step')

  failures = gather_failures(
    engine, lambda: monkeypatch.setattr(programs, 'mixed', broken)
  )
  assert all('broken step' in str(failure) for failure in failures)
  with pytest.raises(records.EngineError, match='failed.*broken step'):
    answer(engine, request([1]))
  with pytest.raises(records.EngineError, match='broken step'):
    engine.wait_active(9)


@pytest.mark.parametrize('step', ['_start', '_leave'])
def test_nobody_is_lost_between_two_places(start, monkeypatch, step):
  """Who has left the queue or the running ones learns of a failure, too."""
  engine, real = start(), engine_lib.Engine.__dict__[step]
  seen = []

  def broken(self, sequence, *rest):
    seen.append(sequence)
    if len(seen) > 1:
      raise FloatingPointError('broken step')
    real(self, sequence, *rest)

  monkeypatch.setattr(engine_lib.Engine, step, broken)

  async def go():
    waits = [engine.sample(request([i, 2], i)) for i in range(4)]
    return await asyncio.wait_for(
      asyncio.gather(*waits, return_exceptions=True), 10.0
    )

  failures = asyncio.run(go())
  assert any(isinstance(x, records.EngineError) for x in failures)


def test_when_it_is_closed_every_waiter_learns(start):
  engine = start()
  closing = threading.Thread(target=engine.close)
  gather_failures(engine, closing.start)
  closing.join(SECONDS)
  with pytest.raises(records.EngineError, match='stopped'):
    answer(engine, request([1]))
  engine.close()  # twice is fine


def test_a_closed_event_loop_harms_nobody_else(start):
  """Who went away without waiting does not stop the others."""
  engine = start()

  async def leave():
    asyncio.ensure_future(engine.sample(request([1], 0, 40)))
    await asyncio.sleep(0.01)

  asyncio.run(leave())
  assert len(answer(engine, request([2]))[0].tokens) == 6
  until(lambda: engine._pool.held == 0, 'pages return')
