"""A filter of system calls, as a BPF program.

Refused (EPERM) is what has no use in a machine and either escapes its limits
(memory in nameless files and System V segments, namespaces and mounts of one's
own) or has a history of holes (io_uring, bpf, userfaultfd, keys), or reads other
processes (ptrace). `clone3` does not exist (ENOSYS), so that libraries fall back
to `clone`, whose flags a filter can see.
"""

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
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


def program(machine: str) -> bytes:
  """The filter for a kind of machine; empty where it is not known."""
  if machine not in ARCHITECTURES:
    return b''
  arch, clone = ARCHITECTURES[machine]
  column = list(ARCHITECTURES).index(machine)
  numbers = [numbers[column] for numbers in REFUSED.values()]
  refuse, missing = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
  # A jump is relative: how many instructions to skip if true, if false.
  lines = [
    (LOAD, 0, 0, ARCH),
    (EQUAL, 1, 0, arch),
    (RETURN, 0, 0, missing),
    (LOAD, 0, 0, NUMBER),
    (AT_LEAST, 0, 1, X32),
    (RETURN, 0, 0, missing),
    (EQUAL, 0, 1, CLONE3),
    (RETURN, 0, 0, missing),
  ]
  for place, number in enumerate(numbers):
    lines.append((EQUAL, len(numbers) - place + 4 - 1, 0, number))
  lines += [
    (EQUAL, 0, 2, clone),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (ANY_BIT, 1, 0, NEW_NAMESPACES),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, refuse),
  ]
  return b''.join(struct.pack('=HBBI', *line) for line in lines)


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
