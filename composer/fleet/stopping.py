"""How a process is asked to stop, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import signal
import threading

INTERRUPTED = 'interrupted'


class Stopped(Exception):
  """What was asked for was left undone, because of a request to stop."""


@dataclasses.dataclass
class Stopper:
  """Asks a part of a process, and all parts below it, to stop.

  `why` is the first reason given here or above; '' while there is none.
  """

  above: Stopper | None = None
  reason: str = ''

  def stop(self, why: str) -> None:
    self.reason = self.reason or why

  def __call__(self) -> bool:
    return bool(self.why)

  @property
  def why(self) -> str:
    return self.reason or (self.above.why if self.above else '')

  @property
  def interrupted(self) -> bool:
    return self.why == INTERRUPTED


@contextlib.contextmanager
def interruptible(stop: Stopper) -> Iterator[None]:
  """The first SIGINT or SIGTERM asks `stop`; a second leaves at once, with 130.

  Machines end with this process however it ends, for their zygotes read from a
  socket that the kernel then closes.
  """

  def handle(number, frame):
    if stop.interrupted:
      os._exit(130)
    stop.stop(INTERRUPTED)
    os.write(2, b'\nstopping after a checkpoint; once more leaves at once\n')

  if threading.current_thread() is not threading.main_thread():
    yield
    return
  signals = signal.SIGINT, signal.SIGTERM
  before = {number: signal.signal(number, handle) for number in signals}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
