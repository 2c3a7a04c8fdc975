"""Stop strings in front of a real engine: a stopped answer is a whole one."""

import base64
import dataclasses

import httpx2
import numpy as np
import pytest
import serving

from composer import wire
from composer.inference import server_sessions

ASK = {'model': 'm', 'max_tokens': 60, 'seed': 7}
EXTRA = {'return_tokens': True, 'return_experts': True, 'stop_token_ids': []}


@pytest.fixture
def asking(serve, engine):
  """(ask(prompt, session, **more) -> (choices, usage), segments(session), what
  runs)."""
  table = server_sessions.Table((2, 2))
  with (
    serve(engine, vocab_size=272, max_context=256, table=table) as running,
    httpx2.Client(base_url=running.url, timeout=20.0) as http,
  ):
    create = running.client.completions.create

    def ask(prompt, session, stream=False, **more):
      metadata = {'session_id': session}
      body = {**ASK, 'prompt': prompt, 'stream': stream, **more}
      answer = create(**body, extra_body={**EXTRA, 'metadata': metadata})
      if not stream:
        return [(x.text, x.tokens) for x in answer.choices], answer.usage
      return streamed(answer), None

    def segments(session):
      body = http.get(f'/v1/sessions/{session}').json()
      return [
        wire.decode_segment(base64.b64decode(x['record']))
        for x in body['segments']
      ]

    yield ask, segments, running
  assert engine.pages_held == 0 and not engine._open


def streamed(chunks):
  """[(text, tokens)] of the choices of a stream."""
  texts, tokens = {}, {}
  for chunk in chunks:
    for choice in chunk.choices:
      texts[choice.index] = texts.get(choice.index, '') + choice.text
      if getattr(choice, 'tokens', None):
        tokens[choice.index] = choice.tokens
  return [(texts[i], tokens[i]) for i in sorted(texts)]


def experts_of(tokens):
  data = base64.b64decode(tokens['experts']['base64'])
  return np.frombuffer(data, '<i2').reshape(tokens['experts']['shape'])


def spelt(tokenizer, ids):
  known = [i for i in ids if tokenizer.has(i) and i not in tokenizer.names]
  return tokenizer.decode(known)


def stop_of(tokenizer, tokens, place):
  """(a stop that two tokens or more spell, how many tokens end it)."""
  ids = tokens['ids']
  for at in range(place, len(ids) - 10):
    stop = spelt(tokenizer, ids[at : at + 3])
    plain = '\ufffd' not in stop and len(stop) == 3
    if plain and stop not in spelt(tokenizer, ids[: at + 2]):
      return stop, at + 3
  raise AssertionError('no three tokens spell characters')


@pytest.mark.parametrize('stream', [False, True])
def test_stopped_answers_have_their_routes(asking, stream):
  """Of two choices, each at a stop of its own that begins in another token."""
  ask, segments, running = asking
  server = running.server
  prompt = [72, 105, 33]
  free, _ = ask(prompt, 'free', n=2)
  ends = [
    stop_of(server.tokenizer, tokens, 4 + 6 * i)
    for i, (_, tokens) in enumerate(free)
  ]
  counted(server, 120)
  cut, usage = ask(prompt, 'cut', stream, n=2, stop=[stop for stop, _ in ends])
  total = sum(count for _, count in ends)
  counted(server, 120 + total)
  if usage is not None:
    assert usage.completion_tokens == total
  for (text, got), (_, want), (stop, count) in zip(
    cut, free, ends, strict=True
  ):
    assert stop not in text and got['stop_reason'] == 'stop'
    size = len(prompt) + count
    for name in ('ids', 'logprobs', 'versions'):
      assert got[name] == want[name][:count], name
    assert got['computed_versions'] == want['computed_versions'][:size]
    experts = experts_of(got)
    assert experts.shape[0] == size and np.all(experts >= 0)
    np.testing.assert_array_equal(experts, experts_of(want)[:size])
  # What is recorded is what was told, whichever choice the client goes on with.
  (recorded,) = segments('cut')
  check_recorded(recorded, prompt, cut[0][1], segments('free')[0])
  again = [*prompt, *cut[1][1]['ids']]
  ask(again, 'cut', max_tokens=1)
  chosen = segments('cut')[-1]
  assert chosen.tokens[: len(again)].tolist() == again
  np.testing.assert_array_equal(
    chosen.experts[: len(again)], experts_of(cut[1][1])
  )


def counted(server, tokens):
  """Once all is sent."""
  metrics = server.metrics
  serving.until(lambda: metrics.sampled_tokens == tokens, 'it is counted')


def check_recorded(segment, prompt, told, free):
  """The segment is that of the answer without a stop, up to the cut."""
  size = len(prompt) + len(told['ids'])
  assert segment.tokens.tolist() == [*prompt, *told['ids']]
  assert np.all(segment.experts >= 0)
  assert segment.auditable[len(prompt) :].all()
  for name in (
    'tokens', 'sampled', 'logprobs', 'temperatures', 'versions', 'experts',
    'auditable',
  ):  # fmt: skip
    got, want = getattr(segment, name), getattr(free, name)
    np.testing.assert_array_equal(got, want[:size], name)


@pytest.mark.parametrize('stream', [False, True])
def test_too_many_kept_behind_the_stop_cost_nothing(asking, stream):
  """A token that nobody wanted was drawn among more ids than are kept."""
  ask, segments, running = asking
  server = running.server
  for seed in range(40):
    free, _ = ask([72, 105], f'free-{seed}', top_p=0.3, seed=seed)
    offsets = free[0][1]['kept']['offsets']
    stop, count = stop_of(server.tokenizer, free[0][1], 0)
    sizes = np.diff(offsets)
    most = int(sizes[:count].max())
    if sizes[count] > most:  # the very next
      break
  assert sizes[count] > most
  server.config = dataclasses.replace(server.config, max_kept=most)
  more = {'top_p': 0.3, 'seed': seed}
  cut, _ = ask([72, 105], 'cut', stream, stop=stop, **more)
  assert cut[0][1]['kept']['offsets'] == offsets[: count + 1]
  assert cut[0][1]['kept']['ids'] == free[0][1]['kept']['ids'][: offsets[count]]
  (segment,) = segments('cut')
  assert segment.sampled.sum() == count
  ask([72, 105], 'whole', **more)
  assert not segments('whole')[0].sampled.any()  # that is context


def test_pages_are_told_of(asking):
  """As gauges; together they are all there are."""
  ask, _, running = asking
  ask([72, 105, 33, 34, 35, 36], 's', max_tokens=8)
  count = running.server.engine.pages
  assert count.held + count.kept + count.free == 599
  assert count.held == 0 and count.kept >= 3
  lines = httpx2.get(running.url + '/metrics').text.splitlines()
  for name in ('held', 'kept', 'free'):
    assert f'composer_engine_pages_{name} {getattr(count, name)}' in lines
