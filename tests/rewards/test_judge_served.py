"""A judge that is a model of ours, behind our own server."""

import asyncio
import contextlib
import dataclasses
import types

import pytest

from composer import config as config_lib
from composer import templates
from composer.config import JudgeConfig
from composer.inference import server
from composer.inference import server_sessions
from composer.records import Task
from composer.rewards import judge as judge_lib
from composer.rewards.judge_calls import JudgeError
from composer.rollout import player
from composer.templates.protocol import Message

CONTEXT = 2048
TASK = Task(
  id='t', kind='code', instruction='Make f return 2.',
  files={'a.py': 'def f():\n  return 1\n'}, tools=(), test_command=(),
  allowed=('a.py',), hidden_files={}, hidden_command=(), metadata={},
)  # fmt: skip
FILES = {'a.py': b'def f():\n  return 2\n'}
VERDICT = '{"criterion": "small", "evidence": "one line", "verdict": "yes"}'


@contextlib.asynccontextmanager
async def serving(engine):
  """Address of a server in front of the engine."""
  tokenizer = player.vocabulary()
  made = server.make(
    server.ServerConfig(model='m', port=0),
    engine,
    templates.choose(player.TEMPLATE, tokenizer),
    tokenizer,
    vocab_size=tokenizer.vocab_size,
    max_context=CONTEXT,
    table=server_sessions.Table((2, 2)),
  )
  async with server.listening(made) as url:
    yield url


def saying(*texts):
  """An engine that answers with these texts, one a request."""
  experiment = config_lib.Experiment(name='x', template=player.TEMPLATE)
  turns = iter([Message('assistant', text) for text in texts])
  speaker = player.Player(player.vocabulary(), experiment, turns)
  return types.SimpleNamespace(
    sample=speaker.sample,
    check=lambda: None,
    version=0,
    stats=types.SimpleNamespace(steps=0),
  )


def judge(engine, **settings):
  judge_lib._cache.cache_clear()

  async def run():
    async with serving(engine) as url:
      config = JudgeConfig(
        rubric='small | 1 | Is nothing changed that need not be?',
        endpoint=f'{url}/v1', model='m', retries=1, backoff_s=0.001,
        timeout_s=60.0, max_tokens=96,
      )  # fmt: skip
      config = dataclasses.replace(config, **settings)
      return await judge_lib.judge(config, TASK, FILES, ())

  return asyncio.run(run())


def test_a_model_that_talks_nonsense_gives_no_verdict():
  """A typed failure after its retries, never a zero."""
  engine = saying('no no no', '{"criterion": "large", "verdict": "no"}')
  with pytest.raises(JudgeError, match="'small': 2 calls of http.* no verdict"):
    judge(engine)
  with pytest.raises(JudgeError, match='2 calls .* cut after judge.max_tokens'):
    judge(saying(VERDICT, VERDICT), max_tokens=8)
  with pytest.raises(JudgeError, match='status 404.*judge.model'):
    judge(saying(), model='another')


def test_a_model_that_judges_is_heard():
  """The whole way: our call, our server, a completion of text, our reading."""
  (verdict,) = judge(saying('yes, it is', VERDICT))
  assert verdict.met and verdict.evidence == 'one line'
  assert verdict.attempts == 2
