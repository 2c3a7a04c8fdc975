"""Readers in processes of their own beside a live publisher, over a bad line.

python tests/weights/soak.py --versions 5000 --readers 4 --exchange file:///...

Every read of a reader may come late, fail, or bring bytes that are not what was
written; now and then a reader is killed and starts again from what it kept.
Each compares every version that it activates with what was published (a
function of the version), bit for bit, and ends at the newest. The publisher
collects as a trainer does, and says how many objects there ever were.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

from composer.weights import pipeline
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep

FORM = 'bf16'
DONE = 'done'
QUIET_S = 120.0


def weights(version: int) -> dict[str, np.ndarray]:
  """Published as `version`: a few words move from one to the next."""
  words = np.arange(20_000, dtype=np.uint32)
  moved = (words * 2654435761 >> np.uint32(7)) % np.uint32(400)
  base = (words // 11 + (version + moved) // 400 * 3).astype(np.uint16)
  bias = np.full(7, version, np.float32)
  return {'layers/w': base.view(ml_dtypes.bfloat16), 'layers/bias': bias}


def same(got: dict[str, np.ndarray], version: int) -> bool:
  want = weights(version)
  return sorted(got) == sorted(want) and all(
    got[name].tobytes() == value.tobytes() for name, value in want.items()
  )


class BadLine:
  """In place of `store.await_result`: late, failing, or with a bit flipped."""

  def __init__(self, seed: int, loss: float, late_s: float):
    self.rng = np.random.default_rng(seed)
    self.loss, self.late_s = loss, late_s
    self.plain = store.await_result
    self.lost = self.bent = 0

  def __call__(self, future, key, doing, wait_s=store.WAIT_S):
    result = self.plain(future, key, doing, wait_s)
    if doing == 'writing':
      return result
    time.sleep(self.rng.exponential(self.late_s))
    draw = self.rng.random()
    if draw < self.loss:
      self.lost += 1
      raise TimeoutError(f'{key} was lost on the way')
    value = getattr(result, 'value', b'')
    if draw < 1.5 * self.loss and value and isinstance(value, bytes):
      self.bent += 1
      bent = bytearray(value)
      bent[self.rng.integers(len(bent))] ^= 1 << self.rng.integers(8)
      return _Bent(result, bytes(bent))
    return result


class _Bent:
  def __init__(self, result, value):
    self.state, self.stamp, self.value = result.state, result.stamp, value


def read(arguments) -> None:
  """One reader: until the newest version of a publisher that has ended."""
  line = BadLine(arguments.seed, arguments.loss, arguments.late)
  kv = store.open_exchange(arguments.exchange, writable=False)
  store.await_result = line
  reader = sync.Subscriber(
    kv,
    FORM,
    reader=('soak', str(arguments.seed)),
    directory=arguments.directory,
  )
  seen, failed, heard, rss = 0, 0, time.monotonic(), []
  while True:
    try:
      ended = store.read(kv, DONE)[0]
      got = reader.poll()
      if got is not None:
        assert same(got[1], got[0]), f'version {got[0]} is not what was sent'
        seen, heard = seen + 1, time.monotonic()
        if seen % 50 == 0:
          reader.save()
        rss.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
      elif ended and reader.version == int(ended):
        break
    except (OSError, ValueError):  # BrokenWeights is one: all is tried again
      failed += 1
    assert time.monotonic() - heard < QUIET_S, reader.problems
  grown = rss[-1] - rss[len(rss) // 3] if len(rss) > 60 else 0
  print(
    json.dumps(
      {
        'seed': arguments.seed,
        'version': reader.version,
        'activated': seen,
        'failed polls': failed,
        'lost': line.lost,
        'bent': line.bent,
        'grown MB': grown / 1024,
      }
    )
  )


def start(arguments, seed: int, directory: str) -> subprocess.Popen:
  command = [sys.executable, __file__, '--exchange', arguments.exchange]
  command += ['--seed', str(seed), '--directory', directory]
  command += ['--loss', str(arguments.loss), '--late', str(arguments.late)]
  path = os.pathsep.join(p for p in sys.path if p)
  return subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path},
  )


def publish(arguments) -> dict:
  """The publisher, and the readers beside it; what came of it."""
  kv = store.open_exchange(arguments.exchange)
  watch = upkeep.Watch(timeout_s=2.0)
  sizes: list[int] = []

  def after(form: str, stats: sync.PublishStats) -> None:
    if stats.kind == 'base':
      upkeep.collect(kv, form, watch, keep=3)
      sizes.append(len(store.keys(kv, 'weights/')))

  publisher = sync.Publisher(kv, FORM, 25)
  line = pipeline.Pipeline({FORM: publisher}, after=after)
  started = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    places = [f'{folder}/{seed}' for seed in range(arguments.readers)]
    readers = [start(arguments, n, place) for n, place in enumerate(places)]
    killed = 0
    for version in range(arguments.versions):
      line.submit(version, lambda form, v=version: pipeline.Form(weights(v)))
      line.flush()
      time.sleep(arguments.pause)
      if arguments.kill and version % arguments.kill == arguments.kill - 1:
        victim = killed % arguments.readers
        os.kill(readers[victim].pid, signal.SIGKILL)
        readers[victim].communicate()
        readers[victim] = start(arguments, victim, places[victim])
        killed += 1
    last = line.finished()[-1].stats.version
    store.write(kv, DONE, str(last).encode())
    told = [reader.communicate(timeout=QUIET_S)[0] for reader in readers]
  line.close()
  half = len(sizes) // 2
  return {
    'versions': arguments.versions,
    'seconds': time.monotonic() - started,
    'killed': killed,
    'most objects, first half and second': [
      max(sizes[:half]),
      max(sizes[half:]),
    ],
    'codes': [reader.returncode for reader in readers],
    'readers': [json.loads(text) for text in told if text],
  }


def parse(arguments=None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--exchange', default='')
  parser.add_argument('--versions', type=int, default=5000)
  parser.add_argument('--readers', type=int, default=4)
  parser.add_argument('--loss', type=float, default=0.02)
  parser.add_argument('--late', type=float, default=0.002, help='mean, seconds')
  parser.add_argument('--pause', type=float, default=0.0, help='a version')
  parser.add_argument('--kill', type=int, default=400, help='versions apart')
  parser.add_argument(
    '--seed', type=int, help='of a reader; the others publish'
  )
  parser.add_argument('--directory')
  return parser.parse_args(arguments)


def main() -> None:
  arguments = parse()
  if arguments.seed is not None:
    read(arguments)
    return
  with tempfile.TemporaryDirectory() as folder:
    if not arguments.exchange:
      arguments.exchange = f'file://{pathlib.Path(folder)}/exchange'
    print(json.dumps(publish(arguments), indent=1))


if __name__ == '__main__':
  main()
