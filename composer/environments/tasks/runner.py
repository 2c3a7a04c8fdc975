"""Checks a solution against cases: `python runner.py solution.py cases.json`.

A case is [arguments, expected]; the file is a JSON list of them. The function
under test is the last callable that the solution defines. Prints `passed X of Y`
as the last line and exits with 0 only if all of them passed. Stands alone, and
imports the standard library only. A machine that knows this text calls `main`
without starting it as a program, which saves a process.

The solution is not trusted. It runs in a forked process that is given arguments
and leaves JSON; this process, which alone knows what is expected, compares. The
fork is older than the reading of the cases, and the file is away while the
solution runs, so the expected values are nowhere that it can look. It has no way
to this process's output and exit code (nor, in a machine, to its memory). What
ends it early (an exit, a crash, a case that takes too long) fails that case and
all after it. What it prints is dropped.
"""

import json
import os
import select
import signal
import sys

CASE_CPU_S = 0.1  # of a case; what loops for ever is killed by the kernel
TOTAL_S = 10.0  # wall time of all cases; a busy host is no fault of theirs
MAX_ANSWERS = 60_000  # bytes of all results; a pipe holds them
DESCRIPTORS = 256  # a machine's limit
canonical = json.JSONEncoder(sort_keys=True).encode


def wait_alone(ended, seconds):
  """Waits until `ended` closes, `seconds` at most."""
  poller = select.poll()
  poller.register(ended, select.POLLIN)
  poller.poll(seconds * 1000)


def main(argv, wait=wait_alone):
  """(exit code, what to print); `wait` is how a machine waits."""
  solution, cases_path = argv
  pid, requests, answers, ended = fork_candidate(solution)
  try:
    with open(cases_path, 'rb', buffering=0) as file:
      data = file.read()
    os.unlink(cases_path)
    try:
      cases = json.loads(data)
      send(requests, canonical([args for args, _ in cases]).encode())
      # Not for answers, which would wake us at every case: they fit the pipe.
      wait(ended, TOTAL_S)
      lines = receive(answers)
    finally:
      kill(pid)
      restore(cases_path, data)
  finally:
    kill(pid)
    for descriptor in (requests, answers, ended):
      os.close(descriptor)
  passed = sum(
    agrees(line, want) for line, (_, want) in zip(lines, cases, strict=False)
  )
  code = 0 if passed == len(cases) > 0 else 1
  return code, f'passed {passed} of {len(cases)}\n'


def agrees(line, want):
  """Whether a line is 'R' + JSON of the wanted value and of its very type.

  True is not 1 and 1 is not 1.0; a tuple is a list, as JSON has it.
  """
  wanted = canonical(want)
  if line == b'R' + wanted.encode():
    return True
  try:
    return line[:1] == b'R' and canonical(json.loads(line[1:])) == wanted
  except (ValueError, RecursionError):
    return False


def send(descriptor, data):
  """Writes a line; the candidate reads all of it before it does anything."""
  data += b'\n'
  while data:
    data = data[os.write(descriptor, data) :]


def receive(answers):
  """Lines that the candidate has left."""
  os.set_blocking(answers, False)
  try:
    return os.read(answers, MAX_ANSWERS).split(b'\n')[:-1]
  except BlockingIOError:
    return []


def kill(pid):
  for function in (os.killpg, os.kill):
    try:
      function(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass  # not yet the leader of a group, or gone


def restore(path, data):
  """Puts the case file back, whatever the candidate left in its place."""
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
  try:
    descriptor = os.open(path, flags, 0o644)
    while data:
      data = data[os.write(descriptor, data) :]
    os.close(descriptor)
  except OSError:
    pass  # the verdict stands without it


# --- the candidate's process -------------------------------------------------


def fork_candidate(solution):
  """(pid, pipe for arguments, pipe of answers, pipe that closes at the end)."""
  requests, requests_write = os.pipe()
  answers_read, answers = os.pipe()
  ended_read, ended = os.pipe()
  pid = os.fork()
  if pid:
    os.close(requests)
    os.close(answers)
    os.close(ended)
    return pid, requests_write, answers_read, ended_read
  try:
    os.setsid()
    keep(os.open('/dev/null', os.O_RDWR), requests, answers, ended)
    candidate(solution)
  finally:
    os._exit(1)


def keep(null, requests, answers, ended):
  """Leaves 0, 1, 2 on nothing, 3 requests, 4 answers, 5 ended; no more."""
  high = [os.dup2(x, 200 + i) for i, x in enumerate((requests, answers, ended))]
  for place, descriptor in enumerate((null, null, null, *high)):
    os.dup2(descriptor, place)
  os.closerange(6, DESCRIPTORS)


def candidate(path, requests=3, answers=4):
  """Answers every case with a line: 'R' and JSON, or 'E' for an exception."""
  data = b''
  while not data.endswith(b'\n'):
    piece = os.read(requests, 65536)
    if not piece:
      return
    data += piece
  inputs = json.loads(data)
  signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)  # kills, as SIGPROF does
  function = load(path)
  for args in inputs:
    signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
    try:
      line = b'R' + json.dumps(function(*args)).encode()
    except Exception:
      line = b'E'
    os.write(answers, line + b'\n')


def load(path):
  with open(path, 'rb', buffering=0) as file:
    source = file.read()
  scope = {'__name__': 'solution', '__file__': path}
  exec(compile(source, path, 'exec'), scope)
  return [x for x in scope.values() if callable(x)][-1]


if __name__ == '__main__':
  exit_code, text = main(sys.argv[1:])
  os.write(1, text.encode())
  sys.exit(exit_code)
