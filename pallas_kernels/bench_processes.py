"""The benchmark in processes: all compile at once, then each has the device.

A kernel takes a second of Python and a second or more of compilers, and there are
hundreds; a measurement wants the device, and the host, to itself. So some
processes compile what they were given and wait. When the last of them is ready
they are let on one after another, and each ends before the next begins: what it
held of the device's memory is free again, and what broke it breaks no other.

A process answers in lines of JSON on its standard output: null when it has
compiled, rows, and numbers of shapes; anything else it prints is passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple
import warnings

from pallas_kernels import bench_rows

# Shapes that a process takes: of what compiles long, few.
TOGETHER = {
  'attention': 2,
  'grouped_matmul': 2,
  'invariance': 3,
  'moe layer': 2,
  'paged_attention': 3,
  'tune attention': 1,
  'tune grouped_matmul': 2,
  'tune matmul': 2,
  'tune token_logprob': 1,
}
COMPILING = 300.0  # seconds for all to be ready
MEASURING = 150.0  # seconds until the next row
ENDING = 10.0  # seconds for a process that closed its output to end
# Operations beside which other libraries run; to import them takes seconds.
BESIDE = (
  'attention',
  'gated matmul',
  'grouped_matmul',
  'matmul',
  'moe layer',
)
LIMITS = 'limits'  # instead of an operation
MARK = '\x1e'  # begins the lines that are answers


class Worker(NamedTuple):
  """A process and what it is to measure."""

  operation: str
  numbers: tuple[int, ...]
  process: subprocess.Popen
  lines: queue.Queue  # of its output; None at the end
  errors: Any  # file of its standard error


def rows(
  wanted: Sequence[tuple[str, int]], limits: bool, seed: int
) -> Iterator[Any]:
  """Measures shapes of operations; see `bench._here` for what comes.

  Args:
    wanted: operations and numbers of their shapes.
    limits: whether to measure the ceilings first.
    seed: of the data.
  """
  with contextlib.ExitStack() as stack:
    workers = [
      _start(stack, *part, seed)
      for part in ([(LIMITS, (0,))] if limits else []) + parts(wanted)
    ]
    until = time.monotonic() + COMPILING
    broken = {}
    for worker in workers:
      try:
        if (answer := _next(worker, until - time.monotonic())) is not None:
          broken[worker] = f'it answered {answer!r} instead of being ready'
      except _Ended as error:
        broken[worker] = str(error)
    for worker in workers:
      yield from _measured(worker, broken.get(worker))
      _stop(worker)


def parts(wanted: Sequence[tuple[str, int]]) -> list[tuple[str, tuple]]:
  """Operations with the numbers of shapes that one process takes."""
  found: list[tuple[str, tuple]] = []
  for name, number in wanted:
    most = TOGETHER.get(name, len(wanted))
    if found and found[-1][0] == name and len(found[-1][1]) < most:
      found[-1] = name, (*found[-1][1], number)
    else:
      found.append((name, (number,)))
  return found


class _Ended(Exception):
  """A process that answers no more, and why."""


def _start(
  stack: contextlib.ExitStack,
  operation: str,
  numbers: tuple[int, ...],
  seed: int,
) -> Worker:
  errors = stack.enter_context(tempfile.TemporaryFile('w+', errors='replace'))
  command = [sys.executable, '-m', 'pallas_kernels.bench_processes', operation]
  process = subprocess.Popen(
    command + [str(number) for number in (seed, *numbers)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=errors,
    text=True,
  )
  worker = Worker(operation, numbers, process, queue.Queue(), errors)
  stack.callback(_stop, worker)
  threading.Thread(target=_read, args=(worker,), daemon=True).start()
  return worker


def _read(worker: Worker) -> None:
  with contextlib.suppress(ValueError):  # it was stopped, and its pipe closed
    for line in worker.process.stdout:
      worker.lines.put(line)
  worker.lines.put(None)


def _stop(worker: Worker) -> None:
  worker.process.kill()  # it has answered, or will not
  worker.process.wait()
  for pipe in (worker.process.stdin, worker.process.stdout):
    with contextlib.suppress(OSError):
      pipe.close()


def _next(worker: Worker, seconds: float) -> Any:
  """The next answer; _Ended with the reason where there is none."""
  while True:
    try:
      line = worker.lines.get(timeout=max(seconds, 0.0))
    except queue.Empty:
      raise _Ended(
        f'nothing came: {COMPILING:.0f} s are given to compile, {MEASURING:.0f}'
        ' to a row'
      ) from None
    if line is None:
      raise _Ended(f'its process ended: {_last_words(worker)}')
    if line.startswith(MARK):
      return json.loads(line[len(MARK) :])
    print(line, end='', flush=True)


def _last_words(worker: Worker) -> str:
  worker.errors.seek(0)
  lines = [line.strip() for line in worker.errors.read().splitlines()]
  said = [line for line in lines if line][-1:] or ['it said nothing']
  try:
    code = worker.process.wait(ENDING)
  except subprocess.TimeoutExpired:  # its output is closed; it is stopped later
    code = 'unknown'
  return f'code {code}, {said[0][: bench_rows.WORDS]}'


def _measured(worker: Worker, broken: str | None) -> Iterator[Any]:
  """Its events; for each shape that it did not come to, a row that says why."""
  from pallas_kernels import bench

  left = list(worker.numbers)
  try:
    if broken is not None:
      raise _Ended(broken)
    try:
      worker.process.stdin.write('go\n')
      worker.process.stdin.flush()
    except OSError:
      raise _Ended(f'its process ended: {_last_words(worker)}') from None
    while left:
      answer = _next(worker, MEASURING)
      if isinstance(answer, list):
        left.remove(answer[1])
        yield tuple(answer)
      elif worker.operation == LIMITS:
        yield answer
        left.clear()
      else:
        yield bench_rows.Row(**answer)
  except _Ended as error:
    if worker.operation == LIMITS:
      raise RuntimeError(f'no ceilings were measured: {error}') from None
    for number in left:
      yield bench.failure(worker.operation, number, str(error))
      yield worker.operation, number


# --- The other side ----------------------------------------------------------


def _say(answer: Any) -> None:
  print(MARK + json.dumps(answer), flush=True)


def main(operation: str, seed: str, *numbers: str) -> None:
  """Compiles, says so, waits for a line, and measures."""
  from pallas_kernels import bench
  from pallas_kernels import bench_others

  def warned(message, *_):  # standard error is read only where one ends
    print(f'{operation}: {message}', flush=True)

  warnings.showwarning = warned
  if operation == LIMITS:
    _say(None)
    sys.stdin.readline()
    _say(bench_rows.ceilings())
    return
  found = {
    int(number): bench.rows_of(operation, int(number)) for number in numbers
  }
  first = {number: next(rows, None) for number, rows in found.items()}
  if operation in BESIDE:
    bench_rows.torch()
    bench_others.tokamax()
  _say(None)
  if not sys.stdin.readline():
    return  # nobody waits any more
  with bench_rows.seeded(int(seed)):
    for number in list(found):
      if first[number] is not None:  # it could not begin
        _say(dataclasses.asdict(first[number]))
      for row in found.pop(number):
        _say(dataclasses.asdict(row))
      _say([operation, number])


if __name__ == '__main__':
  main(*sys.argv[1:])
