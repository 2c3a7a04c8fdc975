"""Runs a command: Python in a fork of this interpreter, all else by exec.

A call ends with everything that it started: when its first process has ended or
its time is over, every other process of the machine is killed and reaped before
the answer is given.
"""

import _signal as signal  # its wrapper's enums touch many pages
import atexit
import builtins
import os
import resource
import select
import sys
import time
import types

TICK_S = 0.05  # between two looks of the watchdog
CHUNK = 65536
HANGUP = getattr(select, 'POLLRDHUP', 0)
# What most small programs import. Each costs every fork some page tables.
PRELOAD = (
  'collections',
  'functools',
  'itertools',
  'json',
  'math',
  'operator',
  're',
  'select',
  'signal',
  'time',
)
_harnesses: dict = {}  # path -> (source, its `main`)


class Result:
  """What a call did; `killed` says why the machine ended it, or ''."""

  def __init__(self):
    self.stdout = bytearray()
    self.stderr = bytearray()
    self.exit_code = 0
    self.seconds = 0.0
    self.cpu_seconds = 0.0
    self.truncated = False
    self.timed_out = False
    self.killed = ''


def run(machine, argv: list, timeout_s: float) -> Result:
  """Runs `argv` in the workspace under the machine's limits."""
  main = find_harness(argv)
  if main:
    return run_harness(machine, main, argv[2:], timeout_s)
  result = Result()
  out_read, out_write = os.pipe()
  err_read, err_write = os.pipe()
  began, used = time.monotonic(), cpu_of_children()
  machine.begin_command()
  pid = os.fork()
  if pid == 0:
    become_command(machine, argv, out_write, err_write, timeout_s)
  os.close(out_write)
  os.close(err_write)
  streams = {out_read: result.stdout, err_read: result.stderr}
  status = watch(machine, pid, streams, began + timeout_s, result)
  kill_everything(machine, pid)
  machine.end_command(result)
  for stream, kept in streams.items():
    os.set_blocking(stream, False)
    while take(stream, kept, machine.output_bytes, result):
      pass
    os.close(stream)
  code = -signal.SIGKILL if status is None else status
  result.exit_code = code
  result.seconds = time.monotonic() - began
  result.cpu_seconds = cpu_of_children() - used
  return result


def cpu_of_children() -> float:
  """Of all that has ended here, theirs included: exact once all is reaped."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def watch(machine, pid: int, streams: dict, deadline: float, result: Result):
  """Collects output until the command ends; its exit code, None if killed."""
  poller = make_poller(machine)
  poller.register(machine.wake, select.POLLIN)
  for stream in streams:
    poller.register(stream, select.POLLIN)
  for descriptor in events(machine, poller, deadline, result):
    if descriptor == machine.wake:
      os.read(machine.wake, 512)
      done, status = os.waitpid(pid, os.WNOHANG)
      if done:
        return os.waitstatus_to_exitcode(status)
    else:
      kept = streams[descriptor]
      if not take(descriptor, kept, machine.output_bytes, result):
        poller.unregister(descriptor)
  return None


def make_poller(machine):
  poller = select.poll()
  poller.register(machine.sock, HANGUP)
  return poller


def events(machine, poller, deadline: float, result: Result):
  """Descriptors as they have something, until the time or a limit is over."""
  look = time.monotonic() + TICK_S
  while True:
    now = time.monotonic()
    if now >= deadline:
      result.timed_out = True
      return
    if now >= look:
      look = now + TICK_S
      result.killed = machine.pressure()
      if result.killed:
        return
    wait = min(deadline, look) - now
    for descriptor, _ in poller.poll(int(wait * 1000) + 1):
      if descriptor == machine.sock.fileno():  # the host is gone
        kill_everything(machine, 0)
        machine.close()
      yield descriptor


def take(stream: int, kept: bytearray, most: int, result: Result) -> bool:
  """Reads once, keeps the first `most` bytes; false at the end."""
  try:
    data = os.read(stream, CHUNK)
  except BlockingIOError:
    return False
  room = most - len(kept)
  if len(data) > room:
    result.truncated = True
  kept += data[: max(room, 0)]
  return bool(data)


def kill_everything(machine, pid: int) -> None:
  """Kills and reaps every process but this one; `pid` leads a group, or 0."""
  if machine.own_kill():
    return
  if machine.contained:
    while True:
      try:
        os.kill(-1, signal.SIGKILL)
      except ProcessLookupError:
        return
      reap(block=True)
  for kill, target in ((os.killpg, pid), (os.kill, pid)):
    try:
      if target:
        kill(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass
  for _ in range(100):  # what left its group, orphaned, has become ours
    if reap(block=False):
      return
    for child in _children():
      try:
        os.kill(child, signal.SIGKILL)
      except ProcessLookupError:
        pass
    time.sleep(0.001)


def reap(block: bool) -> bool:
  """Reaps children; true when none is left."""
  try:
    while os.waitpid(-1, 0 if block else os.WNOHANG)[0]:
      pass
  except ChildProcessError:
    return True
  return False


def _children() -> list:
  me = os.getpid()
  try:
    with open(f'/proc/{me}/task/{me}/children') as file:
      return [int(x) for x in file.read().split()]
  except OSError:
    return []


# --- scripts of the host's own -----------------------------------------------


def add_harness(path: str, text: str) -> None:
  """Knows a trusted script: `main(arguments, wait)` -> (exit code, stdout)."""
  scope = {'__name__': 'harness'}
  exec(compile(text, path, 'exec'), scope)
  _harnesses[path] = (text.encode(), scope['main'])


def find_harness(argv: list):
  """The `main` of a script that is, to the last byte, one of the host's."""
  if len(argv) < 2 or argv[0] != 'python' or argv[1] not in _harnesses:
    return None
  source, main = _harnesses[argv[1]]
  try:
    with open(argv[1], 'rb', buffering=0) as file:
      return main if file.read(len(source) + 1) == source else None
  except OSError:
    return None


def run_harness(machine, main, arguments: list, timeout_s: float) -> Result:
  """Calls a trusted script in process 1: what it tests is in forks of it."""
  result = Result()
  began, used = time.monotonic(), cpu_of_children()

  def wait(descriptor: int, seconds: float) -> None:
    poller = make_poller(machine)
    poller.register(descriptor, select.POLLIN)
    limit = (
      result if began + timeout_s < time.monotonic() + seconds else Result()
    )
    deadline = min(began + timeout_s, time.monotonic() + seconds)
    for _ in events(machine, poller, deadline, limit):
      break
    result.killed = limit.killed

  try:
    result.exit_code, text = main(arguments, wait)
    result.stdout += text.encode()
  except Exception as error:
    result.exit_code = 1
    result.stderr += f'{type(error).__name__}: {error}\n'.encode()
  kill_everything(machine, 0)
  result.seconds = time.monotonic() - began
  result.cpu_seconds = cpu_of_children() - used
  return result


# --- the command's own process -----------------------------------------------


def become_command(machine, argv, stdout, stderr, timeout_s) -> None:
  """Never returns."""
  code = 126
  try:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(machine.null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    machine.prepare_command()
    os.closerange(3, 256)
    seconds = int(timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    os.chdir(machine.workspace)
    if is_python(argv) and not machine.image:
      code = run_python(argv[1:])
    else:
      if argv[0] in ('python', 'python3') and not machine.image:
        argv = [sys.executable, *argv[1:]]
      signal.signal(signal.SIGPIPE, signal.SIG_DFL)
      signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
      try:
        os.execvp(argv[0], argv)
      except FileNotFoundError:
        os.write(2, f'{argv[0]}: command not found\n'.encode())
        code = 127
      except OSError as error:
        os.write(2, f'{argv[0]}: {error.strerror}\n'.encode())
  except BaseException:
    sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
  finally:
    os._exit(code)


def is_python(argv: list) -> bool:
  """Whether the warm interpreter can serve this command."""
  if argv[0] not in ('python', 'python3') or len(argv) < 2:
    return False
  if argv[1] in ('-c', '-m'):
    return len(argv) > 2
  return not argv[1].startswith('-')


def run_python(args: list) -> int:
  """`python ARGS` in this very process; the exit code."""
  code = 0
  try:
    _run_main(args)
  except SystemExit as stop:
    code = _exit_code(stop.code)
  except KeyboardInterrupt:
    code = 130
  except BaseException as error:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
      trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    code = 1
  return _finish(code)


def _run_main(args: list) -> None:
  if args[0] == '-m':
    sys.argv = args[1:]
    sys.path.insert(0, os.getcwd())
    import runpy

    runpy.run_module(args[1], run_name='__main__', alter_sys=True)
    return
  main = types.ModuleType('__main__')
  main.__builtins__ = builtins
  sys.modules['__main__'] = main
  if args[0] == '-c':
    sys.argv = ['-c', *args[2:]]
    sys.path.insert(0, '')
    code = compile(args[1], '<string>', 'exec')
  else:
    sys.argv = list(args)
    main.__file__ = args[0]
    sys.path.insert(0, os.path.dirname(os.path.realpath(args[0])))
    code = _load(args[0])
  exec(code, main.__dict__)


def _load(path: str):
  try:
    with open(path, 'rb', buffering=0) as file:
      source = file.read()
  except OSError as error:
    sys.stderr.write(
      f"python: can't open file '{path}': [Errno {error.errno}]"
      f' {error.strerror}\n'
    )
    raise SystemExit(2) from None
  return compile(source, path, 'exec')


def _exit_code(code) -> int:
  if code is None:
    return 0
  if isinstance(code, int):
    return code & 0xFF
  print(code, file=sys.stderr)
  return 1


def _finish(code: int) -> int:
  """What an interpreter does at its end, as far as a program can tell."""
  threads = sys.modules.get('threading')
  if threads is not None:
    threads._shutdown()
  atexit._run_exitfuncs()
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (AttributeError, OSError, ValueError):
      code = code or 120
  return code
