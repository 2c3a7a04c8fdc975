"""Whole sessions in every template: a scripted model, fakes for all around."""

import asyncio
import dataclasses
import re

import pytest
from speaking import answer

from composer import chat
from composer import templates
from composer.config import EngineConfig
from composer.config import Experiment
from composer.config import ModelConfig
from composer.config import SessionConfig
from composer.environments.tools import Tool
from composer.environments.tools import ToolResult
from composer.records import Task
from composer.rewards.verify import Grade
from composer.rollout import session as session_lib

NAMES = ('chatml', 'qwen3', 'qwen3-thinking', 'smollm2', 'kimi-k2', 'kimi-k2.5')
TASK = Task(
  id='repair/1', kind='repair', instruction='fix it', files={'a.py': 'x = 1\n'},
  tools=('edit', 'test', 'submit'), test_command=('python',), allowed=('a.py',),
  hidden_files={}, hidden_command=('python',), metadata={},
)  # fmt: skip


class Sampler:
  """Samples the given ids, turn by turn."""

  def __init__(self, turns):
    self.turns, self.requests = turns, []

  async def sample(self, request):
    tokens = self.turns[len(self.requests)][: request.max_tokens]
    self.requests.append(request)
    return answer(request, tokens)


class Machine:
  provenance = {'driver': 'fake'}

  def __init__(self):
    self.calls = []

  async def read(self, path):
    return b''


class Pool:
  def __init__(self):
    self.machine = Machine()

  async def acquire(self, files):
    return self.machine

  async def release(self, machine):
    pass


@pytest.fixture(autouse=True)
def world(monkeypatch):
  def tool(name, parameters, text, ends=False):
    async def run(machine, task, arguments):
      machine.calls.append((name, dict(arguments)))
      return ToolResult(text, ends=ends)

    return Tool(chat.ToolSpec(name, name, parameters), run)

  async def grade(pool, task, files):
    return Grade(True, 1, 1, 0.0, '')

  edit = (('line', 'line'), ('token', 'token'))
  tools = {
    'edit': tool('edit', edit, 'ok'),
    'test': tool('test', (), '2 of 5'),
    'submit': tool('submit', (), '', True),
  }
  monkeypatch.setattr(session_lib, 'TOOLS', tools)
  monkeypatch.setattr(session_lib, 'grade', grade)
  monkeypatch.setattr(session_lib, 'LISTINGS', {'repair': lambda t: 'x = 1\n'})


def run(tokenizer, turns, **changes):
  """(trajectory, sampler, machine)."""
  session = SessionConfig(
    max_turns=6, max_act_tokens=400, context_tokens=9000, summary_tokens=60,
    observation_tokens=400,
  )  # fmt: skip
  template = changes.pop('template', '')
  rows = changes.pop('vocab_size', tokenizer.vocab_size)
  experiment = Experiment(
    name='test',
    template=template,
    model=ModelConfig(vocab_size=rows, layers=1, dense_layers=0),
    session=dataclasses.replace(session, **changes),
    engine=EngineConfig(max_context=9600),
  )
  sampler, pool = Sampler(turns), Pool()
  trajectory = asyncio.run(
    session_lib.run_session(
      sampler, pool, TASK, tokenizer, experiment, group_id='g', index=0,
      seed=1, provenance={},
    )
  )  # fmt: skip
  return trajectory, sampler, pool.machine


def turn(name, tokenizer, said, *calls, thinking='hm', ends=True):
  """Ids of a turn: thinking where the model thinks, text, calls."""
  mark, encode = tokenizer.token_id, tokenizer.encode
  found = []
  if name in ('qwen3', 'qwen3-thinking', 'kimi-k2.5'):
    found += [mark('<think>')] if name == 'qwen3' else []
    found += [*encode(thinking), mark('</think>'), *encode('\n\n')]
  found += encode(said)
  for number, (tool, arguments) in enumerate(calls):
    if name.startswith('kimi'):
      found += [
        mark('<|tool_calls_section_begin|>'),
        mark('<|tool_call_begin|>'),
      ]
      found += encode(f'functions.{tool}:{number}')
      found += [mark('<|tool_call_argument_begin|>'), *encode(arguments)]
      found += [mark('<|tool_call_end|>'), mark('<|tool_calls_section_end|>')]
      continue
    body = encode(f'{{"name": "{tool}", "arguments": {arguments}}}')
    if name == 'smollm2':
      found += [*encode('<tool_call>'), *body, *encode('</tool_call>')]
    else:
      found += [mark('<tool_call>'), *body, mark('</tool_call>')]
  return found + [mark('<|im_end|>')] * ends


EDIT = ('edit', '{"line": "L1", "token": "2"}')
TEST = ('test', '{}')
SUBMIT = ('submit', '{}')


@pytest.mark.parametrize('name', NAMES)
def test_a_session(tokenizers, name):
  tokenizer, template = tokenizers[name], templates.TEMPLATES[name]
  turns = [
    turn(name, tokenizer, 'both', EDIT, TEST),
    turn(name, tokenizer, '', ('fly', '{}'), TEST),
    turn(name, tokenizer, 'no end', ends=False),
    turn(name, tokenizer, '', TEST, SUBMIT, EDIT),
  ]
  got, sampler, machine = run(tokenizer, turns, template=name)
  assert [x for x, _ in machine.calls] == [
    'edit',
    'test',
    'test',
    'test',
    'submit',
  ]
  assert machine.calls[0] == ('edit', {'line': 'L1', 'token': '2'})
  (segment,) = got.segments
  assert got.stop_reason == 'finished' and got.reward_parts['tests'] == 1.0
  assert [x.kind for x in got.turns] == [
    'prompt', 'call', 'observation', 'broken', 'observation', 'broken',
    'observation', 'call', 'observation',
  ]  # fmt: skip
  # What was sampled stands there as it was sampled, once each.
  assert segment.tokens[segment.sampled].tolist() == sum(turns, [])
  for request in sampler.requests:
    context = request.tokens.tolist()
    assert segment.tokens[: len(context)].tolist() == context
    assert context[-1:] == template.open_turn(tokenizer)[-1:]
    assert request.stop_tokens == template.stops(tokenizer)
  text = tokenizer.decode(segment.tokens)
  assert 'error: unknown tool: there are edit, test, submit' in text
  assert 'error: no end: the turn was cut after' in text


@pytest.mark.parametrize('name', NAMES)
def test_a_turn_without_a_call_ends_the_session(tokenizers, name):
  tokenizer = tokenizers[name]
  turns = [turn(name, tokenizer, '', TEST), turn(name, tokenizer, 'All done.')]
  got, _, machine = run(tokenizer, turns, template=name)
  assert got.stop_reason == 'finished' and len(machine.calls) == 1
  assert got.turns[-1].kind == 'text' and 'All done.' in got.turns[-1].text


@pytest.mark.parametrize('name', NAMES)
def test_a_summary(tokenizers, name):
  """Two segments; the request for it stands behind the context as it is."""
  tokenizer, template = tokenizers[name], templates.TEMPLATES[name]
  specs = tuple(x.spec for x in session_lib.TOOLS.values())
  prompt = template.render_prompt(tokenizer, specs, 'fix it', 'x = 1\n')
  session = SessionConfig(max_act_tokens=400, observation_tokens=400)
  room = template.turn_tokens(tokenizer, specs, session)
  turns = [
    turn(name, tokenizer, 'x' * 150, TEST),
    turn(name, tokenizer, 'I know.', thinking='secret'),
    turn(name, tokenizer, '', SUBMIT),
  ]
  turns[1] = turns[1][:60]
  context = len(prompt) + room + 100
  got, sampler, _ = run(tokenizer, turns, template=name, context_tokens=context)
  assert got.stop_reason == 'finished'
  assert [x.stop_reason for x in got.segments] == ['summary', 'finished']
  assert [x.parent for x in got.segments] == [-1, 0]
  sampled = [x.tokens[x.sampled].tolist() for x in got.segments]
  assert sum(sampled, []) == sum(turns, [])
  assert 'summary' in [x.kind for x in got.turns]
  for shown in got.turns:
    length = len(got.segments[shown.segment].tokens)
    assert 0 <= shown.start <= shown.end <= length
  last = tokenizer.decode(sampler.requests[-1].tokens)
  assert re.search(r'Your notes:\n+I know\.\n5 turns left', last)
  assert 'secret' not in last
  for request in sampler.requests:
    assert len(request.tokens) <= context


def test_a_tokenizer_that_is_not_the_models_is_refused(qwen):
  with pytest.raises(ValueError, match='the tokenizer has 266 ids'):
    run(qwen, [], vocab_size=200)
  with pytest.raises(ValueError, match="template='kimi-k2' needs"):
    run(qwen, [], template='kimi-k2')
