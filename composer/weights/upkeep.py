"""Who reads what, what an exchange holds, what may go, and whether it is sound.

Readers announce themselves: rollout processes by heartbeats under clusters/,
every subscriber by what it holds and is about to read under readers/. `collect`
deletes only what no living reader needs.

Who is alive is judged by the collector's own clock alone (`Watch`): a reader
lives as long as what it says keeps changing. The times that readers write are
for people, as the clocks of clusters disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

# A dead reader holds old versions back for this long after its last sign.
READER_TIMEOUT_S = 600.0
FORGET = 6  # so many times that, and what a subscriber announced is deleted
ANNOUNCE_S = 5.0  # between two announcements that say the same


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


class Announcer:
  """What one subscriber says of itself, written when it changes or ages."""

  def __init__(self, kv: ts.KvStore, cluster: str, process: str, form: str):
    for what, name in (('cluster', cluster), ('process', process)):
      if not name or '/' in name:
        raise ValueError(f'{what}={name!r} must be a name without a slash')
    self._kv, self._form = kv, form
    self._cluster, self._process = cluster, process
    self._said: tuple[Any, ...] | None = None
    self._when = 0.0
    self._count = 0

  def announce(self, version: int | None, needed: Sequence[int]) -> None:
    """It holds `version` and is about to read `needed`."""
    said = (version, tuple(needed))
    now = time.monotonic()
    if said == self._said and now - self._when < ANNOUNCE_S:
      return
    fields = {
      'form': self._form,
      'version': version,
      'pinned': list(needed),
      'time': time.time(),
      # So that it changes even where a clock stands still.
      'count': self._count,
    }
    store.write(self._kv, self._key, store.to_json(fields))
    self._said, self._when, self._count = said, now, self._count + 1

  def withdraw(self) -> None:
    """It reads no more."""
    store.write(self._kv, self._key, None)
    self._said = None

  @property
  def _key(self) -> str:
    return f'readers/{self._cluster}/{self._process}'


def readers(kv: ts.KvStore) -> list[Reader]:
  """All that was announced, by the living and the dead, one a process.

  Of a process that has both, its heartbeat says what it runs, and what its
  subscriber holds counts as pinned.
  """
  found: dict[tuple[str, str], Reader] = {}
  for _, reader in sorted(_announced(kv).items()):  # clusters/ first
    who = reader[1].cluster, reader[1].process
    found[who] = _merge(found.get(who), reader[1])
  return list(found.values())


def _merge(beat: Reader | None, said: Reader) -> Reader:
  if beat is None:
    return said
  held = () if said.version is None else (said.version,)
  return dataclasses.replace(
    beat,
    pinned=(*beat.pinned, *held, *said.pinned),
    time=max(beat.time, said.time),
  )


def _announced(kv: ts.KvStore) -> dict[str, tuple[bytes, Reader]]:
  """key -> (what is written there, the same understood)."""
  found = {}
  for prefix in ('clusters/', 'readers/'):
    for key in store.keys(kv, prefix):
      value = store.read(kv, key)[0]
      if value is None or key.count('/') != 2:
        continue
      _, cluster, process = key.split('/')
      try:
        fields = store.parse_json(value, key)
      except BrokenWeights:
        continue  # one that writes nonsense holds up nobody else
      reader = Reader(
        cluster=cluster,
        process=process,
        form=fields.get('form'),
        version=fields.get('version'),
        pinned=tuple(fields.get('pinned') or ()),
        time=float(fields.get('time') or 0.0),
      )
      found[key] = value, reader
  return found


@dataclasses.dataclass
class Watch:
  """When readers were last seen to say something new, by our clock.

  Kept by who collects; a reader that is new to it counts as alive for
  `timeout_s`, and so does every one at first.
  """

  timeout_s: float = READER_TIMEOUT_S
  clock: Callable[[], float] = time.monotonic
  seen: dict[str, tuple[bytes, float]] = dataclasses.field(default_factory=dict)

  def alive(self, kv: ts.KvStore) -> list[Reader]:
    """Those that have changed within `timeout_s`.

    What a subscriber announced that has been silent for `FORGET` times as long
    is deleted; heartbeats stay, for they count what their process produced.
    """
    now = self.clock()
    announced = _announced(kv)
    living = []
    for key, (value, reader) in announced.items():
      if self.seen.get(key, (b'', 0.0))[0] != value:
        self.seen[key] = value, now
      silent = now - self.seen[key][1]
      if silent < self.timeout_s:
        living.append(reader)
      elif key.startswith('readers/') and silent > FORGET * self.timeout_s:
        store.write(kv, key, None)
    self.seen = {k: v for k, v in self.seen.items() if k in announced}
    return living


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
  changed: float  # share of elements since the version before; -1 if unknown
  chain: int  # deltas since the base that it is rebuilt from
  time: float
  readers: tuple[str, ...]  # 'cluster/process' that run it


def listing(kv: ts.KvStore) -> list[Entry]:
  """Every version of every form, oldest first."""
  running = readers(kv)
  entries = []
  for form, versions in _directories(kv).items():
    head = store.read_head(kv, form)
    live = _reachable(kv, form, head.ref)
    chain = 0
    for version, fence in sorted(versions):
      key = prefix_of(form, version, fence) + 'manifest'
      text = store.read(kv, key)[0]
      fields = {} if text is None else store.parse_json(text, key)
      full = fields.get('full_bytes', 0)
      alive = (version, fence) in live
      if alive:
        chain = 0 if fields.get('kind') == 'base' else chain + 1
      known = fields.get('changed', -1) >= 0 and fields.get('words')
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
          changed=fields['changed'] / fields['words'] if known else -1.0,
          chain=chain if alive else -1,
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
  kv: ts.KvStore, form: str, watch: Watch, *, keep: int = 0
) -> list[tuple[int, int]]:
  """Deletes what nobody can need any more; (version, fence) of each.

  Kept are the newest base and all after it, and likewise from the base of the
  oldest version that is needed: by a living reader, or as one of the `keep`
  versions before HEAD's. Left-overs of older incarnations that HEAD never named
  go too. A reader taken for dead by mistake (it was cut off for longer than the
  watch waits) loses nothing but the way back: it goes on from the newest base.
  """
  head = store.read_head(kv, form)
  if head.ref is None:
    return []
  needed = {head.ref.version, head.ref.version - keep}
  for reader in watch.alive(kv):
    if reader.form in (None, form):
      needed |= set(reader.pinned)
      if reader.version is not None:
        needed.add(reader.version)
  floor = _floor(kv, form, head.ref, min(needed))
  live = _reachable(kv, form, head.ref)
  gone = []
  # The newest first: a collection that is cut short then leaves no delta whose
  # base is gone on the way from HEAD.
  there = _directories(kv).get(form, set())
  there |= _versions_of(store.folders(kv, f'weights/{form}/'))
  for version, fence in sorted(there, reverse=True):
    abandoned = (version, fence) not in live and fence < head.claimed
    if version < floor or abandoned:
      _delete_version(kv, form, version, fence)
      gone.append((version, fence))
  _forget_incarnations(kv, form, head.claimed)
  return sorted(gone)


def _forget_incarnations(kv: ts.KvStore, form: str, claimed: int) -> None:
  """Names of starts before the present one; nobody waits for them any more."""
  for key in store.keys(kv, f'weights/{form}/incarnations/'):
    value = store.read(kv, key)[0]
    if value is not None and store.parse_json(value, key)['fence'] < claimed:
      store.write(kv, key, None)


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
  store.remove_below(kv, prefix)


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
    if len(parts) >= 4 and (version := _versions_of([parts[2]])):
      found.setdefault(parts[1], set()).update(version)
  return found


def _versions_of(folders: Iterable[str]) -> set[tuple[int, int]]:
  """{(version, fence)} of names like '12-3'; others are none of ours."""
  found = set()
  for name in folders:
    version, _, fence = name.partition('-')
    if version.isdigit() and fence.isdigit():
      found.add((int(version), int(fence)))
  return found
