"""A control group of one command or machine: version 2, or two of version 1.

A group is reached by descriptors that are opened before its filesystem goes out
of sight, so a machine needs no view of it.
"""

import os

KINDS = ('memory', 'pids')
PREFIX = 'composer-'
ROOT = '/sys/fs/cgroup'


def find() -> dict:
  """Kind -> descriptor of the folder where this process may make groups.

  Empty where it may not. In version 2 that takes a group that has both
  controllers handed on to its children, so one without processes of its own:
  this process's parent group, where this process is alone in a leaf of it.
  """
  try:
    with open('/proc/self/cgroup') as file:
      own = [line.rstrip('\n').split(':', 2) for line in file]
  except OSError:
    return {}
  version1 = {kind: path for _, kinds, path in own for kind in kinds.split(',')}
  if all(kind in version1 for kind in KINDS):
    paths = {kind: f'{ROOT}/{kind}{version1[kind]}' for kind in KINDS}
  else:
    parent = os.path.dirname(version1.get('', ''))
    paths = dict.fromkeys(KINDS, f'{ROOT}{parent}')
    try:
      with open(f'{ROOT}{parent}/cgroup.subtree_control') as file:
        handed_on = file.read().split()
    except OSError:
      return {}
    if not all(kind in handed_on for kind in KINDS):
      return {}
  if not all(os.access(path, os.W_OK) for path in paths.values()):
    return {}
  flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
  folders: dict = {}
  for path in paths.values():
    if path not in folders:
      folders[path] = os.open(path, flags)
  return {kind: folders[path] for kind, path in paths.items()}


def sweep(parents: dict, alive) -> bool:
  """Removes groups by the name `composer-<pid>-<n>` unless alive(pid).

  False if something is still dying in one.
  """
  clean = True
  for parent in set(parents.values()):
    for name in os.listdir(parent):
      if name.startswith(PREFIX) and not alive(int(name.split('-')[1])):
        try:
          os.rmdir(name, dir_fd=parent)
        except OSError:
          clean = False
  return clean


class Group:
  """A group below `parents` (kind -> descriptor of a folder).

  In version 2 both kinds share one folder; `names` has it once.
  """

  def __init__(self, parents: dict, name: str, memory: int, processes: int):
    self.parents = parents
    self.name = name
    self.version = 2 if len(set(parents.values())) == 1 else 1
    for parent in set(parents.values()):
      os.mkdir(name, dir_fd=parent)
    if self.version == 2:
      self.put('memory', 'memory.max', memory)
      self.put('memory', 'memory.swap.max', 0, needed=False)
      self.put('memory', 'memory.oom.group', 1, needed=False)
    else:
      self.put('memory', 'memory.limit_in_bytes', memory)
    self.put('pids', 'pids.max', processes)

  def put(self, kind: str, name: str, value, needed: bool = True) -> None:
    path = f'{self.name}/{name}'
    try:
      file = os.open(path, os.O_WRONLY, dir_fd=self.parents[kind])
    except OSError:
      if needed:
        raise
      return
    try:
      os.write(file, str(value).encode())
    finally:
      os.close(file)

  def get(self, kind: str, name: str) -> str:
    path = f'{self.name}/{name}'
    file = os.open(path, os.O_RDONLY, dir_fd=self.parents[kind])
    try:
      return os.read(file, 4096).decode()
    finally:
      os.close(file)

  def enter(self) -> None:
    """Moves this process in."""
    kinds = ('memory',) if self.version == 2 else KINDS
    for kind in kinds:
      self.put(kind, 'cgroup.procs', 0)

  def kills(self) -> int:
    """How many processes of it the kernel killed for want of memory."""
    name = 'memory.events' if self.version == 2 else 'memory.oom_control'
    words = self.get('memory', name).split()
    return int(words[words.index('oom_kill') + 1])

  def kill(self) -> None:
    """Kills everything in it; version 2."""
    self.put('memory', 'cgroup.kill', 1)

  def empty(self) -> bool:
    return 'populated 0' in self.get('memory', 'cgroup.events')

  def remove(self) -> bool:
    """Whether it is gone; it is not while something dies in it."""
    return removed(self.parents, self.name)


def removed(parents: dict, name: str) -> bool:
  """Removes the group of an ended machine; false while it is not empty."""
  gone = True
  for parent in set(parents.values()):
    try:
      os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
      pass
    except OSError:
      gone = False
  return gone
