"""A session's turns, budgets, summaries, failures; fakes for all around it."""

import asyncio
import contextlib
import dataclasses
import types

import numpy as np
import pytest

from composer import chat
from composer.config import Experiment
from composer.config import MachineConfig
from composer.config import ModelConfig
from composer.config import SessionConfig
from composer.config import TasksConfig
from composer.environments.machines import MachineError
from composer.environments.machines import Pool
from composer.environments.tasks import repair
from composer.environments.tools import Tool
from composer.environments.tools import ToolResult
from composer.model import tokenizer as tokenizer_lib
from composer.records import Completion
from composer.records import EngineError
from composer.records import Task
from composer.rewards import combine
from composer.rewards import effort as effort_lib
from composer.rollout import session as session_lib

TOKENIZER = tokenizer_lib.load()
END = TOKENIZER.token_id('<end>')
ACT = TOKENIZER.token_id('<act>')
OBS = TOKENIZER.token_id('<obs>')
SUMMARIZE = TOKENIZER.token_id('<summarize>')
CODE = 'def f(a):\n  t = 0\n  return t\n'
TASK = Task(
  id='repair/1',
  kind='repair',
  instruction=' sum of items',
  files={'solution.py': CODE},
  tools=('edit', 'test', 'submit'),
  test_command=('python', 'test.py'),
  allowed=('solution.py',),
  hidden_files={},
  hidden_command=('python', 'hidden.py'),
  metadata={},
)
REAL = {n: getattr(session_lib, n) for n in ('TOOLS', 'grade', 'LISTINGS')}
EXPERIMENT = Experiment(
  name='test',
  model=ModelConfig(layers=3, dense_layers=1, experts_per_token=2),
  session=SessionConfig(max_turns=8, context_tokens=1000),
)


@dataclasses.dataclass
class ScriptedSampler:
  """Answers with the given texts in turn; a text without '$' is cut."""

  texts: list
  version: int = 7
  requests: list = dataclasses.field(default_factory=list)

  async def sample(self, request):
    self.requests.append(request)
    text = self.texts[len(self.requests) - 1]
    await asyncio.sleep(0)
    if isinstance(text, BaseException):
      raise text
    tokens = TOKENIZER.encode(text.removesuffix('$'))
    tokens = (tokens + [END] * text.endswith('$'))[: request.max_tokens]
    total = len(request.tokens) + len(tokens)
    experts = np.tile(np.asarray([0, 1], np.int16), (total, 2, 1))
    experts[-1] = -1
    computed = np.full(total, self.version, np.int32)
    computed[-1] = -1
    return Completion(
      tokens=np.asarray(tokens, np.int32),
      logprobs=np.full(len(tokens), -0.5, np.float32),
      versions=np.full(len(tokens), self.version, np.int32),
      experts=experts,
      computed_versions=computed,
      stop_reason='stop' if tokens[-1:] == [END] else 'length',
    )


class FakeMachine:
  provenance = {'driver': 'fake'}

  def __init__(self, files):
    self.files = {path: text.encode() for path, text in files.items()}

  async def read(self, path):
    if isinstance(self.files[path], Exception):
      raise self.files[path]
    return self.files[path]


class FakePool:
  """Counts machines; `fail` errors are raised by the next acquisitions."""

  def __init__(self, fail=()):
    self.fail = list(fail)
    self.live = set()
    self.acquired = 0

  async def acquire(self, files):
    await asyncio.sleep(0)
    if self.fail:
      raise self.fail.pop(0)
    self.acquired += 1
    machine = FakeMachine(files)
    self.live.add(machine)
    return machine

  async def release(self, machine):
    await asyncio.sleep(0)
    self.live.remove(machine)


def tool(name, parameters, function):
  async def run(machine, task, arguments):
    await asyncio.sleep(0)
    text, ends = function(machine, **arguments)
    return ToolResult(text, ends=ends, seconds=0.5)

  return Tool(chat.ToolSpec(name, name, parameters), run)


def edit(machine, line, token):
  machine.files['solution.py'] += f'# {line} {token}\n'.encode()
  return ' ok', False


@pytest.fixture(autouse=True)
def world(monkeypatch):
  """Fake tools, and a grader that wants '# L2 <' at the end of the file."""
  parameters = (('line', 'line'), ('token', 'token'))
  tools = {
    'edit': tool('edit', parameters, edit),
    'test': tool('test', (), lambda machine: (' 2 of 5', False)),
    'submit': tool('submit', (), lambda machine: ('', True)),
  }

  async def grade(pool, task, files):
    machine = await pool.acquire(task.files)
    solved = files.get('solution.py', b'').endswith(b'# L2 <\n')
    await pool.release(machine)
    return types.SimpleNamespace(solved=solved, signals={})

  monkeypatch.setattr(session_lib, 'TOOLS', tools)
  monkeypatch.setattr(session_lib, 'grade', grade)
  monkeypatch.setattr(session_lib, 'BACKOFF_S', 0.0)
  monkeypatch.setattr(
    session_lib, 'LISTINGS', {'repair': lambda t: t.files['solution.py']}
  )
  return tools


def run(sampler, pool=None, seed=3, **changes):
  """(trajectory, pool) of a session with fields of `session` changed."""
  pool = pool or FakePool()
  config = dataclasses.replace(EXPERIMENT.session, **changes)
  trajectory = asyncio.run(
    session_lib.run_session(
      sampler,
      pool,
      TASK,
      TOKENIZER,
      dataclasses.replace(EXPERIMENT, session=config),
      group_id='g',
      index=2,
      seed=seed,
      provenance={'cluster': 'here'},
    )
  )
  assert not pool.live
  check(trajectory, sampler, config)
  return trajectory


def check(trajectory, sampler, config):
  """What holds of every trajectory."""
  texts = sum(int(s.sampled.sum()) for s in trajectory.segments)
  attempt = trajectory.provenance['attempt']
  if not attempt:
    budgets = sum(r.max_tokens for r in sampler.requests)
    assert texts <= budgets
  for number, segment in enumerate(trajectory.segments):
    assert segment.parent == number - 1
    assert ((segment.versions >= 0) == segment.sampled).all()
    assert segment.experts.shape[1:] == (2, 2)
    assert (segment.auditable == segment.sampled).all()
  for request in sampler.requests:
    assert len(request.tokens) <= config.context_tokens + 1
  for turn in trajectory.turns:
    tokens = trajectory.segments[turn.segment].tokens
    assert 0 <= turn.start <= turn.end <= len(tokens)
  total = trajectory.timings['total']
  assert sum(trajectory.timings.values()) - total <= total


def kinds(trajectory):
  return [turn.kind for turn in trajectory.turns]


# --- turns -------------------------------------------------------------------


def test_a_session_is_the_template():
  sampler = ScriptedSampler([' edit L2 <$', ' test$', ' submit$'])
  got = run(sampler)
  (segment,) = got.segments
  encode = TOKENIZER.encode
  specs = tuple(t.spec for t in session_lib.TOOLS.values())
  prompt = chat.render_prompt(TOKENIZER, specs, TASK.instruction, CODE)
  want = [
    *prompt,
    *(ACT, *encode(' edit L2 <'), END, OBS, *encode(' ok'), END),
    *(ACT, *encode(' test'), END, OBS, *encode(' 2 of 5'), END),
    *(ACT, *encode(' submit'), END),
  ]
  assert segment.tokens.tolist() == want
  sampled = segment.tokens[segment.sampled].tolist()
  assert sampled == encode(' edit L2 <') + [END] + encode(' test') + [
    END, *encode(' submit'), END,
  ]  # fmt: skip
  assert segment.stop_reason == got.stop_reason == 'finished'
  assert kinds(got) == ['prompt'] + ['call', 'observation'] * 3
  for turn in got.turns:
    if turn.kind != 'prompt':
      text = TOKENIZER.decode(segment.tokens[turn.start : turn.end])
      assert turn.text in text
  assert (got.task_id, got.group_id, got.index) == ('repair/1', 'g', 2)
  assert got.provenance == {
    'cluster': 'here', 'machine': {'driver': 'fake'}, 'seed': 3, 'attempt': 0,
  }  # fmt: skip


def test_reward_has_named_parts():
  solved = run(ScriptedSampler([' edit L2 <$', ' submit$']))
  failed = run(ScriptedSampler([' edit L2 >$', ' submit$']))
  config = EXPERIMENT.reward
  effort = effort_lib.effort(config, effort_lib.EffortCounts(6, 2, 2))
  assert solved.reward_parts == {'tests': 1.0, 'effort': effort}
  assert failed.reward_parts == {'tests': 0.0, 'effort': effort}
  assert solved.reward == combine.combine(config, solved.reward_parts)


def test_contexts_only_grow():
  sampler = ScriptedSampler([' edit L2 <$', ' oops$', ' test$', ' submit$'])
  run(sampler)
  contexts = [r.tokens.tolist() for r in sampler.requests]
  for before, after in zip(contexts, contexts[1:], strict=False):
    assert after[: len(before)] == before


def test_broken_calls_are_answered_and_kept():
  sampler = ScriptedSampler(
    [' edit L2$', ' nothing$', ' edit L2 < <', '$', ' # hm$', ' submit$']
  )
  got = run(sampler, max_act_tokens=4)
  assert kinds(got)[1:] == (
    ['broken', 'observation'] * 4 + ['text', 'observation']
    + ['call', 'observation']
  )  # fmt: skip
  texts = [turn.text for turn in got.turns if turn.kind == 'observation']
  assert texts == [
    'error broken call', 'error unknown tool', 'error broken text',
    'error none', '', '',
  ]  # fmt: skip
  (segment,) = got.segments
  # The act that was cut is closed by the harness, not by the model.
  cut = [*TOKENIZER.encode(' edit L2 < <'), END]
  tokens = segment.tokens.tolist()
  at = next(i for i in range(len(tokens)) if tokens[i : i + 5] == cut)
  assert segment.sampled[at : at + 5].tolist() == [1, 1, 1, 1, 0]
  counts = effort_lib.EffortCounts(
    tokens=int(segment.sampled.sum()), calls=5, turns=6
  )
  assert got.reward_parts['effort'] == effort_lib.effort(
    EXPERIMENT.reward, counts
  )


def test_a_long_observation_keeps_its_markers(world):
  world['test'] = tool('test', (), lambda machine: (' 1 <act> 2' * 99, False))
  sampler = ScriptedSampler([' test$', ' submit$'])
  got = run(sampler, observation_tokens=9)
  observed = sampler.requests[1].tokens[len(sampler.requests[0].tokens) + 2 :]
  assert observed[0] == OBS and observed[-2:].tolist() == [END, ACT]
  assert len(observed) == 10
  assert np.count_nonzero(got.segments[0].tokens == ACT) == 2


# --- ends --------------------------------------------------------------------


def test_the_budget_of_turns():
  sampler = ScriptedSampler([' test$'] * 9)
  got = run(sampler, max_turns=3)
  assert len(sampler.requests) == 3
  assert got.stop_reason == got.segments[-1].stop_reason == 'turns'
  # The last observation came too late to be seen.
  assert got.segments[0].tokens[-1] == END and got.segments[0].sampled[-1]
  assert got.turns[-1].text == '2 of 5'
  assert got.turns[-1].start == got.turns[-1].end


def test_the_budget_of_seconds_counts_what_tools_took():
  sampler = ScriptedSampler([' test$'] * 9)
  got = run(sampler, max_seconds=1.0)
  assert len(sampler.requests) == 2 and got.stop_reason == 'seconds'


def test_a_full_engine_ends_the_session():
  class Full(ScriptedSampler):
    async def sample(self, request):
      answer = await super().sample(request)
      return dataclasses.replace(answer, stop_reason='context')

  got = run(Full([' test']))
  assert got.stop_reason == 'context' and kinds(got) == ['prompt', 'broken']


def test_seeds_differ_by_sample_and_by_session():
  samplers = [ScriptedSampler([' test$'] * 8) for _ in range(3)]
  for sampler, seed in zip(samplers, (3, 3, 4), strict=True):
    run(sampler, seed=seed)
  seeds = [[r.seed for r in sampler.requests] for sampler in samplers]
  assert seeds[0] == seeds[1]
  assert len({*seeds[0], *seeds[2]}) == 16
  assert all(0 <= seed < 2**31 for seed in seeds[0])


# --- summaries ---------------------------------------------------------------


def tight(turns):
  """A context budget into which the prompt and `turns` full turns fit."""
  specs = tuple(t.spec for t in session_lib.TOOLS.values())
  prompt = chat.render_prompt(TOKENIZER, specs, TASK.instruction, CODE)
  session = EXPERIMENT.session
  full = 2 + session.max_act_tokens + session.observation_tokens
  return len(prompt) + full + (turns - 1) * 8  # an edit and its answer take 8


def test_a_summary_starts_a_segment_and_the_machine_goes_on():
  sampler = ScriptedSampler(
    [
      *[' edit L2 >$'] * 4,
      ' error line 3$',
      *(' edit L2 <$', ' submit$'),
    ]
  )
  got = run(sampler, context_tokens=tight(4))
  first, second = got.segments
  assert (first.stop_reason, first.parent) == ('summary', -1)
  assert (second.stop_reason, second.parent) == ('finished', 0)
  assert got.reward_parts['tests'] == 1.0  # files outlived the summary
  prompt = sampler.requests[0].tokens[:-1].tolist()
  summary = TOKENIZER.encode(' error line 3')
  assert first.tokens.tolist()[-5:] == [SUMMARIZE, *summary, END]
  assert first.sampled[-4:].all() and not first.sampled[-5]
  assert second.tokens.tolist() == [
    *prompt,
    TOKENIZER.token_id('<summary>'),
    *(*summary, *TOKENIZER.encode(' 4 turns left , 1 summaries'), END),
    *(ACT, *TOKENIZER.encode(' edit L2 <'), END),
    *(OBS, *TOKENIZER.encode(' ok'), END),
    *(ACT, *TOKENIZER.encode(' submit'), END),
  ]
  total = sum(int(s.sampled.sum()) for s in got.segments)
  assert total == 5 * 4 + 4 + 2  # each sampled token once
  assert [t.segment for t in got.turns] == [0] * 10 + [1] * 5
  assert kinds(got)[9:11] == ['summary', 'prompt']
  counts = effort_lib.EffortCounts(total, 6, 6)
  assert got.reward_parts['effort'] == effort_lib.effort(
    EXPERIMENT.reward, counts
  )


def test_a_cut_summary_is_closed_by_the_harness():
  sampler = ScriptedSampler(
    [' edit L2 >$'] * 4 + [' line token ok', ' submit$']
  )
  got = run(sampler, context_tokens=tight(4), summary_tokens=3)
  first, second = got.segments
  assert first.tokens[-1] == END and not first.sampled[-1]
  assert first.sampled[-4:-1].all()
  assert sampler.requests[4].max_tokens == 3
  assert TOKENIZER.decode(second.tokens).count(' line token ok') == 1


def test_spent_summaries_end_the_session():
  texts = [' edit L2 >$'] * 4 + [' ok$'] + [' edit L2 >$'] * 9
  got = run(ScriptedSampler(texts), context_tokens=tight(4), max_turns=99)
  assert got.stop_reason == 'context' and len(got.segments) == 2
  none = run(ScriptedSampler(texts), context_tokens=tight(4), max_summaries=0)
  assert none.stop_reason == none.segments[0].stop_reason == 'context'
  assert len(none.segments) == 1


def test_a_summary_that_leaves_no_room_ends_the_session():
  sampler = ScriptedSampler([' test$', ' ok' * 15 + '$'])
  got = run(sampler, context_tokens=tight(1) + 4)
  assert got.stop_reason == got.segments[-1].stop_reason == 'context'
  assert len(got.segments) == 1 and kinds(got)[-1] == 'summary'


def test_a_prompt_without_room_is_refused():
  with pytest.raises(ValueError, match='session.context_tokens=20; raise it'):
    run(ScriptedSampler([]), context_tokens=20)


def test_a_tool_that_is_not_known_is_refused():
  task = dataclasses.replace(TASK, tools=('edit', 'fly'))
  with pytest.raises(ValueError, match="'fly', which is not known; the tools"):
    asyncio.run(
      session_lib.run_session(
        None, None, task, TOKENIZER, EXPERIMENT,
        group_id='', index=0, seed=0, provenance={},
      )
    )  # fmt: skip


def test_acts_of_words_cannot_call_a_server(monkeypatch, world):
  @contextlib.asynccontextmanager
  async def attach(text, machine):
    yield {'x__y': world['test']}

  monkeypatch.setattr(session_lib.mcp, 'attach', attach)
  with pytest.raises(ValueError, match='template=compact writes words'):
    run(ScriptedSampler([]), tool_servers='x = y')


# --- infrastructure ----------------------------------------------------------


@pytest.mark.parametrize(
  'error', [EngineError('engine gone'), MachineError('machine gone')]
)
def test_a_failed_attempt_leaves_nothing(error):
  sampler = ScriptedSampler([' edit L2 >$', error, ' edit L2 <$', ' submit$'])
  pool = FakePool()
  got = run(sampler, pool)
  assert kinds(got) == ['prompt', 'call', 'observation', 'call', 'observation']
  assert int(got.segments[0].sampled.sum()) == 6
  assert got.reward_parts['tests'] == 1.0
  assert got.provenance['attempt'] == 1
  seeds = [r.seed for r in sampler.requests]
  assert seeds[:2] == seeds[2:]
  assert pool.acquired == 3


@pytest.mark.parametrize(
  'error, reason',
  [
    (EngineError('engine gone'), 'engine'),
    (MachineError('machine gone'), 'machine'),
  ],
)
def test_persistent_failure_is_no_zero(error, reason):
  sampler = ScriptedSampler([' test$', error] * 3)
  pool = FakePool()
  with pytest.raises(session_lib.SessionFailed, match=str(error)) as caught:
    run(sampler, pool)
  assert caught.value.reason == reason
  assert len(sampler.requests) == 6 and not pool.live


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'logprobs': np.asarray([np.nan, 0])}, 'not finite'),
    ({'tokens': np.full(2, ACT), 'stop_reason': 'stop'}, 'no stop token'),
    ({'tokens': np.asarray([END, ACT])}, 'went on after the stop token'),
  ],
)
def test_a_malformed_answer_is_infrastructure(changes, message):
  class Malformed(ScriptedSampler):
    async def sample(self, request):
      return dataclasses.replace(await super().sample(request), **changes)

  with pytest.raises(session_lib.SessionFailed, match=message) as caught:
    run(Malformed([' test$'] * 3))
  assert caught.value.reason == 'engine'


def test_an_answer_over_its_budget_is_refused():
  class Talkative(ScriptedSampler):
    async def sample(self, request):
      more = dataclasses.replace(request, max_tokens=100)
      return await super().sample(more)

  with pytest.raises(session_lib.SessionFailed, match='max_tokens is 8'):
    run(Talkative([' ok' * 9] * 3))


def test_a_hanging_engine_is_a_timeout():
  class Hanging(ScriptedSampler):
    async def sample(self, request):
      await asyncio.sleep(60)

  pool = FakePool()
  message = 'the engine: no answer within session.max_seconds=0.05'
  with pytest.raises(session_lib.SessionFailed, match=message) as caught:
    run(Hanging([]), pool, max_seconds=0.05)
  assert caught.value.reason == 'timeout' and not pool.live


def test_a_fault_of_ours_is_not_retried(world):
  world['test'] = tool('test', (), lambda machine: 1 / 0)
  pool = FakePool()
  with pytest.raises(ZeroDivisionError):
    run(ScriptedSampler([' test$']), pool)
  assert pool.acquired == 1 and not pool.live


def test_cancellation_gives_the_machine_back():
  async def scenario():
    pool, waiting = FakePool(), asyncio.Event()

    class Waiting:
      async def sample(self, request):
        waiting.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(
      session_lib.run_session(
        Waiting(),
        pool,
        TASK,
        TOKENIZER,
        EXPERIMENT,
        group_id='g',
        index=0,
        seed=0,
        provenance={},
      )  # fmt: skip
    )
    await waiting.wait()
    assert pool.live
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert not pool.live

  asyncio.run(scenario())


@pytest.mark.parametrize('error', [FileNotFoundError, PermissionError])
def test_a_lost_file_is_left_out_and_graded(world, error):
  def remove(machine):
    machine.files['solution.py'] = error('solution.py')
    return ' ok', True

  world['submit'] = tool('submit', (), remove)
  got = run(ScriptedSampler([' submit$']))
  assert got.reward_parts['tests'] == 0.0


# --- with real machines ------------------------------------------------------


@pytest.mark.filterwarnings('ignore:machine.driver=process')
@pytest.mark.parametrize('right, want', [(True, 1.0), (False, 0.0)])
def test_a_real_session(monkeypatch, right, want):
  for name, value in REAL.items():
    monkeypatch.setattr(session_lib, name, value)
  task = repair.build_tasks(TasksConfig()).train[0]
  bug = task.metadata['bug']
  token = bug['right' if right else 'wrong']
  edit = f' edit L{str(bug["line"]).removeprefix("L")} {token}$'
  sampler = ScriptedSampler([edit, ' edit L1$', ' test$', ' submit$'])
  experiment = Experiment(name='real', model=EXPERIMENT.model)

  async def scenario():
    pool = Pool(MachineConfig(driver='process', warm=1))
    try:
      return await session_lib.run_session(
        sampler, pool, task, TOKENIZER, experiment,
        group_id='g', index=0, seed=0, provenance={},
      )  # fmt: skip
    finally:
      await pool.close()

  got = asyncio.run(scenario())
  observed = [turn.text for turn in got.turns if turn.kind == 'observation']
  assert observed[:2] == ['ok', 'error broken call']
  assert (observed[2] == 'all pass') == right
  assert got.stop_reason == 'finished' and got.reward_parts['tests'] == want
  assert got.provenance['machine']['driver'] == 'process'
