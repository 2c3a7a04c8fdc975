"""A run's directory: made once, locked while in use, of one experiment."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import pathlib
from typing import Any

from composer import checkpoint
from composer import config as config_lib

CONFIG = 'config.json'
DONE = 'done'  # written when the run has finished
DEMONSTRATIONS = 'demonstrations.npz'  # played for mid-training
RESULTS = 'results.json'  # what evaluations found so far; survives a kill

# A process that joins a run may differ in how it runs, not in what.
OWN = (
  'machine.',
  'engine.',
  'eval.',
  'fleet.',
  'checkpoint.',
  'weights.exch',
  'weights.cache',
)


def exchange_url(
  experiment: config_lib.Experiment, workdir: pathlib.Path
) -> str:
  """The exchange of a run; `file://<workdir>/exchange` unless configured."""
  if experiment.weights.exchange:
    return experiment.weights.exchange
  return f'file://{workdir.resolve()}/exchange'


def checkpoints(workdir: pathlib.Path, stage: str) -> str:
  """Directory of the checkpoints of a stage ('midtrain' or 'rl')."""
  return str(workdir / 'checkpoints' / stage)


def last_step(experiment: config_lib.Experiment, workdir: pathlib.Path) -> int:
  """Steps of all stages that checkpoints contain; 0 if there is none."""
  done = checkpoint.latest(checkpoints(workdir, 'rl'))
  if done is not None:
    return experiment.midtrain.steps + done
  return checkpoint.latest(checkpoints(workdir, 'midtrain')) or 0


def check(
  experiment: config_lib.Experiment, workdir: pathlib.Path, resume: bool
) -> bool:
  """Whether the directory holds this run already; writes nothing.

  Raises:
    ValueError: it holds a run and `resume` is false, it is of another
      experiment, or the run in it has finished.
  """
  if not (workdir / CONFIG).exists():
    return False
  _check_same(experiment, workdir)
  if (workdir / DONE).exists():
    raise ValueError(
      f'the run in {workdir} has finished; see {workdir}/report.html, or'
      ' choose another --workdir'
    )
  if not resume:
    raise ValueError(
      f'{workdir} holds a run already; continue it with --resume, or choose'
      ' another --workdir'
    )
  return True


def make(experiment: config_lib.Experiment, workdir: pathlib.Path) -> None:
  """Makes the directory, with the experiment in it."""
  workdir.mkdir(parents=True, exist_ok=True)
  _replace(workdir / CONFIG, config_lib.to_json(experiment))


def join(experiment: config_lib.Experiment, workdir: pathlib.Path) -> None:
  """Makes the directory for a process that joins the run in it, if any yet.

  Raises:
    ValueError: the run in it is of another experiment.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  if (workdir / CONFIG).exists():
    _check_same(experiment, workdir, OWN)


def _check_same(
  experiment: config_lib.Experiment,
  workdir: pathlib.Path,
  ignored: tuple[str, ...] = (),
) -> None:
  here = _flat(json.loads(config_lib.to_json(experiment)))
  # A field that is younger than the run has the default, which is what was done.
  there = _flat(json.loads(config_lib.to_json(config_lib.Experiment(''))))
  there.update(_flat(json.loads((workdir / CONFIG).read_text())))
  fields = [
    f'{name}: {there.get(name)!r} there, {here.get(name)!r} here'
    for name in sorted(there.keys() | here.keys())
    if there.get(name) != here.get(name) and not name.startswith(ignored)
  ]
  if fields:
    raise ValueError(
      f'{workdir} belongs to another experiment ({", ".join(fields[:4])});'
      ' choose another --workdir, or the same settings'
    )


def _flat(values: dict, prefix: str = '') -> dict:
  out = {}
  for name, value in values.items():
    if isinstance(value, dict):
      out.update(_flat(value, f'{prefix}{name}.'))
    else:
      out[prefix + name] = value
  return out


def write_results(workdir: pathlib.Path, results: dict[str, Any]) -> None:
  _replace(workdir / RESULTS, json.dumps(results, indent=1))


def read_results(workdir: pathlib.Path) -> dict[str, Any]:
  """What `write_results` wrote last; empty if it did not yet."""
  path = workdir / RESULTS
  return json.loads(path.read_text()) if path.exists() else {}


def _replace(path: pathlib.Path, text: str) -> None:
  """The file is the old one or the new one, never half of it."""
  partial = path.with_name(f'.{path.name}.{os.getpid()}.part')
  try:
    partial.write_text(text)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(workdir: pathlib.Path, role: str) -> Iterator[None]:
  """Holds the directory for one process of a role; the kernel lets go of it
  when the process dies, however it dies.

  Raises:
    ValueError: another process has it.
  """
  path = workdir / f'.lock-{role}'
  with path.open('w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(
        f'another process runs role {role!r} in {workdir}; wait for it, stop'
        ' it, or choose another --workdir'
      ) from error
    yield
