"""Who reads what, what an exchange holds, what may go, and whether it is sound.

Readers announce themselves in heartbeats under clusters/; `collect` deletes
only what no living reader needs.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

import numpy as np
import tensorstore as ts

from composer.weights import store
from composer.weights.store import BrokenWeights
from composer.weights.store import Ref
from composer.weights.versions import Manifest
from composer.weights.versions import lineage
from composer.weights.versions import load
from composer.weights.versions import prefix_of

# A dead reader holds old versions back for this long after its last heartbeat.
READER_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Reader:
  """Who runs which version: what a heartbeat says of weights."""

  cluster: str
  process: str
  form: str | None  # None: whichever
  version: int | None
  pinned: tuple[int, ...]  # further versions it needs
  time: float  # seconds since the epoch


def announce(
  kv: ts.KvStore, reader: Reader, counters: Mapping[str, Any] | None = None
) -> None:
  """Writes the heartbeat of one process (`counters`: its own, JSON-able)."""
  fields = dataclasses.asdict(reader) | {'counters': dict(counters or {})}
  store.write(
    kv, f'clusters/{reader.cluster}/{reader.process}', store.to_json(fields)
  )


def readers(kv: ts.KvStore) -> list[Reader]:
  """All heartbeats, of the living and the dead."""
  found = []
  for key in store.keys(kv, 'clusters/'):
    value = store.read(kv, key)[0]
    if value is None or key.count('/') != 2:
      continue
    _, cluster, process = key.split('/')
    fields = store.parse_json(value, key)
    found.append(
      Reader(
        cluster=cluster,
        process=process,
        form=fields.get('form'),
        version=fields.get('version'),
        pinned=tuple(fields.get('pinned') or ()),
        time=float(fields.get('time') or 0.0),
      )
    )
  return found


@dataclasses.dataclass(frozen=True)
class Entry:
  """One version in the exchange, as `composer weights ls` shows it."""

  form: str
  version: int
  fence: int
  kind: str  # 'base', 'delta', or 'incomplete' without a manifest
  live: bool  # HEAD names it or a successor of it
  head: bool
  bytes: int
  ratio: float  # bytes / full bytes
  time: float
  readers: tuple[str, ...]  # 'cluster/process' that run it


def listing(kv: ts.KvStore) -> list[Entry]:
  """Every version of every form, oldest first."""
  running = readers(kv)
  entries = []
  for form, versions in _directories(kv).items():
    head = store.read_head(kv, form)
    live = _reachable(kv, form, head.ref)
    for version, fence in sorted(versions):
      key = prefix_of(form, version, fence) + 'manifest'
      text = store.read(kv, key)[0]
      fields = {} if text is None else store.parse_json(text, key)
      full = fields.get('full_bytes', 0)
      alive = (version, fence) in live
      entries.append(
        Entry(
          form=form,
          version=version,
          fence=fence,
          kind=fields.get('kind', 'incomplete'),
          live=alive,
          head=head.ref is not None
          and (version, fence) == (head.ref.version, head.ref.fence),
          bytes=fields.get('bytes', 0),
          ratio=fields['bytes'] / full if full else 0.0,
          time=fields.get('time', 0.0),
          readers=tuple(
            f'{reader.cluster}/{reader.process}'
            for reader in running
            if alive
            and reader.version == version
            and reader.form in (None, form)
          ),
        )
      )
  return entries


def collect(
  kv: ts.KvStore,
  form: str,
  *,
  keep: int = 0,
  now: float | None = None,
  reader_timeout_s: float = READER_TIMEOUT_S,
) -> list[tuple[int, int]]:
  """Deletes what nobody can need any more; (version, fence) of each.

  Kept are the newest base and all after it, and likewise from the base of the
  oldest version that is needed: by a reader whose heartbeat is younger than
  `reader_timeout_s`, or as one of the `keep` versions before HEAD's. Left-overs
  of older incarnations that HEAD never named go too. A reader taken for dead by
  mistake (a slow one, a wrong clock) loses nothing but the way back: it goes on
  from the newest base.
  """
  now = time.time() if now is None else now
  head = store.read_head(kv, form)
  if head.ref is None:
    return []
  needed = {head.ref.version, head.ref.version - keep}
  for reader in readers(kv):
    if reader.form in (None, form) and now - reader.time < reader_timeout_s:
      needed |= set(reader.pinned)
      if reader.version is not None:
        needed.add(reader.version)
  floor = _floor(kv, form, head.ref, min(needed))
  live = _reachable(kv, form, head.ref)
  gone = []
  for version, fence in sorted(_directories(kv).get(form, ())):
    abandoned = (version, fence) not in live and fence < head.claimed
    if version < floor or abandoned:
      _delete_version(kv, form, version, fence)
      gone.append((version, fence))
  return gone


def _floor(kv: ts.KvStore, form: str, head: Ref, lowest: int) -> int:
  """The base to keep from, so that `lowest` can be rebuilt if it still can."""
  floor = 0
  try:
    for ref, manifest in lineage(kv, form, head):
      if manifest.kind == 'base':
        floor = ref.version
        if floor <= lowest:
          break
  except BrokenWeights:
    pass  # nothing beyond can be rebuilt: the oldest base found stays
  return floor


def _delete_version(
  kv: ts.KvStore, form: str, version: int, fence: int
) -> None:
  """Manifest first, so that no reader starts on a version half deleted."""
  prefix = prefix_of(form, version, fence)
  store.write(kv, prefix + 'manifest', None)
  store.before_write(prefix)
  # '.' < '/' < '0': the range takes the directory itself along.
  span = ts.KvStore.KeyRange(prefix[:-1] + '.', prefix[:-1] + '0')
  store.await_result(kv.delete_range(span), prefix, 'deleting')


@dataclasses.dataclass(frozen=True)
class Verification:
  """What `verify` found; all is well when `problems` is empty."""

  form: str
  versions: tuple[int, ...]  # reconstructed and bit-equal, ascending
  bytes: int
  problems: tuple[str, ...]


def verify(kv: ts.KvStore, form: str) -> Verification:
  """Reconstructs every version that hangs on HEAD and checks every digest."""
  chain: list[Manifest] = []
  problems: list[str] = []
  try:
    for _, manifest in lineage(kv, form, store.read_head(kv, form).ref):
      chain.append(manifest)
  except ValueError as error:
    problems.append(str(error))
  good: list[int] = []
  total = 0
  flat: dict[str, np.ndarray] | None = None
  for manifest in reversed(chain):
    if manifest.kind == 'delta' and flat is None:
      problems.append(
        f'version {manifest.version} cannot be reached: what is before it is'
        ' broken'
      )
      continue
    try:
      flat = load(kv, manifest, flat)
    except ValueError as error:
      problems.append(f'version {manifest.version}: {error}')
      flat = None
      continue
    good.append(manifest.version)
    total += manifest.bytes
  return Verification(form, tuple(good), total, tuple(problems))


def _reachable(
  kv: ts.KvStore, form: str, ref: Ref | None
) -> set[tuple[int, int]]:
  found: set[tuple[int, int]] = set()
  try:
    for item, _ in lineage(kv, form, ref):
      found.add((item.version, item.fence))
  except BrokenWeights:
    pass  # what lies beyond a broken manifest is not reachable
  return found


def _directories(kv: ts.KvStore) -> dict[str, set[tuple[int, int]]]:
  """form -> {(version, fence)} of everything under weights/, whole or not."""
  found: dict[str, set[tuple[int, int]]] = {}
  for key in store.keys(kv, 'weights/'):
    parts = key.split('/')
    if len(parts) < 4:
      continue
    version, _, fence = parts[2].partition('-')
    if version.isdigit() and fence.isdigit():
      found.setdefault(parts[1], set()).add((int(version), int(fence)))
  return found
