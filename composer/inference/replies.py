"""Hands results from the engine's thread to the event loops that wait."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from typing import Any

# A future with its result or exception, or with (callback, piece).
Reply = tuple[asyncio.Future, Any]


def deliver(replies: Sequence[Reply]) -> None:
  """Resolves futures, and tells callbacks of pieces; one wake-up a loop.

  Order is kept within a loop, so that the last piece comes before the answer.
  """
  by_loop = collections.defaultdict(list)
  for future, result in replies:
    by_loop[future.get_loop()].append((future, result))
  for loop, pairs in by_loop.items():
    try:
      loop.call_soon_threadsafe(_resolve, pairs)
    except RuntimeError:  # the loop is closed: nobody waits any more
      pass


def _resolve(replies: Sequence[Reply]) -> None:
  for future, result in replies:
    if future.done():
      continue
    if isinstance(result, BaseException):
      future.set_exception(_holdable(result))
    elif isinstance(result, tuple):
      tell, piece = result
      try:
        tell(piece)
      except Exception as error:  # the requester's own code
        future.set_exception(_holdable(error))
    else:
      future.set_result(result)


def _holdable(error: BaseException) -> BaseException:
  """The error, or one that a future takes: it refuses a StopIteration."""
  if isinstance(error, StopIteration):
    return RuntimeError(f'the code of the request raised {error!r}')
  return error
