"""Runs of `tiny.py` in processes of their own, and an auditor of their books."""

from collections.abc import Iterator, Sequence
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIMIT_S = 240


class Runs:
  """Starts runs; what is left of them dies with the test."""

  def __init__(self, directory: Path, cache: Path):
    self.directory = directory
    self._cache = cache
    self._started: list[subprocess.Popen] = []
    self._logs: dict[int, Path] = {}

  def start(
    self,
    *arguments: str,
    die: tuple[str, int] = ('never', 0),
    devices: int = 1,
    experiment: Path = HERE / 'tiny.py',
    prefix: Sequence[str] = (),
    command: str = 'run',
    env: dict[str, str] | None = None,
  ) -> subprocess.Popen:
    """`composer run tiny.py ARGUMENTS`, in a session of its own."""
    environment = {
      **os.environ,
      'PYTHONPATH': str(ROOT),
      'PYTHONWARNINGS': 'ignore',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      # What one life compiled the next ones read: most of their time.
      'JAX_COMPILATION_CACHE_DIR': str(self._cache),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
      **(env or {}),
    }
    log = self.directory / f'log-{len(self._started)}'
    with log.open('w') as file:
      process = subprocess.Popen(
        [
          *prefix,
          sys.executable,
          str(HERE / 'child.py'),
          die[0],
          str(die[1]),
          command,
          str(experiment),
          *arguments,
        ],
        env=environment,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    self._started.append(process)
    self._logs[process.pid] = log
    return process

  def log(self, process: subprocess.Popen) -> str:
    return self._logs[process.pid].read_text()

  def end(self, process: subprocess.Popen, code: int | None = 0) -> str:
    """Waits for the end; checks the exit code, returns what was printed."""
    got = process.wait(LIMIT_S)
    text = self.log(process)
    assert code is None or got == code, f'exit code {got}, not {code}:\n{text}'
    return text

  def run(self, *arguments: str, code: int | None = 0, **named: Any) -> str:
    return self.end(self.start(*arguments, **named), code)

  def until(self, process: subprocess.Popen, text: str) -> None:
    """Waits until the process has printed `text`."""
    deadline = time.monotonic() + LIMIT_S
    while text not in self.log(process):
      assert process.poll() is None, self.log(process)
      assert time.monotonic() < deadline, self.log(process)
      time.sleep(0.02)

  def close(self) -> None:
    for process in self._started:
      if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope='session')
def compiled(tmp_path_factory) -> Path:
  return tmp_path_factory.mktemp('compiled')


@pytest.fixture
def runs(tmp_path, compiled) -> Iterator[Runs]:
  made = Runs(tmp_path, compiled)
  yield made
  made.close()


@pytest.fixture
def audit():
  return audit_books


def lines(path: Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def audit_books(workdir: Path) -> dict[str, Any]:
  """Checks a finished run's books from its files alone; returns the ledger.

  Produced is what the leases say, consumed the checkpoint, and queued what lies
  on the exchange.
  """
  exchange = workdir / 'exchange'
  leases = [json.loads(p.read_bytes()) for p in (exchange / 'leases').iterdir()]
  committed = {x['group_id']: x for x in leases if x['state'] == 'committed'}
  assert len({x['draw'] for x in committed.values()}) == len(committed)
  by_life: dict[str, list[int]] = {}
  for lease in committed.values():
    by_life.setdefault(lease['incarnation'], []).append(lease['produced_index'])
  for indices in by_life.values():
    assert sorted(indices) == list(range(1, len(indices) + 1))

  newest = max(
    (workdir / 'checkpoints' / 'rl').iterdir(), key=lambda p: float(p.name)
  )
  extras = json.loads((newest / 'extras' / 'metadata').read_text())['extras']
  ledger = extras['ledger']
  verdicts = [ledger['trained'], *ledger['dropped'].values()]
  consumed = [group_id for ids in verdicts for group_id in ids]
  assert len(set(consumed)) == len(consumed)
  there = {
    group_id
    for group_id, lease in committed.items()
    if (exchange / lease['path'] / 'manifest').exists()
  }
  assert not there & set(consumed), 'a consumed group was not deleted'
  assert set(committed) == there | set(consumed)

  config = json.loads((workdir / 'config.json').read_text())
  first, steps = config['midtrain']['steps'], config['rl']['steps']
  metrics = lines(workdir / 'metrics.jsonl')
  middle = [x['step'] for x in metrics if 'midtrain/loss' in x]
  assert middle == list(range(1, first + 1))
  trained = [x for x in metrics if 'groups/trained' in x]
  assert [x['step'] for x in trained] == list(
    range(first + 1, first + steps + 1)
  )
  assert trained[-1]['groups/trained'] == len(ledger['trained'])
  evaluated = [
    (x['step'], name) for x in metrics for name in x if name[:5] == 'eval/'
  ]
  assert len(set(evaluated)) == len(evaluated)

  published = [
    x['version'] for x in lines(workdir / 'versions.jsonl') if 'kind' in x
  ]
  assert published == sorted(set(published)), 'a version was used twice'
  head = json.loads((exchange / 'HEAD').read_bytes())['forms']['bf16']
  assert head['version'] >= published[-1]

  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['notes'][0].startswith('The books agree')
  rows = [(row['set'], row['who']) for row in summary['rows']]
  assert len(set(rows)) == len(rows)
  assert (workdir / 'report.html').exists() and (workdir / 'done').exists()
  return {**ledger, 'rows': rows}
