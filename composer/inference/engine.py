"""The inference engine: continuous batching over a paged cache, on a thread.

One turn of the loop, in five moves:

1. activate new weights where some arrived (between two decode steps, so every
   token belongs to exactly one version);
2. admit waiting requests: find the pages that earlier requests left for the
   same tokens at the same version, reserve the rest;
3. plan a step: one row for every decoding sequence, then prompt tokens until
   the rows are full;
4. run the step;
5. record token, logprob, version and experts of every row; answer what ended.

Requests come from any event loop (`sample` is a coroutine, the `Sampler`
protocol of `composer.records`), the loop runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from typing import Any

import jax
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.inference import cache as cache_lib
from composer.inference import sampling
from composer.model import transformer


@dataclasses.dataclass(frozen=True)
class Stats:
  """Totals since the engine started."""

  steps: int = 0
  rows: int = 0  # real rows of all steps
  sampled: int = 0
  reused: int = 0  # prompt tokens found in the cache
  requests: int = 0
  busy_s: float = 0.0
  pause_s: float = 0.0  # of the newest weight swap
  version: int = -1


class _Sequence:
  """A request at work. Arrays reach to its last possible token."""

  def __init__(self, request, future, layers, experts_per_token):
    prompt = np.asarray(request.tokens, np.int32)
    size = len(prompt) + request.max_tokens
    self.request = request
    self.future = future
    self.prompt = len(prompt)
    self.length = len(prompt)  # tokens known
    self.computed = 0  # tokens whose keys and values exist
    self.tokens = np.zeros(size, np.int32)
    self.tokens[: self.prompt] = prompt
    self.logprobs = np.zeros(size, np.float32)
    self.versions = np.full(size, records.UNSAMPLED_VERSION, np.int32)
    self.computed_versions = np.full(size, -1, np.int32)
    self.experts = np.full(
      (size, layers, experts_per_token), records.UNKNOWN_EXPERT, np.int16
    )
    self.pages: list[int] = []
    self.published = 0  # pages of this sequence already findable
    self.key = None  # key of the last of them
    self.coming: tuple | list = ()  # keys that this sequence will publish
    self.table = None
    self.stop_reason = ''


class Engine:
  """Serves `sample` from any event loop; `activate` swaps weights in flight."""

  def __init__(
    self,
    model: config_lib.ModelConfig,
    numerics: config_lib.NumericsConfig,
    config: config_lib.EngineConfig,
  ):
    self._model, self._numerics, self._config = model, numerics, config
    block = numerics.kv_block
    self._columns = -(-config.max_context // block)
    if config.pages < self._columns + 1:  # one is scratch
      raise ValueError(
        f'engine.pages={config.pages} cannot hold one sequence of'
        f' engine.max_context={config.max_context} tokens; use'
        f' {self._columns + 1} or more'
      )
    self._pool = cache_lib.PagePool(config.pages)
    self._cache = transformer.init_cache(model, numerics, config.pages)
    self._waiting: collections.deque[_Sequence] = collections.deque()
    self._running: list[_Sequence] = []
    self._pending_weights: tuple[int, Any] | None = None
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

  def activate(self, version: int, params: Any) -> None:
    """Swaps to `params` (float32, as `params.widen` gives) before the next step.

    Running sequences go on: their older tokens keep the keys and values of the
    version that computed them, and `versions` says which. Returns at once.
    """
    with self._wake:
      self._pending_weights = (version, params)
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

  async def sample(self, request: records.SampleRequest) -> records.Completion:
    """Answers a request (`records.Sampler`).

    Raises:
      ValueError: the request cannot fit, or a token is out of range.
      EngineError: the engine failed or was stopped.
    """
    self._validate(request)
    future = asyncio.get_running_loop().create_future()
    sequence = _Sequence(
      request,
      future,
      transformer.moe_layers(self._model),
      self._model.experts_per_token,
    )
    with self._wake:
      self.check()
      self._waiting.append(sequence)
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

  def _validate(self, request: records.SampleRequest) -> None:
    tokens, limit = request.tokens, self._config.max_context
    if not len(tokens):
      raise ValueError('SampleRequest.tokens is empty; give at least one token')
    if request.max_tokens < 1:
      raise ValueError(
        f'SampleRequest.max_tokens is {request.max_tokens}; ask for at least 1'
      )
    if len(tokens) + request.max_tokens > limit:
      raise ValueError(
        f'a context of {len(tokens)} tokens plus max_tokens'
        f' {request.max_tokens} passes engine.max_context={limit}; shorten it'
        ' or raise engine.max_context'
      )
    if np.min(tokens) < 0 or np.max(tokens) >= self._model.vocab_size:
      raise ValueError(
        f'token ids must lie in [0, {self._model.vocab_size}); got'
        f' {int(np.min(tokens))} to {int(np.max(tokens))}'
      )
    if not request.temperature >= 0:
      raise ValueError(f'temperature {request.temperature} is below 0')

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
      left = self._running + list(self._waiting)
      self._waiting.clear()
    why = f'the engine failed: {self._failure!r}'
    error = records.EngineError(
      why if self._failure else 'the engine was stopped'
    )
    for sequence in left:
      _deliver(sequence.future, error)

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
    started = time.perf_counter()
    self._drop_cancelled()
    self._admit()
    plan = self._plan()
    if plan:
      self._run(plan)
    else:
      time.sleep(0.001)
    self._stats = dataclasses.replace(
      self._stats, busy_s=self._stats.busy_s + time.perf_counter() - started
    )
    return True

  def _has_work(self) -> bool:
    if self._pending_weights is not None:
      return True
    return self._params is not None and bool(self._running or self._waiting)

  def _swap(self, version: int, params: Any) -> None:
    started = time.perf_counter()
    self._params = jax.block_until_ready(params)
    self._version = version
    self._pool.drop_versions_but(version)
    pause = time.perf_counter() - started
    self._stats = dataclasses.replace(
      self._stats, pause_s=pause, version=version
    )

  def _drop_cancelled(self) -> None:
    kept = []
    for sequence in self._running:
      if sequence.future.cancelled():
        self._pool.release(sequence.pages)
      else:
        kept.append(sequence)
    self._running = kept

  def _admit(self) -> None:
    """Starts waiting requests, in order, while rows and pages allow.

    A request whose next page is being computed by another (the rollouts of a
    group share their prompt) waits for it rather than computing it twice.
    """
    block, coming = self._numerics.kv_block, set()
    for sequence in self._running:
      coming.update(sequence.coming)
    waiting, delayed = len(self._waiting), []
    for _ in range(waiting):
      if len(self._running) >= self._config.sequences:
        break
      sequence = self._waiting.popleft()
      if sequence.future.cancelled():
        continue
      usable = sequence.tokens[: sequence.prompt - 1]
      keys = cache_lib.chain(self._version, usable, block)
      found = self._pool.lookup(keys)
      if len(found) < len(keys) and keys[len(found)] in coming:
        delayed.append(sequence)
        continue
      size = len(sequence.tokens)
      need = -(-size // block) - len(found)
      self._pool.hold(found)
      if need > self._pool.available:
        self._pool.release(found)
        self._waiting.appendleft(sequence)
        break
      self._start(sequence, keys, found, need)
      coming.update(sequence.coming)
    self._waiting.extendleft(reversed(delayed))

  def _start(self, sequence, keys, found, need) -> None:
    block = self._numerics.kv_block
    sequence.pages = found + self._pool.allocate(need)
    sequence.coming = keys[len(found) :]
    sequence.table = np.zeros(self._columns, np.int32)
    sequence.table[: len(sequence.pages)] = sequence.pages
    reused = len(found) * block
    for index, page in enumerate(found):
      span = slice(index * block, (index + 1) * block)
      sequence.experts[span] = self._pool.experts(page)
    sequence.computed_versions[:reused] = self._version
    sequence.computed = reused
    sequence.published = len(found)
    sequence.key = keys[len(found) - 1] if found else None
    self._running.append(sequence)
    self._stats = dataclasses.replace(
      self._stats,
      reused=self._stats.reused + reused,
      requests=self._stats.requests + 1,
    )

  def _plan(self) -> list[tuple[_Sequence, int]]:
    """(sequence, tokens to compute) of the next step, decoding ones first."""
    left, plan, prefills = self._config.rows, [], []
    for sequence in self._running:
      if sequence.length - sequence.computed > 1:
        prefills.append(sequence)
      elif left:
        plan.append((sequence, 1))
        left -= 1
    for sequence in prefills:
      if not left:
        break
      count = min(left, sequence.length - sequence.computed)
      plan.append((sequence, count))
      left -= count
    return plan

  def _run(self, plan) -> None:
    rows = sum(count for _, count in plan)
    size = self._size(rows)
    tokens = np.zeros(size, np.int32)
    positions = np.zeros(size, np.int32)
    table = np.zeros((size, self._columns), np.int32)
    temperature = np.ones(size, np.float32)
    seeds = np.zeros(size, np.uint32)
    row = 0
    for sequence, count in plan:
      start, end = sequence.computed, sequence.computed + count
      tokens[row : row + count] = sequence.tokens[start:end]
      positions[row : row + count] = np.arange(start, end)
      table[row : row + count] = sequence.table
      last = row + count - 1
      temperature[last] = sequence.request.temperature
      seeds[last] = sequence.request.seed & 0xFFFFFFFF
      row += count
    drawn, logprobs, experts, self._cache = sampling.engine_step(
      self._model,
      self._numerics,
      self._params,
      self._cache,
      tokens,
      positions,
      table,
      temperature,
      seeds,
    )
    self._record(
      plan, np.asarray(drawn), np.asarray(logprobs), np.asarray(experts)
    )

  def _size(self, rows: int) -> int:
    """The smallest compiled size that takes `rows`."""
    for size in step_sizes(self._numerics, self._config):
      if rows <= size:
        return size
    raise AssertionError(f'{rows} rows planned for {self._config.rows}')

  def _record(self, plan, drawn, logprobs, experts) -> None:
    row, done, sampled = 0, [], 0
    for sequence, count in plan:
      start, end = sequence.computed, sequence.computed + count
      sequence.experts[start:end] = experts[row : row + count]
      sequence.computed_versions[start:end] = self._version
      sequence.computed = end
      row += count
      if end == sequence.length:
        sampled += 1
        self._append(sequence, drawn[row - 1], logprobs[row - 1])
      self._publish_pages(sequence)
      if sequence.stop_reason:
        done.append(sequence)
    # Before the answers: whoever has one finds it counted.
    self._stats = dataclasses.replace(
      self._stats,
      steps=self._stats.steps + 1,
      rows=self._stats.rows + row,
      sampled=self._stats.sampled + sampled,
    )
    if done:
      finished = set(map(id, done))
      self._running = [s for s in self._running if id(s) not in finished]
      for sequence in done:
        self._pool.release(sequence.pages)
      _deliver_all([(s.future, _completion(s)) for s in done])

  def _append(self, sequence, token, logprob) -> None:
    at = sequence.length
    sequence.tokens[at] = token
    sequence.logprobs[at] = logprob
    sequence.versions[at] = self._version
    sequence.length += 1
    if int(token) in sequence.request.stop_tokens:
      sequence.stop_reason = 'stop'
    elif sequence.length == len(sequence.tokens):
      sequence.stop_reason = 'length'

  def _publish_pages(self, sequence) -> None:
    """Makes pages findable that are full and of the active version throughout."""
    block = self._numerics.kv_block
    while (sequence.published + 1) * block <= sequence.computed:
      index = sequence.published
      span = slice(index * block, (index + 1) * block)
      # The chain starts anew nowhere: one page of another version ends it.
      whole = np.all(sequence.computed_versions[: span.stop] == self._version)
      if not whole:
        sequence.published = len(sequence.pages)
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


def step_sizes(
  numerics: config_lib.NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """Row counts that the engine compiles for: doubling, up to `engine.rows`."""
  size, sizes = min(2 * numerics.row_block, config.rows), []
  while size < config.rows:
    sizes.append(size)
    size *= 2
  return [*sizes, config.rows]


def _completion(sequence: _Sequence) -> records.Completion:
  sampled = slice(sequence.prompt, sequence.length)
  return records.Completion(
    tokens=sequence.tokens[sampled].copy(),
    logprobs=sequence.logprobs[sampled].copy(),
    versions=sequence.versions[sampled].copy(),
    experts=sequence.experts[: sequence.length].copy(),
    computed_versions=sequence.computed_versions[: sequence.length].copy(),
    stop_reason=sequence.stop_reason,
  )


def _deliver(future: asyncio.Future, result: Any) -> None:
  _deliver_all([(future, result)])


def _deliver_all(results: list[tuple[asyncio.Future, Any]]) -> None:
  """Hands results to their event loops, one wake-up a loop."""
  by_loop = collections.defaultdict(list)
  for future, result in results:
    by_loop[future.get_loop()].append((future, result))
  for loop, pairs in by_loop.items():
    try:
      loop.call_soon_threadsafe(_resolve, pairs)
    except RuntimeError:  # the loop is closed: nobody waits any more
      pass


def _resolve(pairs) -> None:
  for future, result in pairs:
    if future.done():
      continue
    if isinstance(result, BaseException):
      future.set_exception(result)
    else:
      future.set_result(result)


def widen(params: Any) -> Any:
  """Published parameters on the device, as `activate` takes them."""
  return jax.block_until_ready(params_lib.widen(params))
