"""The server under load: many clients that stream, and leave when they like.

COMPOSER_SOAK_SECONDS=60 pytest -s tests/inference/test_server_soak.py is the long
one. Every request ends with an answer or an error of OpenAI's shape; nothing is
left of those that ended: pages, sessions beyond the table's bounds, tasks,
descriptors, memory.
"""

import asyncio
import collections
import gc
import json
import os
import pathlib
import random
import time

import openai
import pytest

from composer.inference import server_sessions

SECONDS = float(os.environ.get('COMPOSER_SOAK_SECONDS', '1'))
ROUNDS = 4 if SECONDS >= 20 else 2
PATIENCE = 300.0  # s; the machine may be a busy one
CLIENTS = 64
LIMITS = server_sessions.Limits(
  sessions=40, tokens=20_000, answers=5_000, feedback=4_000
)
TOOL = {
  'type': 'function',
  'function': {
    'name': 'f',
    'parameters': {
      'type': 'object',
      'properties': {'x': {'enum': [1, 2, None]}},
      'required': ['x'],
      'additionalProperties': False,
    },
  },
}
SHARED = 'You are one of many. ' * 2  # a prefix that pages are reused of


def body(rng):
  """(what is asked, whether it is refused)."""
  about = {
    'model': 'm',
    'messages': [
      {'role': 'system', 'content': SHARED},
      {'role': 'user', 'content': 'x' * rng.randrange(1, 60)},
    ],
    'max_tokens': rng.randrange(1, 40),
    'temperature': rng.choice([0, 0.7, 1]),
  }
  kind = rng.random()
  if kind < 0.1:
    about |= {'tools': [TOOL], 'tool_choice': 'required', 'max_tokens': 90}
  elif kind < 0.2:
    about |= {'logprobs': True, 'top_logprobs': 3, 'n': 2}
  elif kind < 0.3:
    about |= {'top_p': 0.8, 'stop': ['ab', 'q']}
  elif kind < 0.35:
    return about | {'max_tokens': 10_000}, True
  elif kind < 0.4:
    return about | {'temperature': -1}, True
  return about, False


async def one(client, rng, counts):
  """One request; a third of its clients leave before the end."""
  about, refused = body(rng)
  leaves = rng.random() < 1 / 3
  try:
    if rng.random() < 0.3:  # whole
      call = client.chat.completions.create(**about)
      answer = await asyncio.wait_for(
        call, rng.random() if leaves else PATIENCE
      )
      counts['answered'] += 1
      if rng.random() < 0.3:
        await client.post(
          f'/sessions/{answer.session_id}/feedback',
          body={'kind': 'thumbs', 'value': 1, 'detail': 'x' * 900},
          cast_to=object,
        )
        counts['feedback'] += 1
      return
    stream = await client.chat.completions.create(**about, stream=True)
    async with stream:
      seen, finished = 0, set()
      async for chunk in stream:
        seen += 1
        if leaves and seen > rng.randrange(1, 12):
          counts['left'] += 1
          return
        choice = chunk.choices[0]
        if choice.finish_reason:
          finished.add(choice.index)
    assert finished == set(range(about.get('n', 1))), finished
    counts['answered'] += 1
  except openai.BadRequestError as error:
    assert refused and error.body['type'] == 'invalid_request_error'
    counts['refused'] += 1
  except openai.NotFoundError:  # of feedback: its session has left the table
    counts['expired'] += 1
  except (TimeoutError, openai.APITimeoutError):
    assert leaves
    counts['left'] += 1


async def load(url, seconds, seed):
  counts = collections.Counter()
  async with openai.AsyncOpenAI(
    base_url=url + '/v1', api_key='none', max_retries=0
  ) as client:
    until = time.monotonic() + seconds

    async def worker(number):
      rng = random.Random(seed * CLIENTS + number)
      await one(client, rng, counts)
      while time.monotonic() < until:
        await one(client, rng, counts)

    await asyncio.gather(*map(worker, range(CLIENTS)))
  return counts


def wait_for(what, seconds=PATIENCE):
  until = time.monotonic() + seconds
  while not what():
    assert time.monotonic() < until, what
    time.sleep(0.02)


def tasks(running):
  async def count():
    return len(asyncio.all_tasks())

  return asyncio.run_coroutine_threadsafe(count(), running.loop).result(10)


def descriptors():
  return len(os.listdir('/proc/self/fd'))


def resident():
  """MB."""
  gc.collect()
  pages = pathlib.Path('/proc/self/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE') / 1e6


def test_nothing_is_left_of_many_clients(serve, engine):
  table = server_sessions.Table((2, 2), LIMITS)
  with serve(
    engine, 'chatml', vocab_size=272, max_context=640, table=table
  ) as running:
    server, rounds = running.server, []
    engine.warm_up(cuts=True)
    shapes = engine.stats.compilations
    for seed in range(ROUNDS):
      counts = asyncio.run(load(running.url, SECONDS / ROUNDS, seed))
      wait_for(lambda: not server.active and engine.pages_held == 0)
      assert server.answers == 0 and engine.waiting == 0
      assert len(table) <= LIMITS.sessions
      assert table.tokens <= LIMITS.tokens
      assert table._answer_tokens <= LIMITS.answers
      assert table.feedback_bytes <= LIMITS.feedback + 1_000
      wait_for(lambda: tasks(running) <= 3)
      rounds.append((counts, descriptors(), resident()))
      print(dict(counts), *(f'{x:.0f}' for x in rounds[-1][1:]))
    assert engine.stats.compilations == shapes, 'compiled while serving'
    total = sum((x[0] for x in rounds), collections.Counter())
    assert total['answered'] and total['left'] and total['refused'], total
    # Nothing grows with what was served.
    assert rounds[-1][1] <= rounds[0][1] + 4, [x[1] for x in rounds]
    if SECONDS >= 20:
      assert rounds[-1][2] < rounds[1][2] * 1.03 + 5, [x[2] for x in rounds]
    last = running.client.chat.completions.create(
      model='m', messages=[{'role': 'user', 'content': '!'}], max_tokens=2
    )
    assert last.usage.completion_tokens <= 2
    text = json.dumps(server.metrics.requests.most_common(2), default=str)
    assert '/v1/chat/completions' in text


pytestmark = pytest.mark.skipif(
  not pathlib.Path('/proc/self/fd').is_dir(), reason='counts by /proc'
)
