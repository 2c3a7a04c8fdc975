"""Answers of a given form: forced and strict calls, JSON by a schema."""

from concurrent import futures
import functools
import json
import re
import time

from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jsonschema
import numpy as np
import openai
import pytest

from composer import templates
from composer.inference import server_answers
from composer.inference import server_forms
from composer.inference import server_grammar
from composer.inference import server_requests
from composer.inference import server_sessions
from composer.model import transformer

NAMES = ('chatml', 'qwen3', 'qwen3-thinking', 'smollm2', 'kimi-k2', 'kimi-k2.5')
ASK = [{'role': 'user', 'content': 'Zürich?'}]
# Short whatever a model of random weights says.
SCHEMA = {
  'type': 'object',
  'properties': {
    'city': {'type': 'string', 'maxLength': 5},
    'unit': {'enum': ['C', 'F', 'K', 7, None]},
    'days': {'type': 'array', 'items': {'type': 'boolean'}, 'maxItems': 3},
    'at': {
      'type': 'object',
      'properties': {'x': {'const': 'é"'}, 'y': {'type': 'null'}},
      'required': ['y'],
      'additionalProperties': False,
    },
  },
  'required': ['city', 'unit', 'at'],
  'additionalProperties': False,
}


def tool(name, parameters=SCHEMA, **more):
  function = {'name': name, 'parameters': parameters, **more}
  return {'type': 'function', 'function': function}


BRIEF = {
  'type': 'object',
  'properties': {
    'city': {'type': 'string', 'maxLength': 5},
    'n': {'enum': [1, None]},
  },
  'required': ['city', 'n'],
  'additionalProperties': False,
}
TOOLS = (
  tool('weather'), tool('assistant'), tool('wind.x'), tool('no_arguments', {}),
)  # fmt: skip


@pytest.fixture(scope='module')
def opened(vocabularies):
  """Template -> (template, tokenizer, its vocabulary)."""
  out = {}
  for name in NAMES:
    tokenizer = vocabularies[name]
    template = templates.choose(name, tokenizer)
    end = template.stops(tokenizer)[0]
    opened = server_grammar.open_vocabulary(tokenizer, 300, end)
    out[name] = template, tokenizer, opened
  return out


def walk(rng, mask, end, most=400):
  """What a model of no opinion says."""
  ids = []
  while len(ids) < most and ids[-1:] != [end]:
    allowed = np.flatnonzero(mask(np.array(ids, np.int32)))
    ids.append(int(rng.choice(allowed)))
  return ids


def fits(call):
  schema = {'properties': {}, 'additionalProperties': False}
  if call.name != 'no_arguments':
    schema = SCHEMA
  jsonschema.validate(dict(call.arguments), schema)
  return True


@pytest.mark.parametrize('name', NAMES)
def test_forced_calls_are_read_and_fit(opened, name):
  """The template's own parser reads them, whatever was drawn."""
  template, tokenizer, vocabulary = opened[name]
  rng = np.random.default_rng(len(name))
  for choice, count in ((None, 12), ('weather', 4), ('no_arguments', 1)):
    forced, grammar = server_grammar.forced_call(
      template, tokenizer, TOOLS, choice
    )
    masks = server_grammar.compile_grammar(vocabulary, grammar)
    called = set()
    for _ in range(count):
      ids = walk(rng, masks(), template.stops(tokenizer)[0])
      (call,) = template.parse(tokenizer, [*forced, *ids], None).acts
      assert fits(call), call
      called.add(call.name)
    assert called == {choice} if choice else len(called) > 1


@pytest.mark.parametrize('single', [False, True])
@pytest.mark.parametrize('name', NAMES)
def test_calls_of_the_model_own_choice_fit(opened, name, single):
  """All is free but the calls; behind one the turn ends, where it is single."""
  template, tokenizer, vocabulary = opened[name]
  if name == 'smollm2':
    with pytest.raises(ValueError, match='spells its calls'):
      server_grammar.free_calls(template, tokenizer, TOOLS, single)
    return
  grammar = server_grammar.free_calls(template, tokenizer, TOOLS, single)
  masks = server_grammar.compile_grammar(vocabulary, grammar)
  rng, end = np.random.default_rng(0), template.stops(tokenizer)[0]
  (begins,) = grammar.begins
  mask, ids = masks(), [65, 66]
  assert mask(np.array(ids)).all()
  acts = []
  for _ in range(3):
    ids += [begins]
    bound = walk_on(rng, mask, ids, end)
    assert bound > 10 or template.name.startswith('kimi')
    if single:
      assert ids[-1] == end
      break
    assert mask(np.array(ids)).all()
    ids += [67]
  ends = [] if single else [end]
  if name.startswith('kimi'):
    section = tokenizer.controls['<|tool_calls_section_begin|>']
    ids = [*ids[:2], section, *(x for x in ids[2:] if x != 67)]
    ends = [tokenizer.controls['<|tool_calls_section_end|>'], *ends]
    ends = [] if single else ends
  if name in ('qwen3-thinking', 'kimi-k2.5'):
    ids = [tokenizer.controls['</think>'], *ids]
  acts = template.parse(tokenizer, [*ids, *ends], None).acts
  assert len(acts) == (1 if single else 3) and all(map(fits, acts))


def walk_on(rng, mask, ids, end):
  """Goes on with `ids` until all is free again or the turn ended."""
  count = 0
  while ids[-1:] != [end]:
    allowed = mask(np.array(ids, np.int32))
    if allowed.all():
      break
    ids.append(int(rng.choice(np.flatnonzero(allowed))))
    count += 1
  return count


@pytest.mark.parametrize('name', NAMES)
def test_json_answers(opened, name):
  """Behind thinking where there is some; or a call, where there are tools."""
  template, tokenizer, vocabulary = opened[name]
  rng, end = np.random.default_rng(1), template.stops(tokenizer)[0]
  thought = tokenizer.controls.get('</think>')
  for tools in ((), TOOLS):
    form = server_forms.Form(SCHEMA, strict=True)
    grammar = server_grammar.answer(template, tokenizer, form, tools)
    masks = server_grammar.compile_grammar(vocabulary, grammar)
    said = called = 0
    for _ in range(12):
      mask, ids = masks(), []
      if grammar.begins:
        think = [] if grammar.thinks is None else [grammar.thinks]
        ids = [*think, 65, 66, thought]
        for i in range(len(think), len(ids)):
          assert mask(np.array(ids[:i], np.int32)).all()
      walk_on(rng, mask, ids, end)
      reply = template.parse(tokenizer, ids, None)
      if reply.acts:
        called += all(map(fits, reply.acts))
      else:
        jsonschema.validate(json.loads(reply.text), SCHEMA)
        said += 1
    assert said and bool(called) == bool(tools), (said, called)
  if grammar.thinks is not None:
    mask = masks()
    allowed = mask(np.zeros(0, np.int32))
    assert allowed[grammar.thinks] and not allowed[65]
    mask = masks()
    jsonschema.validate(json.loads(tokenizer.decode(walk(rng, mask, end)[:-1]
      )), SCHEMA) if not tools else None  # fmt: skip


LEAVES = st.sampled_from(
  [
    {'type': 'string', 'maxLength': 4},
    {'type': 'integer'},
    {'type': 'number', 'minimum': -3, 'maximum': 40},
    {'type': 'boolean'},
    {'type': 'null'},
    {'enum': ['a"b', 5, None, [1], 'ü']},
    {'const': {'x': [True]}},
    {'type': ['string', 'null'], 'pattern': '^[a-c]{1,3}$'},
  ]
)


def _objects(inner):
  properties = st.dictionaries(
    st.sampled_from(['a', 'b c', 'é', '"']), inner, max_size=3
  )
  return properties.flatmap(
    lambda found: st.fixed_dictionaries(
      {
        'type': st.just('object'),
        'properties': st.just(found),
        'required': st.lists(st.sampled_from(sorted(found)), unique=True)
        if found
        else st.just([]),
        'additionalProperties': st.just(False),
      }
    )
  )


SCHEMAS = st.recursive(
  LEAVES,
  lambda inner: st.one_of(
    _objects(inner),
    st.fixed_dictionaries(
      {
        'type': st.just('array'),
        'items': inner,
        'minItems': st.integers(0, 1),
        'maxItems': st.integers(1, 3),
      }
    ),
    st.lists(inner, min_size=1, max_size=2).map(lambda x: {'anyOf': x}),
  ),
  max_leaves=5,
)


@settings(
  max_examples=40,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**31))
def test_any_schema(opened, schema, seed):
  """What was drawn at random is JSON of the schema, by an own validator."""
  template, tokenizer, vocabulary = opened['chatml']
  grammar = server_grammar.text(server_forms.Form(schema, strict=True))
  mask = server_grammar.compile_grammar(vocabulary, grammar)()
  end = template.stops(tokenizer)[0]
  ids = walk(np.random.default_rng(seed), mask, end, most=3000)
  assert ids[-1] == end
  jsonschema.validate(json.loads(tokenizer.decode(ids[:-1])), schema)


@pytest.mark.parametrize('form', [
  {'choice': ['yes', 'no "?"', 'ö/\\']},
  {'regex': r'[a-c]{2}/[0-9]+\n(x|\\)'},
  {'json': {'enum': [1, 'a']}},
], ids=str)  # fmt: skip
def test_structured_outputs(opened, form):
  template, tokenizer, vocabulary = opened['chatml']
  parsed = server_requests.completions(
    {'model': 'm', 'prompt': 'x', 'structured_outputs': form}, ''
  ).form
  grammar = server_grammar.text(parsed)
  masks = server_grammar.compile_grammar(vocabulary, grammar)
  rng, end = np.random.default_rng(0), template.stops(tokenizer)[0]
  said = {tokenizer.decode(walk(rng, masks(), end)[:-1]) for _ in range(20)}
  if 'choice' in form:
    assert said == set(form['choice'])
  elif 'json' in form:
    assert said == {'1', '"a"'}
  else:
    assert len(said) > 5 and all(re.fullmatch(form['regex'], x) for x in said)


def test_a_mask_is_asked_again_and_refuses_what_it_did_not_allow(opened):
  template, tokenizer, vocabulary = opened['chatml']
  forced, grammar = server_grammar.forced_call(
    template, tokenizer, TOOLS, 'weather'
  )
  masks = server_grammar.compile_grammar(vocabulary, grammar)
  one, other = masks(), masks()
  ids = np.array(tokenizer.encode('{"city": "'), np.int32)
  for i in range(len(ids) + 1):
    np.testing.assert_array_equal(one(ids[:i]), one(ids[:i]))
  np.testing.assert_array_equal(one(ids), other(ids))  # all at once
  with pytest.raises(ValueError, match='not of the form'):
    masks()(np.array([65], np.int32))


# --- over HTTP ---------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def score(model, numerics, params, tokens, ids, positions, temperatures, kept):
  out = transformer.forward(params, model, numerics, tokens, ids, positions)
  return transformer.token_logprob(
    params, model, numerics, out.hidden, tokens, temperatures, kept=kept
  )[0][0]


def trained_logprobs(engine, segment):
  """The trainer's, of a segment, over what its tokens were drawn among."""
  size, length = len(segment.tokens), 512
  offsets = segment.kept_offsets
  kept = np.full((1, length, 272), -1, np.int32)
  for t, ids in enumerate(np.split(segment.kept_ids, offsets[1:-1])):
    kept[0, t, : len(ids)] = ids
  arrays = np.zeros((3, 1, length), np.int32)
  arrays[:, 0, :size] = segment.tokens, np.ones(size), np.arange(size)
  temperatures = np.ones((1, length), np.float32)
  temperatures[0, :size] = segment.temperatures
  of = engine._model, engine._numerics, engine._params
  return np.asarray(score(*of, *arrays, temperatures, kept))[:size]


def test_the_real_client_forces_a_call(serve, engine):
  """Random weights call a tool as its schema wants it; what they drew is
  recorded so that the trainer finds the same bits."""
  about = dict(
    model='m',
    messages=ASK,
    tools=[tool('weather', BRIEF)],
    seed=3,
    temperature=1,
  )
  assert engine._numerics.mode == 'bitwise'
  table = server_sessions.Table((2, 2))
  with serve(
    engine, 'chatml', vocab_size=272, max_context=640, table=table
  ) as (running):
    create = running.client.chat.completions.create
    for i, choice in enumerate(
      ['required', {'type': 'function', 'function': {'name': 'weather'}}]
    ):
      answer = create(**about, tool_choice=choice, max_tokens=None)
      (call,) = answer.choices[0].message.tool_calls
      assert call.function.name == 'weather', i
      jsonschema.validate(json.loads(call.function.arguments), BRIEF)
      assert answer.choices[0].finish_reason == 'tool_calls'
      session = table.get(answer.session_id)
      (segment,) = table.segments(session)
      assert segment.auditable[segment.sampled].all()
      np.testing.assert_array_equal(
        trained_logprobs(engine, segment)[segment.sampled],
        segment.logprobs[segment.sampled],
      )
    calls = {}
    for chunk in create(**about, tool_choice='required', stream=True):
      for piece in chunk.choices[0].delta.tool_calls or ():
        calls[piece.index] = calls.get(piece.index, '') + (
          piece.function.arguments
        )
    jsonschema.validate(json.loads(calls[0]), BRIEF)
    answer = create(
      model='m',
      messages=ASK,
      seed=4,
      logprobs=True,
      top_logprobs=20,
      response_format={
        'type': 'json_schema',
        'json_schema': {'name': 'x', 'schema': BRIEF, 'strict': True},
      },
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), BRIEF)
    forced = [x for x in answer.choices[0].logprobs.content if x.logprob == 0]
    assert forced and all(len(x.top_logprobs) == 1 for x in forced)
    text = running.client.completions.create(
      model='m', prompt='JSON:', seed=5, max_tokens=100, logprobs=3,
      extra_body={'response_format': {'type': 'json_schema', 'json_schema':
        {'name': 'x', 'schema': BRIEF}}},
    ).choices[0]  # fmt: skip
    jsonschema.validate(json.loads(text.text), BRIEF)
    assert all(len(x) <= 4 for x in text.logprobs.top_logprobs)
    answer = create(
      model='m', messages=ASK, response_format={'type': 'json_object'},
      max_tokens=1,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == 'length'
    assert answer.choices[0].message.content.strip()[:1] in ('', '{')


def test_what_was_drawn_among_too_many_is_context(serve, engine):
  """Recorded, its session goes on, and nothing is trained on it."""
  table = server_sessions.Table((2, 2))
  with serve(
    engine, 'chatml', vocab_size=272, max_context=640, table=table, max_kept=64
  ) as running:
    create = running.client.chat.completions.create
    answer = create(
      model='m', messages=ASK, tools=[tool('weather', BRIEF)], tool_choice='required', seed=3,
      extra_body={'return_tokens': True},
    )  # fmt: skip
    told = answer.choices[0].tokens
    assert told['kept'] is None and running.server.metrics.unrecorded == 1
    apart = create(
      model='m', messages=ASK, tools=[tool('weather', BRIEF)], tool_choice='required', seed=3,
      extra_body={'return_tokens': True, 'record': False},
    )  # fmt: skip
    assert apart.choices[0].tokens['kept'] is None  # bounded all the same
    said = answer.choices[0].message
    call = said.tool_calls[0]
    again = create(
      model='m',
      messages=[
        *ASK,
        said.model_dump(include={'role', 'content', 'tool_calls'}),
        {'role': 'tool', 'tool_call_id': call.id, 'content': '?'},
      ],
      tools=[tool('weather', BRIEF)],
      max_tokens=5,
    )
    assert again.session_id == answer.session_id
    (segment,) = table.segments(table.get(again.session_id))
  assert int(segment.sampled.sum()) == 5
  start = len(told['prompt_ids'])
  ids = told['ids']
  assert segment.tokens[start : start + len(ids)].tolist() == ids


def test_without_the_package_it_is_refused(serve, scripted, monkeypatch):
  monkeypatch.setattr(server_grammar, 'PACKAGE', 'llguidance_is_not_here')
  with serve(scripted([65]), 'chatml') as running:
    create = running.client.chat.completions.create
    with pytest.raises(openai.APIStatusError, match='pip install') as caught:
      create(
        model='m', messages=ASK, response_format={'type': 'json_object'},
      )  # fmt: skip
    assert caught.value.status_code == 501
    assert create(model='m', messages=ASK, max_tokens=1).choices


def test_a_vocabulary_is_opened_once(serve, scripted, monkeypatch):
  """However many requests are the first that need it."""
  opened, opening = [], server_grammar.open_vocabulary

  def slowly(*args):
    opened.append(time.sleep(0.1))
    return opening(*args)

  monkeypatch.setattr(server_grammar, 'open_vocabulary', slowly)
  with serve(scripted(), 'chatml') as running:
    make = functools.partial(
      server_answers._masks,
      running.server,
      server_grammar.text(server_forms.Form(choices=('a',))),
    )
    with futures.ThreadPoolExecutor(4) as pool:
      for masks in [pool.submit(make) for _ in range(4)]:
        assert masks.result()()(np.zeros(0, np.int32)).sum() == 1
  assert len(opened) == 1


def test_strict_and_single_calls_are_bound():
  def formed(**body):
    return server_requests.chat(
      {'model': 'm', 'messages': ASK, **body}, ''
    ).formed

  tools = [tool('a'), tool('b', strict=True)]
  assert formed(tools=tools) and not formed(tools=tools[:1])
  assert formed(tools=tools[:1], parallel_tool_calls=False)
  assert not formed(parallel_tool_calls=False)
  assert not formed(tools=tools, tool_choice='none')
  assert formed(tools=tools[:1], tool_choice='required')
  assert not formed(response_format={'type': 'text'})
