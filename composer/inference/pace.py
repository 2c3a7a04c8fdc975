"""When the engine sends its next step: at once, ahead of time, or a little later.

An accelerator works while the host records: the next step is sent before the one
before it is recorded, always. On a CPU both are done by the same cores, and so is
what the requesters do between two turns. There a step that is sent early leaves
out whoever is answered meanwhile, and goes on with who has ended; and one that is
sent before the requesters have come back takes the cores from them. Steps become
many, of few rows each, and few rows take nearly as long as many.
"""

from __future__ import annotations

AHEAD = 1  # steps that the device may work on while the host records another
SETTLES = 16  # steps without a start or an end, after which a CPU looks ahead
RETURN_S = 0.003  # that a step waits at most


class Pace:
  """What has started and ended of late; owned by the engine loop.

  `shared` says whether device and requesters share their cores. `took` is how
  long the newest step took, in seconds.
  """

  def __init__(self, shared: bool):
    self._shared = shared
    self._settled = 0  # steps since anything has started or ended
    self._away = 0  # answered of late, and not back yet
    self.took = 0.0

  @property
  def depth(self) -> int:
    """Steps that may be in flight while the loop goes on."""
    return 0 if self._shared and self._settled < SETTLES else AHEAD

  def start(self) -> None:
    """A sequence has started: perhaps one who was away is back."""
    self._settled, self._away = 0, max(self._away - 1, 0)

  def record(self, ended: int) -> None:
    """A step was recorded, and so many sequences ended of it."""
    self._settled = 0 if ended else self._settled + 1
    self._away += ended
    if self._settled >= SETTLES:  # those who are away do not come back
      self._away = 0

  def wait_s(self, running: int) -> float:
    """Seconds to wait before the next step, with so many sequences at work.

    As long as a step takes, where more requesters are away than are served.
    """
    if self._shared and 0 < running < self._away:
      return min(self.took, RETURN_S)
    return 0.0
