"""The engine: continuous batching over a paged cache, on a thread.

One turn of the loop, in six moves:

1. activate new weights where some arrived (between two steps, so every token
   belongs to exactly one version);
2. drop what was cancelled;
3. admit waiting requests: find the pages that earlier requests left for the
   same tokens at the same version, take the pages that the rest needs;
4. plan a step: a row for every decoding sequence, then prompt tokens until the
   rows are full; or, where all sequences decode, several steps at once;
5. send it to the device;
6. record the step before it: token, logprob, version and experts of every row;
   answer what ended.

The device works on a step while the host records the one before, on a CPU only
where nothing starts or ends (`pace`). What a step needs of that one is the token
drawn, and it stays on the device (`composer.inference.programs`). A sequence that
stopped is then found out one step late: its last rows are thrown away.

Pages are taken as a sequence grows. Where they run out, the sequence that
started last gives its pages back, goes to the front of the queue and is
computed again from its tokens: nothing is lost, and nothing is drawn twice.

Requests come from any event loop (`sample` is a coroutine, the `Sampler`
protocol of `composer.records`), the loop runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from concurrent import futures
import dataclasses
import functools
import operator
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.inference import batches
from composer.inference import cache as cache_lib
from composer.inference import drafts
from composer.inference import pace
from composer.inference import planning
from composer.inference import programs
from composer.inference import replies
from composer.inference import sequence as sequence_lib
from composer.inference import speculate
from composer.model import held
from composer.model import transformer
from pallas_kernels import dispatch

Sequence = sequence_lib.Sequence
Part = batches.Part

COMPILERS = 8  # programs that are compiled at once


@dataclasses.dataclass(frozen=True)
class Stats:
  """Totals since the engine started."""

  steps: int = 0
  rows: int = 0  # real rows of all steps
  sampled: int = 0
  reused: int = 0  # prompt tokens found in the cache
  requests: int = 0  # admitted
  cancelled: int = 0
  preempted: int = 0  # sequences that gave their pages back
  recomputed: int = 0  # tokens that this, or new weights, had computed again
  proposed: int = 0  # tokens of drafts
  accepted: int = 0  # of those, the ones that were drawn
  compilations: int = 0  # shapes of a program that had not run before
  occupied: int = 0  # sequences at work, summed over steps
  busy_s: float = 0.0
  pause_s: float = 0.0  # of the newest weight swap
  version: int = -1


@dataclasses.dataclass(frozen=True)
class _Flight:
  """A step that the device works on."""

  parts: list[Part]
  steps: int  # decode steps of a run ahead; 0: a mixed step
  version: int
  sampled: programs.Sampled


class Engine:
  """Serves `sample` from any event loop; `activate` swaps weights in flight."""

  def __init__(
    self,
    model: config_lib.ModelConfig,
    numerics: config_lib.NumericsConfig,
    config: config_lib.EngineConfig,
  ):
    planning.check(model, numerics, config)
    self._model, self._numerics, self._config = model, numerics, config
    self._pool = cache_lib.PagePool(config.pages)
    self._cache = speculate.init_cache(
      model, numerics, config.pages, config.draft
    )
    self._maker = batches.Maker(model, numerics, config)
    self._last = jnp.zeros(config.sequences + 1, jnp.int32)
    self._free_slots = list(range(config.sequences - 1, -1, -1))
    self._rules = planning.rules(numerics, config)
    self._waiting: collections.deque[Sequence] = collections.deque()
    self._running: list[Sequence] = []  # in the order of their starts
    self._open: set[Sequence] = set()  # not answered yet, wherever they are
    self._flights: collections.deque[_Flight] = collections.deque()
    self._turns = 0
    self._pace = pace.Pace(shared=dispatch.platform() == 'cpu')
    self._pending_weights: tuple[int, Any] | None = None
    self._given = False  # whether there ever were weights to activate
    self._chores: collections.deque[Callable[[], None]] = collections.deque()
    self._cancelled = False
    self._satisfied: set[Sequence] = set()  # whose requesters have enough
    self._params = None
    self._version = -1
    self._wake = threading.Condition()
    self._stopping = False
    self._failure: BaseException | None = None
    self._stats = Stats()
    self._thread = threading.Thread(
      target=self._main, name='engine', daemon=True
    )
    self._thread.start()

  # --- called from outside -----------------------------------------------------

  @property
  def stats(self) -> Stats:
    return self._stats

  @property
  def version(self) -> int:
    """The version that the next token will be sampled at."""
    return self._version

  @property
  def pages_held(self) -> int:
    """Pages of running sequences; others may be taken or are kept for reuse."""
    return self._pool.held

  @property
  def pages(self) -> cache_lib.Count:
    """What the pages are in use for."""
    return self._pool.count

  @property
  def waiting(self) -> int:
    """Requests that have not started, or gave their pages back."""
    return len(self._waiting)

  def activate(self, version: int, params: Any) -> None:
    """Swaps to `params` before the next step; float32 (`widen`), or `prepare`d.

    Running sequences go on: their older tokens keep the keys and values of the
    version that computed them, and `versions` says which. With
    `engine.on_new_weights='restart'` they are computed again from their tokens.
    Returns at once.

    Raises:
      ValueError: the layer that drafts is not among them, and is needed.
    """
    if self._config.draft == drafts.ON_DEVICE and 'mtp' not in params:
      raise ValueError(
        f'version {version} has no `mtp`, the layer that drafts, and'
        f' engine.draft={self._config.draft!r} needs it; publish a model with'
        ' model.mtp_layers=1, or draft by ngram'
      )
    params = prepare(self._numerics, params)
    with self._wake:
      self._pending_weights, self._given = (version, params), True
      self._wake.notify()

  def wait_active(self, version: int, seconds: float = 60.0) -> None:
    """Waits until at least `version` is active."""
    deadline = time.monotonic() + seconds
    while self._version < version:
      self.check()
      if time.monotonic() > deadline:
        raise records.EngineError(
          f'version {version} did not become active within {seconds} s; the'
          f' engine runs version {self._version}'
        )
      time.sleep(0.002)

  def warm_up(
    self,
    cuts: bool = False,
    seconds: float = 600.0,
    say: Callable[[str], None] | None = None,
  ) -> int:
    """Runs every shape of every program once, on scratch; how many there are.

    Afterwards nothing is compiled while serving. Needs active weights.

    Args:
      cuts: also for requests that cut their distribution (top-p and the like).
      seconds: to wait at most.
      say: is told, from the engine's thread, how many are compiled.
    """
    done = threading.Event()
    count = [0]

    def chore() -> None:
      count[0] = self._run_every_shape(cuts, say or (lambda line: None))
      done.set()

    with self._wake:
      self.check()
      if not self._given:
        raise ValueError('no weights to warm up with; call activate first')
      self._chores.append(chore)
      self._wake.notify()
    deadline = time.monotonic() + seconds
    while not done.wait(0.05):
      self.check()
      if time.monotonic() > deadline:
        raise records.EngineError(f'no warm-up within {seconds} s')
    self.check()  # it may have been broken off
    return count[0]

  async def sample(self, request: records.SampleRequest) -> records.Completion:
    """Answers a request (`records.Sampler`).

    Cancelling the task ends the request, wherever it is, and gives its pages
    back before the next step.

    Raises:
      ValueError: the request cannot fit, or a value is out of range.
      EngineError: the engine failed or was stopped.
    """
    sequence_lib.check(
      request, self._config.max_context, self._model.vocab_size
    )
    future = asyncio.get_running_loop().create_future()
    sequence = Sequence(
      request,
      future,
      transformer.moe_layers(self._model),
      self._model.experts_per_token,
    )
    future.add_done_callback(self._notice)
    with self._wake:
      self.check()
      self._waiting.append(sequence)
      self._open.add(sequence)
      self._wake.notify()
    return await future

  def close(self, seconds: float = 30.0) -> None:
    """Stops the loop; unanswered requests get an `EngineError`."""
    with self._wake:
      self._stopping = True
      self._wake.notify()
    self._thread.join(seconds)
    if self._thread.is_alive():
      raise records.EngineError(f'the engine did not stop within {seconds} s')

  def check(self) -> None:
    """Raises `EngineError` where the engine failed or was stopped."""
    if self._failure is not None:
      raise records.EngineError(f'the engine failed: {self._failure!r}')
    if self._stopping:
      raise records.EngineError('the engine was stopped')

  def _notice(self, future: asyncio.Future) -> None:
    """A request may end before its answer: cancelled, or by its callback."""
    if future.cancelled() or future.exception() is not None:
      with self._wake:
        self._cancelled = True
        self._wake.notify()

  # --- the loop ----------------------------------------------------------------

  def _main(self) -> None:
    try:
      while self._turn():
        pass
    except BaseException as error:  # every waiter must learn of it
      self._failure = error
    self._fail_all()

  def _fail_all(self) -> None:
    with self._wake:
      left = list(self._open)
      self._open.clear()
      self._waiting.clear()
    why = f'the engine failed: {self._failure!r}'
    error = records.EngineError(
      why if self._failure else 'the engine was stopped'
    )
    replies.deliver([(sequence.future, error) for sequence in left])

  def _turn(self) -> bool:
    with self._wake:
      while not self._stopping and not self._has_work():
        self._wake.wait(1.0)
      if self._stopping:
        return False
      weights, self._pending_weights = self._pending_weights, None
    if weights is not None:
      self._swap(*weights)
    if self._params is None:
      return True
    if wait := self._pace.wait_s(len(self._running)):
      time.sleep(wait)
    started = time.perf_counter()
    while self._chores:
      self._chores.popleft()()
    self._drop_cancelled()
    self._end_satisfied()
    self._admit()
    self._reserve()
    plan, steps = self._plan()
    self._turns += 1
    if plan:
      self._send(plan, steps)
    if not plan and not self._flights:
      time.sleep(0.001)
    elif not plan:
      self._collect()
    while len(self._flights) > self._pace.depth:
      self._collect()
    self._pace.took = time.perf_counter() - started
    self._count(busy_s=self._pace.took)
    return True

  def _count(self, **more: float) -> None:
    """Adds to the totals; those who read them see one whole state."""
    stats = self._stats
    sums = {name: getattr(stats, name) + n for name, n in more.items()}
    self._stats = dataclasses.replace(stats, **sums)

  def _has_work(self) -> bool:
    if self._pending_weights is not None:
      return True
    return self._params is not None and bool(
      self._running or self._waiting or self._flights or self._chores
    )

  def _swap(self, version: int, params: Any) -> None:
    started = time.perf_counter()
    self._params = jax.block_until_ready(params)
    if self._config.on_new_weights == 'restart':
      self._drain()
      for sequence in reversed(list(self._running)):
        self._count(recomputed=sequence.computed)
        self._put_back(sequence)
    self._version = version
    self._pool.drop_versions_but(version)
    pause = time.perf_counter() - started
    self._stats = dataclasses.replace(
      self._stats, pause_s=pause, version=version
    )

  def _drop_cancelled(self) -> None:
    if not self._cancelled:
      return
    self._cancelled = False
    gone = [s for s in self._running if s.future.done()]
    for sequence in gone:
      self._leave(sequence)
    with self._wake:
      kept = [s for s in self._waiting if not s.future.done()]
      count = len(gone) + len(self._waiting) - len(kept)
      self._open.difference_update(set(self._waiting) - set(kept))
      self._waiting = collections.deque(kept)
    self._answered(gone)
    self._count(cancelled=count)

  def _tell(self, sequence: Sequence, piece: records.Piece) -> None:
    """On the requester's event loop."""
    enough = sequence.request.on_tokens(piece)
    if enough is not None and sequence.enough is None:
      sequence.enough = operator.index(enough)
      with self._wake:
        self._satisfied.add(sequence)

  def _end_satisfied(self) -> None:
    """Answers those that have enough, once the routes of that are known."""
    if not self._satisfied:
      return
    with self._wake:
      some = {s for s in self._satisfied if s.live and not s.future.done()}
      done = [s for s in some if sequence_lib.has_enough(s)]
      self._satisfied = some.difference(done)
      for sequence in done:
        if sequence.slot < 0:  # it gave its pages back
          self._waiting.remove(sequence)
          sequence.live = False
    for sequence in done:
      sequence.stop_reason = 'stop'
      if sequence.live:
        self._leave(sequence)
    replies.deliver([(s.future, sequence_lib.completion(s)) for s in done])
    self._answered(done)

  def _answered(self, sequences: list[Sequence]) -> None:
    """Only after the answer is on its way: a failure before must reach them."""
    with self._wake:
      self._open.difference_update(sequences)

  # --- pages -------------------------------------------------------------------

  def _admit(self) -> None:
    """Starts waiting requests, in order, while slots and pages allow.

    A request whose next page is being computed by another (the rollouts of a
    group share their prompt) waits for it rather than computing it twice. A page
    a running sequence is left free, so that what starts need not stop at once.
    """
    block, coming = self._numerics.kv_block, set()
    for sequence in self._running:
      coming.update(sequence.coming)
    waiting, delayed = len(self._waiting), []
    for _ in range(waiting):
      if not self._free_slots:
        break
      sequence = self._waiting.popleft()
      keys = self._keys(sequence)
      found = self._pool.lookup(keys)
      if len(found) < len(keys) and keys[len(found)] in coming:
        delayed.append(sequence)
        continue
      need = -(-sequence.length // block) - len(found)
      self._pool.hold(found)
      if need + len(self._running) > self._pool.available and (
        self._running or need > self._pool.available
      ):
        self._pool.release(found)
        self._waiting.appendleft(sequence)
        break
      self._start(sequence, keys, found, need)
      coming.update(sequence.coming)
    self._waiting.extendleft(reversed(delayed))

  def _keys(self, sequence: Sequence) -> list[cache_lib.Key]:
    """Keys of the pages that may be found; the last token must be run."""
    what = (self._version, sequence.length)
    if sequence.keys_of != what:
      usable = sequence.tokens[: sequence.length - 1]
      sequence.keys_of = what
      sequence.keys = cache_lib.chain(
        self._version, usable, self._numerics.kv_block
      )
    return sequence.keys

  def _start(self, sequence, keys, found, need) -> None:
    block = self._numerics.kv_block
    sequence.slot = self._free_slots.pop()
    sequence.pages = list(found)
    self._maker.tables[sequence.slot] = 0
    self._maker.tables[sequence.slot, : len(found)] = found
    self._grow(sequence, need)
    sequence.coming = keys[len(found) :]
    reused = len(found) * block
    if found:
      experts = np.concatenate([self._pool.experts(page) for page in found])
      sequence_lib.record(sequence, 0, experts, self._version)
    sequence.sent = reused
    sequence.published = len(found)
    sequence.key = keys[len(found) - 1] if found else None
    self._running.append(sequence)
    first = not sequence.started
    if first:
      sequence.started, sequence.cached = True, reused
    self._pace.start()
    self._count(reused=reused, requests=int(first))

  def _grow(self, sequence: Sequence, count: int) -> None:
    fresh = self._pool.allocate(count)
    held = len(sequence.pages)
    self._maker.tables[sequence.slot, held : held + count] = fresh
    sequence.pages += fresh

  def _reserve(self) -> None:
    """Takes the pages of every sequence's next step, the oldest first.

    One more token must be had, if others have to give pages back for it; those
    of a run ahead, or of a draft, are taken where there are some.
    """
    block, reach = self._numerics.kv_block, self._rules.reach
    for sequence in list(self._running):
      if sequence.slot < 0:  # it ended, or had to stop for another
        continue
      last = sequence.size - 1  # the last token is never computed
      want = min(sequence.due - 1 + reach, last)
      held = len(sequence.pages)
      if want <= held * block:
        continue
      must = min(sequence.due, last)
      need = -(-must // block) - held
      if need > 0 and not self._make_room(sequence, need):
        continue
      wanted = -(-want // block) - held
      need = max(need, min(wanted, self._pool.available))
      if need > 0:
        self._grow(sequence, need)

  def _make_room(self, sequence: Sequence, need: int) -> bool:
    """Frees pages; false where the sequence itself ended or had to stop."""
    while need > self._pool.available:
      if self._flights:
        self._collect()  # may end some, and all must be known of who stops
      else:
        victim = self._running[-1]
        self._count(preempted=1, recomputed=victim.computed)
        self._put_back(victim)
      if sequence.slot < 0:
        return False
    return True

  def _put_back(self, sequence: Sequence) -> None:
    """Stops a sequence of which nothing is in flight; it starts again first."""
    self._running.remove(sequence)
    self._pool.release(sequence.pages)
    self._free_slots.append(sequence.slot)
    sequence_lib.rewind(sequence)
    with self._wake:
      self._waiting.appendleft(sequence)

  def _leave(self, sequence: Sequence) -> None:
    """Ends a sequence. What is in flight of it writes to pages that the device
    will have done with before another's step."""
    self._running.remove(sequence)
    self._pool.release(sequence.pages)
    self._free_slots.append(sequence.slot)
    sequence.slot, sequence.live = -1, False

  # --- steps -------------------------------------------------------------------

  def _plan(self) -> tuple[list[Part], int]:
    return planning.plan(
      self._rules, self._running, self._turns, self._ask_mask
    )

  def _ask_mask(self, sequence: Sequence) -> bool:
    """Which tokens may come next; a mask that fails ends its own request."""
    sampled = sequence.tokens[sequence.prompt : sequence.length].copy()
    try:
      allowed = np.asarray(sequence.request.mask(sampled), bool)
      want = (self._model.vocab_size,)
      if allowed.shape != want or not allowed.any():
        raise ValueError(
          f'SampleRequest.mask gave {allowed.shape}, {int(allowed.sum())}'
          f' allowed; return bool {want} with at least one true'
        )
    except Exception as error:  # the request's own code
      self._leave(sequence)
      replies.deliver([(sequence.future, error)])
      self._answered([sequence])
      return False
    sequence.allowed = np.packbits(allowed)
    return True

  def _send(self, plan: list[Part], steps: int) -> None:
    before = speculate.compiled()
    batch = self._maker.ahead(plan) if steps else self._maker.mixed(plan)
    program, first, batch = self._call(steps, batch)
    out = program(*first, *self._state(), *batch)
    sampled, self._cache, self._last = out
    for array in jax.tree.leaves(sampled):
      array.copy_to_host_async()
    for part in plan:
      part.sequence.sent = part.start + part.count
      # Of a draft, the count is not known before it is recorded.
      part.sequence.due += part.draws if steps else min(part.draws, 1)
    self._flights.append(_Flight(plan, steps, self._version, sampled))
    self._count(compilations=speculate.compiled() - before)

  def _drain(self) -> None:
    while self._flights:
      self._collect()

  def _collect(self) -> None:
    """Records the oldest step in flight, and answers what ended."""
    flight = self._flights.popleft()
    answer, experts, proposed = jax.tree.map(np.asarray, flight.sampled)
    tokens, logprobs = answer.tokens.tolist(), answer.logprobs.tolist()
    draw = rows = sampled = 0
    replied, done = [], []
    chains = iter(() if proposed is None else proposed[0])
    for n, part in enumerate(flight.parts):
      at, draw = draw, draw + part.draws
      sequence = part.sequence
      if part.draws and proposed is not None:
        sequence.drafted = next(chains)
      if not sequence.live:
        continue  # it ended while this step ran
      rows += part.count
      if flight.steps:
        here = slice(part.count), n
        sampled += self._record(part, answer, here, experts[here], flight)
      elif _plain(part):
        sequence_lib.advance(
          sequence,
          part.start,
          tokens[0][at],
          logprobs[0][at],
          experts[0, part.row],
          flight.version,
        )
        self._publish_pages(sequence)
        sampled += 1
      else:
        here = 0, slice(at, draw)
        routes = experts[0, part.row : part.row + part.count]
        sampled += self._record(part, answer, here, routes, flight)
      if part.draws and (piece := sequence_lib.piece(sequence)):
        tell = functools.partial(self._tell, sequence)
        replied.append((sequence.future, (tell, piece)))
      if sequence.stop_reason:
        done.append(sequence)
    self._pace.record(len(done))
    # Before the answers: whoever has one finds it counted.
    steps = flight.steps or 1
    self._count(
      steps=steps,
      rows=rows,
      sampled=sampled,
      occupied=steps * len(flight.parts),
    )
    for sequence in done:
      replied.append((sequence.future, sequence_lib.completion(sequence)))
    for sequence in done:
      self._leave(sequence)
    if replied:
      replies.deliver(replied)
    self._answered(done)

  def _record(self, part, answer, here, routes, flight) -> int:
    """Notes what one sequence's rows gave; how many tokens it sampled.

    `here` are its draws in the answer, of which nothing is cut out that is not
    wanted: that is much of what the host does.
    """
    sequence, taken = part.sequence, 0
    if part.draws:
      tokens = answer.tokens[here]
      if part.proposed is not None:
        good = drafts.accepted(part.proposed, tokens)
        self._count(proposed=len(part.proposed), accepted=good)
        tokens = tokens[: good + 1]
      taken = sequence_lib.extend(
        sequence, tokens, answer.logprobs[here], flight.version
      )
      if sequence.cuts:
        kept = answer.kept[here][:taken]
        sequence_lib.keep(sequence, kept, self._model.vocab_size)
      if sequence.request.top_logprobs:
        top = answer.top_ids[here], answer.top_logprobs[here]
        sequence_lib.tell(sequence, *(x[:taken] for x in top))
    several = flight.steps or part.proposed is not None
    count = taken if several else part.count
    sequence_lib.record(sequence, part.start, routes[:count], flight.version)
    if part.proposed is not None:
      sequence.sent, sequence.due = sequence.computed, sequence.length
    self._publish_pages(sequence)
    return taken

  def _publish_pages(self, sequence: Sequence) -> None:
    """Makes pages findable that are full and of the active version throughout."""
    block = self._numerics.kv_block
    while (sequence.published + 1) * block <= sequence.computed:
      index = sequence.published
      span = slice(index * block, (index + 1) * block)
      # The chain starts anew nowhere: one page of another version ends it.
      versions = sequence.computed_versions[: span.stop]
      if not np.all(versions == self._version):
        sequence.published = len(sequence.tokens)
        break
      (sequence.key,) = cache_lib.chain(
        self._version, sequence.tokens[span], block, sequence.key
      )
      self._pool.publish(
        sequence.pages[index], sequence.key, sequence.experts[span].copy()
      )
      sequence.published += 1
    done = sequence.computed // block
    if sequence.coming and done >= (sequence.prompt - 1) // block:
      sequence.coming = ()

  def _run_every_shape(self, cuts: bool, say: Callable[[str], None]) -> int:
    """Every program in every shape, on scratch pages.

    They are compiled side by side: lowering holds this process, compiling does
    not, but for kernels of Mosaic GPU, one at a time. A program that was compiled
    is not compiled again when it is called.
    """
    numerics, config = self._numerics, self._config
    kinds = [(0, programs.step_sizes(numerics, config))]
    if self._rules.run_ahead > 1:
      kinds.append(
        (self._rules.run_ahead, programs.ahead_sizes(numerics, config))
      )
    calls = [
      self._call(steps, self._maker.blank(size, columns, bool(steps), cut))
      for steps, sizes in kinds
      for size in sizes
      for columns in programs.column_sizes(numerics, config)
      for cut in (False, True)[: 1 + cuts]
    ]
    started = time.perf_counter()
    with futures.ThreadPoolExecutor(COMPILERS) as pool:
      compiling = []
      for program, first, batch in calls:
        if not self._stopping:
          lowered = program.lower(*first, *self._state(), *batch)
          compiling.append(pool.submit(self._compile, lowered))
      for number, one in enumerate(futures.as_completed(compiling), 1):
        one.result()
        took = time.perf_counter() - started
        say(f'{number} of {len(calls)} programs compiled, {took:.0f} s')
    for program, first, batch in calls:
      if self._stopping:
        return 0
      out = program(*first, *self._state(), *batch)
      _, self._cache, self._last = out
    jax.block_until_ready(self._last)
    return len(calls)

  def _compile(self, lowered: Any) -> None:
    """Unless the engine is to stop: that would wait for all of them."""
    if not self._stopping:
      lowered.compile()

  def _call(self, steps: int, batch: tuple) -> tuple:
    """(program, its static arguments, the batch) of so many decode steps."""
    if steps:
      return programs.ahead, (self._model, self._numerics, steps), batch
    if self._config.draft == drafts.ON_DEVICE:
      first = self._model, self._numerics, self._config.draft_tokens
      return speculate.mixed, first, batch
    return programs.mixed, (self._model, self._numerics), batch

  def _state(self) -> tuple:
    """What every program takes next, and gives back but for the parameters."""
    return self._params, self._cache, self._last


def _plain(part: Part) -> bool:
  """Whether it is one row of a sequence that draws one token from all."""
  single = part.count == part.draws == 1 and part.proposed is None
  sequence = part.sequence
  return single and not (sequence.cuts or sequence.request.top_logprobs)


def prepare(
  numerics: config_lib.NumericsConfig, params: Any, split: bool | None = None
) -> Any:
  """Parameters as steps read them: what need not be done in each, done once.

  They are `held`, and, on an accelerator (`split`), the layers lie apart. The
  trainer loops over its layers and gets the same bits all the same: see `between
  the kernels` in `model.operations`. Parameters that are prepared stay as they
  are.
  """
  if split is None:
    split = dispatch.platform() != 'cpu'
  done = not split or any(
    isinstance(params.get(stack), tuple) for stack in ('dense', 'layers')
  )
  if done and (split or numerics.compute == 'float32'):
    return params
  return _prepare(numerics, split, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prepare(numerics: config_lib.NumericsConfig, split: bool, params: Any):
  params = held.held(params, numerics)
  return transformer.split_layers(params) if split else params


def widen(params: Any) -> Any:
  """Published parameters on the device, as `activate` takes them."""
  return jax.block_until_ready(params_lib.widen(params))
