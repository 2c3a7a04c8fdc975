"""End to end: from the trainer's hand to an engine that runs the new weights.

`end_to_end` publishes versions of a model of a given size over a file store and
follows them with a subscriber in a process of its own; `on_the_step` measures
what publishing costs the trainer's step. Both print nothing and return plain
figures, for `composer bench weights`.

What a run of `end_to_end` does for each version, a share of whose words moved:

    publish       encode, upload, manifest, HEAD          (worker thread)
    fetch         download, decode, verify                 (reader, while serving)
    pause         swap of the parameters                   (reader)

and `activated_s` is from `submit` to the end of the pause, polling included.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import ml_dtypes
import numpy as np

from composer.weights import pipeline
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep

FORM = 'bf16'
TENSOR_WORDS = 32 << 20  # of one tensor of the made-up model
POLL_S = 0.005
LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True)
class EndToEnd:
  """Of one size; times are medians over the deltas, in seconds.

  Attributes:
    model_bytes: of the bfloat16 weights.
    changed: share of words that moved in every version.
    base_s, base_bytes: publishing the full base, and the reader having it.
    publish_s: from `submit` to HEAD.
    fetch_s: download, decoding and verification, beside serving.
    publish_cpu_s, fetch_cpu_s: what the cores computed for that, all together:
      what does not depend on who else uses the machine.
    pause_s, worst_pause_s: of the swap.
    activated_s, worst_activated_s: from `submit` to the new weights running.
    delta_bytes: of one version.
    versions: deltas measured.
  """

  model_bytes: int
  changed: float
  base_s: float
  base_bytes: int
  publish_s: float
  fetch_s: float
  publish_cpu_s: float
  fetch_cpu_s: float
  pause_s: float
  worst_pause_s: float
  activated_s: float
  worst_activated_s: float
  delta_bytes: int
  versions: int


def end_to_end(
  model_bytes: int = 4 << 30,
  changed: float = 0.01,
  versions: int = 5,
  directory: str | None = None,
) -> EndToEnd:
  """Measures on a file store below `directory` (default: the system's).

  Takes about five times `model_bytes` of memory over both processes, and half
  of it on the disk.
  """
  with tempfile.TemporaryDirectory(dir=directory) as folder:
    url = f'file://{pathlib.Path(folder).resolve()}/exchange'
    kv = store.open_exchange(url)
    reader = _start_reader(url)
    try:
      sent, stats = _publish_all(kv, reader, model_bytes, changed, versions)
    finally:
      reader.kill()
      reader.communicate()
  return _figures(sent, stats, model_bytes, changed)


def _publish_all(kv, reader, model_bytes, changed, versions):
  """[(version, submitted, published, told)], stats.

  `told` is what the reader said, and what publishing computed.
  """
  rng = np.random.default_rng(0)
  flat = make_weights(model_bytes, rng)
  line = pipeline.Pipeline({FORM: sync.Publisher(kv, FORM, 10**9)})
  sent, stats = [], []
  for version in range(versions + 1):
    if version:
      flat = step_weights(flat, changed, rng)
    submitted, computed = time.time(), time.process_time()
    held = flat
    line.submit(version, lambda form, held=held: pipeline.Form(held))
    line.flush(LIMIT_S)
    published, computed = time.time(), time.process_time() - computed
    stats += [item.stats for item in line.finished()]
    told = _told(reader, version) | {'publish_cpu_s': computed}
    sent.append((version, submitted, published, told))
  line.close()
  return sent, stats


def _figures(sent, stats, model_bytes, changed) -> EndToEnd:
  deltas = sent[1:]
  middle = lambda values: float(np.median(list(values)))  # noqa: E731
  return EndToEnd(
    model_bytes=stats[0].full_bytes,
    changed=changed,
    base_s=sent[0][3]['activated'] - sent[0][1],
    base_bytes=stats[0].bytes,
    publish_s=middle(p - s for _, s, p, _ in deltas),
    fetch_s=middle(t['fetch_s'] for *_, t in deltas),
    publish_cpu_s=middle(t['publish_cpu_s'] for *_, t in deltas),
    fetch_cpu_s=middle(t['fetch_cpu_s'] for *_, t in deltas),
    pause_s=middle(t['pause_s'] for *_, t in deltas),
    worst_pause_s=max(t['pause_s'] for *_, t in deltas),
    activated_s=middle(t['activated'] - s for _, s, _, t in deltas),
    worst_activated_s=max(t['activated'] - s for _, s, _, t in deltas),
    delta_bytes=int(middle(s.bytes for s in stats[1:])),
    versions=len(deltas),
  )


def make_weights(
  model_bytes: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Normal bfloat16 numbers in tensors of `TENSOR_WORDS`."""
  flat, left = {}, model_bytes // 2
  while left > 0:
    words = min(TENSOR_WORDS, left)
    x = rng.standard_normal(words, np.float32) * np.float32(0.02)
    flat[f'layers/{len(flat):03d}/w'] = x.astype(ml_dtypes.bfloat16)
    left -= words
  return flat


def step_weights(
  flat: dict[str, np.ndarray], changed: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """A copy in which a share of words moved by one unit in the last place."""
  out = {}
  for name, array in flat.items():
    words = array.view(np.uint16).copy()
    at = rng.integers(0, words.size, int(changed * words.size))
    words[at] += rng.choice(np.array([1, 0xFFFF], np.uint16), at.size)
    out[name] = words.view(ml_dtypes.bfloat16)
  return out


# --- the reader, a process of its own ----------------------------------------


def _start_reader(url: str) -> subprocess.Popen:
  path = os.pathsep.join(p for p in sys.path if p)
  return subprocess.Popen(
    [sys.executable, '-m', 'composer.bench.weights_sync', url],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path},
  )


def _told(reader: subprocess.Popen, version: int) -> dict[str, Any]:
  """What the reader says of the version that it activated."""
  assert reader.stdout is not None
  line = reader.stdout.readline()
  if not line:
    raise RuntimeError(f'the reader ended with code {reader.wait()}')
  told = json.loads(line)
  assert told['version'] == version, f'{told} instead of {version}'
  return told


def follow(url: str) -> None:
  """Activates every version and tells of it, until it is killed."""
  kv = store.open_exchange(url, writable=False)
  reader = sync.Subscriber(kv, FORM)
  running: dict[str, np.ndarray] = {}
  while True:
    started, computed = time.perf_counter(), time.process_time()
    got = reader.poll()
    if got is None:
      time.sleep(POLL_S)
      continue
    fetched, computed = time.perf_counter(), time.process_time() - computed
    # On CPU the arrays that were decoded are those that run: a swap of names.
    # Those before are let go afterwards, as a rollout does it.
    before, running = running, got[1]
    paused = time.perf_counter() - fetched
    activated = time.time()
    del before
    told = {
      'version': got[0],
      'fetch_s': fetched - started,
      'fetch_cpu_s': computed,
      'pause_s': paused,
      'activated': activated,
      'tensors': len(running),
    }
    print(json.dumps(told), flush=True)


# --- what the trainer's step pays --------------------------------------------


@dataclasses.dataclass(frozen=True)
class OnTheStep:
  """Medians in seconds. `blocked` is what handing over took of a step, in the
  trainer's own thread; `slower` also has what the worker takes of shared cores
  and memory."""

  step_s: float
  with_publishing_s: float
  submit_s: float
  publish_s: float
  blocked: float  # submit_s / step_s
  slower: float  # with_publishing_s / step_s - 1
  versions: int
  replaced: int


def on_the_step(
  step: Callable[[], Any],
  weights: Callable[[], dict[str, Any]],
  steps: int = 40,
  directory: str | None = None,
) -> OnTheStep:
  """Times `step` with and without a publication after each, in turn.

  Args:
    step: one step of a trainer, done when it returns.
    weights: what there is to publish after it; may be arrays that are still
      being computed.
  """
  with tempfile.TemporaryDirectory(dir=directory) as folder:
    kv = store.open_exchange(f'file://{folder}/exchange')
    watch = upkeep.Watch()
    publisher = sync.Publisher(kv, FORM, 25)
    line = pipeline.Pipeline(
      {FORM: publisher},
      after=lambda form, stats: (
        stats.kind == 'base' and upkeep.collect(kv, form, watch)
      ),
    )
    step()
    plain, beside, handed, done = [], [], [], []
    for version in range(steps):
      line.flush(LIMIT_S)
      plain.append(_time(step))
      handed.append(
        _time(functools.partial(_hand_over, line, version, weights))
      )
      beside.append(_time(step))
      done += line.finished()
    line.flush(LIMIT_S)
    done += line.finished()
    line.close()
    shutil.rmtree(folder, ignore_errors=True)
  middle = lambda values: float(np.median(values))  # noqa: E731
  return OnTheStep(
    step_s=middle(plain),
    with_publishing_s=middle(beside),
    submit_s=middle(handed),
    publish_s=middle([item.stats.seconds for item in done]),
    blocked=middle(handed) / middle(plain),
    slower=middle(beside) / middle(plain) - 1.0,
    versions=len(done),
    replaced=line.replaced,
  )


def _hand_over(line, version: int, weights: Callable[[], Any]) -> None:
  flat = weights()
  line.submit(version, lambda form: pipeline.Form(flat))


def _time(act: Callable[[], Any]) -> float:
  started = time.perf_counter()
  act()
  return time.perf_counter() - started


if __name__ == '__main__':
  follow(sys.argv[1])
