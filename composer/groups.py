"""Finished groups on the exchange, and what both sides have counted.

A rollout process commits: the group's segments, then its manifest, and then its
lease moves to `committed` by compare-and-swap (`leases`). Only that last write
counts. The trainer lists what is `committed`, reads it, and deletes the objects
once a checkpoint contains the group's id. The lease stays.

    groups/<cluster>/<incarnation>/<group id>.<token>/<i>-<j>     segments
    groups/<cluster>/<incarnation>/<group id>.<token>/manifest    written last
    clusters/<cluster>/<incarnation>      heartbeat (`weights.upkeep` writes it)
    cursor                                JSON, `Cursor`

The token is the lease's. What a process writes that has lost its lease without
knowing lies under a path of its own, and its commit is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
import contextlib
import dataclasses
from typing import Any

import tensorstore as ts

from composer import leases
from composer import wire
from composer.leases import COMMITTED
from composer.leases import Lease
from composer.leases import LeaseHandle
from composer.leases import LeaseLost
from composer.records import Group
from composer.weights import store
from composer.weights import upkeep


@dataclasses.dataclass(frozen=True)
class Committed:
  """A finished group whose objects are there."""

  group_id: str
  draw: int
  cluster: str
  incarnation: str
  path: str
  produced_index: int


@dataclasses.dataclass
class Cache:
  """Committed leases that one reader has seen; owned by that reader."""

  leases: dict[str, Lease] = dataclasses.field(default_factory=dict)


def commit(kv: ts.KvStore, handle: LeaseHandle, group: Group) -> Committed:
  """Makes a finished group visible, exactly once for its id.

  Raises:
    LeaseLost: the draw is not this holder's any more; nothing is left behind.
    ValueError: the group is not of the handle, or cannot be written.
    OSError (TimeoutError is one): the exchange failed. Commit the same group
      again: LeaseLost then says whether it is committed already.
  """
  for name in ('group_id', 'draw', 'cluster', 'incarnation'):
    if getattr(group, name) != getattr(handle, name):
      raise ValueError(
        f"Group.{name}={getattr(group, name)!r} is not the lease's"
        f' {getattr(handle, name)!r}; commit a group under its own lease'
      )
  if group.produced_index < 1:
    raise ValueError(
      f'Group.produced_index={group.produced_index}; it counts from 1'
    )
  leases.require_held(kv, handle)
  path = (
    f'groups/{handle.cluster}/{handle.incarnation}'
    f'/{handle.group_id}.{handle.token}/'
  )
  objects = wire.to_objects(group)
  try:
    manifest = objects.pop(wire.MANIFEST)
    store.create(kv, {path + name: blob for name, blob in objects.items()})
    store.create(kv, {path + wire.MANIFEST: manifest})
  except BaseException:
    with contextlib.suppress(OSError, ValueError):
      _delete_path(kv, path)
    raise
  _commit_lease(kv, handle, path, group.produced_index)
  return Committed(
    group_id=group.group_id,
    draw=group.draw,
    cluster=group.cluster,
    incarnation=group.incarnation,
    path=path,
    produced_index=group.produced_index,
  )


def _commit_lease(
  kv: ts.KvStore, handle: LeaseHandle, path: str, produced_index: int
) -> None:
  def change(held: Lease) -> Lease:
    return dataclasses.replace(
      held, state=COMMITTED, path=path, produced_index=produced_index
    )

  try:
    leases.swap(kv, handle, change)
  except LeaseLost:
    held, _ = leases.read(kv, handle.group_id)
    # The swap may have landed although its answer was lost.
    if held is None or held.path != path:
      _delete_path(kv, path)
      raise
    if held.produced_index != produced_index:
      raise


def committed(kv: ts.KvStore, cache: Cache | None = None) -> list[Committed]:
  """Groups that are finished and whose objects are there, by draw.

  That is what is queued for the trainer, and what it has consumed since its
  last checkpoint. With a cache, a call lists keys, and reads only leases that
  are new.
  """
  cache = Cache() if cache is None else cache
  paths = {}
  for key in store.keys(kv, 'groups/'):
    if key.endswith('/' + wire.MANIFEST):
      path = key[: -len(wire.MANIFEST)]
      paths[path] = _group_of(path)
  known = _committed_leases(kv, set(paths.values()), cache)
  found = [
    Committed(
      group_id=held.group_id,
      draw=held.draw,
      cluster=held.cluster,
      incarnation=held.incarnation,
      path=held.path,
      produced_index=held.produced_index,
    )
    for path, group_id in paths.items()
    if (held := known.get(group_id)) is not None and held.path == path
  ]
  return sorted(found, key=lambda item: item.draw)


def read_group(kv: ts.KvStore, item: Committed) -> Group:
  """Reads a finished group; ValueError where an object is gone or damaged."""
  manifest_key = item.path + wire.MANIFEST
  manifest = store.read(kv, manifest_key)[0]
  if manifest is None:
    raise ValueError(f'{manifest_key} of the exchange is missing')
  objects = {wire.MANIFEST: manifest}
  names = wire.segment_names(wire.read_manifest(manifest))
  values = leases.read_many(kv, [item.path + name for name in names])
  for key, (value, _) in values.items():
    if value is None:
      raise ValueError(f'{key} of the exchange is missing')
    objects[key[len(item.path) :]] = value
  try:
    group = wire.from_objects(objects)
  except ValueError as error:
    raise ValueError(f'{item.path} of the exchange: {error}') from error
  if group.group_id != item.group_id:
    raise ValueError(
      f'{item.path} of the exchange holds group {group.group_id}'
    )
  return group


def delete_groups(kv: ts.KvStore, group_ids: Collection[str]) -> int:
  """Deletes the objects of groups that a checkpoint contains; how many were.

  Takes along what dead processes left of the same ids. The leases stay.
  """
  group_ids = frozenset(group_ids)
  paths = set()
  for key in store.keys(kv, 'groups/') if group_ids else ():
    path = key.rpartition('/')[0] + '/'
    if _group_of(path) in group_ids:
      paths.add(path)
  for path in sorted(paths):
    _delete_path(kv, path)
  return len({_group_of(path) for path in paths})


def _group_of(path: str) -> str:
  """groups/<cluster>/<incarnation>/<group id>.<token>/ -> the group id."""
  return path[:-1].rpartition('/')[2].partition('.')[0]


def _delete_path(kv: ts.KvStore, path: str) -> None:
  """Manifest first, so that no one lists a group that is half deleted."""
  store.write(kv, path + wire.MANIFEST, None)
  store.before_write(path)
  # Every key that begins with the path less its '/': tokens are of one length,
  # so that is this path alone. A range that ends closer by would leave empty
  # folders behind, and every listing would walk them.
  stem = path[:-1]
  span = ts.KvStore.KeyRange(stem, stem[:-1] + chr(ord(stem[-1]) + 1))
  store.await_result(kv.delete_range(span), path, 'deleting')


def _committed_leases(
  kv: ts.KvStore, group_ids: Iterable[str], cache: Cache
) -> dict[str, Lease]:
  keys = [f'leases/{gid}' for gid in group_ids if gid not in cache.leases]
  for key, (value, _) in leases.read_many(kv, keys).items():
    held = None if value is None else leases.parse(value, key)
    if held is not None and held.state == COMMITTED:
      cache.leases[held.group_id] = held
  return cache.leases


# --- Counters ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Heartbeat:
  """What a rollout process says of itself.

  Attributes:
    version: the active weights, None before the first.
    produced: groups that it committed, by its own count.
    abandoned: sessions of others (or of its earlier life) that it found begun
      and never finished.
    time: seconds since the epoch.
    counters: anything else, name -> number.
  """

  cluster: str
  incarnation: str
  version: int | None
  produced: int
  abandoned: int
  time: float
  counters: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cursor:
  """The trainer's copy of what it consumed, for the rollouts to read.

  Attributes:
    consumed: groups with a verdict; moves the admission limit.
    version: the trainer's.
    trained: ids of groups that were trained on.
    dropped: reason -> ids.
    finished: no more groups are wanted.
  """

  consumed: int = 0
  version: int = 0
  trained: tuple[str, ...] = ()
  dropped: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  finished: bool = False


def beat(kv: ts.KvStore, heartbeat: Heartbeat, form: str | None = None) -> None:
  """Writes the heartbeat; `form` tells the weight store what is being read."""
  reader = upkeep.Reader(
    cluster=heartbeat.cluster,
    process=heartbeat.incarnation,
    form=form,
    version=heartbeat.version,
    pinned=(),
    time=heartbeat.time,
  )
  counters = {
    **heartbeat.counters,
    'produced': heartbeat.produced,
    'abandoned': heartbeat.abandoned,
  }
  upkeep.announce(kv, reader, counters)


def heartbeats(kv: ts.KvStore) -> list[Heartbeat]:
  """The last heartbeat of every incarnation, of the living and the dead."""
  found = []
  keys = store.keys(kv, 'clusters/')
  for key, (value, _) in leases.read_many(kv, keys).items():
    if value is None or key.count('/') != 2:
      continue
    _, cluster, incarnation = key.split('/')
    fields = store.parse_json(value, key)
    counters = dict(fields.get('counters') or {})
    found.append(
      Heartbeat(
        cluster=cluster,
        incarnation=incarnation,
        version=fields.get('version'),
        produced=int(counters.pop('produced', 0)),
        abandoned=int(counters.pop('abandoned', 0)),
        time=float(fields.get('time') or 0.0),
        counters=counters,
      )
    )
  return found


def produced(kv: ts.KvStore, cache: Cache | None = None) -> int:
  """Groups committed over the whole run, as the producers counted them.

  Of each incarnation the larger of its last heartbeat and of the number that it
  wrote into a committed lease, since it may have died between the two.
  """
  cache = Cache() if cache is None else cache
  counts: dict[tuple[str, str], int] = {}
  for item in heartbeats(kv):
    counts[item.cluster, item.incarnation] = item.produced
  prefix = 'leases/'
  group_ids = [key[len(prefix) :] for key in store.keys(kv, prefix)]
  known = _committed_leases(kv, group_ids, cache)
  for held in known.values():
    who = held.cluster, held.incarnation
    counts[who] = max(counts.get(who, 0), held.produced_index)
  return sum(counts.values())


def write_cursor(kv: ts.KvStore, cursor: Cursor) -> None:
  """Written by the one trainer; copies of it may be late, never ahead."""
  store.write(kv, 'cursor', store.to_json(dataclasses.asdict(cursor)))


def read_cursor(kv: ts.KvStore) -> Cursor:
  """The cursor; all zero before the first."""
  value = store.read(kv, 'cursor')[0]
  if value is None:
    return Cursor()
  fields: dict[str, Any] = store.parse_json(value, 'cursor')
  fields['trained'] = tuple(fields['trained'])
  fields['dropped'] = {
    reason: tuple(ids) for reason, ids in fields['dropped'].items()
  }
  return Cursor(**fields)
