"""Pages that run out, restarts, drafts and runs ahead change no answer."""

import asyncio
import collections
from concurrent import futures
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest
import serving
from serving import CONFIG
from serving import MODEL
from serving import NUMERICS
from serving import SECONDS
from serving import answer
from serving import assert_equal_answers
from serving import one_by_one
from serving import pause
from serving import random_requests
from serving import request
from serving import until
from serving import whole

from composer import records
from composer.inference import drafts
from composer.inference import engine as engine_lib
from composer.inference import pace
from composer.inference import programs
from composer.model import transformer


@pytest.fixture
def start():
  with serving.starting() as go:
    yield go


@functools.cache
def ordinary(count, seed):
  """Answers with more pages than are needed, one token a step."""
  with serving.starting() as go:
    return answer(go(), *random_requests(count, seed))


def config(**changed):
  return dataclasses.replace(CONFIG, **changed)


# --- pages --------------------------------------------------------------------


@pytest.mark.parametrize('ahead', (True, False))
def test_preempted_sequences_lose_nothing(start, ahead):
  """Thirteen pages for twelve sequences of up to eleven pages each."""
  engine = start(pages=13, ahead=ahead)
  answers = answer(engine, *random_requests(40, 5))
  assert_equal_answers(answers, ordinary(40, 5))
  stats = engine.stats
  assert stats.preempted > 1 and stats.recomputed > 0
  # What a second start finds is not told.
  assert sum(c.cached for c in answers) < stats.reused
  assert stats.sampled == sum(len(c.tokens) for c in ordinary(40, 5))
  assert stats.requests == 40  # a second start is no second request
  until(lambda: engine._pool.available == 13, 'pages return')


def test_a_cpu_is_sent_a_step_ahead_once_nothing_starts_or_ends(start):
  """Before that, no step goes on with a sequence that has ended."""
  long = request([5, 9, 2], 3, 40)
  tokens = answer(start(), long)[0].tokens.tolist()
  new = [n for n, token in enumerate(tokens) if tokens.index(token) == n]
  early = max(n for n in new if n < pace.SETTLES)
  late = min(n for n in new if n > pace.SETTLES + 1)
  for last, wasted in ((early, 0), (late, 1)):
    engine = start(ahead=False)
    stopping = dataclasses.replace(long, stop_tokens=(tokens[last],))
    assert answer(engine, stopping)[0].tokens.tolist() == tokens[: last + 1]
    assert wasted or not engine._flights
    steps = last + 1 + wasted
    until(lambda e=engine, n=steps: e.stats.steps == n, 'it has recorded all')


def test_preemption_across_a_swap_keeps_the_first_routes(start):
  """Computed again at a newer version: what was known of a token stays."""
  engine, paused = start(pages=13), []
  reached, proceed = pause(engine, 40)

  async def go():
    tasks = [
      asyncio.create_task(engine.sample(request([i, 1, 2], i, 40)))
      for i in range(6)
    ]
    await asyncio.to_thread(reached.wait, SECONDS)
    paused.append(engine.stats.pause_s)
    engine.activate(1, serving.weights()[1])
    proceed.set()
    return await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

  answers = asyncio.run(go())
  assert engine.stats.preempted > 0
  assert 0 < engine.stats.pause_s != paused[0]  # this swap's, not the first's
  seen = 0
  for i, c in enumerate(answers):
    assert len(c.tokens) == 40 and np.all(np.diff(c.versions) >= 0)
    (alone,) = answer(start(), request([i, 1, 2], i, 40))
    old = int(np.sum(c.versions == 0))
    np.testing.assert_array_equal(c.tokens[:old], alone.tokens[:old])
    np.testing.assert_array_equal(c.logprobs[:old], alone.logprobs[:old])
    first = c.computed_versions == 0
    np.testing.assert_array_equal(
      c.experts[first], alone.experts[: len(first)][first]
    )
    if old:
      assert np.all(c.computed_versions[: 3 + old - 1] == 0)
      seen += 1
  assert seen > 2
  assert engine._pool.available == 13


def test_more_sequences_than_rows_take_turns(start):
  """Nobody starves: all advance, and prompts get in beside them."""
  engine = start(config(rows=16, sequences=40, pages=400))
  requests = [request([i, i + 1], i, 20) for i in range(39)]
  late = request(np.arange(30), 7, 3)
  reached, proceed = pause(engine, 100)

  async def go():
    tasks = [asyncio.create_task(engine.sample(r)) for r in requests]
    await asyncio.to_thread(reached.wait, SECONDS)
    tasks.append(asyncio.create_task(engine.sample(late)))
    proceed.set()
    last = await asyncio.wait_for(tasks[-1], SECONDS)
    running = sum(not t.done() for t in tasks)
    await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)
    return running, last, [t.result() for t in tasks[:-1]]

  running, last, rest = asyncio.run(go())
  assert running >= 10  # the late prompt did not wait for the others to end
  assert_equal_answers(
    [last, *rest[:6]], one_by_one(start(), [late, *requests[:6]])
  )


@pytest.mark.parametrize('rows', (16, 32))
def test_a_long_prompt_holds_no_decoding_sequence_up(start, rows):
  """Each step that has a chunk of it draws a token of every other as well."""
  engine = start(config(rows=rows))
  others, long = 11, request(np.arange(40) % 7, 1, 2)
  chunks, send = [], engine._send

  def counted(plan, steps):
    for part in plan:
      if part.sequence.prompt == 40 and part.start < 40:
        others_draw = sum(p.draws for p in plan if p is not part)
        chunks.append((part.count, others_draw))
    send(plan, steps)

  engine._send = counted
  requests = [request([i, i + 1], i, 40) for i in range(others)]
  reached, proceed = pause(engine, 3 * others)

  async def go():
    tasks = [asyncio.create_task(engine.sample(r)) for r in requests]
    await asyncio.to_thread(reached.wait, SECONDS)
    tasks.append(asyncio.create_task(engine.sample(long)))
    await asyncio.sleep(0)
    proceed.set()
    return await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

  answers = asyncio.run(go())
  counts, drawn = zip(*chunks, strict=True)
  assert sum(counts) == 40 and set(drawn) == {others}
  assert len(chunks) == -(-40 // (rows - others)) > 1  # it takes what is left
  assert [len(c.tokens) for c in answers] == [40] * others + [2]


def test_cancelled_while_queued(start):
  engine = start(config(sequences=2))
  reached, proceed = pause(engine, 6)

  async def go():
    tasks = [
      asyncio.create_task(engine.sample(request([i], i, 30))) for i in range(30)
    ]
    await asyncio.to_thread(reached.wait, SECONDS)
    for task in tasks[1:]:
      task.cancel()
    await asyncio.sleep(0)
    proceed.set()
    return await asyncio.wait_for(tasks[0], SECONDS)

  c = asyncio.run(go())
  assert_equal_answers([c], answer(start(), request([0], 0, 30)))
  until(lambda: engine.waiting == 0, 'the queue empties')
  assert engine.stats.cancelled == 29 and engine.stats.requests == 2
  assert engine.pages_held == 0


# --- versions -----------------------------------------------------------------


def test_restart_computes_again_at_the_new_version(start):
  """What is sampled after the swap sees keys and values of its own version."""
  engine = start(config(on_new_weights='restart'))
  reached, proceed = pause(engine, 9)
  r = request([1, 2, 3], 5, 30)

  async def go():
    running = asyncio.create_task(engine.sample(r))
    await asyncio.to_thread(reached.wait, SECONDS)
    engine.activate(7, serving.weights()[1])
    proceed.set()
    return await asyncio.wait_for(running, SECONDS)

  c = asyncio.run(go())
  at = int(np.argmax(c.versions == 7))
  assert 9 <= at <= 11 and np.all(c.versions[at:] == 7)
  fresh = start(activate=False)
  fresh.activate(7, serving.weights()[1])
  tail = request([1, 2, 3, *c.tokens[:at]], 5, 30 - at)
  (again,) = answer(fresh, tail)
  np.testing.assert_array_equal(c.tokens[at:], again.tokens)
  np.testing.assert_array_equal(c.logprobs[at:], again.logprobs)
  # What was sampled before is as it was, and so are its routes.
  assert np.all(c.computed_versions[: 3 + at - 1] == 0)
  assert engine.stats.recomputed >= 3 + at - 1
  assert engine.stats.pause_s > 0


# --- running ahead ------------------------------------------------------------


def test_running_ahead_changes_no_bit(start):
  engine = start(config(run_ahead=3))
  assert_equal_answers(answer(engine, *random_requests(40, 5)), ordinary(40, 5))
  requests = random_requests(40, 5)
  assert_equal_answers(one_by_one(engine, requests[:8]), ordinary(40, 5)[:8])
  until(lambda: engine.pages_held == 0, 'pages return')


@pytest.mark.parametrize('settings', ({'run_ahead': 3}, {'draft': 'ngram'}))
def test_enough_of_some_changes_no_other(start, settings):
  """Whether a step gives one token or several."""
  engine = start(config(**settings))
  serving.in_step(engine)
  requests, want = random_requests(40, 5), ordinary(40, 5)
  wanted = [
    len(c.tokens) if n % 2 else 1 + n % max(len(c.tokens) // 2, 1)
    for n, c in enumerate(want)
  ]

  def ending(r, count):
    told = []

    def tell(piece):
      told.extend(piece.tokens)
      return count if len(told) >= count else None

    return dataclasses.replace(r, on_tokens=tell)

  asked = [
    r if n % 2 else ending(r, count)
    for n, (r, count) in enumerate(zip(requests, wanted, strict=True))
  ]
  answers, shorter = answer(engine, *asked), 0
  assert_equal_answers(answers[1::2], want[1::2])
  for n in range(0, 40, 2):
    c, free, count = answers[n], want[n], wanted[n]
    size, first = len(c.tokens), slice(len(requests[n].tokens) + count)
    assert count <= size <= len(free.tokens)
    shorter += size < len(free.tokens)
    np.testing.assert_array_equal(c.tokens, free.tokens[:size])
    np.testing.assert_array_equal(c.logprobs, free.logprobs[:size])
    np.testing.assert_array_equal(c.experts[first], free.experts[first])
    if count < len(free.tokens):
      assert np.all(c.experts[first] >= 0)
  assert shorter > 5
  until(lambda: engine.pages_held == 0, 'pages return')
  until(lambda: not engine._open and not engine._waiting, 'all have left')


@pytest.mark.parametrize('late', [False, True])
def test_enough_of_one_that_gave_its_pages_back(start, late):
  """It is answered from what is known, or computed again for what is not."""
  engine = start(pages=13)
  requests = [request([i, 1, 2], i, 40) for i in range(6)]
  told, wanted, put_back = [], [], engine._put_back

  def held(sequence):
    put_back(sequence)
    until(lambda: wanted, 'its requester has enough')

  engine._put_back = held

  def tell(piece):
    told.extend(piece.tokens)
    if len(told) < 3 or wanted:
      return None
    until(lambda: engine.stats.preempted, 'the last gives its pages back')
    (it,) = (s for s in list(engine._open) if s.request is asked)
    wanted.append(it.length - 3 if late else 3)
    return wanted[0]

  asked = dataclasses.replace(requests[5], on_tokens=tell)
  *others, c = answer(engine, *requests[:5], asked)
  *want, free = answer(start(), *requests)
  assert_equal_answers(others, want)
  size, first = len(c.tokens), slice(3 + wanted[0])
  assert wanted[0] < size < 40 and c.stop_reason == 'stop'
  np.testing.assert_array_equal(c.tokens, free.tokens[:size])
  np.testing.assert_array_equal(c.experts[first], free.experts[first])
  assert np.all(c.experts[first] >= 0)
  until(lambda: engine._pool.available == 13, 'pages return')
  assert not engine._open


def test_running_ahead_with_few_pages(start):
  engine = start(config(run_ahead=3), pages=13)
  assert_equal_answers(answer(engine, *random_requests(40, 5)), ordinary(40, 5))
  assert engine.stats.preempted > 0


def test_nothing_compiles_after_warm_up(start):
  with pytest.raises(ValueError, match='call activate first'):
    start(activate=False).warm_up()
  engine = start(config(run_ahead=3))
  said = []
  shapes = engine.warm_up(cuts=True, say=said.append)
  assert shapes == 2 * len(programs.step_sizes(NUMERICS, CONFIG)) + 2
  assert len(said) == shapes
  assert said[-1].startswith(f'{shapes} of {shapes} programs compiled, ')
  before = programs.compiled()
  requests = [
    dataclasses.replace(r, top_p=0.9 if n % 3 == 0 else 1.0)
    for n, r in enumerate(random_requests(30, 6))
  ]
  answer(engine, *requests)
  answer(engine, requests[1])
  assert engine.stats.compilations == 0
  assert programs.compiled() == before


def test_weights_on_their_way_are_warmed_up_with(start, monkeypatch):
  """Taken up by the loop and not yet there, they are neither pending nor active."""
  swapping, go_on = threading.Event(), threading.Event()
  swap = engine_lib.Engine._swap

  def slow(self, *weights):
    swapping.set()
    assert go_on.wait(SECONDS)
    swap(self, *weights)

  monkeypatch.setattr(engine_lib.Engine, '_swap', slow)
  engine = start()
  assert swapping.wait(SECONDS)
  threading.Timer(0.2, go_on.set).start()
  assert engine.warm_up() == len(programs.step_sizes(NUMERICS, CONFIG))


def test_closing_waits_for_no_more_programs(start, monkeypatch):
  """Those of a large model take minutes."""
  begun, go_on = threading.Event(), threading.Event()
  compiled = []

  class Slow:
    def lower(self, *args):
      return self

    def compile(self):
      compiled.append(begun.set())
      assert go_on.wait(SECONDS)

  def stopped():
    until(lambda: engine._stopping, 'it is told to stop')
    go_on.set()

  monkeypatch.setattr(programs, 'mixed', Slow())
  monkeypatch.setattr(engine_lib, 'COMPILERS', 1)
  engine = start()
  with futures.ThreadPoolExecutor(2) as pool:
    warming = pool.submit(engine.warm_up, True)
    assert begun.wait(SECONDS)
    pool.submit(stopped)
    engine.close()
    with pytest.raises(records.EngineError, match='was stopped'):
      warming.result(SECONDS)
  assert len(compiled) == 1


def test_prepared_parameters_stay_as_they_are():
  params = serving.make_params(0)
  prepared = engine_lib.prepare(NUMERICS, params, split=True)
  assert engine_lib.prepare(NUMERICS, prepared, split=True) is prepared
  stack, layers = params['layers'], prepared['layers']
  assert len(layers) == transformer.moe_layers(MODEL)
  again = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
  jax.tree.map(np.testing.assert_array_equal, again, stack)


# --- drafts -------------------------------------------------------------------


def test_ngram_proposes_what_followed():
  tokens = np.asarray([1, 2, 3, 4, 9, 1, 2, 3, 7, 7, 1, 2, 3], np.int32)
  assert drafts.ngram(tokens, 3).tolist() == [7, 7, 1]  # the newest place
  assert drafts.ngram(tokens, 1).tolist() == [7]
  assert drafts.ngram(np.asarray([5, 6, 7], np.int32), 4).tolist() == []
  assert drafts.ngram(np.asarray([5], np.int32), 4).tolist() == []
  assert drafts.ngram(np.asarray([4, 4, 4], np.int32), 4).tolist() == [4]


def test_a_draft_changes_no_answer(start, monkeypatch):
  """Lookup, nonsense, and an oracle: bit for bit what there is without."""
  requests = random_requests(24, 5)
  want = ordinary(40, 5)[:24]
  texts = [whole(r, c) for r, c in zip(requests, want, strict=True)]

  def oracle(tokens, most):
    for text in texts:
      if len(text) > len(tokens) and np.array_equal(
        text[: len(tokens)], tokens
      ):
        return text[len(tokens) : len(tokens) + most]
    return tokens[:0]

  def nonsense(tokens, most):
    return np.full(most, (int(tokens[-1]) + 1) % 64, np.int32)

  rates, steps = {}, {}
  for name, draft in (
    ('ngram', drafts.ngram),
    ('oracle', oracle),
    ('nonsense', nonsense),
  ):
    monkeypatch.setitem(drafts.DRAFTS, name, draft)
    engine = start(config(draft=name))
    assert_equal_answers(answer(engine, *requests), want)
    stats = engine.stats
    rates[name] = stats.accepted / max(stats.proposed, 1)
    steps[name] = stats.steps
    until(lambda e=engine: e.pages_held == 0, 'pages return')
    assert stats.sampled == sum(len(c.tokens) for c in want)
  assert rates['oracle'] > 0.95 and rates['nonsense'] < 0.2
  assert steps['oracle'] < 0.6 * steps['nonsense']


def test_what_drafts_propose_is_drawn_as_the_model_says(start, monkeypatch):
  """Behind 42, 41 the prompt goes on with 56, 56: two drafts of about .43.

  Draws behind a draft that was refused count as well as those behind one that
  stood.
  """
  prompt, temperature, seen = [42, 41, 56, 56, 42], 0.6, collections.Counter()
  real = drafts.accepted

  def accepted(proposed, drawn):
    good = real(proposed, drawn)
    seen[(*proposed.tolist(), good)] += 1
    return good

  monkeypatch.setattr(drafts, 'accepted', accepted)
  engine = start(config(draft='ngram', draft_tokens=2))
  answers = answer(
    engine,
    *(request(prompt, n, 4, temperature=temperature) for n in range(1500)),
  )
  assert all(seen[56, 56, good] > 100 for good in range(3)), seen
  behind = [c for c in answers if c.tokens[0] == 41]
  assert len(behind) > 1000
  model = serving.weights()[0], prompt, temperature
  for drafted in (1, 2):
    assert serving.likelihood(*model, behind, drafted) > 1e-3


# --- numerics -----------------------------------------------------------------


def test_bfloat16_engine_equals_trainer():
  """The parameters are cast once, not at every step; no bit may change."""
  half = dataclasses.replace(NUMERICS, compute='bfloat16')
  requests = [
    dataclasses.replace(r, temperature=1.0) for r in random_requests(12, 2)
  ]

  @functools.partial(jax.jit)
  def score(params, *arrays):
    out = transformer.forward(params, MODEL, half, *arrays)
    logprobs, _ = transformer.token_logprob(
      params, MODEL, half, out.hidden, arrays[0], np.ones((1, 48), np.float32)
    )
    return logprobs[0], out.experts[0]

  with serving.starting(numerics=half) as go:
    answers = answer(go(config(rows=16)), *requests)  # one shape to compile
  for r, c in zip(requests, answers, strict=True):
    text = whole(r, c)
    arrays = np.zeros((3, 1, 48), np.int32)
    arrays[:, 0, : len(text)] = text, np.ones(len(text)), np.arange(len(text))
    logprobs, experts = score(serving.weights()[0], *arrays)
    new = slice(len(r.tokens), len(text))
    np.testing.assert_array_equal(c.logprobs, logprobs[new])
    np.testing.assert_array_equal(c.experts[:-1], experts[: len(text) - 1])
