"""The kernel of a virtual machine, and the first filesystem that it starts.

The first filesystem is a cpio archive (newc) with a static busybox, the modules
that find the disks, and a script that mounts them and hands over to the agent,
`inside/guest.py`. The agent's files are not in it: they change more often, and
are appended when a machine boots (the kernel unpacks archives one after another).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import lzma
import os
import pathlib
import re
import shutil
import stat
import tempfile

# In the kernel or as modules, in whatever order they depend on each other.
MODULES = (
  'virtio_mmio',
  'virtio_blk',
  'virtio_console',
  'vmw_vsock_virtio_transport',
  'overlay',
  'virtio-rng',
)
DEPENDS = re.compile(rb'(?<=\0)depends=([^\0]*)\0')
SCRIPT = r"""#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /lower /upper /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module; done
n=0
while [ ! -b /dev/vdb ] && [ $n -lt 100 ]; do n=$((n + 1)); sleep 0.05; done
mount -t ext4 -o ro,noatime /dev/vda /lower
mount -t ext4 -o noatime /dev/vdb /upper
mkdir -p /upper/data /upper/work
mount -t overlay overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work /root
mkdir -p /root/run /root/dev /root/proc /root/sys /root/tmp
mount -t tmpfs -o size=8m,mode=755 run /root/run
cp -r /agent /root/run/agent
exec </dev/null >/dev/null 2>&1
mount --move /proc /root/proc
mount --move /sys /root/sys
mount --move /dev /root/dev
exec switch_root /root /usr/bin/python3 -S -s -P /run/agent/guest.py
"""


def make(folder: pathlib.Path, archives: Sequence[pathlib.Path]) -> None:
  """Writes `vmlinuz` and `initrd` from the packages of kernel and busybox."""
  from composer.environments.images import build  # which imports this module

  with tempfile.TemporaryDirectory(dir=folder) as temporary:
    tree = pathlib.Path(temporary)
    for archive in archives:
      only = ('boot/vmlinuz*', 'usr/lib/modules/*', 'usr/bin/busybox')
      build.unpack(archive, tree, only)
    [kernel] = tree.glob('boot/vmlinuz-*')
    shutil.copyfile(kernel, folder / 'vmlinuz')
    version = kernel.name.removeprefix('vmlinuz-')
    modules = load_order(tree / 'usr/lib/modules' / version, MODULES)
    files: dict[str, tuple[int, bytes]] = {
      'bin/busybox': (0o755, (tree / 'usr/bin/busybox').read_bytes()),
      'init': (0o755, SCRIPT.encode()),
      'modules/order': (0o644, '\n'.join(modules).encode()),
    }
    for name, data in modules.items():
      files[f'modules/{name}'] = (0o644, data)
  (folder / 'initrd').write_bytes(archive_of(files))


def load_order(folder: pathlib.Path, wanted: Iterable[str]) -> dict[str, bytes]:
  """Modules by file name, each after those that it depends on.

  One that is not there is taken to be part of the kernel.
  """
  paths = {
    path.name.split('.ko')[0].replace('-', '_'): path
    for path in folder.rglob('*.ko*')
  }
  order: dict[str, bytes] = {}

  def add(name: str) -> None:
    name = name.replace('-', '_')
    if name not in paths or f'{name}.ko' in order:
      return
    data = paths[name].read_bytes()
    if paths[name].suffix == '.xz':
      data = lzma.decompress(data)
    needs = DEPENDS.search(b'\0' + data)
    for other in (needs[1].decode() if needs else '').split(','):
      add(other)
    order[f'{name}.ko'] = data

  for name in wanted:
    add(name)
  return order


def archive_of(files: Mapping[str, tuple[int, bytes]]) -> bytes:
  """A cpio archive, newc: path -> (permissions, contents); folders are made."""
  folders = {
    str(parent)
    for path in files
    for parent in pathlib.PurePosixPath(path).parents
    if str(parent) != '.'
  }
  entries: list[tuple[str, int, bytes]] = [
    (path, stat.S_IFDIR | 0o755, b'') for path in sorted(folders)
  ]
  entries += [(p, stat.S_IFREG | mode, x) for p, (mode, x) in files.items()]
  entries.append(('TRAILER!!!', 0, b''))
  pieces = []
  for number, (path, mode, data) in enumerate(entries, 1):
    name = os.fsencode(path) + b'\0'
    # ino mode uid gid nlink mtime size devmajor devminor rdev... namesize check
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
    head = b'070701' + b''.join(b'%08x' % x for x in fields) + name
    pieces += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]
  joined = b''.join(pieces)
  return joined + bytes(-len(joined) % 512)
