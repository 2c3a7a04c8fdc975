"""Who answers as a judge: an endpoint over HTTP, or a script for tests.

Both are functions of (config, messages, attempt) that give the judge's text.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from composer.config import JudgeConfig

MOST_BYTES = 1 << 20  # of an answer
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class JudgeError(RuntimeError):
  """No verdict could be had (infrastructure, never the model's fault)."""


class Failed(RuntimeError):
  """One call failed and may be made again, after `wait_s` at the earliest."""

  def __init__(self, message: str, wait_s: float = 0.0):
    super().__init__(message)
    self.wait_s = wait_s


async def over_http(
  config: JudgeConfig, messages: list[dict[str, str]], attempt: int
) -> str:
  """Asks POST {endpoint}/chat/completions.

  Raises:
    Failed: the connection, a status that may pass, or a body that is none.
    JudgeError: a status that will not pass (no such model, no right to it), or
      `httpx2` is not installed.
  """
  try:
    import httpx2
  except ImportError as error:
    raise JudgeError(
      f'judge.endpoint={config.endpoint!r} is asked by httpx2, which is not'
      " installed; pip install 'composer[judge]'"
    ) from error
  body = {
    'model': config.model,
    'messages': messages,
    'temperature': 0.0,
    'seed': attempt,
    'max_tokens': config.max_tokens,
  }
  key = os.environ.get(config.key_env, '') if config.key_env else ''
  headers = {'Authorization': f'Bearer {key}'} if key else {}
  url = config.endpoint.rstrip('/') + '/chat/completions'
  try:
    async with (
      httpx2.AsyncClient(timeout=config.timeout_s) as client,
      client.stream('POST', url, json=body, headers=headers) as response,
    ):
      data = b''
      async for piece in response.aiter_bytes():
        data += piece
        if len(data) > MOST_BYTES:
          raise Failed(f'{url}: an answer of more than {MOST_BYTES} bytes')
      return _content(url, response.status_code, dict(response.headers), data)
  except httpx2.HTTPError as error:
    raise Failed(f'{url}: {type(error).__name__}: {error}') from error
  except httpx2.InvalidURL as error:
    raise JudgeError(f'judge.endpoint={config.endpoint!r}: {error}') from error


def _content(
  url: str, status: int, headers: dict[str, str], data: bytes
) -> str:
  """The text of an answer."""
  if status != 200:
    said = data[:300].decode(errors='replace').strip()
    if status in RETRIED:
      raise Failed(f'{url}: status {status}: {said}', _wait(headers))
    raise JudgeError(
      f'{url}: status {status}: {said}; see judge.endpoint, judge.model and the'
      ' environment variable that judge.key_env names'
    )
  try:
    choice: Any = json.loads(data)['choices'][0]
    text, reason = choice['message']['content'], choice.get('finish_reason')
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise Failed(f'{url}: the body is no chat completion') from error
  if reason == 'length':
    raise Failed(f'{url}: cut after judge.max_tokens; raise it')
  if not isinstance(text, str):
    raise Failed(f'{url}: a completion without text')
  return text


def _wait(headers: dict[str, str]) -> float:
  """Seconds that the endpoint asks to be left alone."""
  try:
    return max(0.0, float(headers.get('retry-after', 0)))
  except ValueError:
    return 0.0  # a date; the backoff does


async def scripted(
  config: JudgeConfig, messages: list[dict[str, str]], attempt: int
) -> str:
  """Takes the question for a regular expression: found in the work is yes.

  For tests and dry runs: it needs no endpoint, and always says the same.
  """
  del config, attempt
  text = messages[1]['content']
  head, _, rest = text.partition('\n')
  name, _, pattern = head.removeprefix('Criterion ').partition(': ')
  work = '\n'.join(
    line[2:] for line in rest.splitlines() if line.startswith('| ')
  )
  found = re.search(pattern, work, re.MULTILINE)
  return json.dumps(
    {
      'criterion': name,
      'evidence': found[0][:80] if found else 'nothing matches',
      'verdict': 'yes' if found else 'no',
    }
  )
