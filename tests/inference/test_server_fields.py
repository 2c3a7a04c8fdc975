"""Fields beyond OpenAI's: what they change, and what is refused with a remedy."""

import dataclasses
import json

import httpx2
import numpy as np
import openai
import pytest

from composer.inference import server_fields
from composer.inference import server_requests
from composer.inference import server_shapes
from composer.inference import server_text
from composer.inference.server_values import ApiError
from composer.records import Piece

ASK = [{'role': 'user', 'content': 'hi'}]
KNOWN = (*server_requests._SHARED, *server_requests._OF_CHAT)


def remedy(field, value=1):
  with pytest.raises(ApiError) as caught:
    server_fields.refuse_unknown({field: value}, KNOWN)
  return str(caught.value)


def test_every_refusal_has_a_remedy():
  for field in [*server_fields._INSTEAD, 'frobnicate', 'x' * 500]:
    if field not in KNOWN:
      said = remedy(field, {'no': 'such'})
      assert field[:80] in said and said.partition('; ')[2], field
      assert len(said) < 300
  assert 'did you mean temperature?' in remedy('temprature')
  assert 'did you mean stop_token_ids?' in remedy('stop_tokens_ids')
  assert 'composer score' in remedy('echo', True)
  assert 'structured_outputs' in remedy('guided_json', {})
  assert 'X-Request-Id' in remedy('request_id', 'x')
  server_fields.refuse_unknown(
    {
      **{name: values[0] for name, values in server_fields.FIXED.items()},
      **{name: {'any': 'thing'} for name in server_fields.NEUTRAL},
    },
    KNOWN,
  )
  # Nothing is both served and refused, and a remedy names nothing unknown.
  assert not set(KNOWN) & {*server_fields.FIXED, *server_fields.NEUTRAL}


# What clients of OpenAI's interface send when nobody chose anything.
NEUTRAL = {
  'frequency_penalty': 0,
  'presence_penalty': 0.0,
  'logit_bias': {},
  'logprobs': None,
  'metadata': {},
  'n': 1,
  'parallel_tool_calls': True,
  'response_format': {'type': 'text'},
  'service_tier': 'auto',
  'stop': None,
  'store': False,
  'top_p': 1.0,
  'user': 'someone',
}
NEUTRAL_OF_CHAT = {
  'function_call': 'none',
  'functions': [],
  'modalities': ['text'],
  'prompt_cache_key': 'x',
  'reasoning_effort': 'medium',
  'tool_choice': 'auto',
  'tools': [],
  'top_logprobs': 0,
  'verbosity': 'medium',
  'web_search_options': None,
}
NEUTRAL_ELSEWHERE = {  # as vLLM and SGLang name them
  'min_p': 0.0,
  'min_tokens': 0,
  'no_repeat_ngram_size': 0,
  'repetition_penalty': 1.0,
  'top_k': -1,
}


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('kind', ['chat', 'text'])
def test_neutral_fields_change_nothing(serve, scripted, kind, stream):
  """One by one and together they ask the engine for the same."""
  engine = scripted(*[[65]] * 99)
  neutral = {**NEUTRAL, **NEUTRAL_ELSEWHERE}
  with serve(engine) as running:
    create = running.client.completions.create
    about = {'model': 'm', 'prompt': 'x', 'seed': 1, 'stream': stream}
    if kind == 'chat':
      create = running.client.chat.completions.create
      neutral |= NEUTRAL_OF_CHAT
      about |= {'messages': ASK}
      del about['prompt']
    if stream:
      neutral['stream_options'] = {'include_obfuscation': False}
    for body in ({}, *({k: x} for k, x in neutral.items()), neutral):
      answer = create(**about, extra_body=body)
      assert not stream or [*answer][-1].choices[0].finish_reason, body
  asked = [_told(x) for x in engine.requests]
  assert len(asked) == len(neutral) + 2 and len(set(asked)) == 1


def _told(request):
  """All of a request but whom it tells."""
  request = dataclasses.replace(request, on_tokens=None)
  return repr({**vars(request), 'tokens': request.tokens.tolist()})


@pytest.mark.parametrize(
  'name, value, instead',
  [
    ('frequency_penalty', 0.5, 'training could not compute again'),
    ('presence_penalty', -0.1, 'training could not compute again'),
    ('repetition_penalty', 1.1, 'training could not compute again'),
    ('no_repeat_ngram_size', 3, 'training could not compute again'),
    ('reasoning_effort', 'high', '--template'),
    ('thinking', {'type': 'enabled'}, '--template'),
    ('web_search_options', {}, 'offer a tool'),
    ('functions', [{'name': 'f'}], 'use tools'),
    ('function_call', {'name': 'f'}, 'use tool_choice'),
  ],
)
def test_what_would_change_an_answer_is_refused(
  serve, scripted, name, value, instead
):
  with serve(scripted()) as running:
    create = running.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match=instead) as caught:
      create(model='m', messages=ASK, extra_body={name: value})
  assert caught.value.param == name


# --- what may be drawn -----------------------------------------------------------

DRAWN = [  # what is changed of a right body -> param of its refusal
  ({'logit_bias': {'5': 1}}, 'logit_bias'),
  ({'logit_bias': {'5': -99.5}}, 'logit_bias'),
  ({'logit_bias': {'5': '-100'}}, 'logit_bias'),
  ({'logit_bias': {'5': True}}, 'logit_bias'),
  ({'logit_bias': {'-5': -100}}, 'logit_bias'),
  ({'logit_bias': {'x': -100}}, 'logit_bias'),
  ({'logit_bias': {'²': -100}}, 'logit_bias'),
  ({'logit_bias': {'9' * 5000: -100}}, 'logit_bias'),
  ({'logit_bias': {'300': -100}}, 'logit_bias'),
  ({'logit_bias': [5]}, 'logit_bias'),
  ({'logit_bias': {'5': 100}, 'allowed_token_ids': [6]}, 'logit_bias'),
  ({'allowed_token_ids': []}, 'allowed_token_ids'),
  ({'allowed_token_ids': [300]}, 'allowed_token_ids'),
  ({'allowed_token_ids': ['5']}, 'allowed_token_ids'),
  (
    {'allowed_token_ids': [5], 'logit_bias': {'5': -100}},
    'allowed_token_ids',
  ),
  (
    {'allowed_token_ids': [5], 'stop_token_ids': [5], 'min_tokens': 1},
    'allowed_token_ids',
  ),
  (
    {'allowed_token_ids': [5], 'structured_outputs': {'choice': ['a']}},
    'allowed_token_ids',
  ),
  (
    {'logit_bias': {'5': -100}, 'structured_outputs': {'choice': ['a']}},
    'logit_bias',
  ),
  ({'include_stop_str_in_output': 'yes'}, 'include_stop_str_in_output'),
  ({'skip_special_tokens': 0}, 'skip_special_tokens'),
  ({'return_tokens_as_token_ids': 1}, 'return_tokens_as_token_ids'),
  (
    {'stream': True, 'stream_options': {'continuous_usage_stats': 1}},
    'continuous_usage_stats',
  ),
  (
    {'structured_outputs': {'choice': ['\ud83d']}},
    'structured_outputs',
  ),
  ({'structured_outputs': {'regex': '\udc00'}}, 'structured_outputs'),
  (
    {
      'response_format': {
        'type': 'json_schema',
        'json_schema': {'name': 'x', 'schema': {'enum': ['\ud83d']}},
      }
    },
    'response_format.json_schema.schema',
  ),
]


def test_what_is_refused(serve, scripted):
  engine = scripted()
  with serve(engine) as running, httpx2.Client(base_url=running.url) as http:
    for change, param in DRAWN:
      body = {'model': 'm', 'prompt': 'x', 'max_tokens': 2, **change}
      answer = http.post(
        '/v1/completions',
        content=json.dumps(body).encode(),
        headers={'Content-Type': 'application/json'},
      )
      error = answer.json()['error']
      assert (answer.status_code, error['param']) == (400, param), (
        change,
        error,
      )
      assert len(error['message']) < 400
    tool = {'name': 'f', 'description': '\ud83d'}
    body = {'model': 'm', 'messages': ASK}
    body['tools'] = [{'type': 'function', 'function': tool}]
    answer = http.post(
      '/v1/chat/completions',
      content=json.dumps(body).encode(),
      headers={'Content-Type': 'application/json'},
    )
    assert answer.json()['error']['param'] == 'tools[0].function'
    assert engine.requests == []


def lowest(request):
  """Samples the lowest id that may be drawn."""
  ids = []
  for _ in range(request.max_tokens):
    allowed = request.mask(np.array(ids, np.int32))
    ids.append(int(np.flatnonzero(allowed)[0]))
    if ids[-1] in request.stop_tokens:
      break
  return ids


def test_what_may_be_drawn(serve, scripted):
  """No other ids come, and they are the kept ones."""
  engine = scripted(*[lowest] * 5)
  with serve(engine) as running:

    def drawn(**more):
      more = {'return_tokens': True, **more}
      found = running.client.completions.create(
        model='m', prompt='x', max_tokens=6, extra_body=more
      )
      return found.choices[0].tokens

    only = drawn(allowed_token_ids=[66, 65, 65])
    assert only['ids'] == [65] * 6 and only['kept']['ids'] == [65, 66] * 6
    same = drawn(logit_bias={'65': 100, '66': 100, '9': 0})
    assert (same['ids'], same['kept']) == (only['ids'], only['kept'])
    banned = drawn(logit_bias={'0': -100, '1': -100})
    assert banned['ids'] == [2] * 6 and len(banned['kept']['ids']) == 6 * 298
    both = drawn(allowed_token_ids=[65, 66], logit_bias={'65': -100})
    assert both['ids'] == [66] * 6
    late = drawn(allowed_token_ids=[65, 66], stop_token_ids=[65], min_tokens=4)
    assert late['ids'] == [66] * 4 + [65] and late['stop_reason'] == 'stop'


# --- how it is told ----------------------------------------------------------------


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('kind', ['chat', 'text'])
def test_stops_are_told_and_kept(serve, scripted, vocabularies, stream, kind):
  """A stop string that spans tokens: kept on demand, told by `stop_reason`."""
  tokenizer = vocabularies['qwen3']
  ids = tokenizer.encode('one\n\nEND two')
  engine = scripted(*[ids] * 4, [65, 66, 67])
  with serve(engine) as running:
    create = running.client.completions.create
    about = dict(model='m', prompt='x', max_tokens=40, stream=stream)
    if kind == 'chat':
      create = running.client.chat.completions.create
      about = dict(model='m', messages=ASK, stream=stream)

    def told(**more):
      body = {'record': False, **more}
      found = create(**about, extra_body=body)
      text, ends = '', []
      for answer in found if stream else [found]:
        choice = answer.choices[0]
        if kind == 'text':
          text += choice.text
        else:
          text += (choice.delta if stream else choice.message).content or ''
        if choice.finish_reason:
          ends.append((choice.finish_reason, choice.model_extra or {}))
      (end,) = ends
      return text, end[0], end[1].get('stop_reason')

    kept = told(stop=['\n\nEND', 'never'], include_stop_str_in_output=True)
    assert kept == ('one\n\nEND', 'stop', '\n\nEND')
    assert told(stop='\n\nEND') == ('one', 'stop', '\n\nEND')
    text, finish, why = told(stop='\n\n', include_stop_str_in_output=True)
    assert (text, finish, why) == ('one\n\n', 'stop', '\n\n')
    text, finish, why = told(stop='never', include_stop_str_in_output=True)
    assert (text, finish, why) == ('one\n\nEND two', 'length', None)
    text, finish, why = told(stop_token_ids=[67])
    assert (text, finish, why) == ('ABC', 'stop', 67)


def test_control_tokens_are_told_or_not(serve, scripted, vocabularies):
  tokenizer = vocabularies['qwen3']
  mark = tokenizer.controls
  ids = [65, mark['<|im_start|>'], 66, mark['<|im_end|>']]
  engine = scripted(*[ids] * 4)
  with serve(engine) as running:
    create = running.client.completions.create
    about = dict(model='m', prompt='x', max_tokens=9)
    for skip, text in (
      (None, 'A<|im_start|>B'),
      (True, 'AB'),
      (False, 'A<|im_start|>B<|im_end|>'),
    ):
      body = {} if skip is None else {'skip_special_tokens': skip}
      (choice,) = create(**about, extra_body=body).choices
      assert (choice.text, choice.finish_reason) == (text, 'stop')
    answer = running.client.chat.completions.create(
      model='m', messages=ASK, extra_body={'skip_special_tokens': False}
    )
    said = answer.choices[0].message.content
    assert said == 'A<|im_start|>B<|im_end|>'


@pytest.mark.parametrize('by_id', [False, True])
@pytest.mark.parametrize('stream', [False, True])
def test_tokens_and_where_they_stand(
  serve, scripted, vocabularies, stream, by_id
):
  """Two tokens may have one text; by id they are told apart. Streamed or not,
  each begins where those before it end."""
  tokenizer = vocabularies['qwen3']
  turn = [*tokenizer.encode('Zürich 😀'), *tokenizer.encode(' é')[:2], 66, 299]
  engine = scripted(turn, turn)
  with serve(engine) as running:
    about = dict(model='m', stream=stream)
    more = {'return_tokens_as_token_ids': by_id, 'return_token_ids': True}
    found = running.client.completions.create(
      prompt='x', logprobs=0, max_tokens=99, extra_body=more, **about
    )
    names, offsets = [], []
    for chunk in found if stream else [found]:
      choice = chunk.choices[0]
      if choice.logprobs:
        names += choice.logprobs.tokens
        offsets += choice.logprobs.text_offset
    assert choice.token_ids == turn
    texts = [server_text.token_text(tokenizer, i)[0] for i in turn]
    assert names == ([f'token_id:{i}' for i in turn] if by_id else texts)
    assert offsets == np.cumsum([0, *map(len, texts)])[:-1].tolist()
    found = running.client.chat.completions.create(
      messages=ASK, logprobs=True, extra_body=more, **about
    )
    told = []
    for chunk in found if stream else [found]:
      logprobs = chunk.choices[0].logprobs
      told += logprobs.content if logprobs else []
    assert [x.token for x in told] == names
    known = [tokenizer.to_bytes((i,)) for i in turn if tokenizer.has(i)]
    assert [bytes(x.bytes) for x in told if x.bytes] == known


def test_the_likeliest_by_their_ids(vocabularies):
  """The sampled one stands among them once, and none is lost to another."""
  tokenizer = vocabularies['qwen3']
  wanted = server_requests.completions(
    {
      'model': 'm', 'prompt': 'x', 'logprobs': 3,
      'return_tokens_as_token_ids': True,
    },
    '',
  ).wanted  # fmt: skip
  half = [i for i in range(256) if tokenizer.to_bytes((i,))[0] >= 0x80][:3]
  piece = Piece(
    tokens=np.array([half[0], 65], np.int32),
    logprobs=np.array([-1, -2], np.float32),
    versions=np.zeros(2, np.int32),
    top_ids=np.array([half, [66, 67, 68]], np.int32),
    top_logprobs=np.array([[-1, -3, -4], [-0.5, -1, -3]], np.float32),
  )
  told = server_shapes.text_logprobs(tokenizer, piece, wanted)
  assert told['top_logprobs'] == [
    {f'token_id:{i}': x for i, x in zip(half, (-1, -3, -4), strict=True)},
    {'token_id:65': -2, 'token_id:66': -0.5, 'token_id:67': -1}
    | {'token_id:68': -3},
  ]
  by_text = dataclasses.replace(wanted, by_id=False)
  told = server_shapes.text_logprobs(tokenizer, piece, by_text)
  assert told['top_logprobs'][0] == {'\ufffd': -1}  # all of them read so
  told = server_shapes.chat_logprobs(tokenizer, piece, wanted)
  found = [x['token'] for x in told['content'][0]['top_logprobs']]
  assert found == [f'token_id:{i}' for i in half]


def test_counts_with_every_piece(serve, scripted):
  """They grow to those of the end; n answers are counted together."""
  turn = [65, 66, 67]
  with serve(scripted(turn, turn)) as running:
    options = {'include_usage': True, 'continuous_usage_stats': True}
    stream = running.client.completions.create(
      model='m', prompt='abc', n=2, max_tokens=3, stream=True,
      stream_options=options,
    )  # fmt: skip
    *pieces, last = stream
  counts = [x.usage.completion_tokens for x in pieces if x.usage]
  assert counts == sorted(counts) and len(counts) == 6 and counts[-1] == 6
  assert last.usage.completion_tokens == 6 and not last.choices
  assert last.usage.prompt_tokens_details.cached_tokens == 0
  assert {x.usage.prompt_tokens for x in pieces if x.usage} == {
    last.usage.prompt_tokens
  }


# --- text to ids, and back ------------------------------------------------------------


def test_ids_of_text_and_messages(serve, scripted, vocabularies):
  """Those of messages are what a chat sends, answers sampled here included."""
  tokenizer = vocabularies['qwen3']
  turn = [*tokenizer.encode('yes'), tokenizer.controls['<|im_end|>']]
  odd = [*map(int, b'yes'), turn[-1]]  # as nobody would write it again
  engine = scripted(odd, turn)
  with serve(engine) as running, httpx2.Client(base_url=running.url) as http:

    def post(path, **body):
      answer = http.post(path, json=body)
      assert answer.status_code == 200, answer.text
      return answer.json()

    text = 'Grüße, 世界 😀 <|im_end|>'
    for path in ('', '/v1'):
      found = post(path + '/tokenize', prompt=text, return_token_strs=True)
      assert found['tokens'] == list(tokenizer.encode(text))
      assert found['count'] == len(found['tokens']) == len(found['token_strs'])
      assert found['max_model_len'] == 1200
      back = post(path + '/detokenize', model='m', tokens=found['tokens'])
      assert back == {'prompt': text}
    assert post('/tokenize', prompt='')['tokens'] == []
    assert post('/detokenize', tokens=[]) == {'prompt': ''}
    named = post('/detokenize', tokens=[65, turn[-1], 299])['prompt']
    assert named.startswith('A<|im_end|>')

    create = running.client.chat.completions.create
    said = create(model='m', messages=ASK).choices[0].message.content
    again = [*ASK, {'role': 'assistant', 'content': said}, *ASK]
    found = post('/tokenize', messages=again)['tokens']
    create(model='m', messages=again)
    sent = engine.requests[-1].tokens.tolist()
    assert found == sent and odd == sent[len(engine.requests[0].tokens) :][:4]
    assert post('/detokenize', tokens=found)['prompt'].count('<|im_start|>') > 2

    for path, body, param in (
      ('tokenize', {}, 'prompt'),
      ('tokenize', {'prompt': [1]}, 'prompt'),
      ('tokenize', {'prompt': 'x', 'messages': ASK}, 'prompt'),
      ('tokenize', {'messages': []}, 'messages'),
      ('tokenize', {'prompt': 'x', 'model': 'other'}, 'model'),
      ('tokenize', {'prompt': 'x', 'return_token_strs': 1}, 'return_token_strs'),
      ('tokenize', {'prompt': 'x', 'add_special_tokens': True},
       'add_special_tokens'),
      ('detokenize', {}, 'tokens'),
      ('detokenize', {'tokens': ['a']}, 'tokens'),
      ('detokenize', {'tokens': [300]}, 'tokens'),
      ('detokenize', {'tokens': [-1]}, 'tokens'),
      ('detokenize', {'prompt': 'x'}, 'prompt'),
    ):  # fmt: skip
      answer = http.post('/' + path, json=body)
      assert answer.status_code in (400, 404), (path, body)
      assert answer.json()['error']['param'] == param, (path, body)
    assert len(engine.requests) == 2


def test_ids_where_there_are_no_conversations(serve, scripted, vocabularies):
  with serve(scripted(), 'compact', vocab_size=768) as running:
    post = running.client.post
    found = post('/tokenize', cast_to=object, body={'prompt': ' edit L3'})
    assert found['tokens'] == vocabularies['compact'].encode(' edit L3')
    with pytest.raises(openai.BadRequestError, match='conversations'):
      post('/tokenize', cast_to=object, body={'messages': ASK})
