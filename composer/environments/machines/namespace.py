"""The `namespace` driver: Linux namespaces, no root needed, no network.

What a machine sees: the interpreter's standard library and the system's
programs, read-only; no installed package, no home, nothing of the run; a /proc,
a few devices, and a workspace of its own of `disk_mb`. What bounds it: limits of
each process, a count of processes by its user namespace, the size of its tmpfs,
and a watchdog over the pid namespace for the sum of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib
import site
import sys
import sysconfig
from typing import Any

from composer.config import MachineConfig
from composer.environments import images
from composer.environments.machines import zygote as zygote_lib
from composer.environments.machines.machine import MissingFacility

NAMESPACES = ('user', 'mnt', 'pid', 'net', 'ipc', 'uts')
SYSTEM = (
  '/usr/bin',
  '/usr/sbin',
  '/usr/lib',
  '/usr/lib32',
  '/usr/lib64',
  '/usr/libexec',
  '/bin',
  '/sbin',
  '/lib',
  '/lib32',
  '/lib64',
)


def launch(
  config: MachineConfig, harness: Mapping[str, str]
) -> zygote_lib.Zygote:
  """A zygote in namespaces.

  Args:
    config: its limits hold for every machine.
    harness: path -> text of trusted scripts, which machines call.

  Raises:
    MissingFacility: with what the system refuses and what to do.
  """
  if sys.platform != 'linux':
    raise MissingFacility(_advice(f'this is {sys.platform}, not Linux'))
  image = str(images.find(config.image).tree) if config.image else ''
  settings = {
    'driver': 'namespace',
    'harness': dict(harness),
    'scratch': '',
    'views': sorted(views()),
    'hide': sorted(hidden()),
    'memory_mb': config.memory_mb,
    'processes': config.processes,
    'disk_mb': config.disk_mb,
    'output_bytes': config.output_bytes,
    'cpu_s': config.exec_cpu_s,
    'image': image,
  }
  try:
    zygote = zygote_lib.launch(settings, config.start_timeout_s)
  except zygote_lib.Missing as error:
    raise MissingFacility(_advice(str(error))) from error
  shared = _shared(zygote.facts['namespaces'])
  if shared:
    zygote_lib.close(zygote)
    raise AssertionError(f'a machine shares {", ".join(shared)} with its host')
  return zygote


def provenance(
  config: MachineConfig, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """What a trajectory records: what a machine saw in force, and its limits."""
  return {
    'driver': 'namespace',
    'isolation': list(NAMESPACES),
    'capabilities': facts['capabilities'],
    'no_new_privs': facts['no_new_privs'] == '1',
    'seccomp': facts['seccomp'] == '2',
    'python': facts['python'],
    'image': config.image,
    'overlay': _overlay(config, facts),
    'image_digest': images.find(config.image).digest if config.image else '',
    'limits': {
      'memory_mb': config.memory_mb,
      'memory': 'each process by rlimit, all together by '
      + (
        f'a control group (v{facts["cgroup"]}) and ' if facts['cgroup'] else ''
      )
      + 'a watchdog',
      'processes': config.processes,
      'disk_mb': config.disk_mb,
      'output_bytes': config.output_bytes,
      'exec_timeout_s': config.exec_timeout_s,
      'exec_cpu_s': config.exec_cpu_s,
    },
  }


def _overlay(config: MachineConfig, facts: Mapping[str, Any]) -> str:
  if not config.image:
    return 'none: read-only views of this system'
  if facts['image_is_own']:
    return 'all of the image'
  return 'beside the image: its own files belong to nobody inside'


def views() -> set[str]:
  """Folders that a machine sees, read-only."""
  base = {'base': sys.base_prefix, 'installed_base': sys.base_prefix}
  base |= {'platbase': sys.base_exec_prefix}  # not those of an environment
  paths = sysconfig.get_paths(vars=base)
  python = {
    os.path.realpath(paths['stdlib']),
    os.path.realpath(paths['platstdlib']),
    os.path.dirname(os.path.realpath(sys.executable)),
  }
  return {*SYSTEM, *python}


def hidden() -> set[str]:
  """Folders of installed packages, this one's too: they hold answers."""
  found = {str(pathlib.Path(__file__).resolve().parents[3])}
  found.update(os.path.realpath(x) for x in site.getsitepackages())
  for prefix in {sys.base_prefix, sys.base_exec_prefix, '/usr', '/usr/local'}:
    for library in ('lib', 'lib64'):
      folder = pathlib.Path(prefix, library)
      for kind in ('site-packages', 'dist-packages'):
        found.update(str(x.resolve()) for x in folder.glob(f'python3*/{kind}'))
  return found


def _shared(theirs: Mapping[str, int]) -> list[str]:
  """Namespaces that a machine has in common with this process."""
  return [
    name
    for name in NAMESPACES
    if theirs[name] == os.stat(f'/proc/self/ns/{name}').st_ino
  ]


def _advice(reason: str) -> str:
  command = ' '.join([*_command(), '--set machine.driver=process'])
  return (
    f'machine.driver=namespace cannot work here: {reason}. Allow unprivileged'
    ' user namespaces (kernel.unprivileged_userns_clone=1,'
    ' kernel.apparmor_restrict_unprivileged_userns=0, or a container with'
    ' --security-opt seccomp=unconfined), or, if you trust every program that'
    f' will run, without any isolation:\n  {command}'
  )


def _command() -> list[str]:
  """The command line in progress, without an earlier choice of driver."""
  words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
  if words[0] in ('__main__.py', ''):
    words[0] = 'composer'
  kept: list[str] = []
  for word in words:
    if word.startswith('machine.driver=') and kept[-1:] == ['--set']:
      kept.pop()
    elif not word.startswith('--set=machine.driver='):
      kept.append(word)
  return kept
