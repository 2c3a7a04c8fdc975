"""One session: a model, a machine and a task, from the prompt to the reward.

`run_session` acquires a machine, renders the prompt, and turns:

  1. open a turn and sample it;
  2. parse it; execute its calls in the machine, or answer what was wrong;
  3. append the observation, and go on with everything so far as the context.

How turns are written and read is the template's (`composer.templates`).

A context that one more turn could take past `session.context_tokens` is
summarised first: the model writes a summary, and goes on in a new segment that
holds the prompt, the summary and the state. The machine goes on as it is. The
session ends when a tool says so or a chat model calls none ('finished'), or
when a budget is spent: 'turns', 'seconds' (those that its own tools took),
'context' (a summary would be needed and none is left, or the engine's context is
full). Every end is graded alike, in a second, clean machine.

Three kinds of trouble are kept apart:
  - what the model did wrong is answered, kept and graded;
  - infrastructure that fails (`MachineError`, `EngineError`, a wait past
    `session.max_seconds`) has the whole session run again from nothing, and
    after `RETRIES` raises `SessionFailed`. It never becomes a reward of zero;
  - anything else is a fault of ours and is raised as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
import dataclasses
import hashlib
import time
from typing import Any, TypeVar

import numpy as np

from composer import chat
from composer import templates
from composer.config import Experiment
from composer.environments.machines import MachineError
from composer.environments.tasks import repair
from composer.environments.tools import TOOLS
from composer.model import vocabularies
from composer.records import Completion
from composer.records import EngineError
from composer.records import Sampler
from composer.records import SampleRequest
from composer.records import Segment
from composer.records import Task
from composer.records import Trajectory
from composer.records import Turn
from composer.rewards import combine
from composer.rewards.verify import grade
from composer.rollout.recorder import BadCompletion
from composer.rollout.recorder import Recorder
from composer.templates.protocol import Answer
from composer.templates.protocol import Reply
from composer.templates.protocol import Template

T = TypeVar('T')

RETRIES = 2
BACKOFF_S = 0.25  # before the first retry; four times as long before the next

LISTINGS = {'repair': repair.listing}  # task kind -> the code as it is shown


class SessionFailed(RuntimeError):
  """Infrastructure failed and went on failing; there is no trajectory.

  `reason` is 'machine', 'engine' or 'timeout', by which failures are counted.
  """

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


class WaitTimeout(RuntimeError):
  """Something gave no answer in time (infrastructure)."""


@dataclasses.dataclass(frozen=True)
class _Job:
  """What a session is given, as `run_session` takes it, and its tools."""

  sampler: Sampler
  pool: Any
  task: Task
  tokenizer: chat.Tokenizer
  experiment: Experiment
  group_id: str
  index: int
  seed: int
  provenance: Mapping[str, Any]
  specs: tuple[chat.ToolSpec, ...]
  template: Template
  stops: tuple[int, ...]  # ids that end a sampled turn, the right one first


@dataclasses.dataclass
class _State:
  """What a running session changes; every attempt has its own.

  `context` is all that the model would see now; `segment` is where the last
  call was recorded, `parent` whose summary the context holds.
  """

  recorder: Recorder
  prompt: list[int]
  context: list[int]
  opening: str  # the context's first part, as a person would read it
  opening_tokens: int
  timings: dict[str, float]
  turns: list[Turn] = dataclasses.field(default_factory=list)
  segment: int = -1
  parent: int = -1
  samples: int = 0
  sampled_tokens: int = 0
  acts: int = 0
  calls: int = 0
  summaries: int = 0
  tool_seconds: float = 0.0  # as the tools count them


async def run_session(
  sampler: Sampler,
  pool: Any,
  task: Task,
  tokenizer: chat.Tokenizer,
  experiment: Experiment,
  *,
  group_id: str,
  index: int,
  seed: int,
  provenance: Mapping[str, Any],
) -> Trajectory:
  """Runs one session of `task` and grades it.

  Args:
    sampler: the engine.
    pool: machines (`composer.environments.machines.Pool`).
    task: what to do; its variables are already drawn.
    tokenizer: of the model.
    experiment: budgets, reward, shape of the routes.
    group_id: of the draw that the session belongs to.
    index: of the session in its group.
    seed: of this session alone; the seed of each sample is a hash of it.
    provenance: JSON-able; the machine's, the seed and the attempt are added.

  Raises:
    SessionFailed: infrastructure failed `RETRIES` + 1 times.
    ValueError: the prompt leaves no room for a turn, or the tokenizer is not
      of the model or of the template.
  """
  if task.kind not in LISTINGS:
    raise ValueError(
      f'task {task.id} has kind {task.kind!r}; the known kinds are'
      f' {", ".join(LISTINGS)}'
    )
  template = templates.choose(experiment.template, tokenizer)
  vocabularies.check_embedding(tokenizer, experiment.model.vocab_size)
  job = _Job(
    sampler=sampler,
    pool=pool,
    task=task,
    tokenizer=tokenizer,
    experiment=experiment,
    group_id=group_id,
    index=index,
    seed=seed,
    provenance=provenance,
    specs=tuple(TOOLS[name].spec for name in task.tools),
    template=template,
    stops=template.stops(tokenizer),
  )
  for attempt in range(RETRIES + 1):
    try:
      return await _attempt(job, attempt)
    except (MachineError, EngineError, WaitTimeout) as error:
      if attempt == RETRIES:
        raise _failure(error, task, attempt + 1) from error
    await asyncio.sleep(BACKOFF_S * 4**attempt)
  raise AssertionError('unreachable')


def sample_seed(seed: int, sample: int) -> int:
  """Seed of a session's n-th sample: 31 bits of a hash of both."""
  digest = hashlib.blake2b(f'{seed}/{sample}'.encode(), digest_size=4).digest()
  return int.from_bytes(digest, 'little') >> 1


def _failure(error: Exception, task: Task, attempts: int) -> SessionFailed:
  reason = 'machine'
  if isinstance(error, EngineError):
    reason = 'engine'
  elif isinstance(error, WaitTimeout):
    reason = 'timeout'
  return SessionFailed(
    reason, f'task {task.id}: {attempts} attempts failed; the last: {error}'
  )


async def _within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
  try:
    async with asyncio.timeout(seconds):
      return await awaitable
  except TimeoutError as error:
    raise WaitTimeout(
      f'{what}: no answer within session.max_seconds={seconds:g}'
    ) from error


# --- one attempt -------------------------------------------------------------


async def _attempt(job: _Job, attempt: int) -> Trajectory:
  """One session from nothing; all that outlives it is what it returns."""
  began = time.perf_counter()
  limit = job.experiment.session.max_seconds
  state = _begin(job)
  machine = await _within(
    limit, job.pool.acquire(job.task.files), 'waiting for a machine'
  )
  try:
    state.timings['machine'] = time.perf_counter() - began
    stop_reason = await _loop(job, state, machine)
    files = await _within(
      limit, _read(machine, job.task.allowed), 'reading the result'
    )
    isolation = dict(machine.provenance)
  finally:
    await asyncio.shield(
      _within(limit, job.pool.release(machine), 'giving a machine back')
    )
  # Graded only now, so that no session holds one machine while it waits for
  # another.
  mark = time.perf_counter()
  result = await _within(limit, grade(job.pool, job.task, files), 'grading')
  ended = time.perf_counter()
  state.timings.update(grading=ended - mark, total=ended - began)
  provenance = {
    **job.provenance,
    'machine': isolation,
    'seed': job.seed,
    'attempt': attempt,
  }
  return _trajectory(job, state, stop_reason, result.solved, provenance)


def _begin(job: _Job) -> _State:
  task, session = job.task, job.experiment.session
  listing = LISTINGS[task.kind](task)
  prompt = job.template.render_prompt(
    job.tokenizer, job.specs, task.instruction, listing
  )
  if _summary_due(job, prompt):
    raise ValueError(
      f'task {task.id}: its prompt of {len(prompt)} tokens and one turn do not'
      f' fit session.context_tokens={session.context_tokens}; raise it'
    )
  model = job.experiment.model
  layers = model.layers - model.dense_layers
  return _State(
    recorder=Recorder(layers, model.experts_per_token),
    prompt=prompt,
    context=list(prompt),
    opening=f'{task.instruction}\n{listing}',
    opening_tokens=len(prompt),
    timings={'machine': 0.0, 'sampling': 0.0, 'tools': 0.0},
  )


async def _read(machine: Any, paths: Sequence[str]) -> dict[str, bytes]:
  """What may be carried to the clean machine.

  A path that is gone or cannot be read is left out: the model's doing.
  """
  files = {}
  for path in paths:
    try:
      files[path] = await machine.read(path)
    except OSError:
      continue
  return files


def _trajectory(
  job: _Job,
  state: _State,
  stop_reason: str,
  solved: bool,
  provenance: Mapping[str, Any],
) -> Trajectory:
  config = job.experiment.reward
  counts = combine.EffortCounts(
    tokens=state.sampled_tokens, calls=state.calls, turns=state.acts
  )
  parts = {
    'tests': 1.0 if solved else 0.0,
    'effort': combine.effort(config, counts),
  }
  segments = state.recorder.finish(stop_reason)
  return Trajectory(
    task_id=job.task.id,
    group_id=job.group_id,
    index=job.index,
    segments=segments,
    turns=tuple(_clamp(turn, segments) for turn in state.turns),
    reward=combine.combine(config, parts),
    reward_parts=parts,
    stop_reason=stop_reason,
    provenance=provenance,
    timings=state.timings,
  )


def _clamp(turn: Turn, segments: Sequence[Segment]) -> Turn:
  """The last observation is in no context: the model never saw it."""
  length = len(segments[turn.segment].tokens)
  if turn.end <= length:
    return turn
  return dataclasses.replace(turn, start=min(turn.start, length), end=length)


# --- the turn loop -----------------------------------------------------------


async def _loop(job: _Job, state: _State, machine: Any) -> str:
  """Takes turns until the session ends; returns why it ended."""
  session = job.experiment.session
  while True:
    if state.acts >= session.max_turns:
      return 'turns'
    if state.tool_seconds >= session.max_seconds:
      return 'seconds'
    if not _summary_due(job, state.context):
      ended = await _turn(job, state, machine)
    elif state.summaries < session.max_summaries:
      ended = await _summarise(job, state)
    else:
      ended = 'context'
    if ended:
      return ended


def _summary_due(job: _Job, context: Sequence[int]) -> bool:
  """Whether one more turn could take the context too far."""
  session = job.experiment.session
  turn = job.template.turn_tokens(job.tokenizer, job.specs, session)
  return len(context) + turn > session.context_tokens


async def _turn(job: _Job, state: _State, machine: Any) -> str:
  """A turn and its observation; returns why the session ended, or ''."""
  session, template = job.experiment.session, job.template
  start = len(state.context)
  state.context += template.open_turn(job.tokenizer)
  completion, seconds = await _sample(job, state, session.max_act_tokens)
  sampled = completion.tokens.tolist()
  reply = template.parse(job.tokenizer, sampled, job.specs)
  state.acts += 1
  state.calls += len(reply.acts)
  kind, shown = _readable(reply)
  _add_turn(state, kind, shown, start, seconds)
  if completion.stop_reason == 'context':
    return 'context'
  state.context += template.close_turn(job.tokenizer, sampled)
  if not reply.acts and template.text_ends:
    return 'finished'
  answers, ends, seconds = await _answer(job, state, machine, reply)
  start = len(state.context)
  state.context += template.render_observation(
    job.tokenizer, answers, session.observation_tokens
  )
  text = '\n'.join(answer.text.strip() for answer in answers)
  _add_turn(state, 'observation', text, start, seconds)
  return 'finished' if ends else ''


async def _answer(
  job: _Job, state: _State, machine: Any, reply: Reply
) -> tuple[list[Answer], bool, float]:
  """(answers, whether the session ends, seconds) of the acts of a turn.

  They are executed in order, up to the one that ends the session. A note is
  answered by nothing.
  """
  answers, total = [], 0.0
  for act in reply.acts:
    if isinstance(act, chat.Broken):
      answers.append(Answer(job.template.error_text(act), '', act.id))
      continue
    mark = time.perf_counter()
    result = await _within(
      job.experiment.session.max_seconds,
      TOOLS[act.name].run(machine, job.task, act.arguments),
      f'tool {act.name}',
    )
    seconds = time.perf_counter() - mark
    total += seconds
    state.timings['tools'] += seconds
    state.tool_seconds += result.seconds
    answers.append(Answer(result.text, act.name, act.id))
    if result.ends:
      return answers, True, total
  return answers or [Answer('')], False, total


async def _summarise(job: _Job, state: _State) -> str:
  """Replaces the context by a summary of it; returns why it ended, or ''."""
  session, tokenizer = job.experiment.session, job.tokenizer
  template, end = job.template, job.stops[0]
  asked = template.open_summary(tokenizer, state.context)
  if len(asked) + session.summary_tokens > job.experiment.engine.max_context:
    return 'context'  # the last summary was so long that none fits behind it
  start = len(asked) - len(template.open_summary(tokenizer, []))
  state.context = asked
  completion, seconds = await _sample(job, state, session.summary_tokens)
  sampled = completion.tokens.tolist()
  state.summaries += 1
  text = template.summary_text(tokenizer, sampled)
  if completion.stop_reason != 'context' and sampled[-1:] != [end]:
    state.context.append(end)
    state.recorder.append([end])
  _add_turn(state, 'summary', text, start, seconds)
  if completion.stop_reason == 'context':
    return 'context'
  left = session.max_turns - state.acts
  state.context = template.render_restart(
    tokenizer, state.prompt, sampled, left, state.summaries
  )
  state.opening = text + chat.state_text(left, state.summaries)
  state.opening_tokens = len(state.context)
  state.parent = state.segment
  return ''


async def _sample(
  job: _Job, state: _State, max_tokens: int
) -> tuple[Completion, float]:
  """Samples behind the context, records it, grows the context by it."""
  session = job.experiment.session
  request = SampleRequest(
    tokens=np.array(state.context, np.int32),
    max_tokens=max_tokens,
    stop_tokens=job.stops,
    temperature=session.temperature,
    seed=sample_seed(job.seed, state.samples),
  )
  mark = time.perf_counter()
  completion = await _within(
    session.max_seconds, job.sampler.sample(request), 'the engine'
  )
  seconds = time.perf_counter() - mark
  _check_answer(completion, request)
  segment = state.recorder.record(
    request.tokens, completion, session.temperature, state.parent
  )
  if segment != state.segment:
    state.segment = segment
    state.turns.append(
      Turn('prompt', state.opening, segment, 0, state.opening_tokens, 0.0)
    )
  state.samples += 1
  state.sampled_tokens += len(completion.tokens)
  state.timings['sampling'] += seconds
  state.context += completion.tokens.tolist()
  return completion, seconds


def _check_answer(completion: Completion, request: SampleRequest) -> None:
  """Refuses an answer that is longer than it may be, or ends elsewhere."""
  tokens = completion.tokens.tolist()
  if len(tokens) > request.max_tokens:
    raise BadCompletion(
      f'the engine sampled {len(tokens)} tokens where max_tokens is'
      f' {request.max_tokens}'
    )
  stops = [at for at, i in enumerate(tokens) if i in request.stop_tokens]
  if stops and stops[0] != len(tokens) - 1:
    raise BadCompletion(
      f'the engine went on after the stop token at {stops[0]} of {len(tokens)}'
    )
  if not stops and completion.stop_reason == 'stop':
    raise BadCompletion("stop_reason is 'stop', but no stop token was sampled")


def _add_turn(
  state: _State, kind: str, text: str, start: int, seconds: float
) -> None:
  end = len(state.context)
  state.turns.append(Turn(kind, text, state.segment, start, end, seconds))


def _readable(reply: Reply) -> tuple[str, str]:
  """(kind of turn, text) of a reply, for people."""
  lines = [x for x in (reply.thinking, reply.text.strip()) if x]
  for act in reply.acts:
    if isinstance(act, chat.Call):
      lines.append(' '.join((act.name, *map(str, act.arguments.values()))))
    else:
      lines.append(f'{act.text.strip()} ({act.reason})')
  if any(isinstance(act, chat.Broken) for act in reply.acts):
    return 'broken', '\n'.join(lines)
  return 'call' if reply.acts else 'text', '\n'.join(lines)
