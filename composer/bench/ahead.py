"""What a measurement will run, compiled side by side before it is.

On an accelerator compiling takes minutes, one thread a program, and measuring
seconds. So everything starts to compile at once, with arguments of the right shapes
and nothing in them, beside other work such as training: programs gain little by
each other, since jaxlib compiles the kernels of Mosaic GPU under one lock of the
process, and they are most of what an engine compiles. Who needs a program waits for
that one and gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import dataclasses
from typing import Any

THREADS = 12
LIMIT_S = 900.0  # of one program, in which it has to be compiled


@dataclasses.dataclass
class Ahead:
  """Names of what is compiled, and how far each is; close it in the end."""

  pool: futures.ThreadPoolExecutor
  say: Callable[[str], None]
  found: dict[str, futures.Future]

  def start(self, name: str, work: Callable[[], Any]) -> None:
    """`work()` compiles what has that name, and gives it."""

    def run() -> Any:
      done = work()
      self.say(f'compiled: {name}')
      return done

    self.found[name] = self.pool.submit(run)

  def wait(self, name: str) -> Any:
    """What was compiled, once; None where it was never started.

    Raises:
      TimeoutError: it takes longer than `LIMIT_S`.
    """
    if name not in self.found:
      return None
    self._until([name])
    return self.found.pop(name).result()

  def wait_all(self) -> None:
    """Until nothing is being compiled: that would take time from a measurement."""
    self._until(list(self.found))

  def _until(self, names: list[str]) -> None:
    waiting = [self.found[name] for name in names]
    late = futures.wait(waiting, LIMIT_S).not_done
    if late:
      name = next(n for n in names if self.found[n] in late)
      raise TimeoutError(f'{name} is not compiled within {LIMIT_S:.0f} s')

  def close(self) -> None:
    """Breaks off what has not begun, and closes what nobody took."""
    self.pool.shutdown(cancel_futures=True)
    for future in self.found.values():
      if future.cancelled() or future.exception() is not None:
        continue
      if hasattr(future.result(), 'close'):
        future.result().close()


def ahead(say: Callable[[str], None]) -> Ahead:
  """Nothing yet, and threads."""
  return Ahead(futures.ThreadPoolExecutor(THREADS), say, {})
