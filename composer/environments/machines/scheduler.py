"""Which request gets a machine on which host, and what follows a death.

Pure bookkeeping, without clocks or machines: the pool drives it with real ones
on its own host, `composer bench fleet` with a model of many hosts. A request
waits in order of arrival; one whose machine died goes to the front after a
backoff, on another host where there is one, and fails for good after `ATTEMPTS`.
Every request is waiting, held back, running or at its end: none is lost.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq

ATTEMPTS = 5
BACKOFF_S = 0.02  # doubled after every failure, times 0.5 to 1.5


@dataclasses.dataclass
class Host:
  """A host of machines.

  Attributes:
    name: unique.
    slots: machines that it may have at once.
    running: that it has.
    open: takes new ones (false under pressure).
  """

  name: str
  slots: int
  running: int = 0
  open: bool = True


@dataclasses.dataclass(frozen=True)
class Grant:
  """A request may start its machine on a host."""

  request: int
  host: str


class Scheduler:
  """Owner of the queue; `random` gives numbers in [0, 1) for the backoff."""

  def __init__(self, random):
    self.hosts: dict[str, Host] = {}
    self.held_back: list[tuple[float, int]] = []  # a heap: (until, request)
    self.failures: dict[int, int] = {}
    self.failed_on: dict[int, str] = {}
    self.running: dict[int, str] = {}
    self._random = random
    self._waiting: collections.deque[int] = collections.deque()
    self._again: collections.deque[int] = collections.deque()
    self._gone: set[int] = set()  # withdrawn, still in one of the queues
    self._room: dict[int, dict[str, None]] = {}  # by running machines: hosts

  def add_host(self, name: str, slots: int) -> None:
    if name in self.hosts or slots < 1:
      raise ValueError(
        f'host {name!r} with {slots} slots: known, or without any'
      )
    self.hosts[name] = Host(name, slots)
    self._file(self.hosts[name])

  def remove_host(self, name: str) -> list[int]:
    """A host is dead: the requests whose machines died with it.

    The caller says `failed` for each of them.
    """
    host = self.hosts.pop(name)
    self._unfile(host)
    return [request for request, at in self.running.items() if at == name]

  def set_open(self, name: str, is_open: bool) -> None:
    """Whether a host takes new machines; those that it has go on."""
    host = self.hosts[name]
    if host.open != is_open:
      self._unfile(host)
      host.open = is_open
      self._file(host)

  def submit(self, request: int) -> None:
    self._waiting.append(request)

  def withdraw(self, request: int) -> None:
    """A request that is waiting is not wanted any more."""
    self._gone.add(request)
    self._forget(request)

  def next(self, now: float) -> Grant | None:
    """The next request to serve, if any host has room; call until None."""
    self._wake(now)
    while self._again or self._waiting:
      queue = self._again or self._waiting
      if queue[0] in self._gone:
        self._gone.discard(queue.popleft())
        continue
      host = self._choose(self.failed_on.get(queue[0], ''))
      if host is None:
        return None
      request = queue.popleft()
      self._unfile(host)
      host.running += 1
      self._file(host)
      self.running[request] = host.name
      return Grant(request, host.name)
    return None

  def wake_at(self) -> float | None:
    """When `next` may have more, with nothing else happening."""
    return self.held_back[0][0] if self.held_back else None

  def done(self, request: int) -> None:
    """A request's machine has ended in order."""
    self._leave(request)
    self._forget(request)

  def failed(self, request: int, now: float) -> bool:
    """A request's machine died; whether it is tried again."""
    self.failed_on[request] = self._leave(request)
    count = self.failures.get(request, 0) + 1
    self.failures[request] = count
    if count >= ATTEMPTS:
      self._forget(request)
      return False
    wait = BACKOFF_S * 2 ** (count - 1) * (0.5 + self._random())
    heapq.heappush(self.held_back, (now + wait, request))
    return True

  def counts(self) -> dict[str, int]:
    """Requests that are waiting, held back after a failure, and running."""
    waiting = len(self._waiting) + len(self._again)
    held = len(self.held_back)
    return {
      'waiting': waiting + held - len(self._gone),
      'held_back': held,
      'running': len(self.running),
    }

  def _wake(self, now: float) -> None:
    while self.held_back and self.held_back[0][0] <= now:
      self._again.append(heapq.heappop(self.held_back)[1])

  def _leave(self, request: int) -> str:
    name = self.running.pop(request)
    host = self.hosts.get(name)
    if host is not None:
      self._unfile(host)
      host.running -= 1
      self._file(host)
    return name

  def _forget(self, request: int) -> None:
    self.failures.pop(request, None)
    self.failed_on.pop(request, None)

  def _choose(self, avoid: str) -> Host | None:
    """The emptiest host with room; `avoid` only where there is no other."""
    last = None
    for count in sorted(self._room):
      for name in self._room[count]:
        if name != avoid:
          return self.hosts[name]
        last = self.hosts[name]
    return last

  def _file(self, host: Host) -> None:
    if host.open and host.running < host.slots:
      self._room.setdefault(host.running, {})[host.name] = None

  def _unfile(self, host: Host) -> None:
    names = self._room.get(host.running)
    if names and host.name in names:
      del names[host.name]
      if not names:
        del self._room[host.running]
