"""A filter of system calls, as a BPF program.

Refused (EPERM) is what has no use in a machine and either escapes its limits
(memory in nameless files and System V segments, namespaces and mounts of one's
own) or has a history of holes (io_uring, bpf, userfaultfd, keys), or reads other
processes (ptrace). Of families of sockets there are only the usual ones: a network
namespace does not part the others from the host, and vsock, on a host that is a
virtual machine, leads to the host of that. Limits and priorities can be set of
the caller only: process 1 has the same user, and would not survive a limit of no
files. `clone3` does not exist (ENOSYS), so that libraries fall back
to `clone`, whose flags a filter can see.
"""

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCH = 0, 4  # offsets in struct seccomp_data
FIRST_ARGUMENT, SECOND_ARGUMENT = 16, 24
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32 = 0x40000000
# NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NEW_NAMESPACES = 0x7E020080

# Machine -> (audit architecture, `clone`), then number by machine for each.
ARCHITECTURES = {'x86_64': (0xC000003E, 56), 'aarch64': (0xC00000B7, 220)}
REFUSED = {
  'add_key': (248, 217),
  'bpf': (321, 280),
  'chroot': (161, 51),
  'fsopen': (430, 430),
  'io_uring_setup': (425, 425),
  'kcmp': (312, 272),
  'keyctl': (250, 219),
  'memfd_create': (319, 279),
  'memfd_secret': (447, 447),
  'mount': (165, 40),
  'move_mount': (429, 429),
  'msgget': (68, 186),
  'open_by_handle_at': (304, 265),
  'open_tree': (428, 428),
  'perf_event_open': (298, 241),
  'pivot_root': (155, 41),
  'process_vm_readv': (310, 270),
  'process_vm_writev': (311, 271),
  'ptrace': (101, 117),
  'request_key': (249, 218),
  'semget': (64, 190),
  'setns': (308, 268),
  'shmget': (29, 194),
  'umount2': (166, 39),
  'unshare': (272, 97),
  'userfaultfd': (323, 282),
}
CLONE3 = 435
OF_A_PROCESS = {  # by their first argument; 0 is the caller
  'prlimit64': (302, 261),
  'sched_setaffinity': (203, 122),
  'sched_setattr': (314, 274),
  'sched_setparam': (142, 118),
  'sched_setscheduler': (144, 119),
}
SETPRIORITY = (141, 140)  # of a kind, 0 for processes, and of one
SOCKETS = {'socket': (41, 198), 'socketpair': (53, 199)}
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK


def program(machine: str) -> bytes:
  """The filter for a kind of machine; empty where it is not known."""
  if machine not in ARCHITECTURES:
    return b''
  arch, clone = ARCHITECTURES[machine]
  column = list(ARCHITECTURES).index(machine)
  return assemble(
    [
      (LOAD, 0, 0, ARCH),
      (EQUAL, 0, 'missing', arch),
      (LOAD, 0, 0, NUMBER),
      (AT_LEAST, 'missing', 0, X32),
      (EQUAL, 'missing', 0, CLONE3),
      *((EQUAL, 'refuse', 0, x[column]) for x in REFUSED.values()),
      *((EQUAL, 'own', 0, x[column]) for x in OF_A_PROCESS.values()),
      (EQUAL, 'priority', 0, SETPRIORITY[column]),
      *((EQUAL, 'family', 0, x[column]) for x in SOCKETS.values()),
      (EQUAL, 0, 'allow', clone),
      (LOAD, 0, 0, FIRST_ARGUMENT),
      (ANY_BIT, 'refuse', 'allow', NEW_NAMESPACES),
      'priority',
      (LOAD, 0, 0, FIRST_ARGUMENT),
      (EQUAL, 0, 'refuse', 0),
      (LOAD, 0, 0, SECOND_ARGUMENT),
      (EQUAL, 'allow', 'refuse', 0),
      'own',
      (LOAD, 0, 0, FIRST_ARGUMENT),
      (EQUAL, 'allow', 'refuse', 0),
      'family',
      (LOAD, 0, 0, FIRST_ARGUMENT),
      *((EQUAL, 'allow', 0, family) for family in FAMILIES),
      (RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT),
      'allow',
      (RETURN, 0, 0, ALLOW),
      'refuse',
      (RETURN, 0, 0, ERRNO | errno.EPERM),
      'missing',
      (RETURN, 0, 0, ERRNO | errno.ENOSYS),
    ]
  )


def assemble(lines: list) -> bytes:
  """Instructions (code, where to if true, if false, value) and names of places.

  0 goes on with the next; jumps are relative, and only forward.
  """
  places, code = {}, []
  for line in lines:
    if isinstance(line, str):
      places[line] = len(code)
    else:
      code.append(line)
  return b''.join(
    struct.pack('=HBBI', kind, *(jump(x, n, places) for x in ways), value)
    for n, (kind, *ways, value) in enumerate(code)
  )


def jump(way, place: int, places: dict) -> int:
  return places[way] - place - 1 if way else 0


_code = program(os.uname().machine)
_buffer = ctypes.create_string_buffer(_code, len(_code) or 1)


class Program(ctypes.Structure):
  _fields_ = (('length', ctypes.c_ushort), ('code', ctypes.c_void_p))


_program = Program(len(_code) // 8, ctypes.addressof(_buffer))


def install(libc: ctypes.CDLL) -> int:
  """Filters this process and all that it forks; an errno, or 0."""
  if not _code:
    return 0
  address = ctypes.byref(_program)
  if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, address, 0, 0) != 0:
    return ctypes.get_errno()
  return 0
