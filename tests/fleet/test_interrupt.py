"""Ctrl-C and SIGTERM: in order, at any moment; a second one at once."""

import json
from pathlib import Path
import signal
import time


def descendants(pid: int) -> set[int]:
  """All processes below `pid`, by /proc."""
  parents = {}
  for path in Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rpartition(')')[2].split()
    except OSError:  # gone meanwhile
      continue
    parents[int(path.parent.name)] = int(fields[1])
  found, ahead = set(), {pid}
  while ahead:
    ahead = {child for child, parent in parents.items() if parent in ahead}
    found |= ahead
  return found


def assert_gone(pids: set[int]) -> None:
  deadline = time.monotonic() + 60
  while left := [pid for pid in pids if Path(f'/proc/{pid}').exists()]:
    assert time.monotonic() < deadline, f'processes {left} are left over'
    time.sleep(0.05)


def test_a_signal_ends_a_run_in_order_and_a_second_one_at_once(runs, audit):
  workdir = runs.directory / 'run'
  # Enough of everything that a signal meets it at work.
  arguments = (
    *('--workdir', str(workdir), '--set', 'midtrain.steps=20'),
    *('--set', 'rl.steps=8', '--set', 'eval.sessions=16'),
  )
  resume: tuple[str, ...] = ()
  for text, number, stage in (
    ('mid-training 1/', signal.SIGINT, 'midtrain'),
    ('first reward', signal.SIGTERM, 'rl'),
    ('reinforcement 8/8', signal.SIGINT, 'rl'),
  ):
    process = runs.start(*arguments, *resume)
    runs.until(process, text)
    below = descendants(process.pid)
    process.send_signal(number)
    printed = runs.end(process, 130)
    assert 'stopped; go on with: composer run' in printed
    assert f'--workdir {workdir} --resume' in printed
    assert_gone(below)
    saved = list((workdir / 'checkpoints' / stage).iterdir())
    assert saved and all(path.name.isdigit() for path in saved)
    resume = ('--resume',)
  runs.run(*arguments, '--resume')
  audit(workdir)
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  steps = [x for x in map(json.loads, lines) if 'groups/trained' in x]
  # The first steps of a life may be of queued groups, before a swap.
  paused = [x['weights/pause_s'] for x in steps if 'weights/pause_s' in x]
  assert len(paused) > 3 and 0 < min(paused) and max(paused) < 10
  assert all(x['rollout/compiled'] >= 0 for x in steps)


def test_a_second_signal_leaves_at_once(runs):
  process = runs.start(
    *('--workdir', str(runs.directory / 'run'), '--set', 'midtrain.steps=0'),
    *('--set', 'rl.steps=500'),
  )
  runs.until(process, 'first reward')
  below = descendants(process.pid)
  assert below, 'machines'
  process.send_signal(signal.SIGINT)
  runs.until(process, 'once more leaves at once')
  process.send_signal(signal.SIGINT)
  started = time.monotonic()
  runs.end(process, 130)
  assert time.monotonic() - started < 15  # in order it may take a minute
  assert_gone(below)
