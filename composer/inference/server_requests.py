"""Bodies of HTTP requests to requests that can be served, or to OpenAI's errors.

Everything that a client can get wrong is found here, before an engine is asked.
A field that would change the answer and is not served is refused by its name;
nothing is ignored in silence but what cannot change an answer
(`server_fields.NEUTRAL`).
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import re
from typing import Any

from composer.chat import Call
from composer.config import GREEDY
from composer.inference import server_fields
from composer.inference import server_forms
from composer.inference.server_values import ApiError
from composer.inference.server_values import flag
from composer.inference.server_values import invalid
from composer.inference.server_values import number
from composer.inference.server_values import whole
from composer.records import TOP_LOGPROBS
from composer.templates.protocol import Message

CHOICES = 128  # prompts times n, of one request
STOPS = 16  # stop strings
MESSAGES = 8192
DIGITS = 1000  # of a number
SESSION = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:-]{0,127}')  # a folder's name


@dataclasses.dataclass(frozen=True)
class Wanted:
  """How to sample and what to tell of it; of chats and completions alike.

  Attributes:
    n: answers to each prompt.
    max_tokens: None: what the server allows.
    temperature, top_p, top_k, min_p: as in `records.SampleRequest`.
    seed: None: the server draws one.
    stop: strings that end an answer and are not part of it.
    stop_tokens: ids that end it; None: those of the template.
    stop_sequences: runs of ids that end it.
    keep_stop: the stop string that ends an answer is part of it.
    special: whether control tokens are told by their names; None: those that end
      an answer are not.
    allowed: ids that may be drawn at all; None: any.
    banned: ids that may not.
    min_tokens: before which no stop token is drawn.
    stream, usage: in pieces; and the counts of tokens as the last.
    running: those so far with every piece.
    logprobs: of every sampled token, in OpenAI's form.
    top: likeliest tokens that are told beside each.
    by_id: they are told of as 'token_id:5' rather than by their text, of which
      two may have the same.
    ids: of prompt and answer, as other servers give them.
    tokens, experts: the project's own fields in the answer.
    session: id, or ''.
    record: whether the session is recorded.
  """

  n: int
  max_tokens: int | None
  temperature: float
  top_p: float
  top_k: int
  min_p: float
  seed: int | None
  stop: tuple[str, ...]
  stop_tokens: tuple[int, ...] | None
  stop_sequences: tuple[tuple[int, ...], ...]
  keep_stop: bool
  special: bool | None
  allowed: tuple[int, ...] | None
  banned: tuple[int, ...]
  min_tokens: int
  stream: bool
  usage: bool
  running: bool
  logprobs: bool
  top: int
  by_id: bool
  ids: bool
  tokens: bool
  experts: bool
  session: str
  record: bool


@dataclasses.dataclass(frozen=True)
class Chat:
  """A body of /v1/chat/completions.

  Attributes:
    model, messages, tools: as given.
    calls: 'none', 'auto', 'required', or the name of the tool to be called.
    named: `calls` is a name.
    bound: calls of the model's own choice must fit their tools: one is strict,
      or there shall be one call at most (`single`).
    form: of an answer in words, or None.
    wanted: see there.
  """

  model: str
  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...]
  calls: str
  named: bool
  bound: bool
  single: bool
  form: server_forms.Form | None
  wanted: Wanted

  @property
  def formed(self) -> bool:
    """Whether a grammar must be kept."""
    return self.form is not None or self.bound or self.forced

  @property
  def forced(self) -> bool:
    """Whether the answer must be a call."""
    return self.calls not in ('none', 'auto')


@dataclasses.dataclass(frozen=True)
class Completions:
  """A body of /v1/completions; a prompt is a text or token ids, `form` as of
  `Chat`."""

  model: str
  prompts: tuple[str | tuple[int, ...], ...]
  form: server_forms.Form | None
  wanted: Wanted


_SHARED = (
  'model',
  'n',
  'max_tokens',
  'temperature',
  'top_p',
  'top_k',
  'min_p',
  'seed',
  'stop',
  'stop_token_ids',
  'min_tokens',
  'ignore_eos',
  'allowed_token_ids',
  'logit_bias',
  'include_stop_str_in_output',
  'skip_special_tokens',
  'stream',
  'stream_options',
  'logprobs',
  'metadata',
  'parallel_tool_calls',
  'response_format',
  'structured_outputs',
  'return_token_ids',
  'return_tokens_as_token_ids',
  'return_tokens',
  'return_experts',
  'record',
)
_OF_CHAT = (
  'messages',
  'tools',
  'tool_choice',
  'top_logprobs',
  'max_completion_tokens',
)


def load(body: bytes) -> dict[str, Any]:
  """The JSON object of a body."""
  try:
    text = body.decode('utf-8')
  except UnicodeDecodeError as error:
    raise ApiError(
      f'the body is not UTF-8: {error.reason} at byte {error.start}',
      code='invalid_utf8',
    ) from None
  try:
    value = json.loads(text, parse_constant=_no_number, parse_int=_integer)
  except RecursionError:
    raise too_deep() from None
  except ValueError as error:
    raise ApiError(
      f'the body is not JSON: {str(error)[:200]}', code='invalid_json'
    ) from None
  if not isinstance(value, dict):
    raise ApiError('the body must be a JSON object', code='invalid_json')
  return {key: x for key, x in value.items() if x is not None}


def too_deep() -> ApiError:
  return ApiError(
    'the body is nested too deeply to be read', code='invalid_json'
  )


def _no_number(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def _integer(digits: str) -> int:
  if len(digits) > DIGITS:
    raise ValueError(f'a number of {len(digits)} digits; at most {DIGITS}')
  return int(digits)


def chat(body: Mapping[str, Any], session: str) -> Chat:
  """A body of /v1/chat/completions; `session` is that of the header, or ''."""
  server_fields.refuse_unknown(body, (*_SHARED, *_OF_CHAT))
  tools = server_forms.tools_of(body.get('tools', []))
  calls, named = server_forms.tool_choice(body, tools)
  limit = whole(body, 'max_completion_tokens', None, 1)
  wanted = _wanted(body, session)
  if limit is not None:
    wanted = dataclasses.replace(wanted, max_tokens=limit)
  top = whole(body, 'top_logprobs', 0, 0, TOP_LOGPROBS)
  if top and not wanted.logprobs:
    raise invalid(f'top_logprobs={top} needs logprobs=true', 'top_logprobs')
  single = not flag(body, 'parallel_tool_calls', True)
  strict = any(tool['function'].get('strict') for tool in tools)
  form = server_forms.form_of(body)
  parsed = Chat(
    model=model_of(body),
    messages=_messages(body.get('messages')),
    tools=tools,
    calls=calls,
    named=named,
    bound=calls == 'auto' and (single or strict),
    single=single,
    form=form,
    wanted=dataclasses.replace(wanted, top=top),
  )
  _check_ending(wanted, parsed.formed)
  return parsed


def completions(body: Mapping[str, Any], session: str) -> Completions:
  """A body of /v1/completions; max_tokens is 16 unless given, as there."""
  server_fields.refuse_unknown(body, (*_SHARED, 'prompt'))
  body = {'max_tokens': 16, **body}
  top = 0
  if type(body.get('logprobs')) is int:  # here it is the number of alternatives
    top = whole(body, 'logprobs', 0, 0, TOP_LOGPROBS)
    body = {**body, 'logprobs': True}
  wanted = dataclasses.replace(_wanted(body, session), top=top)
  flag(body, 'parallel_tool_calls', True)  # no tools here
  form = server_forms.form_of(body)
  _check_ending(wanted, form)
  prompts = _prompts(body.get('prompt'))
  if len(prompts) * wanted.n > CHOICES:
    raise invalid(
      f'{len(prompts)} prompts times n={wanted.n} are more than {CHOICES}', 'n'
    )
  return Completions(model_of(body), prompts, form, wanted)


def _check_ending(wanted: Wanted, formed: Any) -> None:
  """A form decides what is drawn next, and where an answer ends."""
  if not formed:
    return
  for name, given in (
    ('min_tokens', wanted.min_tokens),
    ('ignore_eos', wanted.stop_tokens == ()),
    ('allowed_token_ids', wanted.allowed is not None),
    ('logit_bias', wanted.banned),
  ):
    if given:
      raise invalid(
        f'{name}: an answer of a given form is drawn, and ends, as that says;'
        ' leave it out',
        name,
      )


def _temperature(body: Mapping[str, Any]) -> float:
  value = number(body, 'temperature', 1.0, 0.0, 100.0)
  if 0 < value < GREEDY:
    raise invalid(
      f'temperature={value} must be at least {GREEDY:g}, or 0, which takes the'
      ' likeliest token',
      'temperature',
    )
  return value


def _wanted(body: Mapping[str, Any], session: str) -> Wanted:
  options = body.get('stream_options', {})
  if not isinstance(options, dict) or set(options) - {
    'include_usage',
    'include_obfuscation',
    'continuous_usage_stats',
  }:
    raise invalid(
      'stream_options takes include_usage and continuous_usage_stats only',
      'stream_options',
    )
  flag(options, 'include_obfuscation')  # there is none
  stop_tokens, stop_sequences = _stop_ids(body.get('stop_token_ids'))
  if flag(body, 'ignore_eos') and stop_tokens is None:
    stop_tokens = ()
  allowed, banned = _drawable(body)
  return Wanted(
    n=whole(body, 'n', 1, 1, CHOICES),
    max_tokens=whole(body, 'max_tokens', None, 1),
    temperature=_temperature(body),
    top_p=number(body, 'top_p', 1.0, 0.0, 1.0, above=True),
    top_k=max(whole(body, 'top_k', 0, -1), 0),  # -1 is all, as elsewhere
    min_p=number(body, 'min_p', 0.0, 0.0, 1.0),
    seed=whole(body, 'seed', None, -(2**63), 2**64),
    stop=_stop(body.get('stop', [])),
    stop_tokens=stop_tokens,
    stop_sequences=stop_sequences,
    keep_stop=flag(body, 'include_stop_str_in_output'),
    special=_special(body),
    allowed=allowed,
    banned=banned,
    min_tokens=whole(body, 'min_tokens', 0, 0),
    stream=flag(body, 'stream'),
    usage=flag(options, 'include_usage'),
    running=flag(options, 'continuous_usage_stats'),
    logprobs=flag(body, 'logprobs'),
    top=0,
    by_id=flag(body, 'return_tokens_as_token_ids'),
    ids=flag(body, 'return_token_ids'),
    tokens=flag(body, 'return_tokens'),
    experts=flag(body, 'return_experts'),
    session=_session(body, session),
    record=flag(body, 'record', True),
  )


def _session(body: Mapping[str, Any], header: str) -> str:
  metadata = body.get('metadata', {})
  if not isinstance(metadata, dict):
    raise invalid('metadata must be an object', 'metadata')
  given = metadata.get('session_id')
  found = header or ('' if given is None else given)
  if found != '' and not (isinstance(found, str) and SESSION.fullmatch(found)):
    raise invalid(
      'a session id is 1 to 128 letters, digits and ._:-, a letter or digit'
      ' first',
      'metadata.session_id',
    )
  return found


def model_of(body: Mapping[str, Any]) -> str:
  model = body.get('model')
  if not isinstance(model, str) or not model:
    raise invalid(
      'model must be the name of a model (see /v1/models)',
      'model',
      'missing_required_parameter',
    )
  return model


# --- values ------------------------------------------------------------------


def _stop(value: Any) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else value
  if not (
    isinstance(stops, list)
    and len(stops) <= STOPS
    and all(isinstance(x, str) and 0 < len(x) <= 256 for x in stops)
  ):
    raise invalid(
      f'stop must be a text, or at most {STOPS} texts, of 1 to 256 characters',
      'stop',
    )
  return tuple(stops)


def _special(body: Mapping[str, Any]) -> bool | None:
  if 'skip_special_tokens' not in body:
    return None
  return not flag(body, 'skip_special_tokens')


def _drawable(
  body: Mapping[str, Any],
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
  """(ids that may be drawn or None, ids that may not be).

  Of OpenAI's biases, two say what is left of a distribution: -100 bans a token,
  and 100 bans all that have no such bias. Those between would draw from one that
  the model does not have.
  """
  allowed = body.get('allowed_token_ids')
  if allowed is not None and not token_ids(allowed, 'allowed_token_ids'):
    raise invalid(
      'allowed_token_ids is empty; name one, or leave it out',
      'allowed_token_ids',
    )
  biases = body.get('logit_bias', {})
  if not isinstance(biases, dict) or not all(
    key.isascii() and key.isdecimal() and len(key) < 10 for key in biases
  ):
    raise invalid(
      'logit_bias must be an object of token ids, such as {"5": -100}',
      'logit_bias',
      'invalid_type',
    )
  for key, bias in biases.items():
    if type(bias) not in (int, float) or bias not in (-100, 0, 100):
      raise invalid(
        f'logit_bias of {key} is {json.dumps(bias)[:80]}; -100, which bans a'
        ' token, and 100, which bans all others, are served',
        'logit_bias',
        'unsupported_value',
      )
  only = [int(key) for key, bias in biases.items() if bias == 100]
  if only and allowed is not None:
    raise invalid('give allowed_token_ids or a logit_bias of 100', 'logit_bias')
  banned = tuple(int(key) for key, bias in biases.items() if bias == -100)
  return tuple(only or allowed) if only or allowed else None, banned


def _stop_ids(value: Any):
  """(ids, runs of ids) of a list in which both may stand; None is (None, ())."""
  if value is None:
    return None, ()
  if not isinstance(value, list):
    raise invalid(
      'stop_token_ids must be a list of token ids, or of lists of them',
      'stop_token_ids',
      'invalid_type',
    )
  runs = tuple(
    token_ids(x, 'stop_token_ids') for x in value if isinstance(x, list) and x
  )
  ids = [x for x in value if not isinstance(x, list) or not x]
  return token_ids(ids, 'stop_token_ids'), runs


def token_ids(value: Any, name: str) -> tuple[int, ...]:
  if not (isinstance(value, list) and all(type(i) is int for i in value)):
    raise invalid(f'{name} must be a list of token ids', name, 'invalid_type')
  return tuple(value)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(value, str):
    return (value,)
  if not isinstance(value, list) or not value:
    raise invalid(
      'prompt must be a text, a list of token ids, or a list of either',
      'prompt',
      'invalid_type',
    )
  if type(value[0]) is int:
    return (token_ids(value, 'prompt'),)
  return tuple(
    x if isinstance(x, str) else token_ids(x, f'prompt[{i}]')
    for i, x in enumerate(value)
  )


# --- messages ----------------------------------------------------------------


def _messages(value: Any) -> tuple[Message, ...]:
  if not (isinstance(value, list) and 0 < len(value) <= MESSAGES):
    raise invalid(
      f'messages must be a list of 1 to {MESSAGES} messages',
      'messages',
      'invalid_type',
    )
  names: dict[str, str] = {}  # of the tools that were called, by id
  out = []
  for i, item in enumerate(value):
    message = _message(item, f'messages[{i}]', names)
    names.update({call.id: call.name for call in message.calls})
    out.append(message)
  return tuple(out)


def _message(item: Any, where: str, names: Mapping[str, str]) -> Message:
  if not isinstance(item, dict):
    raise invalid(f'{where} must be an object', where, 'invalid_type')
  item = {key: x for key, x in item.items() if x is not None}
  role = item.get('role')
  if role in ('system', 'developer'):
    return Message('system', _content(item, where))
  if role == 'user':
    return Message('user', _content(item, where))
  if role == 'assistant':
    thinking = item.get('reasoning_content', item.get('reasoning', ''))
    if not isinstance(thinking, str):
      raise invalid(
        f'{where}.reasoning_content must be a text',
        f'{where}.reasoning_content',
      )
    calls = _calls(item.get('tool_calls', []), f'{where}.tool_calls')
    content = _content(item, where) if item.get('content') else ''
    return Message('assistant', content, thinking, calls)
  if role == 'tool':
    call_id = item.get('tool_call_id')
    if not isinstance(call_id, str) or call_id not in names:
      raise invalid(
        f'{where}.tool_call_id must be the id of a call that the assistant made'
        ' before',
        f'{where}.tool_call_id',
      )
    return Message(
      'tool', _content(item, where), name=names[call_id], call_id=call_id
    )
  raise invalid(
    f'{where}.role={json.dumps(role)[:40]}; use system, developer, user,'
    ' assistant or tool',
    f'{where}.role',
  )


def _content(item: Mapping[str, Any], where: str) -> str:
  content = item.get('content')
  if isinstance(content, str):
    return content
  if isinstance(content, list):
    texts = [
      part.get('text')
      if isinstance(part, dict) and part.get('type') == 'text'
      else None
      for part in content
    ]
    if all(isinstance(x, str) for x in texts):
      return ''.join(texts)
  raise invalid(
    f'{where}.content must be a text, or a list of parts of type text',
    f'{where}.content',
    'invalid_type',
  )


def _calls(value: Any, where: str) -> tuple[Call, ...]:
  if not isinstance(value, list):
    raise invalid(f'{where} must be a list', where, 'invalid_type')
  return tuple(_call(x, f'{where}[{i}]') for i, x in enumerate(value))


def _call(item: Any, where: str) -> Call:
  try:
    name, text = item['function']['name'], item['function']['arguments']
    call_id = item['id']
    arguments = json.loads(text, parse_constant=_no_number)
  except (KeyError, TypeError, ValueError, RecursionError):
    arguments = None
  if not (
    isinstance(arguments, dict)
    and isinstance(name, str)
    and isinstance(call_id, str)
    and name
  ):
    raise invalid(
      f'{where} must be {{"id": ID, "type": "function", "function": {{"name":'
      ' NAME, "arguments": JSON OBJECT AS A TEXT}}',
      where,
    )
  return Call(name, arguments, call_id)
