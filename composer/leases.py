"""Leases of draws on the exchange: who is rolling what, until when.

Draws are numbered 0, 1, 2, ...; each is one group. Any number of processes roll.
`LeaseBook.claim` leases the lowest free draw under the admission limit, `renew`
keeps it while its sessions run, and `groups.commit` moves it to `committed`,
for good: no draw is rolled twice.

    leases/<group id>    JSON, `Lease`; every write is a compare-and-swap

A lease that was not renewed in time may be taken over. The token, new with every
lease, tells a holder from one that comes back from the dead.

Times are seconds since the epoch, of each machine's own clock; a lease should
last much longer than the clocks differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import re
import time
import uuid

import tensorstore as ts

from composer.weights import store

ROLLING = 'rolling'
COMMITTED = 'committed'

_BATCH = 64  # keys read at once
_NAME = re.compile(r'[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*')


class LeaseLost(RuntimeError):
  """The draw is no longer this holder's: taken over, freed, or committed."""


@dataclasses.dataclass(frozen=True)
class Lease:
  """What `leases/<group id>` holds; once `committed` it never changes."""

  group_id: str
  draw: int
  cluster: str
  incarnation: str
  token: str
  until: float
  state: str = ROLLING
  path: str = ''  # of the group's objects, with a final '/'
  produced_index: int = 0


@dataclasses.dataclass(frozen=True)
class LeaseHandle:
  """The right to roll one draw.

  `taken_from` names the holder ('cluster/incarnation') whose lease ran out, or
  is ''; the sessions that it had begun count as abandoned.
  """

  group_id: str
  draw: int
  cluster: str
  incarnation: str
  token: str
  until: float
  taken_from: str = ''

  @property
  def taken_over(self) -> bool:
    return bool(self.taken_from)


def new_incarnation() -> str:
  """A name for this life of a process, later ones sorting after it."""
  return f'{int(time.time()):010d}-{uuid.uuid4().hex[:8]}'


def lease(
  kv: ts.KvStore,
  group_id: str,
  draw: int,
  cluster: str,
  incarnation: str,
  seconds: float,
  now: float,
) -> LeaseHandle | None:
  """Leases a draw until `now + seconds`; None if another has or had it.

  A rolling lease whose time is over is taken over; of several that try, one
  succeeds.
  """
  for name in (cluster, incarnation, group_id):
    _check_name(name)
  if '.' in group_id:
    raise ValueError(f'group id {group_id!r} must not contain a "."')
  held, generation = read(kv, group_id)
  if held is not None and (held.state != ROLLING or held.until > now):
    return None
  new = Lease(
    group_id=group_id,
    draw=draw,
    cluster=cluster,
    incarnation=incarnation,
    token=uuid.uuid4().hex[:12],
    until=now + seconds,
  )
  if not _write(kv, new, generation):
    return None
  return LeaseHandle(
    group_id=group_id,
    draw=draw,
    cluster=cluster,
    incarnation=incarnation,
    token=new.token,
    until=new.until,
    taken_from=f'{held.cluster}/{held.incarnation}' if held else '',
  )


def renew(
  kv: ts.KvStore, handle: LeaseHandle, seconds: float, now: float
) -> LeaseHandle:
  """The lease, until `now + seconds`; LeaseLost if it is another's by now."""
  until = now + seconds
  swap(kv, handle, lambda held: dataclasses.replace(held, until=until))
  return dataclasses.replace(handle, until=until)


def release(kv: ts.KvStore, handle: LeaseHandle) -> bool:
  """Gives a draw back unrolled; False if it was not this holder's any more."""
  try:
    swap(kv, handle, lambda held: None)
  except LeaseLost:
    return False
  return True


def release_cluster(kv: ts.KvStore, cluster: str, incarnation: str) -> int:
  """Frees what earlier incarnations of a cluster's only process were rolling.

  Returns how many groups that were; their sessions count as abandoned. Not for
  clusters of several processes: it would free the draws of the living.
  """
  freed = 0
  keys = store.keys(kv, 'leases/')
  for key, (value, generation) in read_many(kv, keys).items():
    held = None if value is None else parse(value, key)
    if (
      held is not None
      and held.state == ROLLING
      and held.cluster == cluster
      and held.incarnation != incarnation
    ):
      freed += bool(store.write(kv, key, None, if_equal=generation))
  return freed


def swap(
  kv: ts.KvStore, handle: LeaseHandle, change: Callable[[Lease], Lease | None]
) -> None:
  """Compare-and-swap of the handle's lease (to None: deletes it).

  A swap is repeated where the holder itself changed the lease meanwhile (a
  renewal beside a commit), which the token tells.
  """
  end = time.monotonic() + store.WAIT_S
  while True:
    held, generation = require_held(kv, handle)
    if _write(kv, change(held), generation, handle.group_id):
      return
    if time.monotonic() > end:
      raise TimeoutError(
        f'the lease of group {handle.group_id} kept changing for'
        f' {store.WAIT_S:g} s'
      )


def require_held(kv: ts.KvStore, handle: LeaseHandle) -> tuple[Lease, bytes]:
  held, generation = read(kv, handle.group_id)
  if held is None:
    why = 'was freed'
  elif held.token != handle.token:
    why = f'is held by {held.cluster}/{held.incarnation} ({held.state})'
  elif held.state != ROLLING:
    why = 'is committed already'
  else:
    return held, generation
  raise LeaseLost(
    f'the lease of group {handle.group_id} (draw {handle.draw}) of'
    f' {handle.cluster}/{handle.incarnation} is lost: it {why}'
  )


def read(kv: ts.KvStore, group_id: str) -> tuple[Lease | None, bytes]:
  key = f'leases/{group_id}'
  value, generation = store.read(kv, key)
  return None if value is None else parse(value, key), generation


def _write(
  kv: ts.KvStore, new: Lease | None, generation: bytes, group_id: str = ''
) -> bool:
  """False where the generation is stale (TensorStore answers b'')."""
  key = f'leases/{new.group_id if new else group_id}'
  value = store.to_json(dataclasses.asdict(new)) if new else None
  return bool(store.write(kv, key, value, if_equal=generation))


def parse(value: bytes, key: str) -> Lease:
  try:
    return Lease(**store.parse_json(value, key))
  except TypeError as error:
    raise ValueError(
      f'{key} of the exchange is not a lease: {error}'
    ) from error


def _check_name(name: str) -> None:
  if not _NAME.fullmatch(name):
    raise ValueError(
      f'{name!r} cannot name a cluster, process or group on the exchange; use'
      ' letters, digits, "_", "-" and single dots between them'
    )


def read_many(
  kv: ts.KvStore, keys: Iterable[str]
) -> dict[str, tuple[bytes | None, bytes]]:
  """key -> (value or None, generation), `_BATCH` reads at a time."""
  keys = list(keys)
  found: dict[str, tuple[bytes | None, bytes]] = {}
  for at in range(0, len(keys), _BATCH):
    some = keys[at : at + _BATCH]
    for key, future in [(key, kv.read(key)) for key in some]:
      result = store.await_result(future, key, 'reading')
      value = result.value if result.state == 'value' else None
      found[key] = value, result.stamp.generation
  return found


# --- Claiming draws ----------------------------------------------------------


class LeaseBook:
  """What one rollout process knows of the draws; it claims the next free one.

  Not thread-safe: one call at a time.
  """

  def __init__(
    self,
    kv: ts.KvStore,
    cluster: str,
    incarnation: str,
    seconds: float,
    clock: Callable[[], float] = time.time,
  ):
    self._kv, self._clock = kv, clock
    self._holder = (cluster, incarnation)
    self._seconds = seconds
    self._floor = 0  # every draw below is committed
    self._done: set[int] = set()  # committed draws from there on
    self._wake: dict[int, float] = {}  # draw -> when to look at it again

  def claim(
    self, limit: int, group_id_of: Callable[[int], str]
  ) -> LeaseHandle | None:
    """Leases the lowest free draw below `limit`; None if there is none now.

    Args:
      limit: the admission bound, `admission_limit(...)`.
      group_id_of: draw -> group id, the same function in every process.
    """
    now = self._clock()
    free = [
      draw
      for draw in range(self._floor, limit)
      if draw not in self._done and self._wake.get(draw, now) <= now
    ]
    for at in range(0, len(free), _BATCH):
      ids = {draw: group_id_of(draw) for draw in free[at : at + _BATCH]}
      for draw in self._open(ids, now):
        handle = lease(
          self._kv, ids[draw], draw, *self._holder, self._seconds, now
        )
        # A lost race looks again soon: the winner may already have given up.
        wait = self._seconds if handle else min(1.0, self._seconds)
        self._wake[draw] = now + wait
        if handle is not None:
          return handle
    return None

  def forget(self, draw: int) -> None:
    """Looks at a draw again at the next claim (it was released)."""
    self._wake.pop(draw, None)

  def _open(self, ids: Mapping[int, str], now: float) -> list[int]:
    """Which of the draws can be leased; notes what is known of the others."""
    values = read_many(self._kv, [f'leases/{gid}' for gid in ids.values()])
    free = []
    for draw, gid in ids.items():
      key = f'leases/{gid}'
      value = values[key][0]
      held = None if value is None else parse(value, key)
      if held is None or (held.state == ROLLING and held.until <= now):
        free.append(draw)
      elif held.state == ROLLING:
        # No later than one lease from now: the holder may release it before.
        self._wake[draw] = min(held.until, now + self._seconds)
      else:
        self._done.add(draw)
        self._wake.pop(draw, None)
    while self._floor in self._done:
      self._done.discard(self._floor)
      self._floor += 1
    return free


def admission_limit(consumed: int, staleness: int, groups_per_step: int) -> int:
  """Draws below it may be rolled: (S + 1) steps' worth beyond the consumed.

  Whatever becomes of a group, being consumed returns its slot, so that a bound
  of 0 cannot deadlock.
  """
  return consumed + (staleness + 1) * groups_per_step
