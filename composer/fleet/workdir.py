"""A run's directory: made once, locked while in use, of one experiment."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib

from composer import config as config_lib

CONFIG = 'config.json'
DONE = 'done'  # written when the run has finished


def exchange_url(
  experiment: config_lib.Experiment, workdir: pathlib.Path
) -> str:
  """The exchange of a run; `file://<workdir>/exchange` unless configured."""
  if experiment.weights.exchange:
    return experiment.weights.exchange
  return f'file://{workdir.resolve()}/exchange'


def prepare(
  experiment: config_lib.Experiment, workdir: pathlib.Path, resume: bool
) -> None:
  """Makes the directory, or checks that it is this experiment's.

  Raises:
    ValueError: it holds a run already and `resume` is false, it is of another
      experiment, or the run in it has finished.
  """
  path = workdir / CONFIG
  text = config_lib.to_json(experiment)
  if path.exists():
    _check_same(path, text, workdir)
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
    return
  workdir.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix('.partial')
  partial.write_text(text)
  os.replace(partial, path)


def _check_same(path: pathlib.Path, text: str, workdir: pathlib.Path) -> None:
  there, here = json.loads(path.read_text()), json.loads(text)
  if there == here:
    return
  fields = sorted(
    name
    for name in _flat(there).keys() | _flat(here).keys()
    if _flat(there).get(name) != _flat(here).get(name)
  )
  shown = ', '.join(
    f'{n}: {_flat(there).get(n)!r} there, {_flat(here).get(n)!r} here'
    for n in fields[:4]
  )
  raise ValueError(
    f'{workdir} belongs to another experiment ({shown}); choose another'
    ' --workdir, or the same settings'
  )


def _flat(values: dict, prefix: str = '') -> dict:
  out = {}
  for name, value in values.items():
    if isinstance(value, dict):
      out.update(_flat(value, f'{prefix}{name}.'))
    else:
      out[prefix + name] = value
  return out


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


@dataclasses.dataclass(frozen=True)
class Stopper:
  """Asks every part of a process to stop; `why` is shown."""

  flags: list = dataclasses.field(default_factory=list)

  def stop(self, why: str) -> None:
    self.flags.append(why)

  def __call__(self) -> bool:
    return bool(self.flags)

  @property
  def why(self) -> str:
    return self.flags[0] if self.flags else ''
