"""Namespaces, mounts, limits and privileges, by system calls.

The zygote enters a mount and a pid namespace (and a user namespace, unless it
is a root that may do without) and builds a root of read-only views of the
interpreter and the system's programs. A machine gets mount, ipc, uts, net and
pid namespaces of its own, mounts a sized tmpfs and its own /proc, and only then
enters a user namespace that owns none of these: whatever becomes of it, it has
no power over its mounts.
"""

import _signal as signal
import ctypes
import os
import resource
import struct
import sys
import time

import groups
import seccomp

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1024, 2048, 1 << 21
ST_RELATIME = 4096
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21
NOBODY = 65534
MACHINE = '/machine'
GROUP_SPARE_MB = 8  # process 1's own
IMAGE = '/image'
MOUNTED = ('dev', 'proc', 'machine', 'tmp')  # in the root of an image
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # everywhere the same
MOUNT_ATTR_IDMAP = 0x100000

_libc = ctypes.CDLL(None, use_errno=True)
_state = {
  'outer': 0,  # user id of machines, outside
  'root': False,  # of the host, with its capabilities
  'mapped': False,  # the image's owner is the machine's root
  'parents': {},  # where control groups can be made
  'prefix': '',  # of their names
}


class Missing(Exception):
  """A facility that the kernel refuses."""

  def __init__(self, facility: str, errno: int):
    super().__init__(facility, errno)
    self.facility = facility
    self.errno = errno


def call(facility: str, name: str, *args) -> None:
  if getattr(_libc, name)(*args) != 0:
    raise Missing(facility, ctypes.get_errno())


def attempt(facility: str, function, *args):
  try:
    return function(*args)
  except OSError as error:
    raise Missing(facility, error.errno or 0) from error


def mount(source: str, target: str, kind: str, flags: int, data: str = ''):
  what = f'mount({kind or source} on {target})'
  names = (source.encode(), target.encode(), kind.encode() or None)
  call(what, 'mount', *names, ctypes.c_ulong(flags), data.encode() or None)


def write(path: str, text: str) -> None:
  descriptor = attempt(f'open({path})', os.open, path, os.O_WRONLY)
  try:
    attempt(f'write({path})', os.write, descriptor, text.encode())
  finally:
    os.close(descriptor)


# --- the zygote --------------------------------------------------------------


def enter(config: dict) -> int:
  """Moves this process into its namespaces; returns its pid namespace.

  Forks: what returns is process 1 of a new pid namespace, the caller waits for
  it and ends with it.
  """
  uid = os.geteuid()
  root = uid == 0 and _has(CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID)
  if uid == 0 and not root:
    # Root of the host must not be root of a machine, /proc/sys obeys it.
    _become_nobody()
  _state['root'] = root
  parents = _control_groups()
  _state['outer'] = NOBODY if root else os.geteuid()
  if not root:
    gid = os.getegid()
    call('unshare(CLONE_NEWUSER)', 'unshare', NEWUSER)
    write('/proc/self/setgroups', 'deny')
    write('/proc/self/uid_map', f'0 {_state["outer"]} 1')
    write('/proc/self/gid_map', f'0 {gid} 1')
  call('unshare(CLONE_NEWNS|CLONE_NEWPID)', 'unshare', NEWNS | NEWPID)
  child = os.fork()
  if child:
    status = os.waitpid(child, 0)[1]
    own = os.getpid()
    for _ in range(100):
      if groups.sweep(parents, lambda pid: pid != own):
        break
      time.sleep(0.005)
    os._exit(0 if status == 0 else 1)
  die_with_parent()
  _state['parents'] = parents
  _build_root(config)
  return os.open('/proc/self/ns/pid', os.O_RDONLY | os.O_CLOEXEC)


def _control_groups() -> dict:
  """Where groups can be made; one is, as a trial. What others left is removed."""
  parents = groups.find()
  try:
    groups.sweep(parents, lambda pid: os.path.exists(f'/proc/{pid}'))
    if parents:
      name = f'{groups.PREFIX}{os.getpid()}-0'
      groups.Group(parents, name, 1 << 26, 16).remove()
      _state['prefix'] = name[:-1]
  except (OSError, ValueError):
    return {}
  return parents


def next_pid_namespace(own: int) -> None:
  """The next child is process 1 of a pid namespace of its own."""
  call('setns(CLONE_NEWPID)', 'setns', own, NEWPID)
  call('unshare(CLONE_NEWPID)', 'unshare', NEWPID)


def take_network(networks: list) -> int:
  """The next child is in a network namespace of its own; a descriptor of it."""
  if networks:
    network = networks.pop()
    call('setns(CLONE_NEWNET)', 'setns', network, NEWNET)
    return network
  call('unshare(CLONE_NEWNET)', 'unshare', NEWNET)
  return os.open('/proc/self/ns/net', os.O_RDONLY | os.O_CLOEXEC)


def die_with_parent() -> None:
  if sys.platform == 'linux':
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def trim() -> None:
  """Gives free memory back: what is not here is not copied by a fork."""
  if hasattr(_libc, 'malloc_trim'):
    _libc.malloc_trim(0)


def _has(*capabilities: int) -> bool:
  with open('/proc/self/status') as file:
    line = next(x for x in file if x.startswith('CapEff'))
  held = int(line.split()[1], 16)
  return all(held >> capability & 1 for capability in capabilities)


def _become_nobody() -> None:
  attempt('setgroups()', os.setgroups, [])
  attempt(f'setresgid({NOBODY})', os.setresgid, NOBODY, NOBODY, NOBODY)
  attempt(f'setresuid({NOBODY})', os.setresuid, NOBODY, NOBODY, NOBODY)
  # Else /proc/self, where the maps are written, belongs to root.
  _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def _build_root(config: dict) -> None:
  """A root of its own: read-only views, /dev, /proc; nothing else of the host."""
  mount('none', '/', '', MS_REC | MS_PRIVATE)
  mount('tmpfs', '/tmp', 'tmpfs', MS_NOSUID | MS_NODEV, 'mode=755')
  os.chdir('/tmp')
  os.mkdir('old')
  os.mkdir('new')
  _pivot('.', 'old')
  os.chdir('/')
  mount('tmpfs', '/new', 'tmpfs', MS_NOSUID | MS_NODEV, 'mode=755')
  for path in _views(config['views']):
    os.makedirs('/new' + path, exist_ok=True)
    mount('/old' + path, '/new' + path, '', MS_BIND | MS_REC)
  for path in ('/bin', '/sbin', '/lib', '/lib32', '/lib64'):
    if os.path.islink('/old' + path) and not os.path.lexists('/new' + path):
      os.symlink(os.readlink('/old' + path), '/new' + path)
  _cover(config['hide'])
  _read_only()
  _devices()
  _etc()
  for path in (MACHINE, '/proc'):
    os.mkdir('/new' + path)
  if not os.path.exists('/new/tmp'):  # an interpreter may live there
    os.symlink(MACHINE + '/tmp', '/new/tmp')
  mount('proc', '/new/proc', 'proc', MS_NOSUID | MS_NODEV | MS_NOEXEC)
  if config['image']:
    os.mkdir('/new' + IMAGE)
    _state['mapped'] = _show_image('/old' + config['image'], '/new' + IMAGE)
  os.chdir('/new')
  _pivot('.', '.')
  call('umount2(old root)', 'umount2', b'.', MNT_DETACH)
  os.chdir('/')
  mount(
    'none', '/', '', MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
  )


def _pivot(new: str, old: str) -> None:
  numbers = {'x86_64': 155, 'aarch64': 41, 'riscv64': 41}
  machine = os.uname().machine
  if machine not in numbers:
    raise Missing(f'pivot_root (unknown on {machine})', 38)
  args = (numbers[machine], new.encode(), old.encode())
  call('pivot_root', 'syscall', *args)


def _views(wanted: list) -> list:
  """Directories to show, none inside another; libraries in use included."""
  with open('/old/proc/self/maps') as file:
    mapped = {line.split(None, 5)[-1].strip() for line in file if '/' in line}
  libraries = {
    os.path.dirname(x).removeprefix('/old')
    for x in mapped
    if '.so' in os.path.basename(x)
  }
  paths = sorted(
    path
    for path in {*wanted, *libraries}
    if os.path.isdir('/old' + path) and not os.path.islink('/old' + path)
  )
  kept: list = []
  for path in paths:
    if path != '/' and not any(path.startswith(x + '/') for x in kept):
      kept.append(path)
  return kept


def _read_only() -> None:
  """Makes every mount of the new root read-only, /new itself excepted.

  Flags that the host's mount has are locked here, and must be repeated.
  """
  with open('/old/proc/self/mountinfo') as file:
    points = [line.split()[4] for line in file]
  for point in points:
    path = point.replace('\\040', ' ')  # as mountinfo spells a space
    if not path.startswith('/new/'):
      continue
    have = os.statvfs(path).f_flag
    flags = have & (
      MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME
    )
    flags |= MS_RELATIME if have & ST_RELATIME else 0
    flags |= MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    mount('none', path, '', flags)


def _cover(hidden: list) -> None:
  """Hides installed packages: they may hold the very answers to a task."""
  os.mkdir('/new/empty')
  for path in hidden:
    if os.path.isdir('/new' + path):
      mount('/new/empty', '/new' + path, '', MS_BIND)


def _devices() -> None:
  os.mkdir('/new/dev')
  for name in ('null', 'zero', 'full', 'random', 'urandom'):
    os.close(os.open(f'/new/dev/{name}', os.O_CREAT | os.O_WRONLY, 0o666))
    mount(f'/old/dev/{name}', f'/new/dev/{name}', '', MS_BIND)
  for link, target in (
    ('fd', '/proc/self/fd'),
    ('stdin', '/proc/self/fd/0'),
    ('stdout', '/proc/self/fd/1'),
    ('stderr', '/proc/self/fd/2'),
    ('shm', MACHINE + '/tmp'),
  ):
    os.symlink(target, f'/new/dev/{link}')


def _etc() -> None:
  os.mkdir('/new/etc')
  home = f'{MACHINE}/work'
  texts = {
    'passwd': f'root:x:0:0:root:{home}:/bin/sh\n',
    'group': 'root:x:0:\n',
    'hosts': '127.0.0.1 localhost\n',
  }
  for name, text in texts.items():
    with open(f'/new/etc/{name}', 'w') as file:
      file.write(text)
  for name in ('ld.so.cache', 'localtime'):
    try:
      with open(f'/old/etc/{name}', 'rb') as source:
        data = source.read()
    except OSError:
      continue  # absolute links of the host lead nowhere here; not needed
    with open(f'/new/etc/{name}', 'wb') as target:
      target.write(data)
  if os.path.isdir('/old/etc/alternatives'):
    os.mkdir('/new/etc/alternatives')
    for entry in os.scandir('/old/etc/alternatives'):
      if entry.is_symlink():
        link = os.readlink(entry.path)
        os.symlink(link, f'/new/etc/alternatives/{entry.name}')


# --- images ------------------------------------------------------------------


def _show_image(source: str, target: str) -> bool:
  """Binds an image, read-only; whether its files belong to the machine's root.

  They do where this user owns them. As root of the host, machines are nobody's,
  and the mount maps the owner (Linux 5.19 for an overlay over it).
  """
  if not _state['root']:
    mount(source, target, '', MS_BIND | MS_REC)
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    mount('none', target, '', flags)
    return True
  tree = _libc.syscall(
    OPEN_TREE,
    AT_FDCWD,
    source.encode(),
    1 | os.O_CLOEXEC,  # a copy of it
  )
  if tree < 0:
    raise Missing('open_tree', ctypes.get_errno())
  space = _owner_space()
  attributes = struct.pack(
    'QQQQ', MS_RDONLY | 2 | 4 | MOUNT_ATTR_IDMAP, 0, 0, space
  )
  mapped = not _libc.syscall(
    MOUNT_SETATTR, tree, b'', AT_EMPTY_PATH, attributes, len(attributes)
  )
  os.close(space)
  if _libc.syscall(MOVE_MOUNT, tree, b'', AT_FDCWD, target.encode(), 4):
    raise Missing('move_mount', ctypes.get_errno())
  os.close(tree)
  if not mapped:
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    mount('none', target, '', flags)
  return mapped


def image_is_own() -> bool:
  """Whether a machine may change what its image holds, in its overlay."""
  return _state['mapped']


def _owner_space() -> int:
  """A user namespace in which root is nobody of the host."""
  ready, go = os.pipe(), os.pipe()
  child = os.fork()
  if child == 0:
    try:
      call('unshare(CLONE_NEWUSER)', 'unshare', NEWUSER)
      os.write(ready[1], b'x')
      os.read(go[0], 1)
    finally:
      os._exit(0)
  os.read(ready[0], 1)
  for name in ('uid_map', 'gid_map'):
    write(f'/new/proc/{child}/{name}', f'0 {NOBODY} 1')
  space = os.open(f'/new/proc/{child}/ns/user', os.O_RDONLY | os.O_CLOEXEC)
  os.write(go[1], b'x')
  os.waitpid(child, 0)
  for descriptor in (*ready, *go):
    os.close(descriptor)
  return space


def _enter_image(owner: int) -> int:
  """Makes an overlay over the image the root; a descriptor of its changes."""
  upper, work = f'{MACHINE}/upper', f'{MACHINE}/overlay'
  root, own = f'{MACHINE}/root', f'{MACHINE}/own'
  for path in (upper, work, root, own, f'{own}/work', f'{own}/tmp'):
    os.mkdir(path)
    os.chown(path, owner, owner)
  options = f'lowerdir={IMAGE},upperdir={upper},workdir={work}'
  options += '' if _state['root'] else ',userxattr'
  mount('overlay', root, 'overlay', MS_NOSUID | MS_NODEV, options)
  for name in MOUNTED:
    if not os.path.isdir(f'{root}/{name}'):
      os.mkdir(f'{root}/{name}')
  mount('/dev', f'{root}/dev', '', MS_BIND | MS_REC)
  flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
  mount('proc', f'{root}/proc', 'proc', flags)
  mount(own, f'{root}/machine', '', MS_BIND)
  mount(f'{own}/tmp', f'{root}/tmp', '', MS_BIND)
  changes = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  os.chdir(root)
  _pivot('.', '.')
  call('umount2(old root)', 'umount2', b'.', MNT_DETACH)
  os.chdir('/')
  return changes


# --- a machine ---------------------------------------------------------------


def become_machine(config: dict, number: int) -> tuple:
  """Isolates this process, process 1 of its pid namespace.

  Its workspace, a descriptor of what it changes of its image, or -1, and its
  control group, or None.
  """
  die_with_parent()
  group = _enter_group(config, number)
  everything = NEWNS | NEWIPC | NEWUTS  # the network is the zygote's to give
  call('unshare(CLONE_NEWNS|CLONE_NEWIPC|CLONE_NEWUTS)', 'unshare', everything)
  mount('proc', '/proc', 'proc', MS_NOSUID | MS_NODEV | MS_NOEXEC)
  owner = _state['outer'] if _state['root'] else 0
  options = f'size={config["disk_mb"]}m,nr_inodes=4096,mode=700'
  options += f',uid={owner},gid={owner}'
  mount('tmpfs', MACHINE, 'tmpfs', MS_NOSUID | MS_NODEV, options)
  _libc.sethostname(b'machine', 7)
  upper = -1
  if config['image']:
    upper = _enter_image(owner)
  if _state['root']:
    _become_nobody()
  os.umask(0o022)
  call('unshare(CLONE_NEWUSER)', 'unshare', NEWUSER)
  write('/proc/self/setgroups', 'deny')
  inner = _state['outer'] if _state['root'] else 0
  write('/proc/self/uid_map', f'0 {inner} 1')
  write('/proc/self/gid_map', f'0 {inner} 1')
  # Else a program could be root of a namespace made by itself, and mount.
  write('/proc/sys/user/max_user_namespaces', '0')
  # Only now: a limit on processes that is in force when a user namespace is made
  # binds all machines of the outer user together, not each of them.
  limit(config, count_processes=True)
  _drop_privileges()
  return _workspace(MACHINE), upper, group


def _enter_group(config: dict, number: int):
  """A group that bounds the machine; files in its workspace are memory too."""
  if not _state['parents']:
    return None
  megabytes = config['memory_mb'] + config['disk_mb'] + GROUP_SPARE_MB
  group = groups.Group(
    _state['parents'],
    f'{_state["prefix"]}{number}',
    megabytes << 20,
    config['processes'] + 1,
  )
  group.enter()
  return group


def leave_group(number: int) -> bool:
  """Removes the group of an ended machine; false while it is not empty."""
  return groups.removed(_state['parents'], f'{_state["prefix"]}{number}')


def become_process(config: dict, number: int) -> tuple:
  """A plain process: limits where the system has them, a folder of its own."""
  die_with_parent()
  if sys.platform == 'linux':
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
  limit(config, count_processes=False)
  os.umask(0o022)
  return _workspace(os.path.join(config['scratch'], str(number))), -1, None


def _workspace(folder: str) -> str:
  work = os.path.join(folder, 'work')
  temporary = os.path.join(folder, 'tmp')
  os.makedirs(work, exist_ok=True)
  os.makedirs(temporary, exist_ok=True)
  os.environ['HOME'] = work
  os.environ['TMPDIR'] = temporary
  os.chdir(work)
  return work


def remove_tree(folder: str) -> None:
  """Without `shutil`: it loads libraries that every fork would carry."""
  for path, folders, files in os.walk(folder, topdown=False):
    for name in files + folders:
      full = os.path.join(path, name)
      try:
        link = name in files or os.path.islink(full)
        (os.unlink if link else os.rmdir)(full)
      except OSError:
        pass  # what remains, the pool removes when it closes
  try:
    os.rmdir(folder)
  except OSError:
    pass


def limit(config: dict, count_processes: bool) -> None:
  """Limits of a process; the hard ones, so that they cannot be raised."""
  memory = config['memory_mb'] << 20
  wanted = [
    ('RLIMIT_AS', memory),
    ('RLIMIT_FSIZE', config['disk_mb'] << 20),
    ('RLIMIT_NOFILE', 256),
    ('RLIMIT_CORE', 0),
  ]
  if count_processes:
    wanted.append(('RLIMIT_NPROC', config['processes'] + 1))
    wanted += [('RLIMIT_MSGQUEUE', 0), ('RLIMIT_MEMLOCK', 0)]
  for name, value in wanted:
    try:
      resource.setrlimit(getattr(resource, name), (value, value))
    except (AttributeError, OSError, ValueError):
      if count_processes:
        raise Missing(f'setrlimit({name}={value})', 0) from None


def _drop_privileges() -> None:
  """No capability now, none by exec, no debugger on process 1."""
  no_new = (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  call('prctl(PR_SET_NO_NEW_PRIVS)', 'prctl', *no_new)
  failed = seccomp.install(_libc)
  if failed:
    raise Missing('prctl(PR_SET_SECCOMP)', failed)
  header = struct.pack('Ii', 0x20080522, 0)  # version 3, this process
  call('capset', 'capset', header, bytes(24))
  _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
  die_with_parent()  # a change of credentials cleared it
