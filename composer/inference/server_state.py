"""What a server is made of: settings, and the state that its loop owns."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import threading
from typing import Any, Protocol

from composer.inference import server_metrics
from composer.inference import server_sessions
from composer.records import Completion
from composer.records import SampleRequest
from composer.templates.protocol import Template

LOG = logging.getLogger('composer.serve')


class Engine(Protocol):
  """All that a server knows of an engine."""

  @property
  def version(self) -> int: ...

  @property
  def stats(self) -> Any: ...

  @property
  def pages(self) -> Any: ...

  def check(self) -> None: ...

  async def sample(self, request: SampleRequest) -> Completion: ...


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """Settings of a server. Times in seconds.

  Attributes:
    model: the name that requests must give.
    host, port: to listen at; port 0 takes a free one.
    token: that clients must bear; may be '' on loopback only.
    max_body: bytes of a request.
    max_tokens: of an answer whose request sets no limit.
    max_requests: answers under way at once, n of a request, and feedback; more
      are told to come back (429).
    max_kept: ids that a token of an answer may have been drawn among, where they
      were not all, for them to be told and recorded. An answer with more is
      recorded as a context, for nothing could be trained on it.
    request_s: for a whole answer.
    body_s: for a client to send its request.
    drain_s: for requests under way once the server is to stop.
  """

  model: str
  host: str = '127.0.0.1'
  port: int = 8000
  token: str = ''
  max_body: int = 16 << 20
  max_tokens: int = 4096
  max_requests: int = 4096
  max_kept: int = 4096
  request_s: float = 600.0
  body_s: float = 30.0
  drain_s: float = 30.0


def validate(config: ServerConfig) -> None:
  """Refuses what must not be started.

  Raises:
    ValueError: reachable from outside without a token, a token that no header
      can carry, or a value out of range.
  """
  if not config.token and not is_loopback(config.host):
    raise ValueError(
      f'host={config.host!r} can be reached from other machines, and there is no'
      ' token: anybody could use the model. Set COMPOSER_SERVE_TOKEN to a secret'
      ' that clients give as their API key, or listen at 127.0.0.1'
    )
  if not (config.token.isascii() and config.token.isprintable()) or (
    config.token != config.token.strip()
  ):
    raise ValueError(
      'the token must be printable ASCII without space around it, so that it'
      ' fits into a header'
    )
  if not 0 <= config.port < 65536:
    raise ValueError(f'port={config.port} must lie in 0..65535')
  for name in (
    'max_body', 'max_tokens', 'max_requests', 'request_s', 'body_s',
  ):  # fmt: skip
    if not getattr(config, name) > 0:
      raise ValueError(f'{name}={getattr(config, name)} must be more than 0')
  for name in ('drain_s', 'max_kept'):
    if not getattr(config, name) >= 0:
      raise ValueError(f'{name}={getattr(config, name)} must be at least 0')


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach what listens at `host`."""
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host.strip('[]')).is_loopback
  except ValueError:
    return False


@dataclasses.dataclass
class Server:
  """One server.

  `active` are the tasks of requests that are being answered, `answers` how many
  answers those are. `draining`: no more are taken; `cut`: nor are those finished
  that are under way. `vocabulary` is the model's as grammars are kept by; None
  until the first (`server_grammar.open_vocabulary`), of which each would take
  seconds and memory: `opening` is held meanwhile, on a thread.
  """

  config: ServerConfig
  engine: Engine
  template: Template
  tokenizer: Any
  vocab_size: int
  max_context: int
  table: server_sessions.Table
  began: int  # s since 1970
  metrics: server_metrics.Metrics = dataclasses.field(
    default_factory=server_metrics.Metrics
  )
  active: set[asyncio.Task] = dataclasses.field(default_factory=set)
  answers: int = 0
  vocabulary: Any = None
  opening: threading.Lock = dataclasses.field(default_factory=threading.Lock)
  draining: bool = False
  cut: bool = False
