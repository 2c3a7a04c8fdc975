"""Chat completions and completions: from a body to an answer, whole or streamed.

1. read the body (`server_requests`), find what was sampled before in the
   conversation (`server_sessions`), render the context;
2. ask the engine for n answers, reading the tokens as they come;
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

from composer.inference import sequence
from composer.inference import server_requests
from composer.inference import server_shapes
from composer.inference import server_text
from composer.inference.server_requests import ApiError
from composer.inference.server_requests import Wanted
from composer.inference.server_sessions import Session
from composer.inference.server_shapes import Choice
from composer.inference.server_state import LOG
from composer.inference.server_state import Server
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
class Prompt:
  """A context to go on from, and how the answer reads.

  `conversation` is the digest of a chat's messages, b'' of a completion's.
  """

  context: np.ndarray  # int32 [P]
  turn: server_text.Turn
  conversation: bytes = b''


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
  parsed = server_requests.chat(
    server_requests.load(body), request.headers.get(SESSION_HEADER, '')
  )
  _check_model(server, parsed.model)
  messages, conversation = server.table.with_tokens(
    parsed.messages, parsed.wanted.session
  )
  render = _render_chat
  if len(body) > LARGE:
    prompt = await asyncio.to_thread(
      render, server, parsed, messages, conversation
    )
  else:
    prompt = render(server, parsed, messages, conversation)
  return await _answer(server, request, 'chat', (prompt,), parsed.wanted)


def _render_chat(
  server: Server,
  parsed: server_requests.Chat,
  messages: Sequence[Message],
  conversation: bytes,
) -> Prompt:
  template, tokenizer = server.template, server.tokenizer
  tools = () if parsed.calls == 'none' else parsed.tools
  forced: tuple[int, ...] = ()
  try:
    if parsed.calls not in ('none', 'auto'):
      forced = server_text.forced_call(
        template, tokenizer, parsed.calls if parsed.named else None
      )
    ids = template.render(tokenizer, messages, tools)
  except ValueError as error:
    raise ApiError(str(error), param='messages') from error
  context = [*ids, *template.open_turn(tokenizer), *forced]
  return Prompt(
    np.array(context, np.int32),
    server_text.Turn(
      template, tokenizer, forced, bool(tools), parsed.wanted.stop
    ),
    conversation,
  )


async def completions(server: Server, request: web.Request, body: bytes):
  """POST /v1/completions."""
  parsed = server_requests.completions(
    server_requests.load(body), request.headers.get(SESSION_HEADER, '')
  )
  _check_model(server, parsed.model)
  turn = server_text.Turn(
    server.template, server.tokenizer, stop=parsed.wanted.stop, chat=False
  )
  prompts = []
  for prompt in parsed.prompts:
    ids = server.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    _check_ids(server, ids, 'prompt')
    if not len(ids):
      raise server_requests.invalid('a prompt is empty', 'prompt')
    prompts.append(Prompt(np.array(ids, np.int32), turn))
  return await _answer(server, request, 'text', tuple(prompts), parsed.wanted)


def _check_model(server: Server, model: str) -> None:
  if model != server.config.model:
    raise ApiError(
      f'there is no model {model[:80]!r}; this server has'
      f' {server.config.model!r}',
      status=404,
      param='model',
      code='model_not_found',
    )


def _check_ids(server: Server, ids: Sequence[int], param: str) -> None:
  if len(ids) and not 0 <= min(ids) <= max(ids) < server.vocab_size:
    bad = min(ids) if min(ids) < 0 else max(ids)
    raise server_requests.invalid(
      f'token id {bad} must lie in 0..{server.vocab_size - 1}', param
    )


# --- sampling ----------------------------------------------------------------


def sample_requests(
  server: Server, prompt: Prompt, wanted: Wanted, seed: int
) -> list[SampleRequest]:
  """n requests to the engine, the seeds counting up from `seed`."""
  room = server.max_context - len(prompt.context)
  limit = wanted.max_tokens
  if limit is None:
    limit = max(min(server.config.max_tokens, room), 1)
  if limit > room:
    raise ApiError(
      f"this model's context is {server.max_context} tokens; the prompt has"
      f' {len(prompt.context)}, and {limit} are to be sampled. Shorten either',
      param='messages' if prompt.conversation else 'prompt',
      code='context_length_exceeded',
    )
  stops = wanted.stop_tokens
  if stops is None:
    stops = tuple(server.template.stops(server.tokenizer))
  else:
    _check_ids(server, stops, 'stop_token_ids')
  for run in wanted.stop_sequences:
    _check_ids(server, run, 'stop_token_ids')
  return [
    SampleRequest(
      tokens=prompt.context,
      max_tokens=limit,
      stop_tokens=stops,
      temperature=wanted.temperature,
      seed=(seed + i) & 0xFFFFFFFF,
      top_p=wanted.top_p,
      top_k=wanted.top_k,
      min_p=wanted.min_p,
      stop_sequences=wanted.stop_sequences,
    )
    for i in range(wanted.n)
  ]


async def sample(
  server: Server,
  request: SampleRequest,
  reader: server_text.Reader,
  on_piece: Callable[[Piece, server_text.Delta], None] | None = None,
) -> Completion:
  """Samples one answer, read by `reader` as it comes.

  A stop string may end within a token, and be spelt by any tokens, so the
  engine cannot know it. Once the reader has found one, the engine is told to
  stop, and the answer is made of the pieces: their routes are then unknown.

  Args:
    on_piece: called with new tokens and the text that they made certain.
  """
  if on_piece is None and not reader.turn.stop:
    completion = await server.engine.sample(request)
    reader.feed(completion.tokens)
    return completion
  pieces: list[Piece] = []
  stopped = asyncio.get_running_loop().create_future()

  def take(piece: Piece) -> None:
    if reader.stopped:
      return
    pieces.append(piece)
    before = reader.count
    delta = reader.feed(piece.tokens)
    if on_piece is not None:
      on_piece(_part(piece, reader.count - before), delta)
    if reader.stopped and not stopped.done():
      stopped.set_result(None)

  task = asyncio.ensure_future(
    server.engine.sample(dataclasses.replace(request, on_tokens=take))
  )
  try:
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      return _of_pieces(server, request, pieces, reader.count)
    completion = task.result()
  finally:
    task.cancel()
  seen = sum(len(piece.tokens) for piece in pieces)
  if seen < len(completion.tokens):  # an engine that gives no pieces
    take(_piece(completion, seen))
  return _cut(completion, reader.count) if reader.stopped else completion


def _part(piece: Piece, count: int) -> Piece:
  return Piece(
    piece.tokens[:count], piece.logprobs[:count], piece.versions[:count]
  )


def _piece(completion: Completion, start: int) -> Piece:
  return Piece(
    completion.tokens[start:],
    completion.logprobs[start:],
    completion.versions[start:],
  )


def _cut(completion: Completion, count: int) -> Completion:
  """The answer up to its `count`-th token."""
  end = len(completion.experts) - len(completion.tokens) + count
  offsets = completion.kept_offsets
  return dataclasses.replace(
    completion,
    tokens=completion.tokens[:count],
    logprobs=completion.logprobs[:count],
    versions=completion.versions[:count],
    experts=completion.experts[:end],
    computed_versions=completion.computed_versions[:end],
    stop_reason='stop',
    kept_ids=None if offsets is None else completion.kept_ids[: offsets[count]],
    kept_offsets=None if offsets is None else offsets[: count + 1],
  )


def _of_pieces(
  server: Server, request: SampleRequest, pieces: Sequence[Piece], count: int
) -> Completion:
  """An answer that was stopped here; what was not told of it is unknown."""
  total = len(request.tokens) + count
  shape = server.table.shape
  kept = [ids for x in pieces for ids in x.kept or ()][:count]
  return Completion(
    tokens=np.concatenate([x.tokens for x in pieces])[:count],
    logprobs=np.concatenate([x.logprobs for x in pieces])[:count],
    versions=np.concatenate([x.versions for x in pieces])[:count],
    experts=np.full((total, *shape), -1, np.int16),
    computed_versions=np.full(total, -1, np.int32),
    stop_reason='stop',
    **(sequence.ragged(kept) if kept else {}),
  )


def _choice(
  index: int,
  prompt: Prompt,
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
  )


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
    try:
      session = server.table.record(
        name,
        prompt.context,
        [x.completion for x in own],
        wanted.temperature,
        named=bool(wanted.session),
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
    for one in sample_requests(server, prompt, wanted, seed + i * wanted.n)
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
  response = None
  if wanted.stream:
    response = web.StreamResponse(headers={**_EVENTS, **_headers(job)})
  try:
    async with asyncio.timeout(server.config.request_s):
      if response is None:
        response, choices = await _whole(server, request, job, asked)
      else:
        choices = await _stream(server, request, response, job, asked, began)
  except (TimeoutError, EngineError, ValueError) as error:
    failed = _as_api_error(server, error)
    if response is None or not response.prepared:
      raise failed from error
    LOG.warning('%s: %s after the answer had begun', request.path, failed)
    await _send_last(request, response, failed.body())
    return response
  metrics = server.metrics
  metrics.prompt_tokens += sum(len(x.context) for x in prompts)
  metrics.sampled_tokens += sum(len(x.completion.tokens) for x in choices)
  metrics.whole.add(time.monotonic() - began)
  return response


def _as_api_error(server: Server, error: Exception) -> ApiError:
  if isinstance(error, TimeoutError):
    return ApiError(
      f'no answer within {server.config.request_s:g} s; ask for fewer tokens',
      status=504,
      kind='server_error',
      code='timeout',
    )
  if isinstance(error, EngineError):
    return ApiError(str(error), status=503, kind='server_error')
  return ApiError(str(error))  # the engine refused the request


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


async def _whole(server: Server, request: web.Request, job: Job, asked):
  async def one(index: int, prompt: Prompt, wanted: SampleRequest) -> Choice:
    reader = server_text.Reader(prompt.turn)
    completion = await sample(server, wanted, reader)
    reader.finish()
    return _choice(index, prompt, completion, reader)

  choices = await _all(
    [one(i, prompt, x) for i, (prompt, x) in enumerate(asked)]
  )
  chatting, wanted = job.kind == 'chat', job.wanted
  shape = server_shapes.chat_choice if chatting else server_shapes.text_choice

  def worded() -> str:
    told = [
      shape(server.tokenizer, x, wanted.logprobs, wanted.tokens, wanted.experts)
      for x in choices
    ]
    word = 'chat.completion' if chatting else 'text_completion'
    usage = _usage(job, choices)
    body = {**_outer(server, job, word), 'choices': told, 'usage': usage}
    return json.dumps(body, ensure_ascii=False)

  # Routes may be a hundred megabytes: no other answer waits for them.
  text = await asyncio.to_thread(worded) if wanted.experts else worded()
  response = web.Response(
    text=text, content_type='application/json', headers=_headers(job)
  )
  with _recorded(server, job, choices):
    await response.prepare(request)
    await response.write_eof()
  return response, choices


def _usage(job: Job, choices: Sequence[Choice]) -> dict[str, int]:
  prompts = sum(len(x.context) for x in job.prompts)
  return server_shapes.usage(prompts, choices)


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
    if request.transport is not None:
      request.transport.abort()
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
  events: asyncio.Queue[tuple[int, dict[str, Any]] | None] = asyncio.Queue()
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

  try:
    while (event := await events.get()) is not None:
      await begin()
      await _send(response, server_shapes.chunk(outer, *event))
    choices = await sampling
  finally:
    sampling.cancel()
  with _recorded(server, job, choices):
    await begin()  # an answer without text has had no event
    for choice in choices:
      for inner in _endings(job, choice):
        await _send(response, server_shapes.chunk(outer, choice.index, inner))
    if job.wanted.usage:
      usage = {'choices': [], 'usage': _usage(job, choices)}
      await _send(response, {**outer, **usage})
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
  """Samples one answer; puts (index, what a chunk tells) for every piece."""
  reader = server_text.Reader(prompt.turn)

  def told(delta: server_text.Delta, piece: Piece | None) -> None:
    logprobs = None
    if piece is not None and job.wanted.logprobs:
      logprobs = _logprobs(server, job, piece, len(reader.content))
    if not (delta.content or delta.thinking or logprobs):
      return
    inner: dict[str, Any] = {'text': delta.content}
    if job.kind == 'chat':
      inner = {'delta': _chat_delta(delta)}
    if logprobs:
      inner['logprobs'] = logprobs
    events.put_nowait((index, inner))

  completion = await sample(
    server, wanted, reader, lambda piece, delta: told(delta, piece)
  )
  sent = len(reader.thinking), len(reader.content)
  reader.finish()
  choice = _choice(index, prompt, completion, reader)
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
    return server_shapes.chat_logprobs(
      server.tokenizer, piece.tokens, piece.logprobs
    )
  return server_shapes.text_logprobs(
    server.tokenizer, piece.tokens, piece.logprobs, offset
  )


def _endings(job: Job, choice: Choice) -> list[dict[str, Any]]:
  """What the last chunks of a choice tell: its calls, and how it ended."""
  if job.kind == 'chat':
    inner = [{'delta': x} for x in server_shapes.tool_deltas(choice)]
    last: dict[str, Any] = {'delta': {}}
  else:
    inner, last = [], {'text': ''}
  last['finish_reason'] = choice.finish
  if job.wanted.tokens or job.wanted.experts:
    last['tokens'] = server_shapes.tokens_field(choice, job.wanted.experts)
  return [*inner, last]
