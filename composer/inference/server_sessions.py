"""The server's table of sessions: calls to segments, kept for a bounded time.

Whose call it is:

  named       The client says (header X-Session-Id, or metadata.session_id).
  unnamed     The session whose segment the context begins with. A context that
              no session has begun starts one, and so does one that repeats the
              last call of a session, unless the client says that it tries again
              (the official client does): two rollouts of one task begin alike.

A conversation arrives as text. What the assistant said is found again by the
digest of the conversation up to there, and written as the tokens that were
sampled (`answers`), so that a trajectory is what the model saw, and never a
re-tokenisation. Where a client or a template changed what was said, the context
no longer begins with a segment, and a new one begins.

One event loop owns the table; nothing here waits.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import secrets
import shutil
import time
from typing import Any

import numpy as np

from composer import wire
from composer.records import Completion
from composer.records import Segment
from composer.rollout.recorder import Recorder
from composer.templates.protocol import Message

FEEDBACK = 256  # of one session
LOG = logging.getLogger('composer.serve')


@dataclasses.dataclass(frozen=True)
class Limits:
  """What the table holds at most; the sessions used longest ago go first.

  Attributes:
    seconds: since a session was last used.
    idle: seconds since then after which what has changed of it is written, so
      that a process that is killed takes no more with it.
    sessions: of them.
    tokens: of all their segments.
    answers: tokens of answers that are found again in conversations.
    feedback: bytes of it, as JSON, of all sessions.
  """

  seconds: float = 3600.0
  idle: float = 60.0
  sessions: int = 10_000
  tokens: int = 4_000_000
  answers: int = 4_000_000
  feedback: int = 256 << 20


@dataclasses.dataclass
class Session:
  """One session; `choices` are the answers to its last call, of which the
  recorder holds one until the next call shows which was used. `trainable` says
  of each whether it can be trained on. `written`: its folder may be there."""

  id: str
  folder: str  # that it is written to: a name may come again
  named: bool
  recorder: Recorder
  began: float  # wall clock, s
  used: float  # monotonic, s
  calls: int = 0
  tokens: int = 0
  feedback: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  feedback_bytes: int = 0
  context: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )
  choices: tuple[Completion, ...] = ()
  trainable: tuple[bool, ...] = ()
  chosen: int = 0
  temperature: float = 1.0
  written: bool = False
  ends: tuple[tuple[int, bytes], ...] = ()  # keys of the prefix index


class Table:
  """All sessions.

  Args:
    shape: (MoE layers, experts a token) of the model.
    limits: of the table.
    directory: where sessions are written when they leave the table, rest
      (`write_idle`), or get feedback; None: they are not.
    clock: monotonic seconds.
  """

  def __init__(
    self,
    shape: tuple[int, int],
    limits: Limits = Limits(),
    directory: pathlib.Path | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.shape, self._limits, self._clock = shape, limits, clock
    self._directory = directory
    self._sessions: collections.OrderedDict[str, Session] = (
      collections.OrderedDict()
    )  # used longest ago first
    self._changed: collections.OrderedDict[str, None] = (
      collections.OrderedDict()
    )  # since they were written; longest ago first
    self._prefixes: dict[int, dict[bytes, str]] = {}  # length -> digest -> id
    self._answers: collections.OrderedDict[bytes, tuple[int, ...]] = (
      collections.OrderedDict()
    )
    self._writer = futures.ThreadPoolExecutor(1, 'sessions')
    self._answer_tokens = 0
    self._tokens = 0
    self._feedback = 0
    self.expired = 0

  def __len__(self) -> int:
    return len(self._sessions)

  @property
  def tokens(self) -> int:
    """Tokens of all segments."""
    return self._tokens

  @property
  def feedback_bytes(self) -> int:
    """Of all feedback, as JSON."""
    return self._feedback

  # --- conversations -----------------------------------------------------------

  def with_tokens(
    self, messages: Sequence[Message], session: str
  ) -> tuple[tuple[Message, ...], bytes]:
    """The messages, those sampled here as tokens; and the digest of them all."""
    state, out = _digest(b'', session), []
    for message in messages:
      state = _digest(state, _canonical(message))
      tokens = None
      if message.role == 'assistant':
        tokens = self._answers.get(state)
      if tokens is not None:
        self._answers.move_to_end(state)
        message = dataclasses.replace(message, tokens=tokens)
      out.append(message)
    return tuple(out), state

  def remember(
    self, conversation: bytes, message: Message, tokens: Sequence[int]
  ) -> None:
    """Keeps the tokens of an answer to a conversation (`with_tokens`)."""
    key = _digest(conversation, _canonical(message))
    self._answer_tokens -= len(self._answers.pop(key, ()))
    self._answers[key] = tuple(map(int, tokens))
    self._answer_tokens += len(tokens)
    while self._answer_tokens > self._limits.answers and self._answers:
      _, gone = self._answers.popitem(last=False)
      self._answer_tokens -= len(gone)

  # --- calls -------------------------------------------------------------------

  def locate(self, name: str, context: np.ndarray, retry: bool) -> str:
    """Id of the session that a call belongs to, or of a new one.

    Args:
      name: that the client gave, or ''.
      context: int32 [P].
      retry: the client says that it tries again.
    """
    self.expire()
    if name:
      return name
    context = np.ascontiguousarray(context, np.int32)
    digest, at, found = hashlib.blake2b(digest_size=16), 0, ''
    for length in sorted(self._prefixes):
      if length > len(context):
        break
      digest.update(context[at:length].tobytes())
      at = length
      known = self._prefixes[length].get(digest.digest(), '')
      if known:
        # The context of a call alone, without an answer behind it.
        repeated = len(self._sessions[known].context) == length
        if not repeated or (retry and length == len(context)):
          found = known
    return found or f'session-{secrets.token_hex(12)}'

  def record(
    self,
    name: str,
    context: np.ndarray,
    choices: Sequence[Completion],
    temperature: float,
    *,
    named: bool = True,
    trainable: Sequence[bool] | None = None,
  ) -> Session:
    """Records an answered call.

    Args:
      name: as `locate` gave it.
      context: int32 [P].
      choices: n answers; the first is recorded until a later call goes on with
        another.
      temperature: of the call.
      named: by the client.
      trainable: of each choice; one that is not is recorded as context. None:
        all are.

    Raises:
      BadCompletion: an answer that cannot be recorded; nothing is.
    """
    context = np.asarray(context, np.int32)
    session = self._sessions.get(name)
    if session is None:
      session = Session(
        id=name,
        folder=f'{name}@{time.time_ns() // 10**6}-{secrets.token_hex(3)}',
        named=named,
        recorder=Recorder(*self.shape),
        began=time.time(),
        used=0.0,
      )
    _settle(session, context)
    trainable = (True,) * len(choices) if trainable is None else trainable
    session.recorder.record(
      context, choices[0], temperature, trainable=trainable[0]
    )
    session.context, session.choices = context, tuple(choices)
    session.trainable = tuple(trainable)
    session.chosen, session.temperature = 0, temperature
    session.calls += 1
    self._sessions[session.id] = session
    self._touch(session)
    self._change(session)
    self._index(session)
    self._bound(session)
    return session

  def retract(self, session: Session, completion: Completion) -> None:
    """The last call's answer did not reach the client.

    Nothing is done where `completion`, the first of its choices, is no longer
    the last of the session, or the session has left the table since.
    """
    if self._sessions.get(session.id) is not session:
      return
    if not session.choices or session.choices[0] is not completion:
      return
    session.recorder.retract()
    session.choices = ()
    session.calls -= 1
    self._change(session)
    self._index(session)
    if not len(session.recorder) and not session.feedback:
      self._remove(session)
      if session.written:
        folder = self._directory / session.folder
        self._writer.submit(shutil.rmtree, folder, ignore_errors=True)

  def get(self, name: str) -> Session | None:
    """A session by its id; one that expired is not there."""
    self.expire()
    return self._sessions.get(name)

  def segments(self, session: Session) -> tuple[Segment, ...]:
    """The segments so far."""
    return session.recorder.finish('finished')

  async def add_feedback(
    self, session: Session, feedback: dict[str, Any]
  ) -> int:
    """Adds what a user said of a session; returns how many there are.

    Raises:
      ValueError: there are `FEEDBACK` already.
      OSError: it cannot be written; it is not added then.
    """
    if len(session.feedback) >= FEEDBACK:
      raise ValueError(
        f'session {session.id} has {FEEDBACK} pieces of feedback; no more are'
        ' kept'
      )
    size = len(json.dumps(feedback))
    session.feedback.append(feedback)
    self._weigh(session, size)
    self._touch(session)
    self._make_room()
    written = self._write(session)
    if written is not None:
      try:
        await asyncio.wrap_future(written)
      except OSError:
        session.feedback.remove(feedback)
        self._weigh(session, -size)
        raise
    return len(session.feedback)

  # --- bounds ------------------------------------------------------------------

  def expire(self) -> None:
    """Lets go of sessions that were not used for `Limits.seconds`."""
    before = self._clock() - self._limits.seconds
    while self._sessions:
      session = next(iter(self._sessions.values()))
      if session.used > before:
        return
      self._leave(session)

  def write_idle(self) -> None:
    """Writes what has changed of sessions that were not used for
    `Limits.idle` seconds; they stay in the table."""
    if self._directory is None:
      return
    before = self._clock() - self._limits.idle
    while self._changed:
      session = self._sessions[next(iter(self._changed))]
      if session.used > before:
        return
      self._write_and_tell(session)

  def close(self) -> None:
    """Lets go of all sessions, and waits until they are written."""
    for session in list(self._sessions.values()):
      self._leave(session)
    self._writer.shutdown()

  def _touch(self, session: Session) -> None:
    session.used = self._clock()
    self._sessions.move_to_end(session.id)

  def _change(self, session: Session) -> None:
    self._changed[session.id] = None
    self._changed.move_to_end(session.id)

  def _bound(self, newest: Session) -> None:
    count = sum(newest.recorder.lengths())
    self._tokens += count - newest.tokens
    newest.tokens = count
    self._make_room()

  def _make_room(self) -> None:
    """Lets go of the sessions used longest ago, but for the newest."""
    while len(self._sessions) > 1 and (
      len(self._sessions) > self._limits.sessions
      or self._tokens > self._limits.tokens
      or self._feedback > self._limits.feedback
    ):
      self._leave(next(iter(self._sessions.values())))

  def _weigh(self, session: Session, size: int) -> None:
    """Counts more bytes of feedback of a session, if it is in the table."""
    if self._sessions.get(session.id) is session:
      self._feedback += size
      session.feedback_bytes += size

  def _leave(self, session: Session) -> None:
    self._remove(session)
    self.expired += 1
    self._write_and_tell(session)

  def _remove(self, session: Session) -> None:
    self._unindex(session)
    self._sessions.pop(session.id, None)
    self._changed.pop(session.id, None)
    self._tokens -= session.tokens
    self._feedback -= session.feedback_bytes

  def _write_and_tell(self, session: Session) -> None:
    written = self._write(session)
    if written is not None:
      written.add_done_callback(functools.partial(_tell, session.id))

  def _write(self, session: Session) -> futures.Future | None:
    """On a thread: routes are many bytes, and answers must not wait."""
    if self._directory is None:
      return None
    session.written = True
    self._changed.pop(session.id, None)
    segments, about = self.segments(session), describe(session)
    folder = self._directory / session.folder
    return self._writer.submit(write, folder, about, segments)

  # --- the index of prefixes -----------------------------------------------------

  def _index(self, session: Session) -> None:
    """Makes an unnamed session findable by its last call, and each answer."""
    self._unindex(session)
    if session.named:
      return
    ends = [session.context]
    ends += [np.append(session.context, x.tokens) for x in session.choices]
    keys = []
    for tokens in ends:
      data = np.ascontiguousarray(tokens, np.int32).tobytes()
      key = len(tokens), hashlib.blake2b(data, digest_size=16).digest()
      self._prefixes.setdefault(key[0], {})[key[1]] = session.id
      keys.append(key)
    session.ends = tuple(keys)

  def _unindex(self, session: Session) -> None:
    for length, digest in session.ends:
      at = self._prefixes.get(length, {})
      if at.get(digest) == session.id:
        del at[digest]
        if not at:
          del self._prefixes[length]
    session.ends = ()


def _settle(session: Session, context: np.ndarray) -> None:
  """Records the answer that the next call goes on with, if it is another."""
  before = len(session.context)
  for i, choice in enumerate(session.choices):
    end = before + len(choice.tokens)
    if (
      end <= len(context)
      and np.array_equal(context[:before], session.context)
      and np.array_equal(context[before:end], choice.tokens)
    ):
      if i != session.chosen:
        session.recorder.record(
          session.context,
          choice,
          session.temperature,
          trainable=session.trainable[i],
        )
        session.chosen = i
      return


def _canonical(message: Message) -> str:
  """What tells a message of a conversation; not its thinking, which clients
  leave out."""
  calls = [[x.id, x.name, dict(x.arguments)] for x in message.calls]
  return json.dumps(
    [message.role, message.content, message.name, message.call_id, calls],
    sort_keys=True,
  )


def _digest(before: bytes, text: str) -> bytes:
  return hashlib.blake2b(
    before + text.encode('utf-8', 'surrogatepass'), digest_size=16
  ).digest()


# --- on disk -----------------------------------------------------------------


def write(
  folder: pathlib.Path, about: dict[str, Any], segments: Sequence[Segment]
) -> None:
  """FOLDER/segment-<i> and, as the last, session.json.

  A session that is written again replaces itself, one file after the other.

  Args:
    folder: of the session.
    about: of `describe`.
    segments: of the session.

  Raises:
    OSError: the disk.
  """
  folder.mkdir(parents=True, exist_ok=True)
  names = []
  for i, segment in enumerate(segments):
    names.append(f'segment-{i}')
    _replace(folder / names[-1], wire.encode_segment(segment))
  text = json.dumps({**about, 'segments': names}, indent=2)
  _replace(folder / 'session.json', text.encode())


def describe(session: Session) -> dict[str, Any]:
  """What there is to say of a session beside its segments."""
  return {
    'id': session.id,
    'began': session.began,
    'calls': session.calls,
    'feedback': list(session.feedback),
  }


def _tell(name: str, written: futures.Future) -> None:
  error = written.exception()
  if error is not None:
    LOG.error('session %s could not be written: %s', name, error)


def _replace(path: pathlib.Path, data: bytes) -> None:
  part = path.with_name(path.name + '.part')
  try:
    part.write_bytes(data)
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)
