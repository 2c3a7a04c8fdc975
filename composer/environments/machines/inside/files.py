"""A machine's files, by paths that never lead out of a root folder.

A saved tree is a list of [path, "d", mode], [path, "f", mode, bytes],
[path, "l", target] and [path, "x"] (removed from an image), with the contents of the files behind each other. It has
what a program can leave between two commands: folders, files, links. Two names
of one file become two files; pipes and sockets, which nobody holds any more, are
left out.
"""

import errno
import os
import stat

NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


def locate(root: str, path: str, make: bool) -> str:
  """The absolute path of a path below `root`; never one outside it."""
  parts = path.split('/')
  if not path or path.startswith('/') or '..' in parts or '\0' in path:
    text = 'not a path inside the workspace (relative, without ..)'
    raise PermissionError(errno.EPERM, text, path)
  full = os.path.join(root, path)
  if len(parts) > 1:
    parent = os.path.dirname(full)
    real_root = os.path.realpath(root)
    real = os.path.realpath(parent)
    if real != real_root and not real.startswith(real_root.rstrip('/') + '/'):
      text = 'a link on the way leads out of the workspace'
      raise PermissionError(errno.EPERM, text, path)
    if make:
      os.makedirs(real, exist_ok=True)
  return full


def write_all(root: str, reader, files) -> None:
  """Writes [path, bytes] or [path, bytes, mode] from the reader.

  Consumes all data even when one is refused.
  """
  refused = None
  for path, size, *mode in files:
    descriptor = -1
    try:
      if not refused:
        descriptor = open_new(root, path)
    except OSError as error:
      refused = error
    failed = reader.copy(size, descriptor)
    if descriptor >= 0:
      if mode:
        os.fchmod(descriptor, mode[0])
      os.close(descriptor)
    if failed and not refused:
      refused = OSError(failed, os.strerror(failed), path)
  if refused:
    raise refused


def open_new(root: str, path: str) -> int:
  full = locate(root, path, make=True)
  try:
    return os.open(full, NEW | SAFE, 0o644)
  except OSError as error:
    raise OSError(error.errno, error.strerror, path) from None


def make_all(root: str, entries) -> None:
  """Folders and links of a saved tree; a mode of a folder comes last of all."""
  for path, kind, *rest in entries:
    full = locate(root, path, make=True)
    if kind == 'x' or (kind == 'l' and os.path.lexists(full)):
      remove(full)
    if kind == 'l':
      os.symlink(rest[0], full)
    if kind != 'd':
      continue
    [what] = rest
    if not os.path.isdir(full):
      os.mkdir(full)
    os.chmod(full, what)


def remove(path: str) -> None:
  if os.path.isdir(path) and not os.path.islink(path):
    for name in os.listdir(path):
      remove(os.path.join(path, name))
    os.rmdir(path)
  elif os.path.lexists(path):
    os.unlink(path)


def read(root: str, path: str, most: int) -> bytes:
  """A regular file; anything else of that name counts as no file."""
  try:
    descriptor = os.open(
      locate(root, path, make=False), os.O_RDONLY | os.O_NONBLOCK | SAFE
    )
  except PermissionError:
    raise
  except OSError:
    raise FileNotFoundError(errno.ENOENT, 'no such file', path) from None
  try:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
      raise FileNotFoundError(errno.ENOENT, 'not a regular file', path)
    if about.st_size > most:
      raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    pieces = []
    while piece := os.read(descriptor, 1 << 20):
      pieces.append(piece)
    return b''.join(pieces)
  finally:
    os.close(descriptor)


def save(root: str, most: int, skip=()) -> tuple:
  """The tree below `root` and the contents of its files.

  Names in `root` itself that `skip` has are left out.

  Raises:
    OSError: the files have more than `most` bytes (holes count), or one cannot
      be read.
  """
  entries, blobs, closed = [], [], []
  pending, total = [''], 0
  try:
    while pending:
      folder = pending.pop()
      for entry in list(os.scandir(os.path.join(root, folder))):
        path = os.path.join(folder, entry.name)
        if path in skip:
          continue
        about = entry.stat(follow_symlinks=False)
        mode = stat.S_IMODE(about.st_mode)
        if entry.is_symlink():
          entries.append([path, 'l', os.readlink(entry.path)])
          continue
        if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
          entries.append([path, 'x'])  # an overlay's mark of what was removed
          continue
        regular = stat.S_ISREG(about.st_mode)
        if not regular and not entry.is_dir():
          continue
        if mode & 0o700 != 0o700:  # ours all the same
          os.chmod(entry.path, mode | 0o700)
          closed.append((entry.path, mode))
        if regular:
          total += about.st_size
          if total > most:
            raise OSError(errno.EFBIG, f'more than {most >> 20} MB', path)
          blobs.append(read(root, path, most))
          entries.append([path, 'f', mode, len(blobs[-1])])
        else:
          entries.append([path, 'd', mode])
          pending.append(path)
  finally:
    for path, mode in reversed(closed):
      os.chmod(path, mode)
  return entries, blobs
