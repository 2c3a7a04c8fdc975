"""Acts of a turn in a chat template: side by side, in order, state, budgets."""

import asyncio
import dataclasses
import sys

import numpy as np
import pytest
from speaking import TOKENIZER
from speaking import answer
from speaking import turn

from composer import chat
from composer.config import EngineConfig
from composer.config import Experiment
from composer.config import JudgeConfig
from composer.config import MachineConfig
from composer.config import ModelConfig
from composer.config import SessionConfig
from composer.environments import mcp
from composer.environments import tools as tools_lib
from composer.environments import tools_code
from composer.environments.machines import MachineError
from composer.environments.machines import Pool
from composer.environments.machines import process
from composer.environments.tools import Tool
from composer.environments.tools import ToolResult
from composer.records import EngineError
from composer.records import Task
from composer.rewards import judge as judge_lib
from composer.rewards import judge_calls
from composer.rewards.effort import EffortCounts
from composer.rewards.effort import effort
from composer.rewards.judge_cache import Cache
from composer.rewards.verify import Grade
from composer.rollout import session as session_lib

REAL = {name: getattr(session_lib, name) for name in ('TOOLS', 'grade')}


TASK = Task(
  id='code/1', kind='code', instruction='fix it', files={'a.py': 'x = 1\n'},
  tools=('look', 'slow', 'do', 'todo', 'finish'), test_command=(),
  allowed=('a.py',), hidden_files={}, hidden_command=(), metadata={},
)  # fmt: skip
EXPERIMENT = Experiment(
  name='test',
  template='qwen3',
  model=ModelConfig(vocab_size=TOKENIZER.vocab_size, layers=1),
  session=SessionConfig(
    max_turns=6, max_act_tokens=900, context_tokens=9000, summary_tokens=80,
    observation_tokens=900,
  ),
  engine=EngineConfig(max_context=9600),
)  # fmt: skip


class Sampler:
  """Samples the given turns; an exception among them is raised."""

  def __init__(self, *turns):
    self.turns, self.requests = list(turns), []

  async def sample(self, request):
    said = self.turns[len(self.requests)]
    self.requests.append(request)
    await asyncio.sleep(0)
    if isinstance(said, Exception):
      raise said
    tokens = said[: request.max_tokens]
    return answer(request, tokens)


class Machine:
  provenance = {'driver': 'fake'}

  def __init__(self, files):
    self.files, self.log, self.running, self.most = files, [], 0, 0

  async def read(self, path):
    return self.files[path].encode()


class FakePool:
  def __init__(self):
    self.machines, self.live = [], 0

  async def acquire(self, files):
    self.machines.append(Machine(files))
    self.live += 1
    return self.machines[-1]

  async def release(self, machine):
    self.live -= 1


def tool(name, reads, seconds):
  """Notes when it begins and ends; answers what it was asked."""

  async def run(machine, task, arguments):
    what = f'{name} {arguments["n"]}'
    if arguments['n'] == 'dead':
      raise MachineError('it died')
    machine.log.append(f'+{what}')
    machine.running += 1
    machine.most = max(machine.most, machine.running)
    await asyncio.sleep(seconds)
    machine.running -= 1
    machine.log.append(f'-{what}')
    return ToolResult(what, seconds=seconds)

  spec = chat.ToolSpec(name, name, (('n', 'string'),))
  return Tool(spec, run, reads)


@pytest.fixture(autouse=True)
def world(monkeypatch):
  async def grade(pool, task, files):
    return Grade(True, 1, 1, 0.0, '')

  tools = {
    'look': tool('look', True, 0.01),
    'slow': tool('slow', True, 0.05),
    'do': tool('do', False, 0.01),
    'todo': tools_lib.TOOLS['todo'],
    'finish': tools_lib.TOOLS['finish'],
  }
  monkeypatch.setattr(session_lib, 'TOOLS', tools)
  monkeypatch.setattr(session_lib, 'grade', grade)
  monkeypatch.setattr(session_lib, 'BACKOFF_S', 0.0)


def run(sampler, pool=None, experiment=EXPERIMENT, task=TASK, **changes):
  pool = pool or FakePool()
  session = dataclasses.replace(experiment.session, **changes)
  experiment = dataclasses.replace(experiment, session=session)
  got = asyncio.run(
    session_lib.run_session(
      sampler, pool, task, TOKENIZER, experiment, group_id='g', index=0, seed=1,
      provenance={},
    )
  )  # fmt: skip
  assert not getattr(pool, 'live', 0)
  return got


def observations(got):
  return [x.text for x in got.turns if x.kind == 'observation']


FINISH = turn(('finish', {'message': 'done'}))

# --- side by side ------------------------------------------------------------


def test_calls_that_look_run_side_by_side_and_are_answered_in_order():
  calls = [('slow', {'n': 'a'}), ('look', {'n': 'b'}), ('look', {'n': 'c'})]
  pool = FakePool()
  got = run(Sampler(turn(*calls), FINISH), pool)
  assert observations(got)[0] == 'slow a\nlook b\nlook c'
  (machine,) = pool.machines
  assert machine.most == 3 and machine.log[-1] == '-slow a'
  assert got.timings['tools'] >= 0.05
  text = TOKENIZER.decode(got.segments[0].tokens)
  assert text.index('slow a') < text.rindex('look b') < text.rindex('look c')


def test_calls_that_act_wait_for_all_before_them():
  calls = [
    ('look', {'n': 'a'}), ('slow', {'n': 'b'}), ('do', {'n': 'c'}),
    ('look', {'n': 'd'}), ('do', {'n': 'e'}), ('do', {'n': 'f'}),
  ]  # fmt: skip
  pool = FakePool()
  run(Sampler(turn(*calls), FINISH), pool)
  assert pool.machines[0].log == [
    '+look a', '+slow b', '-look a', '-slow b', '+do c', '-do c', '+look d',
    '-look d', '+do e', '-do e', '+do f', '-do f',
  ]  # fmt: skip


def test_a_broken_call_among_others_is_answered_in_its_place():
  calls = [('look', {'n': 'a'}), ('fly', {}), ('look', {}), ('do', {'n': 'b'})]
  got = run(Sampler(turn(*calls), FINISH))
  first, unknown, missing, last = observations(got)[0].split('\n')
  assert (first, last) == ('look a', 'do b')
  assert 'unknown tool' in unknown and 'missing argument' in missing
  assert got.turns[1].kind == 'broken'


def test_nothing_is_done_behind_the_end():
  pool = FakePool()
  calls = [('do', {'n': 'a'}), ('finish', {}), ('do', {'n': 'b'})]
  got = run(Sampler(turn(*calls)), pool)
  assert got.stop_reason == 'finished'
  assert pool.machines[0].log == ['+do a', '-do a']


def test_a_machine_that_dies_under_one_of_them_is_replaced():
  """All of them have ended before the session starts again elsewhere."""
  calls = [('slow', {'n': 'a'}), ('look', {'n': 'dead'})]
  pool = FakePool()
  got = run(Sampler(turn(*calls), turn(('look', {'n': 'b'})), FINISH), pool)
  first, second = pool.machines
  assert first.log == ['+slow a', '-slow a'] and second.log[0] == '+look b'
  assert got.provenance['attempt'] == 1
  assert got.provenance['failures'] == ['machine: it died']
  assert got.reward_parts['tests'] == 1.0


# --- state and budgets -------------------------------------------------------


def test_the_todo_list_outlives_a_summary():
  plan = '[x] look\n[ ] do'
  long = turn(('todo', {'items': plan}), thinking='hm ' * 50)
  summary = turn(thinking='what matters', text='I looked.')
  sampler = Sampler(long, summary, FINISH)
  specs = [x.spec for x in session_lib.TOOLS.values()]
  from composer import templates

  template = templates.TEMPLATES['qwen3']
  prompt = template.render_prompt(TOKENIZER, specs, 'fix it', '')
  room = template.turn_tokens(TOKENIZER, specs, EXPERIMENT.session)
  got = run(sampler, context_tokens=len(prompt) + room + 100)
  last = TOKENIZER.decode(sampler.requests[-1].tokens)
  assert (
    'I looked.\n5 turns left , 1 summaries\ntodo:\n[x] look\n[ ] do' in last
  )
  assert 'what matters' not in last
  assert [s.parent for s in got.segments] == [-1, 0]
  # The request for the summary stands behind all that was said, thinking too.
  asked = sampler.requests[1].tokens.tolist()
  before = sampler.requests[0].tokens.tolist() + long
  assert asked[: len(before)] == before
  assert sum(int(s.sampled.sum()) for s in got.segments) == sum(
    map(len, (long, summary, FINISH))
  )


def test_the_budget_of_sampled_tokens():
  look = turn(('look', {'n': 'a'}))
  budget = 2 * len(look) + 7
  sampler = Sampler(look, look, look, look)
  got = run(sampler, max_tokens=budget)
  assert got.stop_reason == got.segments[-1].stop_reason == 'tokens'
  assert sum(int(s.sampled.sum()) for s in got.segments) == budget
  assert sampler.requests[-1].max_tokens == 7
  assert got.turns[-2].kind == 'broken'  # the turn that was cut


def test_effort_knows_kinds_of_tokens():
  first = turn(('look', {'n': 'a'}), thinking='hmm', text='Now:')
  last = turn(text='All done.')
  counts = EffortCounts(
    tokens=len(first) + len(last), calls=1, turns=2, thinking=3,
    message=4 + len(last), call=len(first) - 3 - 4, output=0,
  )  # fmt: skip
  reward = dataclasses.replace(
    EXPERIMENT.reward, effort_per_thinking_token=0.1, effort_per_call_token=0.2,
    effort_per_message_token=0.3,
  )  # fmt: skip
  experiment = dataclasses.replace(EXPERIMENT, reward=reward)
  got = run(Sampler(first, last), experiment=experiment)
  assert got.reward_parts['effort'] == pytest.approx(effort(reward, counts))
  more = dataclasses.replace(reward, effort_per_output_token=1.0)
  experiment = dataclasses.replace(EXPERIMENT, reward=more)
  dearer = run(Sampler(first, last), experiment=experiment)
  output = len(got.segments[0].tokens) - len(first) - len(last)
  assert dearer.reward_parts['effort'] > got.reward_parts['effort']
  assert output > len(observations(got)[0]) == len('look a')


# --- judges and servers ------------------------------------------------------

RUBRIC = 'kept | 1 | a\\.py is unchanged\nloud | 3 | shouting'


def test_a_rubric_is_judged_and_recorded():
  judge = JudgeConfig(rubric=RUBRIC, endpoint='scripted')
  experiment = dataclasses.replace(EXPERIMENT, judge=judge)
  got = run(Sampler(FINISH), experiment=experiment)
  assert got.reward_parts['judge'] == 0.25
  assert got.reward_parts['judge/kept'] == 1.0
  assert got.reward_parts['judge/loud'] == 0.0
  assert got.provenance['judge']['kept']['met'] is True
  plain = run(Sampler(FINISH))
  assert got.reward == pytest.approx(plain.reward + 0.25 * 0.2)
  assert 'judge' not in plain.reward_parts


def test_a_judge_that_fails_is_infrastructure(monkeypatch):
  async def down(config, messages, attempt):
    raise judge_calls.Failed('status 503')

  monkeypatch.setattr(judge_calls, 'scripted', down)
  judge_lib._cache.cache_clear()
  judge = JudgeConfig(
    rubric=RUBRIC, endpoint='scripted', retries=1, backoff_s=0.001
  )
  experiment = dataclasses.replace(EXPERIMENT, judge=judge)
  sampler = Sampler(FINISH, FINISH)
  with pytest.raises(session_lib.SessionFailed, match='status 503') as caught:
    run(sampler, experiment=experiment)
  assert caught.value.reason == 'judge'
  assert len(sampler.requests) == 1  # the session is not to blame


def test_tools_of_a_server_are_offered_and_its_death_is_typed(tmp_path):
  server = tmp_path / 'server.py'
  server.write_text(SERVER)
  text = f'lab = {sys.executable} {server}'
  sampler = Sampler(
    turn(('lab__double', {'x': 4}), ('lab__double', {'x': 'four'})), FINISH
  )
  got = run(sampler, tool_servers=text)
  good, bad = observations(got)[0].split('\n')
  assert good == '8' and 'x must be integer' in bad
  prompt = TOKENIZER.decode(sampler.requests[0].tokens)
  assert '"lab__double"' in prompt and '"minimum": 0' in prompt
  dying = turn(('lab__double', {'x': 0}))
  with pytest.raises(session_lib.SessionFailed, match='lab ended') as caught:
    run(Sampler(dying, dying, dying), tool_servers=text)
  assert caught.value.reason == 'tool_server'


SERVER = """
import json, os, sys
SCHEMA = {'type': 'object', 'required': ['x'],
          'properties': {'x': {'type': 'integer', 'minimum': 0}}}
for line in sys.stdin:
  message = json.loads(line)
  if 'id' not in message:
    continue
  method, params = message['method'], message.get('params') or {}
  answer = {'error': {'code': -32601, 'message': 'no such method'}}
  if method == 'initialize':
    answer = {'result': {
      'protocolVersion': params['protocolVersion'], 'capabilities': {'tools': {}},
      'serverInfo': {'name': 'lab', 'version': '1'}}}
  elif method == 'tools/list':
    answer = {'result': {'tools': [
      {'name': 'double', 'description': 'twice x', 'inputSchema': SCHEMA}]}}
  elif method == 'tools/call':
    x = params['arguments']['x']
    if not x:
      os._exit(1)
    answer = {'result': {'content': [{'type': 'text', 'text': str(2 * x)}]}}
  print(json.dumps({'jsonrpc': '2.0', 'id': message['id'], **answer}), flush=True)
"""


def test_a_server_may_not_take_the_name_of_a_tool(monkeypatch):
  import contextlib

  @contextlib.asynccontextmanager
  async def attach(text, machine):
    yield {'look': session_lib.TOOLS['look']}

  monkeypatch.setattr(mcp, 'attach', attach)
  with pytest.raises(ValueError, match="offer 'look', which task code/1"):
    run(Sampler(FINISH), tool_servers='x = y')


# --- a coding agent in a real machine ----------------------------------------


def test_a_coding_session_in_a_real_machine(monkeypatch):
  for name, value in REAL.items():
    monkeypatch.setattr(session_lib, name, value)
  monkeypatch.setattr(process, '_warned', [True])
  check = (
    'from a import f\nok = f() == 2\n'
    'print("passed", int(ok), "of 1")\nraise SystemExit(not ok)\n'
  )
  task = dataclasses.replace(
    TASK,
    files={'a.py': 'def f():\n  return 1\n', 'test.py': check},
    tools=tuple(x.spec.name for x in tools_code.CODE_TOOLS),
    test_command=('python', 'test.py'),
    hidden_files={'hidden.py': check},
    hidden_command=('python', 'hidden.py'),
  )
  sampler = Sampler(
    turn(
      ('list', {}),
      ('search', {'pattern': 'return'}),
      ('read', {'path': 'a.py'}),
      ('run_tests', {}),
      thinking='look around',
    ),
    turn(
      ('edit', {'path': 'a.py', 'old': 'return 1', 'new': 'return 2'}),
      ('run_tests', {}),
      ('shell', {'command': 'echo $((40 + 2))'}),
    ),
    turn(text='f returns 2 now.'),
  )

  async def scenario():
    pool = Pool(MachineConfig(driver='process', warm=0))
    try:
      return await session_lib.run_session(
        sampler, pool, task, TOKENIZER, EXPERIMENT, group_id='g', index=0,
        seed=1, provenance={},
      )  # fmt: skip
    finally:
      await pool.close()

  got = asyncio.run(scenario())
  first, second = observations(got)
  assert first.splitlines() == [
    'a.py 20', 'test.py 88', 'a.py:2:   return 1', 'def f():', '  return 1',
    'passed 0 of 1', '(exit code 1)',
  ]  # fmt: skip
  assert second.splitlines() == ['edited a.py at line 2', 'passed 1 of 1', '42']
  assert got.stop_reason == 'finished' and got.reward_parts['tests'] == 1.0


# --- failures everywhere -----------------------------------------------------


def test_many_sessions_with_failures_everywhere(monkeypatch):
  """Each ends in the one right reward or a typed failure; nothing is left."""
  judge = JudgeConfig(
    rubric=RUBRIC, endpoint='scripted', retries=1, backoff_s=0.001
  )
  experiment = dataclasses.replace(EXPERIMENT, judge=judge)
  first = turn(*[('look', {'n': 'a'})] * 2)
  calm = run(Sampler(first, FINISH), experiment=experiment)
  random = np.random.default_rng(3)

  def unlucky(share, error):
    if random.random() < share:
      raise error

  class Pool(FakePool):
    async def acquire(self, files):
      unlucky(0.15, MachineError('no machine'))
      return await super().acquire(files)

  class Shaky(Sampler):
    async def sample(self, request):
      unlucky(0.15, EngineError('no engine'))
      answered = TOKENIZER.token_id('<tool_response>') in request.tokens
      self.requests = [None] * answered
      return await super().sample(request)

  async def grade(pool, task, files):
    unlucky(0.15, MachineError('no clean machine'))
    return Grade(True, 1, 1, 0.0, '')

  async def ask(config, messages, attempt):
    unlucky(0.15, judge_calls.Failed('busy'))
    return await scripted(config, messages, attempt)

  async def dies(machine, task, arguments):
    unlucky(0.15, MachineError('it died'))
    unlucky(0.05, mcp.ToolServerError('it went'))
    return ToolResult('fine')

  look = session_lib.TOOLS['look']
  scripted = judge_calls.scripted
  monkeypatch.setitem(
    session_lib.TOOLS, 'look', dataclasses.replace(look, run=dies)
  )
  monkeypatch.setattr(session_lib, 'grade', grade)
  monkeypatch.setattr(judge_calls, 'scripted', ask)
  monkeypatch.setattr(judge_lib, '_cache', Cache)
  pool = Pool()

  async def scenario():
    sessions = [
      session_lib.run_session(
        Shaky(first, FINISH), pool, TASK, TOKENIZER, experiment, group_id='g',
        index=index, seed=index, provenance={},
      )
      for index in range(150)
    ]  # fmt: skip
    ended = await asyncio.gather(*sessions, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1
    return ended

  ended = asyncio.run(scenario())
  assert not pool.live
  failed = [x for x in ended if isinstance(x, session_lib.SessionFailed)]
  whole = [x for x in ended if not isinstance(x, Exception)]
  assert len(failed) + len(whole) == 150 and len(failed) > 10
  assert {x.reason for x in failed} <= set(session_lib.REASONS.values())
  assert len({x.reason for x in failed}) >= 3
  assert len({x.reward for x in whole}) == 1 and whole[0].reward == calm.reward
  again = [x for x in whole if x.provenance['attempt']]
  assert again and all(x.provenance['failures'] for x in again)
