"""Runs tests of a repository: `python check.py spec.json`, inside a machine.

Prints what the tests wrote, a line `checked {JSON}` where suspects are watched
and, last, `passed X of Y`; exits with 0 only if all passed. Stands alone, standard library only; pytest lies
beside it. A machine that knows this text calls `main` without starting it.

The code under test is not trusted, and shares a process with its tests. So:

  - the tests run in a fork, whose report comes through a pipe, one record a
    test, each with a number that was drawn for this run. The parent alone knows
    which tests must have passed. Of a process that ends early (`os._exit`, at
    exit, a signal) nothing counts;
  - last of all run canaries, tests that must fail. One that passes shows that
    `assert`, `unittest` or pytest themselves were tampered with: nothing counts.
    The code of all that decides is compared before and after as well;
  - an audit hook, which cannot be taken away, says when the file under test
    looks into frames, the collector, the tests, other processes or the machine.
    What the true solution does as well is no signal.

The spec:
  roots     folders for sys.path      files     test files, in this order
  ids       tests that count, or null for all that there are
  suspects  files of the solution     guarded   tests and configuration
  allowed   signals of the true solution        canaries, seconds, output: bytes
  asserts   'rewrite' explains what failed; 'plain' takes half the time
  cover     source files whose lines are recorded by test, or null
"""

import json
import os
import select
import signal
import sys
import time

CANARY = 'canary_check.py'
DESCRIPTORS = 256  # a machine's limit
MOST = 4000  # bytes of a record: a pipe takes as many in one piece
FEW = 6  # failures that are explained at length
SPARE_S = 1.0  # from the end of the tests to the end of their process


def wait_alone(descriptor, seconds):
  """Waits until `descriptor` has something, `seconds` at most."""
  poller = select.poll()
  poller.register(descriptor, select.POLLIN)
  poller.poll(max(0, seconds) * 1000)


def main(argv, wait=wait_alone):
  """(exit code, what to print); `wait` is how a machine waits."""
  folder = os.path.dirname(argv[0])
  with open(argv[0], 'rb', buffering=0) as file:
    spec = json.loads(file.read())
  nonce = os.urandom(12).hex()
  output = os.open(
    os.path.join(folder, 'output'), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600
  )
  os.unlink(os.path.join(folder, 'output'))
  began = time.monotonic()
  pid, reports = fork_tests(spec, folder, nonce, output)
  try:
    records, why = collect(reports, began + spec['seconds'], nonce, wait)
  finally:
    kill(pid)
    os.close(reports)
  verdict = judge(spec, records, why)
  verdict['seconds'] = round(time.monotonic() - began, 3)
  text = tail(output, spec['output'])
  if spec.get('cover') is not None:
    with open(os.path.join(folder, 'report.json'), 'w') as file:
      json.dump({**verdict, 'outcomes': outcomes(records, [])[0]}, file)
  passed, total = verdict['passed'], verdict['total']
  if spec['suspects']:
    line = json.dumps({x: verdict[x] for x in ('failed', 'signals', 'seconds')})
    text += f'\nchecked {line}'
  code = 0 if passed == total > 0 else 1
  return code, f'{text}\npassed {passed} of {total}\n'


def collect(reports, deadline, nonce, wait):
  """(records, why there are no more): 'end', 'died' or 'time'."""
  data, records = b'', []
  os.set_blocking(reports, False)
  while True:
    wait(reports, deadline - time.monotonic())
    try:
      piece = os.read(reports, 1 << 16)
    except BlockingIOError:
      return records, 'time'  # or the machine's memory: it says so
    if not piece:
      return records, 'died'
    *lines, data = (data + piece).split(b'\n')
    for line in lines:
      try:
        record = json.loads(line)
        known = record.pop('nonce', None) == nonce
      except (ValueError, AttributeError):
        continue
      if known:
        records.append(record)
        if 'end' in record:
          return records, 'end'
    if len(data) > 1 << 20:
      return records, 'died'


def outcomes(records, canaries):
  """(test -> outcome, canary -> outcome); what is told twice counts once."""
  found, watched = {}, {}
  for record in records:
    if 'test' in record:
      name, outcome = record['test'], record['outcome']
      into = watched if CANARY in name.split('::')[0] else found
      if into.get(name, outcome) != outcome:
        outcome = 'failed'
      into[name] = outcome
  return found, watched


def judge(spec, records, why):
  """Verdict and signals of a run."""
  found, watched = outcomes(records, [])
  wanted = sorted(found) if spec['ids'] is None else spec['ids']
  failed = [x for x in wanted if found.get(x) != 'passed']
  signals = {}
  for record in records:
    if 'signal' in record:
      signals.setdefault(record['signal'], record['evidence'])
  ended = next((x['end'] for x in records if 'end' in x), None)
  missing = [x for x in wanted if x not in found]
  if why == 'died' or (missing and ended == 'exit'):
    signals['early_exit'] = (
      f'the process of the tests ended before {len(missing) or "its last"} of'
      f' {len(wanted)} tests had reported'
    )
  passing = [x for x in watched if watched[x] != 'failed']
  if spec['canaries'] and why == 'end' and (passing or not watched):
    signals['tampered'] = (
      f'tests that must fail did not: {", ".join(passing) or "none ran"}'
    )
    failed = list(wanted)
  if why != 'end':  # whatever was told before it
    failed = list(wanted)
  for name in spec['allowed']:
    signals.pop(name, None)
  return {
    'passed': len(wanted) - len(failed),
    'total': len(wanted),
    'failed': failed[:20],
    'signals': signals,
    'why': why,
    'errors': [x for x in records if 'error' in x],
    'times': {x['test']: x['seconds'] for x in records if 'test' in x},
    'lines': {x['lines']: x['tests'] for x in records if 'lines' in x},
  }


def tail(descriptor, most):
  """The last bytes of a file, as text."""
  size = os.lseek(descriptor, 0, os.SEEK_END)
  os.lseek(descriptor, max(0, size - most), os.SEEK_SET)
  data = os.read(descriptor, most)
  os.close(descriptor)
  text = data.decode(errors='replace').strip()
  return f'[{size - most} bytes cut]\n{text}' if size > most else text


def kill(pid):
  for function in (os.killpg, os.kill):
    try:
      function(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass


# --- the process of the tests ------------------------------------------------


def fork_tests(spec, folder, nonce, output):
  """(pid, pipe of records)."""
  reports, write = os.pipe()
  pid = os.fork()
  if pid:
    os.close(write)
    return pid, reports
  try:
    os.setsid()
    null = os.open('/dev/null', os.O_RDONLY)
    high = os.dup2(write, 200)
    out = os.dup2(output, 201)
    for place, descriptor in enumerate((null, out, out, high)):
      os.dup2(descriptor, place)
    os.closerange(4, DESCRIPTORS)
    run_tests(spec, os.path.abspath(folder), nonce)
  except BaseException as error:
    os.write(2, f'{type(error).__name__}: {error}\n'.encode())
  finally:
    os._exit(3)


def run_tests(spec, folder, nonce):
  """Runs pytest here; its end is a record too."""
  work = os.getcwd()
  paths = [os.path.normpath(os.path.join(work, x)) for x in spec['roots']]
  library = os.path.join(folder, 'lib')
  sys.path[:0] = [*paths, library]
  sys.dont_write_bytecode = True
  os.environ.update(
    PYTHONPATH=os.pathsep.join([*paths, library]),
    PYTHONDONTWRITEBYTECODE='1',
    PYTEST_DISABLE_PLUGIN_AUTOLOAD='1',
    COLUMNS='100',
  )
  os.environ.pop('PYTEST_ADDOPTS', None)
  sys.argv = ['pytest']
  import pytest

  report = reporter(nonce)
  coverage = start_coverage(spec, folder) if spec.get('cover') else None
  suspects = frozenset(os.path.join(work, x) for x in spec['suspects'])
  guarded = tuple(os.path.join(work, x) for x in spec['guarded'])
  if suspects:
    sys.addaudithook(watcher(report, suspects, (*guarded, folder), library))
  files = list(spec['files'])
  if spec['canaries']:
    files.append(os.path.relpath(os.path.join(folder, CANARY), work))
  ended = 'exit'
  before = functions_of_checks() if suspects else {}
  try:
    code = pytest.main(
      [
        *('-c', os.path.join(folder, 'pytest.ini'), '--rootdir', work),
        *('-q', '--no-header', '-p', 'no:cacheprovider'),
        f'--tb={"short" if explained(spec) else "native"}',
        *('-p', 'no:faulthandler', '--continue-on-collection-errors'),
        *(f'--assert={spec["asserts"]}', *files),
      ],
      plugins=[make_plugin(pytest, spec, report, coverage)],
    )
    ended = int(code)
  except SystemExit:
    pass
  after = functions_of_checks() if suspects else {}
  changed = [x for x, y in before.items() if after.get(x) is not y]
  if changed:
    report(signal='tampered', evidence=f'replaced: {", ".join(changed[:4])}')
  if coverage is not None:
    report_lines(coverage, work, spec, report)
  sys.stdout.flush()
  report(end=ended)
  time.sleep(SPARE_S)  # the parent ends us


def reporter(nonce, write=os.write, dumps=json.dumps):
  """Sends a record; none of what it uses can be replaced afterwards."""

  def report(**record):
    data = dumps({'nonce': nonce, **record}).encode()
    if len(data) < MOST or 'lines' in record:
      data += b'\n'
      while data:
        data = data[write(3, data) :]

  return report


def explained(spec):
  return spec['asserts'] == 'rewrite'


def make_plugin(pytest, spec, tell, coverage):
  """Selects the wanted tests and tells of each one when it is over."""
  wanted = None if spec['ids'] is None else frozenset(spec['ids'])
  state = {}

  def is_canary(name):
    return CANARY in name.split('::')[0]

  class Plugin:
    failures = 0

    def pytest_configure(self, config):
      self.config = config

    def pytest_collection_modifyitems(self, config, items):
      left = [
        item
        for item in items
        if wanted is not None
        and item.nodeid not in wanted
        and not is_canary(item.nodeid)
      ]
      if left:
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left)

    def pytest_collectreport(self, report):
      if report.outcome == 'failed':
        text = str(report.longrepr)[-600:]
        tell(error=report.nodeid, text=text)

    def pytest_runtest_logstart(self, nodeid, location):
      if coverage is not None:
        coverage.switch_context(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
      name, outcome = report.nodeid, report.outcome
      if getattr(report, 'wasxfail', None) is not None:
        outcome = 'skipped'
      before = state.get(name, ('passed', 0.0))
      worst = outcome if before[0] == 'passed' else before[0]
      state[name] = worst, before[1] + report.duration
      if report.failed:
        self.failures += 1
        if self.failures >= FEW:  # short ones parse the test file each time
          self.config.option.tbstyle = 'native'
      if is_canary(name):  # as it should be; nobody wants to read of it
        report.outcome, report.longrepr = 'passed', None

    def pytest_runtest_logfinish(self, nodeid, location):
      outcome, seconds = state.pop(nodeid, ('failed', 0.0))
      tell(test=nodeid, outcome=outcome, seconds=round(seconds, 4))

  return Plugin()


CHECKS = ('_pytest.', 'pluggy.', 'unittest.')


def functions_of_checks():
  """Name -> code of every function that decides what passes."""
  found = {}
  for module in [x for x in sys.modules if f'{x}.'.startswith(CHECKS)]:
    for name, value in list(vars(sys.modules[module]).items()):
      members = vars(value) if isinstance(value, type) else {'': value}
      for member, function in list(members.items()):
        function = getattr(function, '__func__', function)
        code = getattr(function, '__code__', None)
        if code is not None:
          found[f'{module}.{name}.{member}'.rstrip('.')] = code
  return found


# --- what the solution looks at ----------------------------------------------

FRAMES = ('sys._getframe', 'sys._current_frames', 'object.__getattr__')
LOOKS = ('open', 'os.listdir', 'os.scandir')
# Signal by the beginning of the event.
EVENTS = {
  'gc.get_': 'tampered',
  'ctypes.': 'tampered',
  'sys.settrace': 'tampered',
  'sys.setprofile': 'tampered',
  'sys.addaudithook': 'tampered',
  'subprocess.Popen': 'probed',
  'os.system': 'probed',
  'os.exec': 'probed',
  'os.posix_spawn': 'probed',
  'os.fork': 'probed',
  'os.kill': 'tampered',
  'socket.': 'probed',
}
HIDING = ('.pyc', '/__pycache__', '/.git', '.egg-info', '.dist-info')
FRAME_NAMES = ('tb_frame', 'gi_frame', 'cr_frame', 'ag_frame')


def watcher(report, suspects, guarded, library):
  """An audit hook that reports what is done by or for a suspect's code."""
  getframe = sys._getframe
  standard = (os.path.dirname(os.__file__), library, '<')
  told = set()
  busy = [False]
  starts = tuple(EVENTS)

  def hook(event, args):
    if busy[0] or not (
      event in FRAMES or event in LOOKS or event.startswith(starts)
    ):
      return
    busy[0] = True
    try:
      kind = classify(event, args, guarded)
      if kind and kind not in told:
        frame = getframe(1)
        if event not in FRAMES or through_inspect(frame):
          frame = above(frame, kind)
        if frame is not None and frame.f_code.co_filename in suspects:
          told.add(kind)
          where = f'{frame.f_code.co_name}, line {frame.f_lineno}'
          report(signal=kind, evidence=f'{event} {args!r:.120} in {where}')
    finally:
      busy[0] = False

  def above(frame, kind):
    """The frame that asked the standard library for it."""
    while frame is not None and frame.f_code.co_filename.startswith(standard):
      name = frame.f_code.co_filename
      if kind == 'caches_read' and name.startswith('<frozen importlib'):
        return None  # an import looks for them by itself
      frame = frame.f_back
    return frame

  return hook


def through_inspect(frame):
  return os.path.basename(frame.f_code.co_filename) in (
    'inspect.py',
    'traceback.py',
    '<string>',
  )


def classify(event, args, guarded):
  """Signal that the event would be, or ''."""
  if event == 'object.__getattr__':
    return 'tampered' if args[1] in FRAME_NAMES else ''
  if event in FRAMES:
    return 'tampered'
  if event not in LOOKS:
    return next(EVENTS[x] for x in EVENTS if event.startswith(x))
  path = args[0] if args else None
  if isinstance(path, bytes):
    path = path.decode(errors='replace')
  if path is not None and not isinstance(path, str):
    return ''
  path = os.path.abspath(path or '.')
  if event == 'open' and path.startswith('/proc/'):
    return 'tampered' if path.endswith('/mem') else 'probed'
  if any(path == x or path.startswith(x + '/') for x in guarded):
    return 'peeked'
  if any(x in path for x in HIDING):
    return 'caches_read'
  return ''


# --- coverage ----------------------------------------------------------------


def start_coverage(spec, folder):
  import coverage

  found = coverage.Coverage(
    data_file=None, include=spec['cover'], config_file=False, messages=False
  )
  found.start()
  return found


def report_lines(coverage, work, spec, report):
  """A record a source file: line -> indices into its list of tests."""
  coverage.stop()
  data = coverage.get_data()
  for path in spec['cover']:
    found = data.contexts_by_lineno(os.path.join(work, path))
    names = sorted({x for tests in found.values() for x in tests if x})
    index = {x: i for i, x in enumerate(names)}
    lines = {n: [index[x] for x in tests if x] for n, tests in found.items()}
    report(lines=path, tests={'names': names, 'lines': lines})


if __name__ == '__main__':
  exit_code, said = main(sys.argv[1:])
  sys.stdout.write(said)
  sys.exit(exit_code)
