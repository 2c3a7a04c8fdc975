"""What is kept of virtual machines: what was used last, up to a number of bytes.

An entry of the cache is a file (`agent-*`, `vmlinux-*`) or the folder of a saved
state. Who uses one holds a shared lock on it (flock, of the entry itself) until
it ends; a state that is being made is guarded by a file beside it, `<name>.lock`.
What is removed is locked by who removes it, so nothing goes that is in use, and
nothing that was used within the hour: its user may be on the way to its lock.
What this process may not remove stays, as do links, which lead elsewhere.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import shutil
import time

BYTES = 2 << 30  # of disk, as the filesystem counts
YOUNG_S = 3600.0
LOCK = '.lock'
OTHERS = 'kvm-'  # verdicts, which have an age of their own
FACTS = 'facts.json'  # of a state, written last: without it there is none


def hold(path: str) -> int:
  """A descriptor that keeps the entry until it is closed, or this process ends.

  Raises:
    FileNotFoundError: it is not there (any more).
  """
  descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not _is(path, descriptor):
      raise FileNotFoundError(f'{path} has been removed')
    os.utime(path)
  except BaseException:
    os.close(descriptor)
    raise
  return descriptor


@contextlib.contextmanager
def making(path: str) -> Iterator[None]:
  """While the entry is looked for and made: others wait."""
  while True:
    with open(path + LOCK, 'w') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if _is(path + LOCK, lock.fileno()):  # else it went with its entry
        yield
        return


def _is(path: str, descriptor: int) -> bool:
  """Whether the name still leads to what was opened."""
  try:
    return os.path.samestat(os.stat(path), os.fstat(descriptor))
  except FileNotFoundError:
    return False


def prune(cache: str, most: int = BYTES) -> list:
  """Removes what was used longest ago, beyond `most` bytes; [(name, bytes)]."""
  entries = []
  for name in _names(cache):
    path = os.path.join(cache, name)
    if os.path.islink(path):
      continue
    try:
      entries.append((os.stat(path).st_mtime, name, size_of(path)))
    except FileNotFoundError:
      pass  # another process does the same
  total, removed, now = 0, [], time.time()
  for used, name, size in sorted(entries, reverse=True):
    total += size
    if total <= most or used > now - YOUNG_S:
      continue
    if _remove(os.path.join(cache, name), used):
      removed.append((name, size))
      total -= size
  return removed


def _names(cache: str) -> Iterator[str]:
  for name in os.listdir(cache):
    if not name.startswith(OTHERS) and not name.endswith(LOCK):
      yield name


def size_of(path: str) -> int:
  """Bytes of disk that an entry takes; holes take none."""
  paths = [path]
  for folder, _, names in os.walk(path):
    paths += [os.path.join(folder, x) for x in names]
  return sum(512 * os.lstat(x).st_blocks for x in paths)


def _remove(path: str, used: float) -> bool:
  """Whether it is gone: nobody has or makes it, nor used it since `used`."""
  try:
    with contextlib.ExitStack() as held:
      if os.path.isdir(path):
        lock = held.enter_context(open(path + LOCK, 'w'))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is(path + LOCK, lock.fileno()):
          return False
      descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
      held.callback(os.close, descriptor)
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if not _is(path, descriptor) or os.stat(path).st_mtime != used:
        return False
      if os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
          # First: who is ended in the middle leaves no state that seems whole.
          os.unlink(os.path.join(path, FACTS))
        shutil.rmtree(path)
        os.unlink(path + LOCK)
      else:
        os.unlink(path)
  except OSError:
    return False
  return True
