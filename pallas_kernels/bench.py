"""Every operation at real shapes: right, then how fast, ours and theirs.

For each named shape random data is drawn on the device, in each run from a fresh
seed, ours is checked against float32 of the highest precision, and then ours,
XLA's and, where they can be imported, others' are timed on that data in one
process. The check is of all that was computed where that is cheap, else of some
rows: a group of experts, a head, the first 64 or 512 rows; of a gradient to an
unembedding, of some columns. Times are medians, in order of the table, with
the launches that a call needs; of a call of less than 0.2 ms, theirs too, the
kernels' own on the device.

On a GPU some processes compile at once, before any of them runs anything there;
then they take turns, and what one holds is gone before the next begins (see
`bench_processes`). On a machine without an accelerator the shapes are cut down,
and only the plain implementations run: that shows that the benchmark works, and
no speed.

  python -m pallas_kernels.bench --only route,norm --json kernels.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import platform
import secrets
import time
from typing import Any

import jax

from pallas_kernels import bench_processes
from pallas_kernels import bench_rows
from pallas_kernels import bench_shapes
from pallas_kernels import bench_tune
from pallas_kernels import dispatch
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.bench_rows import TOLERANCE
from pallas_kernels.bench_rows import Row
from pallas_kernels.delta import shapes as delta_shapes
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.matmul import shapes as matmul_shapes
from pallas_kernels.norm import shapes as norm_shapes
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.quantize import shapes as quantize_shapes
from pallas_kernels.route import shapes as route_shapes
from pallas_kernels.token_logprob import shapes as logprob_shapes

WHO = 'ours'
OWN = (WHO, 'nvfp4', 'fp8', 'whole', 'apart')  # ours in other forms too
ENDED = 'ended: '  # begins the note of a shape that was not measured
# Of the device, once; a table that goes on keeps them.
LIMITS = ('copy_bytes_per_s', 'matmul_flops_per_s')


def _of(module: str, name: str) -> Callable[[Any], bench_rows.Rows]:
  """Rows of a module that is imported where they are asked for."""

  def rows(shape: Any) -> bench_rows.Rows:
    found = importlib.import_module(f'pallas_kernels.{module}')
    yield from getattr(found, name)(shape)

  return rows


CASES = {
  'grouped_matmul': (
    _of('bench_matmul', 'grouped'),
    grouped_shapes.TRAINING + grouped_shapes.DECODING,
  ),
  'gated matmul': (
    _of('bench_matmul', 'gated'),
    grouped_shapes.DECODING[1:3],
  ),
  'matmul': (
    _of('bench_matmul', 'dense'),
    matmul_shapes.TRAINING + matmul_shapes.DECODING,
  ),
  'token_logprob': (
    _of('bench_dense', 'logprobs'),
    logprob_shapes.TRAINING + logprob_shapes.DECODING,
  ),
  'norm': (_of('bench_dense', 'norms'), norm_shapes.TRAINING),
  'route': (
    _of('bench_words', 'routing'),
    route_shapes.TRAINING + route_shapes.DECODING,
  ),
  'delta': (_of('bench_words', 'changes'), delta_shapes.TRAINING),
  'quantize': (_of('bench_words', 'rounding'), quantize_shapes.TRAINING),
  'packed weights': (
    _of('bench_words', 'packed_weights'),
    grouped_shapes.DECODING[:3],
  ),
  'attention': (_of('bench_attention', 'packed'), bench_shapes.ATTENTION),
  'paged_attention': (
    _of('bench_paged', 'paged'),
    paged_shapes.DECODING + paged_shapes.PREFILLING + paged_shapes.FEW,
  ),
  'decode step': (_of('bench_paged', 'step'), bench_shapes.STEPS),
  'moe layer': (_of('bench_moe', 'layer'), bench_shapes.LAYERS),
  'invariance': (_of('bench_invariance', 'rows'), bench_shapes.INVARIANCE),
}


def cases(operation: str) -> tuple[Callable[[Any], bench_rows.Rows], Any]:
  """What gives an operation's rows, and its shapes."""
  if operation.startswith(bench_tune.PREFIX):
    return bench_tune.rows, bench_tune.cases()[operation]
  return CASES[operation]


def small(shape: Any) -> Any:
  """The shape cut down to what a CPU does in a moment."""
  if isinstance(shape, bench_shapes.Attention | bench_shapes.Invariance):
    return dataclasses.replace(shape, shape=small(shape.shape))
  most = dict(rows=64, tokens=64, k=128, n=128, depth=128, vocabulary=512)
  most |= dict(groups=4, active=2, words=4096)
  if isinstance(shape, attention_shapes.Shape | paged_shapes.Shape):
    most = dict(rows=2, tokens=64, heads=4, groups=2, key=64, width=64)
    most |= dict(block=16, sequences=2, queries=4, shared=True)
  values = {
    name: min(value, most.get(name, value))
    for name, value in dataclasses.asdict(shape).items()
    if isinstance(value, int)
  }
  return dataclasses.replace(shape, **values)


def rows_of(operation: str, number: int) -> Iterator[Row | None]:
  """Rows of shape `number` of an operation; None once it is compiled.

  What fails ends with a row that says why.
  """
  function, shapes = cases(operation)
  shape = shapes[number]
  if dispatch.platform() == 'cpu':
    shape = small(shape)
  start = time.monotonic()
  try:
    for row in function(shape):
      now = time.monotonic()
      if row is not None:
        case = f'{operation} {number}'
        row = dataclasses.replace(row, took=now - start, case=case)
      yield row
      start = time.monotonic()
  except Exception as error:  # the next shape may do
    yield failure(operation, number, bench_rows.reason(error))


def failure(operation: str, number: int, why: str) -> Row:
  """The row of a shape that ended before it was measured."""
  name = cases(operation)[1][number].name
  case = f'{operation} {number}'
  return Row(operation, name, WHO, note=f'{ENDED}{why}', case=case)


# --- The report --------------------------------------------------------------


def run(
  operations: Sequence[str] | None = None,
  json_path: pathlib.Path | None = None,
  *,
  resume: bool = False,
  apart: bool | None = None,
  keep: list[Row] | None = None,
  seed: int | None = None,
) -> int:
  """Measures, prints a table, and writes the same as JSON.

  Args:
    operations: names of CASES; None: all.
    json_path: file to write to, after each row.
    resume: leave out the shapes that this file has, and go on with its table.
    apart: in processes of their own; None: on a GPU.
    keep: gets all rows.
    seed: of the data, 0 to 2^32 - 1, to repeat a run; None: the file's where it
      is gone on with, else a fresh one.

  Returns:
    1 if a result of ours is wrong, differs where it must not, or could not be
    measured.

  Raises:
    ValueError: an operation or a seed that there is not, or a file of another
      device or seed, or that is no table.
  """
  # Else jax takes three quarters of the memory, and PyTorch finds none.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.92')
  for name in operations or ():
    if name not in CASES and name not in bench_tune.cases():
      raise ValueError(f'no operation {name!r}; there are {", ".join(CASES)}')
  if resume and json_path is None:
    raise ValueError('resume=True goes on with a file; give json_path')
  if json_path is not None and not json_path.parent.is_dir():
    raise ValueError(f'json_path={json_path}: there is no such folder; make it')
  if seed is not None and not 0 <= seed < 2**32:
    raise ValueError(f'seed={seed} must be 0 to 2^32 - 1')
  table = _table(json_path if resume and json_path.exists() else None, seed)
  wanted = [
    (name, number)
    for name in operations or CASES
    for number in range(len(cases(name)[1]))
    if f'{name} {number}' not in table['finished']
  ]
  apart = dispatch.platform() == 'gpu' if apart is None else apart
  source = bench_processes.rows if apart else _here
  limits = not set(LIMITS) <= set(table)
  # Closed, whatever ends the report: no process stays.
  with contextlib.closing(source(wanted, limits, table['seed'])) as events:
    return _report(events, table, json_path, [] if keep is None else keep)


def _here(
  wanted: list[tuple[str, int]], limits: bool, seed: int
) -> Iterator[Any]:
  """Events of this process, as `bench_processes.rows` has them of others.

  The ceilings as a dict, then rows, and after those of a shape its number, a
  pair of the operation and the place among its shapes.
  """
  if limits:
    yield bench_rows.ceilings()
  with bench_rows.seeded(seed):
    for name, number in wanted:
      for row in rows_of(name, number):
        if row is not None:
          yield row
      yield name, number


def _table(path: pathlib.Path | None, seed: int | None) -> dict[str, Any]:
  """What is written: about the device, and what a file has already."""
  fresh = secrets.randbits(32) if seed is None else seed
  table = {
    'seed': fresh,
    'device': jax.devices()[0].device_kind,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'date': datetime.date.today().isoformat(),
    'rows': [],
    'finished': [],
  }
  if path is None:
    return table
  found = _read(path)
  same = ('device', 'jax') if seed is None else ('device', 'jax', 'seed')
  for name in ('device', 'jax', 'seed', 'finished'):
    if name not in found or name in same and found[name] != table[name]:
      raise ValueError(
        f'{path} has {name}={found.get(name)!r}, and here it is'
        f' {table[name]!r}; write to another file'
      )
  kept = [row for row in found['rows'] if row.get('case') in found['finished']]
  found['rows'] = kept
  return table | found


def _read(path: pathlib.Path) -> dict[str, Any]:
  """What `_write` wrote; ValueError where it is something else."""
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
    for row in found['rows']:
      Row(**row)
    return found
  except (ValueError, LookupError, TypeError) as error:
    raise ValueError(
      f'{path} is no table of this benchmark ({bench_rows.reason(error)}); it'
      ' cannot be gone on with: write to another file, or without resume'
    ) from None


def _report(
  events: Iterator[Any],
  table: dict[str, Any],
  json_path: pathlib.Path | None,
  rows: list[Row],
) -> int:
  rows += [Row(**row) for row in table['rows']]
  start = time.monotonic()
  if set(LIMITS) <= set(table):
    _head(table)
  for event in events:
    if isinstance(event, dict):
      table |= event
      _head(table)
    elif isinstance(event, Row):
      rows.append(event)
      at = f'{time.monotonic() - start:6.1f}  '
      print(at + describe(event, rows, table), flush=True)
    else:
      name = f'{event[0]} {event[1]}'
      ended = any(row.case == name and _ended(row) for row in rows)
      table['finished'] += [] if ended else [name]
    if json_path is not None:
      _write(json_path, table | {'rows': [dataclasses.asdict(r) for r in rows]})
  took = time.monotonic() - start
  print(f'{len(rows)} rows of {len(table["finished"])} shapes in {took:.0f} s')
  faults = [(row, why) for row in rows if (why := fault(row))]
  for row, why in faults:
    print(f'wrong: {row.operation} at {row.shape}, {why}')
  return 1 if faults else 0


def tune(
  path: pathlib.Path,
  operations: Sequence[str] | None = None,
  json_path: pathlib.Path | None = None,
  *,
  resume: bool = False,
  seed: int | None = None,
) -> int:
  """Measures candidates for the tunings of this GPU, and writes the best.

  Args:
    path: file to write to, as `tunings/<device>.json`.
    operations: whose; None: of all that have some.
    (others): see `run`.

  Returns:
    As `run`; what differs or could not be measured is not written.

  Raises:
    ValueError: as `run`, no GPU, or an operation without tunings.
  """
  if dispatch.platform() != 'gpu':
    raise ValueError(
      'tunings say how kernels for GPUs are cut, and the default device is a'
      f' {dispatch.platform()}'
    )
  if not path.parent.is_dir():
    raise ValueError(f'{path}: there is no such folder; make it')
  known = [name.removeprefix(bench_tune.PREFIX) for name in bench_tune.cases()]
  for name in operations or ():
    if name not in known:
      raise ValueError(f'{name!r} has no tunings; {", ".join(known)} have')
  names = [bench_tune.PREFIX + name for name in operations or known]
  rows: list[Row] = []
  code = run(names, json_path, resume=resume, keep=rows, seed=seed)
  found = bench_tune.tunings(rows, [c for n in names for c in cases(n)[1]])
  _replace(path, bench_tune.text(found))
  print(
    f'wrote {path}; as pallas_kernels/tunings/{dispatch.device_key()}.json it is'
    ' what models get on such a device'
  )
  return code


def _ended(row: Row) -> bool:
  return row.note.startswith(ENDED)


def fault(row: Row) -> str | None:
  """What is wrong with a row of ours, or None; theirs may fail."""
  if row.operation.startswith(bench_tune.PREFIX):
    if row.who == WHO or row.who == bench_tune.DEFAULT and not row.seconds:
      return row.note  # nothing could be measured
    return (
      f'{row.who}: {row.differing} elements differ' if row.differing else None
    )
  if row.who not in OWN:
    return None
  if row.seconds is None or row.note.startswith(bench_rows.UNCHECKED):
    return row.note
  if row.error is not None and not row.error < TOLERANCE:
    return f'relative error {row.error}'
  return f'{row.differing} elements differ' if row.differing else None


def _write(path: pathlib.Path, table: dict[str, Any]) -> None:
  _replace(path, json.dumps(table, indent=1))


def _replace(path: pathlib.Path, text: str) -> None:
  """Whole or not at all: whoever is cut off goes on from what is there."""
  new = path.with_name(path.name + '.new')
  new.write_text(text, encoding='utf-8')
  os.replace(new, path)


WIDTHS = (27, 18, 11, 9, 8, 7, 6, 6, 8)


def _line(*cells: str) -> str:
  text = ''.join(
    f'{cell:<{width - 1}} ' if i < 3 else f'{cell:>{width}}'
    for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=False))
  )
  return f'{text}  {cells[-1]}'.rstrip()


def _head(table: dict[str, Any]) -> None:
  print(
    f'{table["device"]}, jax {table["jax"]}, seed {table["seed"]}: copies'
    f' {table["copy_bytes_per_s"] / 1e12:.3f} TB/s, multiplies'
    f' {table["matmul_flops_per_s"] / 1e12:.1f} TFLOP/s; shares are of these'
  )
  columns = 'operation shape who ms TFLOP/s TB/s prod. copy it/ours notes'
  print(f'{"s":>6}  ' + _line(*columns.split()), flush=True)


def describe(row: Row, all_rows: list[Row], limits: dict[str, Any]) -> str:
  """A line of the table: rates, shares of both ceilings, ratio to ours."""
  notes = [row.note] if row.note else []
  if row.error is not None:
    notes.append(f'error {row.error:.1e}')
  if row.differing is not None:
    notes.append(f'{row.differing} differing')
  if row.memory is not None:
    notes.append(f'{row.memory / 2**20:.0f} MiB')
  cells = [''] * 6
  if row.seconds:
    flops = (row.flops or 0) / row.seconds
    moved = (row.bytes or 0) / row.seconds
    ours = [
      one.seconds
      for one in all_rows
      if one.who == WHO
      and (one.operation, one.shape) == (row.operation, row.shape)
      and one.seconds
    ]
    cells = [
      f'{row.seconds * 1e3:.3f}',
      f'{flops / 1e12:.1f}' if row.flops else '',
      f'{moved / 1e12:.2f}' if row.bytes else '',
      f'{flops / limits["matmul_flops_per_s"]:.2f}' if row.flops else '',
      f'{moved / limits["copy_bytes_per_s"]:.2f}' if row.bytes else '',
      f'{row.seconds / ours[0]:.2f}' if ours and row.who != WHO else '',
    ]
  return _line(row.operation, row.shape, row.who, *cells, ', '.join(notes))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog='python -m pallas_kernels.bench')
  parser.add_argument(
    '--only', metavar='NAMES', help=f'with commas, of: {", ".join(CASES)}'
  )
  parser.add_argument('--json', type=pathlib.Path, metavar='FILE')
  parser.add_argument(
    '--resume', action='store_true', help='go on with what FILE has'
  )
  parser.add_argument(
    '--tune',
    type=pathlib.Path,
    metavar='FILE',
    help='measure candidates for the tunings of this GPU, and write the best',
  )
  parser.add_argument(
    '--seed', type=int, help='of the data, to repeat a run; else a fresh one'
  )
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  arguments = _parser().parse_args(argv)
  names = None
  if arguments.only:
    names = [name.strip() for name in arguments.only.split(',')]
  more = dict(resume=arguments.resume, seed=arguments.seed)
  if arguments.tune is not None:
    return tune(arguments.tune, names, arguments.json, **more)
  return run(names, arguments.json, **more)


if __name__ == '__main__':
  raise SystemExit(main())
