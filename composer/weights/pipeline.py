"""Publishing beside the trainer: what changed is found, coded and uploaded while
the next step computes.

    trainer thread    submit(version, make)         returns at once
    worker thread     make(form) -> publish -> after(form, stats)

`make` runs in the worker: what it does (copies from devices, conversion to a
form) costs the trainer nothing but the memory of one version. At most one
version waits while one is on its way. With one host a newer one takes the place
of the one that waits: a store that is slower than the steps makes versions
rarer, never the trainer slower. Hosts that publish together must publish the
same versions, so there `submit` waits for its place.

A store that fails is tried again for `patience_s`, with whatever is the newest
version by then. What goes wrong for good, a full disk among it, is raised by the
next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import errno
import threading
import time
from typing import Any

from composer.weights import pieces
from composer.weights import sync

# What no waiting helps against: a full disk, a store that refuses us.
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
RETRY_S = (0.1, 10.0)  # first and longest pause between two attempts


@dataclasses.dataclass(frozen=True)
class Form:
  """What a host uploads of a version in one form; see `Publisher.publish`."""

  flat: Mapping[str, Any]
  shapes: Mapping[str, pieces.Shape] = dataclasses.field(default_factory=dict)


Make = Callable[[str], Form]


@dataclasses.dataclass(frozen=True)
class Published:
  """One form of one version, on the exchange."""

  form: str
  stats: sync.PublishStats
  waited_s: float  # from `submit` to the beginning
  attempts: int


class Pipeline:
  """Publishes the versions of one trainer, in all its forms. One submitter.

  Attributes:
    blocked_s: how long `submit` and `flush` made the trainer wait, in all.
    replaced: versions that gave way to a newer one.
  """

  def __init__(
    self,
    publishers: Mapping[str, sync.Publisher],
    *,
    together: bool = False,
    patience_s: float = 600.0,
    after: Callable[[str, sync.PublishStats], None] = lambda form, stats: None,
  ):
    """Starts the worker.

    Args:
      publishers: by form.
      together: several hosts publish the same versions.
      patience_s: for how long a failing store is tried again.
      after: called by the worker after each publication (to collect, say);
        its failure counts as the store's.
    """
    self._publishers = dict(publishers)
    self._together, self._patience_s = together, patience_s
    self._after = after
    self._changed = threading.Condition()
    self._waiting: tuple[int, Make, float] | None = None
    self._busy = False
    self._closing = False
    self._failure: BaseException | None = None
    self._done: list[Published] = []
    self.blocked_s = 0.0
    self.replaced = 0
    self._thread = threading.Thread(
      target=self._main, name='publish', daemon=True
    )
    self._thread.start()

  @property
  def forms(self) -> tuple[str, ...]:
    """What is published of every version."""
    return tuple(self._publishers)

  def submit(self, version: int, make: Make) -> None:
    """Hands over a version; `make(form)` is called later, by the worker.

    Raises:
      PublisherFenced, OSError, TimeoutError, ValueError: an earlier version
        could not be published.
    """
    started = time.monotonic()
    with self._changed:
      self.check()
      if self._together:
        self._wait(lambda: self._waiting is None, self._patience_s)
      elif self._waiting is not None:
        self.replaced += 1
      self._waiting = version, make, started
      self._changed.notify_all()
    self.blocked_s += time.monotonic() - started

  def finished(self) -> list[Published]:
    """What was published since the last call; raises like `submit`."""
    with self._changed:
      self.check()
      done, self._done = self._done, []
    return done

  def flush(self, seconds: float | None = None) -> None:
    """Waits until all that was submitted is on the exchange.

    Raises:
      TimeoutError: not within `seconds` (default: the patience and a minute).
    """
    started = time.monotonic()
    limit = self._patience_s + 60.0 if seconds is None else seconds
    with self._changed:
      self._wait(lambda: self._waiting is None and not self._busy, limit)
    self.blocked_s += time.monotonic() - started

  def close(self, seconds: float = 60.0) -> None:
    """Ends the worker after what it is doing; what waits is given up."""
    with self._changed:
      self._closing, self._waiting = True, None
      self._changed.notify_all()
    self._thread.join(seconds)

  def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
    ended = lambda: ready() or self._failure is not None  # noqa: E731
    if not self._changed.wait_for(ended, seconds):
      raise TimeoutError(
        f'the weights of a version were not published within {seconds:g} s'
      )
    self.check()

  def check(self) -> None:
    """Raises what made a publication fail for good."""
    if self._failure is not None:
      raise self._failure
    if self._closing:
      raise RuntimeError('the pipeline is closed')

  # --- in the worker ----------------------------------------------------------

  def _main(self) -> None:
    try:
      while (item := self._next()) is not None:
        self._publish(*item)
        with self._changed:
          self._busy = False
          self._changed.notify_all()
    except BaseException as error:
      with self._changed:
        self._failure = error
        self._busy = False
        self._changed.notify_all()

  def _next(self) -> tuple[int, Make, float] | None:
    with self._changed:
      self._changed.wait_for(lambda: self._closing or self._waiting is not None)
      if self._closing:
        return None
      item, self._waiting, self._busy = self._waiting, None, True
      self._changed.notify_all()
      return item

  def _newer(self) -> tuple[int, Make, float] | None:
    """What waits, in place of a version that cannot be published now."""
    with self._changed:
      item = None if self._together else self._waiting
      if item is not None:
        self._waiting = None
        self.replaced += 1
      return item

  def _publish(self, version: int, make: Make, submitted: float) -> None:
    left = dict(self._publishers)
    landed: dict[str, sync.PublishStats] = {}
    pause, attempts = RETRY_S[0], 0
    deadline = time.monotonic() + self._patience_s
    while left:
      form, publisher = next(iter(left.items()))
      attempts += 1
      waited = time.monotonic() - submitted
      try:
        if form not in landed:  # else only `after` failed
          made = make(form)
          landed[form] = publisher.publish(
            made.flat, version, shapes=made.shapes, copy=False
          )
        stats = landed[form]
        self._after(form, stats)
      except OSError as error:  # TimeoutError is one
        lasting = error.errno in LASTING or time.monotonic() > deadline
        if lasting or self._closing or self._together:
          raise
        time.sleep(pause)
        pause = min(RETRY_S[1], 2 * pause)
        newer = self._newer()
        if newer is not None:
          version, make, submitted = newer
          left, landed = dict(self._publishers), {}
        continue
      with self._changed:
        self._done.append(Published(form, stats, waited, attempts))
      del left[form]
