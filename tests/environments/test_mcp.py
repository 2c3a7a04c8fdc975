"""MCP servers as tools: real server processes, on the host and in a machine."""

import asyncio
import dataclasses
import json
import pathlib
import sys

import psutil
import pytest

from composer.config import Experiment
from composer.config import MachineConfig
from composer.config import SessionConfig
from composer.config import validate
from composer.environments import machines
from composer.environments import mcp
from composer.environments import mcp_inside
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import process

SERVERS = pathlib.Path(__file__).with_name('mcp_servers.py')
HOST = f'notes = {sys.executable} {SERVERS}'
CONFIG = MachineConfig(warm=0, concurrent=2)


def children():
  me = psutil.Process()
  return [
    x for x in me.children(recursive=True) if 'mcp_servers' in str(x.cmdline())
  ]


def on_host(act, text=HOST):
  """What `act(tools)` gives while the servers of `text` are attached."""

  async def scenario():
    async with mcp.attach(text, None) as tools:
      return await act(tools)

  result = asyncio.run(scenario())
  assert not children()
  return result


def call(tools, name, **arguments):
  return tools[name].run(None, None, arguments)


def test_a_server_on_the_host(monkeypatch):
  monkeypatch.setenv('SECRET_KEY', 'x')

  async def act(tools):
    assert set(tools) == {
      f'notes__{x}'
      for x in ('keep', 'all_notes', 'fail', 'sleep', 'die', 'look')
    }
    reads = [name for name, tool in tools.items() if tool.reads]
    return (
      tools['notes__keep'].spec,
      reads,
      [
        await call(tools, 'notes__keep', text='one'),
        await call(tools, 'notes__keep', text='two'),
        await call(tools, 'notes__all_notes', limit=5),
        await call(tools, 'notes__fail'),
        await call(tools, 'notes__look'),
      ],
    )

  spec, reads, (one, two, notes, fail, look) = on_host(act)
  assert spec.description == 'Keep a note; says how many there are.'
  assert reads == ['notes__all_notes']
  assert spec.schema['required'] == ['text']
  assert (one.text, two.text) == ('1 notes', '2 notes')  # it remembers
  assert notes.text == 'one two' and notes.ok and notes.seconds > 0
  assert not fail.ok and fail.text == 'Error executing tool fail'
  assert 'SECRET_KEY' not in look.text and 'PATH' in look.text


def test_time_is_answered_and_death_is_infrastructure(monkeypatch):
  async def act(tools):
    with monkeypatch.context() as changed:
      changed.setattr(mcp, 'CALL_S', 0.3)
      slow = await call(tools, 'notes__sleep', seconds=1.0)
    with pytest.raises(mcp.ToolServerError, match='ended in the middle of die'):
      await call(tools, 'notes__die')
    return slow

  slow = on_host(act)
  assert not slow.ok and slow.text == 'error no answer within 0.3 s'


@pytest.mark.parametrize(
  'text, message',
  [
    (f'notes = {sys.executable} {SERVERS} broken', 'no licence'),
    ('notes = /no/such/program', 'did not start: FileNotFoundError'),
  ],
)
def test_a_server_that_does_not_start_says_why(text, message):
  with pytest.raises(mcp.ToolServerError, match=message):
    on_host(lambda tools: None, text)


def test_cancellation_ends_the_server():
  async def scenario():
    async with mcp.attach(HOST, None) as tools:
      calling = asyncio.ensure_future(call(tools, 'notes__sleep', seconds=0.5))
      await asyncio.sleep(0.1)
      calling.cancel()
      await asyncio.gather(calling, return_exceptions=True)
      raise KeyError('ours')

  with pytest.raises(KeyError):
    asyncio.run(scenario())
  assert not children()


# --- in the machine ----------------------------------------------------------


@pytest.fixture(scope='module')
def driver():
  try:
    machines.probe(CONFIG)
  except MissingFacility:
    return 'process'
  return 'namespace'


def inside(driver, text, act):
  async def scenario():
    pool = Pool(dataclasses.replace(CONFIG, driver=driver))
    try:
      files = {'server.py': SERVERS.read_text(), 'a.txt': 'four'}
      machine = await pool.acquire(files)
      async with mcp.attach(text, machine) as tools:
        return await act(machine, tools)
    finally:
      await pool.close()

  return asyncio.run(scenario())


def test_a_server_in_the_machine(driver, monkeypatch):
  monkeypatch.setattr(process, '_warned', [True])

  async def act(machine, tools):
    size = tools['files__size']
    with pytest.raises(mcp.ToolServerError, match='that was too much'):
      await tools['files__gone'].run(machine, None, {'path': 'a.txt'})
    await machine.write('a.txt', 'longer')
    return size.spec, [
      await size.run(machine, None, {'path': 'a.txt'}),
      await size.run(machine, None, {'path': 'b.txt'}),
      await size.run(machine, None, {'path': 'x' * 70_000}),
    ]

  text = 'files in machine = python3 server.py plain'
  spec, (size, none, long) = inside(driver, text, act)
  assert spec.schema['properties'] == {'path': {'type': 'string'}}
  assert size.text == '6' and size.ok
  assert none.text == 'No such file or directory' and not none.ok
  assert not long.ok and 'a request of' in long.text


@pytest.mark.parametrize(
  'command, message',
  [
    ('python3 server.py broken', 'did not start: .*no licence'),
    ('no-such-program', 'did not start: no-such-program: No such file'),
  ],
)
def test_a_server_that_does_not_start_in_the_machine(
  driver, monkeypatch, command, message
):
  monkeypatch.setattr(process, '_warned', [True])
  with pytest.raises(mcp.ToolServerError, match=message):
    inside(driver, f'files in machine = {command}', None)


# --- the config --------------------------------------------------------------


@pytest.mark.parametrize('text', ['x' * 9, 'é' * 30_000, '"\n' * 30_000])
def test_an_answer_fits_a_machines_output(text):
  kept = mcp_inside.fitted(text)
  assert len(json.dumps(kept)) < 12_100
  if len(text) > 9:
    head, _, gone = kept.rpartition('\n')
    assert text.startswith(head) and len(head) > 1500
    assert gone == f'[{len(text) - len(head)} characters left out]'
  else:
    assert kept == text


def test_servers_are_read():
  got = mcp.read_servers("# ours\n\nb in machine = x 'y z'\na=w\n")
  assert got == (
    mcp.Server('b', ('x', 'y z'), True),
    mcp.Server('a', ('w',), False),
  )


@pytest.mark.parametrize(
  'text, message',
  [
    ('python server.py', 'is no server; write NAME'),
    ('A = x', 'is no server'),
    ("a = 'x", 'is no server'),
    ('a = x\na = y', "'a' stands twice"),
  ],
)
def test_what_is_no_server_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    mcp.read_servers(text)


def test_a_schema_that_is_none_is_refused():
  server = mcp.Server('s', ('x',), False)
  good = {'description': 'd', 'schema': {'type': 'object'}, 'reads': False}
  for name, about in (
    ('a b', good),
    ('x' * 41, good),
    ('x' * 40, {**good, 'server': 'y' * 24}),
    ('a', {**good, 'schema': {'type': 'string'}}),
  ):
    with pytest.raises(mcp.ToolServerError):
      mcp._tool(
        dataclasses.replace(server, name=about.get('server', 's')),
        name, about, None,
      )  # fmt: skip


def test_servers_are_checked_with_the_config():
  session = SessionConfig(tool_servers='python server.py')
  with pytest.raises(ValueError, match='session.tool_servers: .* is no server'):
    validate(Experiment(name='x', session=session))
