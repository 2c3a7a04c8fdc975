"""A pool on an event loop of its own thread, which many tests share."""

import asyncio
import contextlib
import threading

import pytest

from composer.config import MachineConfig
from composer.environments import images
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import microvm

LIMIT_S = 240.0  # of a call of a test; a busy host emulates slowly
SIZES = dict(warm=0, memory_mb=128, disk_mb=16, processes=32, concurrent=8)


class Live:
  """A pool, and machines of it, from a test that is not a coroutine."""

  def __init__(self, config):
    self.loop = asyncio.new_event_loop()
    self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
    self.thread.start()
    self.pool = None
    try:
      self.pool = self.call(self._open(config))
    except BaseException:
      self.close()
      raise

  async def _open(self, config):
    pool = Pool(config, wait_s=LIMIT_S)
    await pool.open()
    return pool

  def call(self, coroutine, limit_s=LIMIT_S):
    return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(
      limit_s
    )

  @contextlib.contextmanager
  def machine(self, files=None, snapshot=None):
    machine = self.call(self.pool.acquire(files or {}, snapshot))
    try:
      yield machine
    finally:
      self.call(self.pool.release(machine))

  def run(self, argv, timeout_s=None, files=None):
    """The result of one command in a clean machine."""
    with self.machine(files) as machine:
      return self.call(machine.run(argv, timeout_s))

  def close(self):
    if self.pool is not None:
      self.call(self.pool.close())
    self.loop.call_soon_threadsafe(self.loop.stop)
    self.thread.join(10)
    self.loop.close()


def why_no_microvm(image):
  """'' where virtual machines can start from the image, else what is missing."""
  try:
    microvm._programs('auto')
    images.find(image)
  except (MissingFacility, ValueError) as error:
    return str(error)
  return ''


def needs_microvm(image='base'):
  reason = why_no_microvm(image)
  return pytest.mark.skipif(bool(reason), reason=reason)


def open_live(driver, **changes):
  """A live pool, or a skip where the driver cannot work here."""
  try:
    return Live(MachineConfig(driver=driver, **{**SIZES, **changes}))
  except MissingFacility as error:
    pytest.skip(str(error))
