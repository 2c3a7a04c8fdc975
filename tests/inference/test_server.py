"""The server over HTTP, with OpenAI's own client."""

import asyncio
import base64
import dataclasses
import json

import numpy as np
import openai
import pytest

from composer.inference import server_sessions
from composer.records import EngineError
from composer.records import SampleRequest
from composer.rollout import remote

NAMES = ('chatml', 'qwen3', 'qwen3-thinking', 'smollm2', 'kimi-k2', 'kimi-k2.5')
ASK = [{'role': 'user', 'content': 'What is the weather in Zürich?'}]
TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'weather',
      'description': 'of a city',
      'parameters': {
        'type': 'object',
        'properties': {'city': {'type': 'string'}},
        'required': ['city'],
      },
    },
  }
]
ARGUMENTS = '{"city": "Zürich \\"10\\""}'


def calling(name, tokenizer, text='I look.'):
  """A sampled turn of each family that says something and calls a tool."""
  mark = tokenizer.controls
  if name.startswith('kimi'):
    ids = []
    if name == 'kimi-k2.5':
      ids = [*tokenizer.encode('hm'), mark['</think>']]
    ids += tokenizer.encode(text)
    ids += [mark['<|tool_calls_section_begin|>'], mark['<|tool_call_begin|>']]
    ids += tokenizer.encode('functions.weather:0')
    ids += [mark['<|tool_call_argument_begin|>'], *tokenizer.encode(ARGUMENTS)]
    ids += [mark['<|tool_call_end|>'], mark['<|tool_calls_section_end|>']]
    return [*ids, mark['<|im_end|>']]
  call = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
  if name == 'smollm2':
    spelt = f'{text}<tool_call>[{call}]</tool_call>'
    return [*tokenizer.encode(spelt), mark['<|im_end|>']]
  ids = []
  if name == 'qwen3-thinking':
    ids = [*tokenizer.encode('hm\n'), mark['</think>']]
  ids += [*tokenizer.encode(text + '\n'), mark['<tool_call>']]
  ids += tokenizer.encode(f'\n{call}\n')
  return [*ids, mark['</tool_call>'], mark['<|im_end|>']]


def saying(name, tokenizer, text):
  """A sampled turn that only talks."""
  opened = name in ('qwen3-thinking', 'kimi-k2.5')
  thought = [tokenizer.controls['</think>']] if opened else []
  return [*thought, *tokenizer.encode(text), tokenizer.controls['<|im_end|>']]


def gathered(stream):
  """A streamed answer put together: (content, thinking, calls, last chunk)."""
  content, thinking, calls, ends = '', '', {}, []
  for chunk in stream:
    if not chunk.choices:
      ends.append(chunk)
      continue
    choice = chunk.choices[0]
    content += choice.delta.content or ''
    thinking += getattr(choice.delta, 'reasoning_content', None) or ''
    for call in choice.delta.tool_calls or ():
      one = calls.setdefault(call.index, {'id': call.id, 'arguments': ''})
      if call.function.name:
        one['name'] = call.function.name
      one['arguments'] += call.function.arguments
    if choice.finish_reason:
      ends.append(chunk)
  return content, thinking, calls, ends


# --- tools, streams and sessions, in every template ------------------------------


@pytest.mark.parametrize('stream', [False, True], ids=['whole', 'stream'])
@pytest.mark.parametrize('name', NAMES)
def test_tool_session(serve, scripted, vocabularies, name, stream):
  """Two turns around a tool are one segment, of the tokens that were sampled."""
  tokenizer = vocabularies[name]
  turns = calling(name, tokenizer), saying(name, tokenizer, 'It snows.')
  engine = scripted(*turns)
  with serve(engine, name) as running:
    client, about = running.client, dict(model='m', tools=TOOLS, temperature=1)
    if stream:
      content, thinking, calls, ends = gathered(
        client.chat.completions.create(messages=ASK, stream=True, **about)
      )
      assert ends[0].choices[0].finish_reason == 'tool_calls'
      (call,) = calls.values()
    else:
      answer = client.chat.completions.create(messages=ASK, **about)
      said = answer.choices[0].message
      assert answer.choices[0].finish_reason == 'tool_calls'
      content = said.content
      thinking = getattr(said, 'reasoning_content', '')
      (made,) = said.tool_calls
      call = {**made.function.model_dump(), 'id': made.id}
    assert content == 'I look.' and call['name'] == 'weather'
    assert json.loads(call['arguments']) == json.loads(ARGUMENTS)
    assert thinking == ('hm' if name in ('qwen3-thinking', 'kimi-k2.5') else '')
    history = [
      *ASK,
      {
        'role': 'assistant',
        'content': content,
        'tool_calls': [
          {
            'id': call['id'],
            'type': 'function',
            'function': {
              'name': call['name'],
              'arguments': call['arguments'],
            },
          }
        ],
      },
      {'role': 'tool', 'tool_call_id': call['id'], 'content': '-3 °C'},
    ]
    answer = client.chat.completions.create(messages=history, **about)
    assert answer.choices[0].message.content == 'It snows.'
    assert answer.choices[0].finish_reason == 'stop'
    first, second = (x.tokens.tolist() for x in engine.requests)
    assert second[: len(first) + len(turns[0])] == first + turns[0]
    (session,) = running.server.table._sessions.values()
    (segment,) = running.server.table.segments(session)
  assert session.id == answer.session_id and session.calls == 2
  assert segment.tokens.tolist() == second + turns[1]
  assert segment.tokens[segment.sampled].tolist() == [*turns[0], *turns[1]]
  assert (segment.versions[segment.sampled] == 3).all()
  assert segment.stop_reason == 'finished'


def test_streams_without_text(serve, scripted, vocabularies):
  """Nothing but a call, or but the end: a stream all the same."""
  tokenizer = vocabularies['qwen3']
  call = calling('qwen3', tokenizer)
  call = call[call.index(tokenizer.controls['<tool_call>']) :]
  end = [tokenizer.controls['<|im_end|>']]
  with serve(scripted(call, end, end)) as running:
    about = dict(model='m', stream=True)
    create = running.client.chat.completions.create
    content, _, calls, ends = gathered(
      create(messages=ASK, tools=TOOLS, **about)
    )
    assert content == '' and calls[0]['name'] == 'weather'
    assert ends[0].choices[0].finish_reason == 'tool_calls'
    *_, last = create(messages=ASK, **about)
    assert last.choices[0].finish_reason == 'stop'
    *_, last = running.client.completions.create(
      prompt='x', max_tokens=1, **about
    )
    assert last.choices[0].text == '' and last.choices[0].finish_reason


def test_rewritten_history(serve, scripted, vocabularies):
  """Qwen3 drops thinking once the user speaks again: a new segment begins."""
  tokenizer = vocabularies['qwen3']
  mark = tokenizer.controls
  thinking = [mark['<think>'], *tokenizer.encode('hm'), mark['</think>']]
  turn = [*thinking, *tokenizer.encode('\n\nhello'), mark['<|im_end|>']]
  engine = scripted(turn, saying('qwen3', tokenizer, 'bye'))
  named = {'metadata': {'session_id': 'one:session'}}
  with serve(engine) as running:
    create = running.client.chat.completions.create
    said = create(model='m', messages=ASK, **named).choices[0].message
    assert (said.content, said.reasoning_content) == ('hello', 'hm')
    again = [*ASK, said.model_dump(exclude_none=True), *ASK]
    create(model='m', messages=again, **named)
    found = running.server.table.segments(
      running.server.table.get('one:session')
    )
  assert [x.stop_reason for x in found] == ['rewritten', 'finished']
  assert [int(x.sampled.sum()) for x in found] == [len(turn), 4]


def test_retry_leaves_no_orphan(serve, scripted, vocabularies):
  """The client tries again by itself: after an error, and after a lost answer."""
  tokenizer = vocabularies['qwen3']
  lost, kept = (saying('qwen3', tokenizer, x) for x in ('lost', 'kept'))
  engine = scripted(EngineError('no pages'), lost, kept)
  with serve(engine) as running:
    create = running.client.chat.completions.create
    assert create(model='m', messages=ASK).choices[0].message.content == 'lost'
    again = {'x-stainless-retry-count': '1'}
    create(model='m', messages=ASK, extra_headers=again)
    table = running.server.table
    (session,) = table._sessions.values()
    (segment,) = table.segments(session)
    assert segment.tokens[segment.sampled].tolist() == kept
    # Not a retry: another rollout of the same task is another session.
    engine.turns.append(kept)
    create(model='m', messages=ASK)
    assert len(table) == 2


def test_choices(serve, scripted, vocabularies):
  """n answers; the session goes on with the one that the client chose."""
  tokenizer = vocabularies['qwen3']
  turns = [saying('qwen3', tokenizer, x) for x in ('one', 'two', 'more')]
  engine = scripted(*turns)
  with serve(engine) as running:
    create = running.client.chat.completions.create
    answer = create(model='m', messages=ASK, n=2, seed=11)
    assert [x.message.content for x in answer.choices] == ['one', 'two']
    assert [x.seed for x in engine.requests] == [11, 12]
    assert answer.usage.completion_tokens == 8
    told = {'role': 'assistant', 'content': 'two'}
    create(model='m', messages=[*ASK, told, *ASK])
    (session,) = running.server.table._sessions.values()
    (segment,) = running.server.table.segments(session)
  assert segment.tokens[segment.sampled].tolist() == [*turns[1], *turns[2]]


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('choice', ['required', 'weather'])
def test_tool_choice(serve, scripted, vocabularies, name, choice):
  """The call is begun for the model, which goes on from there."""
  tokenizer = vocabularies[name]
  begun, tail = [], []

  def go_on(request):
    """What the model would write of a whole call, behind what was begun."""
    begun.extend(request.tokens.tolist())
    whole = calling(name, tokenizer, '')
    opening = running.server.template.open_turn(tokenizer)
    at = len(begun) - 1 - begun[::-1].index(opening[0])
    tail.extend(_behind(tokenizer, begun[at + len(opening) :], whole))
    return tail

  engine = scripted(go_on)
  about = dict(model='m', messages=ASK, tools=TOOLS)
  named = {'type': 'function', 'function': {'name': 'weather'}}
  about['tool_choice'] = named if choice == 'weather' else choice
  with serve(engine, name) as running:
    answer = running.client.chat.completions.create(**about)
    text = tokenizer.decode(begun)
    assert ('weather' in text[text.rindex('assistant') :]) == (
      choice == 'weather'
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == 'weather'
    assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    (session,) = running.server.table._sessions.values()
    (segment,) = running.server.table.segments(session)
    assert segment.tokens[segment.sampled].tolist() == tail
    # The braces and quotes are certain, what is quoted is not.
    among = np.diff(segment.kept_offsets)[segment.sampled]
    assert among.min() == 1 and among.max() > 100


def _behind(tokenizer, forced, whole):
  """What is left of a turn, by its text, behind what was forced of it."""
  marks = [i for i in forced if i in tokenizer.names]
  last = marks[-1] if marks else None
  if last is None:  # spelt out
    text = tokenizer.decode(whole[:-1])
    start = tokenizer.decode(forced)
    start = start[start.index('<tool_call>') :]
    return [*tokenizer.encode(text[len(start) :]), whole[-1]]
  start = tokenizer.decode(forced[len(forced) - forced[::-1].index(last) :])
  rest = whole[whole.index(last) + 1 :]
  head = tokenizer.encode(start)
  assert rest[: len(head)] == head
  return rest[len(head) :]


# --- a real engine -----------------------------------------------------------------


def test_chat_of_a_real_engine(serve, engine):
  """Whole, streamed and asked directly, it is the same answer."""
  table = server_sessions.Table((2, 2))
  with serve(engine, vocab_size=272, max_context=256, table=table) as running:
    create = running.client.chat.completions.create
    about = dict(model='m', messages=ASK, max_tokens=12, seed=4)
    about |= {'logprobs': True, 'temperature': 0.8}
    whole = create(
      **about,
      extra_body={'return_tokens': True, 'return_experts': True},
    )
    chunks = list(
      create(**about, stream=True, stream_options={'include_usage': True})
    )
    asked = whole.choices[0].tokens
    request = SampleRequest(
      np.array(asked['prompt_ids'], np.int32), 12,
      tuple(running.server.template.stops(running.server.tokenizer)), 0.8, 4,
    )  # fmt: skip
    direct = asyncio.run(engine.sample(request))
  assert asked['ids'] == direct.tokens.tolist()
  assert asked['logprobs'] == direct.logprobs.tolist()
  assert asked['versions'] == [5] * len(direct.tokens)
  assert asked['computed_versions'] == direct.computed_versions.tolist()
  assert asked['stop_reason'] == direct.stop_reason
  experts = np.frombuffer(base64.b64decode(asked['experts']['base64']), '<i2')
  assert (experts.reshape(asked['experts']['shape']) == direct.experts).all()
  told = [x.logprob for x in whole.choices[0].logprobs.content]
  assert told == asked['logprobs']
  pieces = [x.choices[0] for x in chunks if x.choices]
  content = ''.join(x.delta.content or '' for x in pieces)
  assert content == whole.choices[0].message.content
  streamed = [
    y.logprob for x in pieces if x.logprobs for y in x.logprobs.content
  ]
  assert streamed == told
  counts = [
    x.usage.model_dump(exclude={'prompt_tokens_details'})
    for x in (whole, chunks[-1])
  ]
  assert counts[0] == counts[1]
  assert whole.usage.completion_tokens == len(direct.tokens)


def test_completions_of_a_real_engine(serve, engine):
  table = server_sessions.Table((2, 2))
  with serve(engine, vocab_size=272, max_context=256, table=table) as running:
    create = running.client.completions.create
    ids = [72, 105, 33]
    answer = create(
      model='m',
      prompt=ids,
      max_tokens=6,
      seed=1,
      logprobs=0,
      extra_body={'return_tokens': True, 'stop_token_ids': []},
    )
    request = SampleRequest(np.array(ids, np.int32), 6, (), 1.0, 1)
    direct = asyncio.run(engine.sample(request))
    (choice,) = answer.choices
    assert choice.tokens['ids'] == direct.tokens.tolist()
    assert choice.logprobs.token_logprobs == direct.logprobs.tolist()
    assert choice.finish_reason == 'length'
    tokenizer = running.server.tokenizer
    assert choice.text == tokenizer.decode(
      [i for i in choice.tokens['ids'] if tokenizer.has(i)]
    )
    cut = create(
      model='m', prompt=ids, max_tokens=2, seed=1,
      extra_body={'return_experts': True, 'record': False, 'top_k': 3},
    )  # fmt: skip
    assert cut.choices[0].tokens['kept']['offsets'] == [0, 3, 6]
    both = create(model='m', prompt=['Hi!', 'So'], max_tokens=6, seed=1)
    assert [x.index for x in both.choices] == [0, 1]
    texts = ''
    for chunk in create(
      model='m', prompt='Hi!', max_tokens=6, seed=1, stream=True
    ):
      texts += chunk.choices[0].text
    assert texts == both.choices[0].text


@pytest.fixture
def counted(fresh_engine):
  """counted(usage): (cached tokens of it, tokens that the engine found in its
  cache since it was asked last)."""
  before = fresh_engine.stats.reused

  def count(usage):
    nonlocal before
    found = fresh_engine.stats.reused - before
    before += found
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage.prompt_tokens_details.cached_tokens, found

  return count


def test_cached_tokens_of_a_session(serve, fresh_engine, counted):
  """None of a first prompt; of the next, the full pages of the turn before."""
  table = server_sessions.Table((2, 2))
  page = 4  # tokens
  settings = dict(vocab_size=272, max_context=640, table=table)
  # A template that has no thinking, which the next turn would leave out.
  with serve(fresh_engine, 'chatml', **settings) as here:
    create = here.client.chat.completions.create
    about = dict(model='m', max_tokens=10, seed=4)
    about |= {'extra_body': {'return_tokens': True}}
    messages, computed = [*ASK], 0
    for turn in range(4):
      if stream := turn % 2 == 1:
        options = {'include_usage': True}
        *chunks, last = create(
          messages=messages, stream=True, stream_options=options, **about
        )
        assert not last.choices and not any(x.usage for x in chunks)
        content = gathered(chunks)[0]
        tokens, usage = chunks[-1].choices[0].tokens, last.usage
      else:
        answer = create(messages=messages, **about)
        content = answer.choices[0].message.content
        tokens, usage = answer.choices[0].tokens, answer.usage
      want = computed // page * page
      assert counted(usage) == (want, want), (turn, stream)
      assert usage.prompt_tokens == len(tokens['prompt_ids']) > want
      # No keys and values are computed of the last token that was sampled.
      computed = len(tokens['prompt_ids']) + len(tokens['ids']) - 1
      messages += [{'role': 'assistant', 'content': content}, *ASK]
  assert want > 100


@pytest.mark.parametrize('stream', [False, True])
def test_cached_tokens_of_shared_prompts(serve, fresh_engine, counted, stream):
  """Each prompt counts once: what n answers found of each other is not told."""
  table = server_sessions.Table((2, 2))
  with serve(
    fresh_engine, vocab_size=272, max_context=256, table=table
  ) as here:

    def ask(prompts, n):
      more = {'stream_options': {'include_usage': True}} if stream else {}
      found = here.client.completions.create(
        model='m', prompt=prompts, n=n, max_tokens=3, stream=stream,
        extra_body={'stop_token_ids': []}, **more,
      )  # fmt: skip
      usage = list(found)[-1].usage if stream else found.usage
      assert usage.prompt_tokens == sum(map(len, prompts))
      assert usage.completion_tokens == len(prompts) * n * 3
      return counted(usage)

    one, two = [*range(20)], [*range(100, 113)]
    assert ask([one], 3) == (0, 2 * 16)
    assert ask([one, two], 1) == (16, 16)
    assert ask([one, two], 2) == (16 + 12, 2 * (16 + 12))
    assert ask([[*one, 5, 6]], 1) == (20, 20)


def test_remote_sampler(serve, engine):
  """A sampler over HTTP is the engine behind it, to the last bit."""
  request = SampleRequest(
    np.array([72, 105, 33], np.int32), 8, (10,), 0.7, 2**31 + 5
  )

  async def go(url):
    async with remote.RemoteSampler(remote.Endpoint(url + '/v1', 'm')) as far:
      return await far.sample(request), await engine.sample(request)

  table = server_sessions.Table((2, 2))
  with serve(engine, vocab_size=272, max_context=256, table=table) as running:
    far, near = asyncio.run(go(running.url))
  for field in dataclasses.fields(near):
    if not field.compare:
      continue
    got, wanted = (getattr(x, field.name) for x in (far, near))
    assert np.array_equal(got, wanted), field.name
  assert len(table) == 0  # it was told not to record


# --- stop strings ------------------------------------------------------------------


@pytest.mark.parametrize('pieces', [True, False])
@pytest.mark.parametrize('stream', [False, True])
def test_stop_strings(serve, scripted, vocabularies, stream, pieces):
  """Not part of the answer; what was sampled up to there is recorded."""
  tokenizer = vocabularies['qwen3']
  turn = saying('qwen3', tokenizer, 'a b STOP c')
  engine = scripted(turn, pieces=pieces)
  with serve(engine) as running:
    answer = running.client.chat.completions.create(
      model='m', messages=ASK, stop=['xx', 'STOP'], stream=stream
    )
    if stream:
      content, _, _, ends = gathered(answer)
      assert ends[0].choices[0].finish_reason == 'stop'
    else:
      content = answer.choices[0].message.content
      assert answer.choices[0].finish_reason == 'stop'
    assert content == 'a b'
    (session,) = running.server.table._sessions.values()
    (segment,) = running.server.table.segments(session)
  sampled = tokenizer.decode(segment.tokens[segment.sampled])
  assert sampled == 'a b STOP'


def test_a_stop_string_in_a_cut_answer(serve, engine):
  """What each token was drawn among is told, wherever the engine was stopped."""
  table = server_sessions.Table((2, 2))
  with serve(engine, vocab_size=272, max_context=256, table=table) as running:

    def ask(**more):
      extra = {'return_tokens': True, 'stop_token_ids': [], 'top_k': 5}
      answer = running.client.completions.create(
        model='m', prompt=[72, 105], max_tokens=200, seed=1,
        extra_body=extra, **more,
      )  # fmt: skip
      return answer.choices[0]

    free = ask()
    cut = ask(stop=free.text[4])
  count = len(cut.tokens['ids'])
  assert count < 200 and cut.tokens['ids'] == free.tokens['ids'][:count]
  offsets = free.tokens['kept']['offsets'][: count + 1]
  assert cut.tokens['kept']['offsets'] == offsets
  assert cut.tokens['kept']['ids'] == free.tokens['kept']['ids'][: offsets[-1]]


# --- models, health, metrics, feedback -----------------------------------------------


def test_what_else_is_told(serve, scripted):
  engine = scripted([65, 66])
  with serve(engine) as running:
    client = running.client
    (model,) = client.models.list()
    assert (model.id, model.version) == ('m', 3)
    assert client.models.retrieve('m') == model
    with pytest.raises(openai.NotFoundError):
      client.models.retrieve('other')
    client.completions.create(model='m', prompt='x', max_tokens=2)
    http = client._client
    lines = http.get(running.url + '/metrics').text.splitlines()
    assert 'composer_sampled_tokens_total 2' in lines
    assert 'composer_engine_steps 7' in lines
    assert 'composer_engine_pages_held 5' in lines
    assert 'composer_engine_pages_free 2' in lines
    wanted = 'composer_requests_total{route="/v1/completions",status="200"} 1'
    assert wanted in lines
    assert http.get(running.url + '/health').json()['status'] == 'ok'
    engine.failure = 'out of memory'
    answer = http.get(running.url + '/health')
    assert answer.status_code == 503 and answer.json()['status'] == 'failed'


def test_feedback_is_kept(serve, scripted, vocabularies, tmp_path):
  tokenizer = vocabularies['qwen3']
  turn = saying('qwen3', tokenizer, 'yes')
  table = server_sessions.Table((1, 2), directory=tmp_path)
  with serve(scripted(turn), table=table) as running:
    client = running.client
    answer = client.chat.completions.create(
      model='m', messages=ASK, extra_headers={'X-Session-Id': 'u1'}
    )
    http, path = client._client, f'{running.url}/v1/sessions/u1'
    good = {'kind': 'thumbs', 'value': 1, 'detail': {'user': 7}}
    assert answer.session_id == 'u1'
    assert http.post(path + '/feedback', json=good).json()['feedback'] == 1
    for bad in (
      {'kind': '', 'value': 1},
      {'kind': 'x'},
      {'kind': 'x', 'value': True},
      {'kind': 'x', 'value': 1, 'more': 1},
    ):
      assert http.post(path + '/feedback', json=bad).status_code == 400, bad
    missing = http.post(f'{running.url}/v1/sessions/u2/feedback', json=good)
    assert missing.status_code == 404
    told = http.get(path).json()
    assert [x['value'] for x in told['feedback']] == [1]
    assert told['segments'][0]['tokens'][-len(turn) :] == turn
  (folder,) = tmp_path.iterdir()
  written = json.loads((folder / 'session.json').read_text())
  assert written['feedback'][0]['detail'] == {'user': 7}
  assert written['segments'] == ['segment-0']
