"""The turn loop of a session: sample, act, observe, summarise, until it ends.

`run` changes a `State` and says why the session ended. It touches the world only
through the tools of its `Job`, and the engine only through its sampler.

Calls of one turn are answered in their order. Those that only look (`Tool.reads`)
and follow one another run side by side; the others wait for all before them.
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
from composer.config import Experiment
from composer.environments.tools import Tool
from composer.environments.tools import ToolResult
from composer.records import Completion
from composer.records import Sampler
from composer.records import SampleRequest
from composer.records import Task
from composer.records import Turn
from composer.rollout.recorder import BadCompletion
from composer.rollout.recorder import Recorder
from composer.templates.protocol import Answer
from composer.templates.protocol import Reply
from composer.templates.protocol import Template

T = TypeVar('T')


class WaitTimeout(RuntimeError):
  """Something gave no answer in time (infrastructure)."""


@dataclasses.dataclass(frozen=True)
class Job:
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
  tools: Mapping[str, Tool]  # by the names that the model calls
  template: Template
  stops: tuple[int, ...]  # ids that end a sampled turn, the right one first

  @property
  def specs(self) -> tuple[chat.ToolSpec, ...]:
    return tuple(tool.spec for tool in self.tools.values())


@dataclasses.dataclass
class State:
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
  todo: str = ''  # as the model wrote it last
  executed: list[chat.Call] = dataclasses.field(default_factory=list)
  segment: int = -1
  parent: int = -1
  samples: int = 0
  sampled_tokens: int = 0
  thinking_tokens: int = 0  # of those sampled, as are the next two
  call_tokens: int = 0
  message_tokens: int = 0
  output_tokens: int = 0  # of observations
  acts: int = 0
  calls: int = 0
  summaries: int = 0
  tool_seconds: float = 0.0  # as the tools count them


def sample_seed(seed: int, sample: int) -> int:
  """Seed of a session's n-th sample: 31 bits of a hash of both."""
  digest = hashlib.blake2b(f'{seed}/{sample}'.encode(), digest_size=4).digest()
  return int.from_bytes(digest, 'little') >> 1


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
  """What `awaitable` gives.

  Raises:
    WaitTimeout: it gave nothing in time.
  """
  try:
    async with asyncio.timeout(seconds):
      return await awaitable
  except TimeoutError as error:
    raise WaitTimeout(
      f'{what}: no answer within session.max_seconds={seconds:g}'
    ) from error


async def run(job: Job, state: State, machine: Any) -> str:
  """Takes turns until the session ends; returns why it ended."""
  session = job.experiment.session
  while True:
    if state.acts >= session.max_turns:
      return 'turns'
    if state.tool_seconds >= session.max_seconds:
      return 'seconds'
    if tokens_left(job, state) <= 0:
      return 'tokens'
    if not summary_due(job, state.context):
      ended = await _turn(job, state, machine)
    elif state.summaries < session.max_summaries:
      ended = await _summarise(job, state)
    else:
      ended = 'context'
    if ended:
      return ended


def summary_due(job: Job, context: Sequence[int]) -> bool:
  """Whether one more turn could take the context too far."""
  session = job.experiment.session
  turn = job.template.turn_tokens(job.tokenizer, job.specs, session)
  return len(context) + turn > session.context_tokens


def tokens_left(job: Job, state: State) -> int:
  """Tokens that the session may still sample; many where there is no limit."""
  most = job.experiment.session.max_tokens
  return most - state.sampled_tokens if most else 1 << 30


# --- a turn ------------------------------------------------------------------


async def _turn(job: Job, state: State, machine: Any) -> str:
  """A turn and its observation; returns why the session ended, or ''."""
  session, template = job.experiment.session, job.template
  start = len(state.context)
  state.context += template.open_turn(job.tokenizer)
  completion, seconds = await _sample(job, state, session.max_act_tokens)
  sampled = completion.tokens.tolist()
  reply = template.parse(job.tokenizer, sampled, job.specs)
  state.acts += 1
  state.calls += len(reply.acts)
  _count_kinds(job, state, reply, len(sampled))
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
  state.output_tokens += len(state.context) - start
  text = '\n'.join(answer.text.strip() for answer in answers)
  _add_turn(state, 'observation', text, start, seconds)
  return 'finished' if ends else ''


def _count_kinds(job: Job, state: State, reply: Reply, sampled: int) -> None:
  """Adds a turn's tokens to their kinds, each once.

  Thinking and text are as many as their text takes alone; what is left is calls
  and marks where there are calls, else part of the message.
  """
  encode = job.tokenizer.encode
  thinking = min(len(encode(reply.thinking)), sampled) if reply.thinking else 0
  left = sampled - thinking
  message = left
  if reply.acts:
    message = min(len(encode(reply.text)), left) if reply.text else 0
  state.thinking_tokens += thinking
  state.message_tokens += message
  state.call_tokens += left - message


async def _answer(
  job: Job, state: State, machine: Any, reply: Reply
) -> tuple[list[Answer], bool, float]:
  """(answers, whether the session ends, seconds) of the acts of a turn.

  They are executed up to the one that ends the session. A note is answered by
  nothing.
  """
  answers, total = [], 0.0
  for batch in _batches(job, reply.acts):
    mark = time.perf_counter()
    results = await _side_by_side([_do(job, machine, act) for act in batch])
    seconds = time.perf_counter() - mark
    total += seconds
    if any(isinstance(act, chat.Call) for act in batch):
      state.timings['tools'] += seconds
    state.tool_seconds += max(result.seconds for result in results)
    for act, result in zip(batch, results, strict=True):
      name = act.name if isinstance(act, chat.Call) else ''
      answers.append(Answer(result.text, name, act.id))
      if isinstance(act, chat.Call):
        state.executed.append(act)
      if result.todo is not None:
        state.todo = result.todo
      if result.ends:
        return answers, True, total
  return answers or [Answer('')], False, total


def _batches(
  job: Job, acts: Sequence[chat.Call | chat.Broken]
) -> list[list[chat.Call | chat.Broken]]:
  """The acts in order; each list may run side by side."""
  batches: list[list[chat.Call | chat.Broken]] = []
  together = False
  for act in acts:
    reads = isinstance(act, chat.Broken) or job.tools[act.name].reads
    if not (reads and together):
      batches.append([])
    batches[-1].append(act)
    together = reads
  return batches


async def _do(
  job: Job, machine: Any, act: chat.Call | chat.Broken
) -> ToolResult:
  if isinstance(act, chat.Broken):
    return ToolResult(job.template.error_text(act), ok=False)
  return await within(
    job.experiment.session.max_seconds,
    job.tools[act.name].run(machine, job.task, act.arguments),
    f'tool {act.name}',
  )


async def _side_by_side(
  doing: Sequence[Awaitable[ToolResult]],
) -> list[ToolResult]:
  """All results, or the first failure once none of them runs any more."""
  if len(doing) == 1:
    return [await doing[0]]
  results = await asyncio.gather(*doing, return_exceptions=True)
  for result in results:
    if isinstance(result, BaseException):
      raise result
  return results


# --- a summary ---------------------------------------------------------------


async def _summarise(job: Job, state: State) -> str:
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
    tokenizer, state.prompt, sampled, left, state.summaries, state.todo
  )
  state.opening = text + chat.state_text(left, state.summaries, state.todo)
  state.opening_tokens = len(state.context)
  state.parent = state.segment
  return ''


# --- the engine --------------------------------------------------------------


async def _sample(
  job: Job, state: State, max_tokens: int
) -> tuple[Completion, float]:
  """Samples behind the context, records it, grows the context by it."""
  session = job.experiment.session
  request = SampleRequest(
    tokens=np.array(state.context, np.int32),
    max_tokens=min(max_tokens, tokens_left(job, state)),
    stop_tokens=job.stops,
    temperature=session.temperature,
    seed=sample_seed(job.seed, state.samples),
  )
  mark = time.perf_counter()
  completion = await within(
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
  state: State, kind: str, text: str, start: int, seconds: float
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
