"""One session: a model, a machine and a task, from the prompt to the reward.

`run_session` acquires a machine, renders the prompt, and turns (`loop.py`):

  1. open a turn and sample it;
  2. parse it; execute its calls in the machine, or answer what was wrong;
  3. append the observation, and go on with everything so far as the context.

How turns are written and read is the template's (`composer.templates`), which
tools there are the task's (`composer.environments.tools`), and the config's
where it attaches MCP servers.

A context that one more turn could take past `session.context_tokens` is
summarised first: the model thinks, writes a summary, and goes on in a new
segment that holds the prompt, the summary and the state (turns left, the todo
list). The request for a summary stands behind the whole context and the new
segment begins with the prompt, so that the keys and values of both are reused.
The machine goes on as it is. The session ends when a tool says so or a chat
model calls none ('finished'), or when a budget is spent: 'turns', 'tokens'
(sampled), 'seconds' (those that its own tools took), 'context' (a summary would
be needed and none is left, or the engine's context is full). Every end is graded
alike, in a second, clean machine.

Three kinds of trouble are kept apart:
  - what the model did wrong is answered, kept and graded;
  - infrastructure that fails (`MachineError`, `EngineError`, `ToolServerError`, a
    wait past `session.max_seconds`) has the whole session run again from
    nothing, on another machine and after a pause, and after `RETRIES` raises
    `SessionFailed`; a judge retries by itself (`JudgeError`). None ever becomes
    a reward of zero;
  - anything else is a fault of ours and is raised as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
import dataclasses
import time
from typing import Any

from composer import chat
from composer import templates
from composer.config import Experiment
from composer.environments import mcp
from composer.environments import tools as tools_lib
from composer.environments.machines import MachineError
from composer.environments.tasks import repair
from composer.environments.tools import TOOLS
from composer.model import vocabularies
from composer.records import EngineError
from composer.records import Sampler
from composer.records import Segment
from composer.records import Task
from composer.records import Trajectory
from composer.records import Turn
from composer.rewards import combine
from composer.rewards import judge as judge_lib
from composer.rewards import monitors
from composer.rewards.effort import EffortCounts
from composer.rewards.effort import effort
from composer.rewards.verify import Grade
from composer.rewards.verify import Remains
from composer.rewards.verify import collect
from composer.rewards.verify import grade
from composer.rollout import loop
from composer.rollout.loop import Job
from composer.rollout.loop import State
from composer.rollout.loop import WaitTimeout as WaitTimeout
from composer.rollout.loop import sample_seed as sample_seed
from composer.rollout.loop import within
from composer.rollout.recorder import Recorder

RETRIES = 2
BACKOFF_S = 0.25  # before the first retry; four times as long before the next

LISTINGS = {'repair': repair.listing}  # task kind -> the code as it is shown

# What is infrastructure -> by which name its failures are counted.
REASONS: Mapping[type[Exception], str] = {
  MachineError: 'machine',
  EngineError: 'engine',
  mcp.ToolServerError: 'tool_server',
  WaitTimeout: 'timeout',
  judge_lib.JudgeError: 'judge',
}


class SessionFailed(RuntimeError):
  """Infrastructure failed and went on failing; there is no trajectory.

  `reason` is one of `REASONS`, by which failures are counted.
  """

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


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
    provenance: JSON-able; the machine's, the seed, the attempt and what failed
      before it are added.

  Raises:
    SessionFailed: infrastructure failed `RETRIES` + 1 times.
    ValueError: the prompt leaves no room for a turn, the tokenizer is not of
      the model or of the template, or the task offers a tool that is not known.
  """
  template = templates.choose(experiment.template, tokenizer)
  vocabularies.check_embedding(tokenizer, experiment.model.vocab_size)
  job = Job(
    sampler=sampler,
    pool=pool,
    task=task,
    tokenizer=tokenizer,
    experiment=experiment,
    group_id=group_id,
    index=index,
    seed=seed,
    provenance=provenance,
    tools=tools_lib.choose(task, TOOLS),
    template=template,
    stops=template.stops(tokenizer),
  )
  failures: list[str] = []
  while True:
    try:
      return await _attempt(job, failures)
    except tuple(REASONS) as error:
      failures.append(f'{_reason(error)}: {error}')
      # A judge has been asked again already; the session is not to blame.
      last = isinstance(error, judge_lib.JudgeError)
      if last or len(failures) > RETRIES:
        raise SessionFailed(
          _reason(error),
          f'task {task.id}: {len(failures)} attempts failed; the last: {error}',
        ) from error
    await asyncio.sleep(_pause(seed, len(failures)))


def _reason(error: Exception) -> str:
  return next(y for x, y in REASONS.items() if isinstance(error, x))


def _pause(seed: int, failures: int) -> float:
  """Seconds before the next attempt; the sessions of a group differ in it."""
  spread = 0.5 + sample_seed(seed, -failures) / 2**31
  return BACKOFF_S * 4 ** (failures - 1) * spread


# --- one attempt -------------------------------------------------------------


async def _attempt(job: Job, failures: Sequence[str]) -> Trajectory:
  """One session from nothing; all that outlives it is what it returns."""
  began = time.perf_counter()
  limit = job.experiment.session.max_seconds
  timings = {'machine': 0.0, 'sampling': 0.0, 'tools': 0.0}
  machine = await within(
    limit, job.pool.acquire(job.task.files), 'waiting for a machine'
  )
  try:
    timings['machine'] = time.perf_counter() - began
    servers = job.experiment.session.tool_servers
    async with mcp.attach(servers, machine) as more:
      job = _with_tools(job, more)
      state = _begin(job, timings)
      stop_reason = await loop.run(job, state, machine)
    remains = await within(
      limit, collect(machine, job.task), 'reading the result'
    )
    isolation = dict(machine.provenance)
  finally:
    await asyncio.shield(
      within(limit, job.pool.release(machine), 'giving a machine back')
    )
  # Graded only now, so that no session holds one machine while it waits for
  # another.
  mark = time.perf_counter()
  tests = float(job.task.metadata.get('seconds', 0.0))  # may be the longer
  result = await within(
    limit + tests, grade(job.pool, job.task, remains.files), 'grading'
  )
  graded = time.perf_counter()
  watched = await within(
    limit,
    asyncio.to_thread(_watch, job, state, remains, result),
    'looking for signals',
  )
  verdicts = await judge_lib.judge(
    job.experiment.judge, job.task, remains.files, state.turns
  )
  ended = time.perf_counter()
  timings.update(grading=graded - mark, total=ended - began)
  if verdicts:
    timings['judging'] = ended - graded
  provenance = {
    **job.provenance,
    'machine': isolation,
    'seed': job.seed,
    'attempt': len(failures),
  }
  if failures:
    provenance['failures'] = list(failures)
  if watched.signals:
    provenance['signals'] = watched.to_json()
  if verdicts:
    provenance['judge'] = judge_lib.to_json(verdicts)
  parts = _parts(job, state, result.solved, watched.share, verdicts)
  return _trajectory(job, state, stop_reason, parts, provenance)


def _with_tools(job: Job, more: Mapping[str, tools_lib.Tool]) -> Job:
  if more and job.template.name == 'compact':
    raise ValueError(
      'session.tool_servers need a template with JSON calls, and template=compact'
      ' writes words; choose the template of a chat model'
    )
  both = sorted(set(job.tools) & set(more))
  if both:
    raise ValueError(
      f'session.tool_servers offer {both[0]!r}, which task {job.task.id} offers'
      ' too; give the server another name'
    )
  return dataclasses.replace(job, tools={**job.tools, **more})


def _begin(job: Job, timings: dict[str, float]) -> State:
  task, session = job.task, job.experiment.session
  listing = LISTINGS[task.kind](task) if task.kind in LISTINGS else ''
  prompt = job.template.render_prompt(
    job.tokenizer, job.specs, task.instruction, listing
  )
  if loop.summary_due(job, prompt):
    raise ValueError(
      f'task {task.id}: its prompt of {len(prompt)} tokens and one turn do not'
      f' fit session.context_tokens={session.context_tokens}; raise it'
    )
  model = job.experiment.model
  layers = model.layers - model.dense_layers
  return State(
    recorder=Recorder(layers, model.experts_per_token),
    prompt=prompt,
    context=list(prompt),
    opening='\n'.join(x for x in (task.instruction, listing) if x),
    opening_tokens=len(prompt),
    timings=timings,
  )


def _watch(
  job: Job, state: State, remains: Remains, result: Grade
) -> monitors.Verdict:
  """What the monitors see, and what it costs."""
  calls = [(call.name, call.arguments) for call in state.executed]
  signals = monitors.examine(job.task, remains, calls, result)
  return monitors.judge(job.experiment.reward.monitors, signals)


def _parts(
  job: Job,
  state: State,
  solved: bool,
  share: float,
  verdicts: Sequence[judge_lib.Verdict],
) -> dict[str, float]:
  counts = EffortCounts(
    tokens=state.sampled_tokens,
    calls=state.calls,
    turns=state.acts,
    thinking=state.thinking_tokens,
    call=state.call_tokens,
    message=state.message_tokens,
    output=state.output_tokens,
  )
  parts = {
    'tests': 1.0 if solved else 0.0,
    'effort': effort(job.experiment.reward, counts),
    **judge_lib.parts(verdicts),
  }
  if share:
    parts['monitors'] = combine.taken(parts, share)
  return parts


def _trajectory(
  job: Job,
  state: State,
  stop_reason: str,
  parts: Mapping[str, float],
  provenance: Mapping[str, Any],
) -> Trajectory:
  segments = state.recorder.finish(stop_reason)
  return Trajectory(
    task_id=job.task.id,
    group_id=job.group_id,
    index=job.index,
    segments=segments,
    turns=tuple(_clamp(turn, segments) for turn in state.turns),
    reward=combine.combine(job.experiment.reward, parts),
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
