"""Chat completions and completions: from a body to an answer, whole or streamed.

1. read the body (`server_requests`), find what was sampled before in the
   conversation (`server_sessions`), render the context, and compile the form
   that the answer must have (`server_grammar`);
2. ask the engine for n answers, reading the tokens as they come
   (`server_sampling`);
3. record the session, then send the answer: what could not be sent is taken
   back, so that a client that left leaves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
import contextlib
import dataclasses
import json
import secrets
import time
from typing import Any

from aiohttp import web
import numpy as np

from composer.inference import server_grammar
from composer.inference import server_requests
from composer.inference import server_sampling
from composer.inference import server_shapes
from composer.inference import server_text
from composer.inference.server_requests import Wanted
from composer.inference.server_sampling import Prompt
from composer.inference.server_sessions import Session
from composer.inference.server_shapes import Choice
from composer.inference.server_state import LOG
from composer.inference.server_state import Server
from composer.inference.server_values import ApiError
from composer.inference.server_values import invalid
from composer.records import Completion
from composer.records import EngineError
from composer.records import Piece
from composer.records import SampleRequest
from composer.rollout.recorder import BadCompletion
from composer.templates.protocol import Message

SESSION_HEADER = 'X-Session-Id'
RETRY_HEADER = 'x-stainless-retry-count'  # of OpenAI's clients
LARGE = 1 << 16  # bytes of a body that is rendered on a thread
LAST_S = 5.0  # for a client to read why its stream ends
_EVENTS = {'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'}


@dataclasses.dataclass(frozen=True)
class Job:
  """One request: its prompts, and under which names it is answered."""

  kind: str  # 'chat' or 'text'
  prompts: tuple[Prompt, ...]
  wanted: Wanted
  id: str
  created: int
  sessions: tuple[str, ...]  # of the prompts; '' is not recorded


async def chat(server: Server, request: web.Request, body: bytes):
  """POST /v1/chat/completions."""
  header = request.headers.get(SESSION_HEADER, '')
  large = len(body) > LARGE
  parsed = await _aside(
    large, lambda: server_requests.chat(server_requests.load(body), header)
  )
  check_model(server, parsed.model)
  messages, conversation = server.table.with_tokens(
    parsed.messages, parsed.wanted.session
  )
  prompt = await _aside(
    large or parsed.formed,
    lambda: render(server, parsed, messages, conversation),
  )
  return await _answer(server, request, 'chat', (prompt,), parsed.wanted)


async def _aside(much: bool, work: Callable[[], Any]) -> Any:
  """Does work, on a thread where it is much: no other answer waits for it."""
  return await asyncio.to_thread(work) if much else work()


def render(
  server: Server,
  parsed: server_requests.Chat,
  messages: Sequence[Message],
  conversation: bytes,
) -> Prompt:
  """The context of a chat, and how its answer reads.

  Raises:
    ApiError: the template cannot write the messages, no grammar keeps the form.
  """
  template, tokenizer = server.template, server.tokenizer
  tools = () if parsed.calls == 'none' else parsed.tools
  forced, masks = _form(server, parsed, tools)
  try:
    ids = template.render(tokenizer, messages, tools)
  except ValueError as error:
    raise ApiError(str(error), param='messages') from error
  context = [*ids, *template.open_turn(tokenizer), *forced]
  turn = server_text.Turn(
    template,
    tokenizer,
    forced,
    bool(tools),
    parsed.wanted.stop,
    keep_stop=parsed.wanted.keep_stop,
    special=parsed.wanted.special,
  )
  return Prompt(np.array(context, np.int32), turn, conversation, masks)


def _form(server: Server, parsed: server_requests.Chat, tools: Sequence[Any]):
  """(ids written for the model, masks of what it must say or None)."""
  if not parsed.formed:
    return (), None
  of, forced, form = (server.template, server.tokenizer), (), parsed.form
  param = 'tools' if parsed.forced or form is None else form.param
  with _forming(param):
    if parsed.forced:
      name = parsed.calls if parsed.named else None
      forced, grammar = server_grammar.forced_call(*of, tools, name)
    elif form is not None:
      grammar = server_grammar.answer(*of, form, tools)
    else:
      grammar = server_grammar.free_calls(*of, tools, parsed.single)
    return forced, _masks(server, grammar)


@contextlib.contextmanager
def _forming(param: str):
  """What cannot be kept is the client's error in `param`."""
  if why := server_grammar.missing():
    raise ApiError(why, status=501, kind='server_error', code='not_installed')
  try:
    yield
  except ValueError as error:
    raise invalid(str(error), param, 'invalid_schema') from error


def _masks(server: Server, grammar: server_grammar.Grammar):
  with server.opening:
    if server.vocabulary is None:
      end = server.template.stops(server.tokenizer)[0]
      server.vocabulary = server_grammar.open_vocabulary(
        server.tokenizer, server.vocab_size, end
      )
  return server_grammar.compile_grammar(server.vocabulary, grammar)


async def completions(server: Server, request: web.Request, body: bytes):
  """POST /v1/completions."""
  header = request.headers.get(SESSION_HEADER, '')

  def read() -> tuple[tuple[Prompt, ...], Wanted]:
    parsed = server_requests.completions(server_requests.load(body), header)
    check_model(server, parsed.model)
    turn = server_text.Turn(
      server.template,
      server.tokenizer,
      stop=parsed.wanted.stop,
      chat=False,
      keep_stop=parsed.wanted.keep_stop,
      special=parsed.wanted.special,
    )
    masks, form = None, parsed.form
    if form is not None:
      with _forming(form.param):
        masks = _masks(server, server_grammar.text(form))
    prompts = [_prompt(server, x, turn, masks) for x in parsed.prompts]
    return tuple(prompts), parsed.wanted

  much = len(body) > LARGE or b'"response_format"' in body
  much |= b'"structured_outputs"' in body
  prompts, wanted = await _aside(much, read)
  return await _answer(server, request, 'text', prompts, wanted)


def _prompt(
  server: Server,
  prompt: str | tuple[int, ...],
  turn: server_text.Turn,
  masks: Callable[[], server_grammar.Mask] | None,
) -> Prompt:
  ids = server.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
  server_sampling.check_ids(server, ids, 'prompt')
  if not len(ids):
    raise invalid('a prompt is empty', 'prompt')
  return Prompt(np.array(ids, np.int32), turn, masks=masks)


def check_model(server: Server, model: str) -> None:
  """Refuses the name of another model."""
  if model != server.config.model:
    raise ApiError(
      f'there is no model {model[:80]!r}; this server has'
      f' {server.config.model!r}',
      status=404,
      param='model',
      code='model_not_found',
    )


def _choice(
  index: int,
  prompt: Prompt,
  request: SampleRequest,
  completion: Completion,
  reader: server_text.Reader,
) -> Choice:
  said = server_text.said(reader, completion.tokens)
  finish = 'stop' if completion.stop_reason == 'stop' else 'length'
  if said.calls and finish == 'stop':
    finish = 'tool_calls'
  return Choice(
    index,
    prompt.context,
    completion,
    said,
    finish,
    tuple(x.id or f'call_{secrets.token_hex(12)}' for x in said.calls),
    server_sampling.trainable(request, completion),
    _ended_by(prompt, request, completion, reader),
  )


def _ended_by(
  prompt: Prompt,
  request: SampleRequest,
  completion: Completion,
  reader: server_text.Reader,
) -> str | int | None:
  """The stop string, or the stop token, but for the end of a turn."""
  if reader.stopped:
    return reader.stop
  last = int(completion.tokens[-1]) if len(completion.tokens) else -1
  usual = prompt.turn.template.stops(prompt.turn.tokenizer)
  return last if last in request.stop_tokens and last not in usual else None


# --- recording ---------------------------------------------------------------


def record(
  server: Server, job: Job, choices: Sequence[Choice]
) -> list[tuple[Session, Completion]]:
  """Records the answers to each prompt; the sessions that have a new call, and
  the answer that was recorded of it."""
  wanted, sessions = job.wanted, []
  for i, (prompt, name) in enumerate(
    zip(job.prompts, job.sessions, strict=True)
  ):
    own = choices[i * wanted.n : (i + 1) * wanted.n]
    if not name:
      continue
    lost = sum(not x.trainable for x in own)
    if lost:
      server.metrics.unrecorded += lost
      LOG.info(
        'session %s: an answer was drawn among more than max_kept=%d ids and is'
        ' recorded as context',
        name,
        server.config.max_kept,
      )
    try:
      session = server.table.record(
        name,
        prompt.context,
        [x.completion for x in own],
        wanted.temperature,
        named=bool(wanted.session),
        trainable=[x.trainable for x in own],
      )
      sessions.append((session, own[0].completion))
    except BadCompletion as error:
      LOG.error('session %s: a call was not recorded: %s', name, error)
      continue
    if prompt.conversation:
      for choice in own:
        tokens = [*prompt.turn.forced, *choice.completion.tokens.tolist()]
        server.table.remember(prompt.conversation, _message(choice), tokens)
  return sessions


def _message(choice: Choice) -> Message:
  """The answer as a client sends it again."""
  calls = tuple(
    dataclasses.replace(call, id=call_id)
    for call, call_id in zip(choice.said.calls, choice.call_ids, strict=True)
  )
  return Message('assistant', choice.said.content, calls=calls)


@contextlib.contextmanager
def _recorded(server: Server, job: Job, choices: Sequence[Choice]):
  """Records; takes it back where the answer does not reach the client."""
  sessions = record(server, job, choices)
  try:
    yield
  except (OSError, asyncio.CancelledError):
    for session, completion in reversed(sessions):
      server.table.retract(session, completion)
    raise


# --- answers -----------------------------------------------------------------


async def _answer(
  server: Server,
  request: web.Request,
  kind: str,
  prompts: tuple[Prompt, ...],
  wanted: Wanted,
) -> web.StreamResponse:
  began = time.monotonic()
  seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
  asked = [
    (prompt, one)
    for i, prompt in enumerate(prompts)
    for one in server_sampling.sample_requests(
      server, prompt, wanted, seed + i * wanted.n
    )
  ]
  retry = request.headers.get(RETRY_HEADER, '0') != '0'
  names = tuple(
    server.table.locate(wanted.session, prompt.context, retry)
    if wanted.record
    else ''
    for prompt in prompts
  )
  word = 'chatcmpl' if kind == 'chat' else 'cmpl'
  job = Job(
    kind, prompts, wanted, f'{word}-{secrets.token_hex(12)}', int(time.time()),
    names,
  )  # fmt: skip
  with _counted(server, len(asked)):
    response, choices = await _sent(server, request, job, asked, began)
  if not choices:  # its stream ended with an error
    return response
  metrics = server.metrics
  metrics.prompt_tokens += sum(len(x.context) for x in prompts)
  metrics.sampled_tokens += sum(len(x.completion.tokens) for x in choices)
  metrics.whole.add(time.monotonic() - began)
  return response


def too_many(what: str, server: Server) -> ApiError:
  """Refuses for now."""
  return ApiError(
    f'{what} are more than the {server.config.max_requests} that are under way'
    ' at once; come back in a while',
    status=429,
    kind='rate_limit_error',
    code='rate_limit_exceeded',
  )


@contextlib.contextmanager
def _counted(server: Server, answers: int):
  """Makes room for answers; raises where there is none."""
  under_way, most = server.answers, server.config.max_requests
  if under_way and under_way + answers > most:
    raise too_many(f'{under_way + answers} answers', server)
  server.answers += answers
  try:
    yield
  finally:
    server.answers -= answers


async def _sent(
  server: Server,
  request: web.Request,
  job: Job,
  asked: Sequence[tuple[Prompt, SampleRequest]],
  began: float,
) -> tuple[web.StreamResponse, Sequence[Choice]]:
  """Samples, records and sends; what fails before anything is sent is raised.

  Behind that the status is sent already: a stream ends with the error, an answer
  in one piece is broken off.
  """
  streams, choices = job.wanted.stream, []
  response = None
  if streams:
    response = web.StreamResponse(headers={**_EVENTS, **_headers(job)})
  try:
    async with asyncio.timeout(server.config.request_s):
      if streams:
        choices = await _stream(server, request, response, job, asked, began)
      else:
        choices, text = await _whole(server, job, asked)
        response = web.Response(
          text=text, content_type='application/json', headers=_headers(job)
        )
        with _recorded(server, job, choices):
          await response.prepare(request)
          await response.write_eof()
  except asyncio.CancelledError as error:
    if not server.cut:  # the client left
      raise
    go_on()
    await _end(request, response, streams, stopping(), error)
  except Exception as error:
    begun = response is not None and response.prepared
    known = isinstance(error, TimeoutError | EngineError | ValueError)
    if isinstance(error, ConnectionError) or not (begun or known):
      raise
    failed = _as_api_error(server, error)
    if begun:
      LOG.warning(
        '%s: %s after the answer had begun',
        request.path,
        failed,
        exc_info=not known,
      )
    await _end(request, response, streams, failed, error)
  return response, choices


async def _end(
  request: web.Request,
  response: web.StreamResponse | None,
  streams: bool,
  failed: ApiError,
  cause: BaseException,
) -> None:
  """Tells of what failed as the last of a stream that has begun; else raises."""
  if response is None or not response.prepared:
    raise failed from cause
  if not streams:
    _break_off(request)
    raise ConnectionResetError('it did not read its answer') from cause
  await _send_last(request, response, failed.body())


def stopping() -> ApiError:
  """No answer, or no more of it, for the server ends."""
  return ApiError(
    'the server stops; ask again once it is back',
    status=503,
    kind='server_error',
    code='server_stopping',
  )


def go_on() -> None:
  """This task was cancelled for the answer that it gave; it has one more."""
  task = asyncio.current_task()
  assert task is not None
  task.uncancel()


def _break_off(request: web.Request) -> None:
  if request.transport is not None:
    request.transport.abort()


def _as_api_error(server: Server, error: Exception) -> ApiError:
  if isinstance(error, TimeoutError):
    return ApiError(
      f'no answer within {server.config.request_s:g} s; ask for fewer tokens, or'
      ' serve with a higher --request-seconds',
      status=504,
      kind='server_error',
      code='timeout',
    )
  if isinstance(error, EngineError):
    return ApiError(str(error), status=503, kind='server_error')
  if isinstance(error, ValueError):  # the engine refused the request
    return ApiError(str(error))
  return ours(error)


def ours(error: Exception) -> ApiError:
  """Tells of an error that is no client's, and not more than that."""
  return ApiError(
    f'the server failed: {type(error).__name__}',
    status=500,
    kind='server_error',
  )


async def _all(coroutines: Sequence[Coroutine[Any, Any, Choice]]):
  """Their results; where one fails, the others are cancelled."""
  tasks = [asyncio.ensure_future(x) for x in coroutines]
  try:
    return await asyncio.gather(*tasks)
  finally:
    for task in tasks:
      task.cancel()


def _outer(server: Server, job: Job, kind: str) -> dict[str, Any]:
  session = job.sessions[0] if len(job.sessions) == 1 else ''
  return server_shapes.envelope(
    kind, job.id, job.created, server.config.model, session
  )


def _headers(job: Job) -> dict[str, str]:
  named = len(job.sessions) == 1 and job.sessions[0]
  return {SESSION_HEADER: job.sessions[0]} if named else {}


async def _whole(
  server: Server, job: Job, asked: Sequence[tuple[Prompt, SampleRequest]]
) -> tuple[list[Choice], str]:
  """(the answers, the body that tells of them)."""

  async def one(index: int, prompt: Prompt, wanted: SampleRequest) -> Choice:
    reader = server_text.Reader(prompt.turn)
    completion = await server_sampling.sample(server, wanted, reader)
    reader.finish()
    return _choice(index, prompt, wanted, completion, reader)

  choices = await _all(
    [one(i, prompt, x) for i, (prompt, x) in enumerate(asked)]
  )
  chatting, wanted = job.kind == 'chat', job.wanted
  shape = server_shapes.chat_choice if chatting else server_shapes.text_choice

  def worded() -> str:
    told = [shape(server.tokenizer, x, wanted) for x in choices]
    word = 'chat.completion' if chatting else 'text_completion'
    usage = server_shapes.usage(choices, wanted.n)
    body = {**_outer(server, job, word), 'choices': told, 'usage': usage}
    return json.dumps(body, ensure_ascii=False)

  # Routes may be a hundred megabytes.
  return choices, await _aside(wanted.experts or wanted.top > 0, worded)


# --- streams -----------------------------------------------------------------


async def _send(response: web.StreamResponse, event: Any) -> None:
  text = event if isinstance(event, str) else json.dumps(event)
  await response.write(f'data: {text}\n\n'.encode())


async def _send_last(
  request: web.Request, response: web.StreamResponse, event: Any
) -> None:
  """Sends the end of a stream, in limited time: its client may not read."""
  try:
    async with asyncio.timeout(LAST_S):
      await _send(response, event)
      await response.write_eof()
  except TimeoutError:
    _break_off(request)
    raise ConnectionResetError(
      f'it did not read the end of its stream within {LAST_S:g} s'
    ) from None


async def _stream(
  server: Server,
  request: web.Request,
  response: web.StreamResponse,
  job: Job,
  asked: Sequence[tuple[Prompt, SampleRequest]],
  began: float,
) -> list[Choice]:
  """Sends the answers in pieces as they come, and how each ended as the last.

  Nothing is sent before the first text, so that what fails until then is an
  error of HTTP.
  """
  events: asyncio.Queue[tuple[int, int, dict[str, Any]] | None] = (
    asyncio.Queue()
  )
  sampling = asyncio.ensure_future(
    _all(
      [
        _one_streamed(server, job, i, prompt, x, events)
        for i, (prompt, x) in enumerate(asked)
      ]
    )
  )
  sampling.add_done_callback(lambda _: events.put_nowait(None))
  word = 'chat.completion.chunk' if job.kind == 'chat' else 'text_completion'
  outer = _outer(server, job, word)

  async def begin() -> None:
    if response.prepared:
      return
    server.metrics.first_token.add(time.monotonic() - began)
    await response.prepare(request)
    if job.kind == 'chat':
      for i in range(len(asked)):
        opened = {'delta': {'role': 'assistant', 'content': ''}}
        await _send(response, server_shapes.chunk(outer, i, opened))

  prompts, sampled = sum(len(x.context) for x in job.prompts), 0
  try:
    while (event := await events.get()) is not None:
      await begin()
      index, count, inner = event
      sampled += count
      chunk = server_shapes.chunk(outer, index, inner)
      if job.wanted.running:
        chunk['usage'] = server_shapes.counts(prompts, sampled)
      await _send(response, chunk)
    choices = await sampling
  finally:
    sampling.cancel()
  with _recorded(server, job, choices):
    await begin()  # an answer without text has had no event
    for choice in choices:
      for inner in _endings(job, choice):
        await _send(response, server_shapes.chunk(outer, choice.index, inner))
    if job.wanted.usage:
      usage = server_shapes.usage(choices, job.wanted.n)
      await _send(response, {**outer, 'choices': [], 'usage': usage})
    await _send(response, '[DONE]')
    await response.write_eof()
  return choices


async def _one_streamed(
  server: Server,
  job: Job,
  index: int,
  prompt: Prompt,
  wanted: SampleRequest,
  events: asyncio.Queue,
) -> Choice:
  """Samples one answer; puts (index, tokens read since the last, what a chunk
  tells) for every piece that tells something."""
  reader, told_of, offset = server_text.Reader(prompt.turn), 0, 0

  def told(delta: server_text.Delta, piece: Piece | None) -> None:
    nonlocal told_of, offset
    logprobs = None
    if piece is not None and job.wanted.logprobs:
      logprobs = _logprobs(server, job, piece, offset)
      offset += server_shapes.characters(server.tokenizer, piece.tokens)
    if not (delta.content or delta.thinking or logprobs):
      return
    inner: dict[str, Any] = {'text': delta.content}
    if job.kind == 'chat':
      inner = {'delta': _chat_delta(delta)}
    if logprobs:
      inner['logprobs'] = logprobs
    events.put_nowait((index, reader.count - told_of, inner))
    told_of = reader.count

  completion = await server_sampling.sample(
    server, wanted, reader, lambda piece, delta: told(delta, piece)
  )
  sent = len(reader.thinking), len(reader.content)
  reader.finish()
  choice = _choice(index, prompt, wanted, completion, reader)
  rest = server_text.Delta(
    choice.said.thinking[sent[0] :], choice.said.content[sent[1] :]
  )
  told(rest, None)
  return choice


def _chat_delta(delta: server_text.Delta) -> dict[str, str]:
  out = {'content': delta.content} if delta.content else {}
  if delta.thinking:
    out['reasoning_content'] = delta.thinking
  return out


def _logprobs(server: Server, job: Job, piece: Piece, offset: int):
  if job.kind == 'chat':
    return server_shapes.chat_logprobs(server.tokenizer, piece, job.wanted)
  return server_shapes.text_logprobs(
    server.tokenizer, piece, job.wanted, offset
  )


def _endings(job: Job, choice: Choice) -> list[dict[str, Any]]:
  """What the last chunks of a choice tell: its calls, and how it ended."""
  if job.kind == 'chat':
    inner = [{'delta': x} for x in server_shapes.tool_deltas(choice)]
    last: dict[str, Any] = {'delta': {}}
  else:
    inner, last = [], {'text': ''}
  last['finish_reason'] = choice.finish
  return [*inner, {**last, **server_shapes.extras(choice, job.wanted)}]
