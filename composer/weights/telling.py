"""What is listed of an exchange: versions, readers, who runs what."""

from __future__ import annotations

from collections.abc import Iterator
import time

import tensorstore as ts

from composer.weights import upkeep

HEADER = (
  f'{"form":8}{"version":>8} {"kind":11}{"MB":>9}{"ratio":>7}'
  f'{"changed":>9}{"chain":>6}  published'
)


def listing(kv: ts.KvStore, now: float | None = None) -> Iterator[str]:
  """Versions of every form, then who reads them.

  `ratio` is bytes over those of the whole weights, `changed` the share of
  elements that differ from the version before, `chain` the deltas since the
  base that a version is rebuilt from.
  """
  entries = upkeep.listing(kv)
  if not entries:
    yield 'no versions'
    return
  yield HEADER
  for entry in entries:
    yield _line(entry)
  yield _sum(entries)
  heads = {entry.form: entry.version for entry in entries if entry.head}
  for reader in sorted(
    upkeep.readers(kv), key=lambda r: (r.cluster, r.process)
  ):
    yield _reader(reader, heads, time.time() if now is None else now)


def _line(entry: upkeep.Entry) -> str:
  when = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry.time))
  notes = [*(['HEAD'] if entry.head else []), *entry.readers]
  if not entry.live:
    notes.append('abandoned')
  changed = f'{100 * entry.changed:.2f}%' if entry.changed >= 0 else '-'
  chain = str(entry.chain) if entry.chain >= 0 else '-'
  line = (
    f'{entry.form:8}{entry.version:8d} {entry.kind:11}'
    f'{entry.bytes / 1e6:9.3f}{entry.ratio:7.3f}{changed:>9}{chain:>6}'
    f'  {when}  {" ".join(notes)}'
  )
  return line.rstrip()


def _sum(entries: list[upkeep.Entry]) -> str:
  deltas = [e for e in entries if e.live and e.kind == 'delta']
  total = sum(entry.bytes for entry in entries) / 1e6
  text = f'{len(entries)} versions, {total:.3f} MB'
  if deltas:
    mean = sum(entry.ratio for entry in deltas) / len(deltas)
    text += f'; a delta is {100 * mean:.2f} % of the weights in the mean'
  return text


def _reader(reader: upkeep.Reader, heads: dict[str, int], now: float) -> str:
  who = f'{reader.cluster}/{reader.process}'
  version = 'none' if reader.version is None else str(reader.version)
  head = heads.get(reader.form or '')
  behind = ''
  if head is not None and reader.version is not None:
    behind = f', {head - reader.version} behind'
  age = now - reader.time
  silent = ', silent' if age > upkeep.READER_TIMEOUT_S else ''
  return (
    f'{who} runs version {version} of {reader.form or "any form"}{behind}'
    f' ({max(age, 0):.0f} s ago{silent})'
  )
