"""The `microvm` driver: a real kernel in QEMU's microvm machine.

For what a namespace cannot give: services that run on (a database), processes
and memory that a snapshot keeps, root, and a kernel between the program and the
host. There is no network device. A machine is a fork of a booted one: its memory
is that of the saved state until it writes to it. Under emulation (where a boot
under KVM fails, whatever /dev/kvm promises) it is some ten times slower than its
host; provenance says which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from typing import Any

from composer.config import MachineConfig
from composer.environments import images
from composer.environments.images import catalog
from composer.environments.images import initrd
from composer.environments.machines import zygote as zygote_lib
from composer.environments.machines.machine import MachineError
from composer.environments.machines.machine import MissingFacility

IMAGE = 'base'  # where the config names none
BOOT_S = 90.0
SERVICES_S = 300.0
START_S = 60.0  # of a fork, on a host that starts many at once
AGENT = ('execute.py', 'files.py', 'groups.py', 'guest.py', 'isolate.py')
AGENT += ('seccomp.py', 'serve.py')


def launch(
  config: MachineConfig, harness: Mapping[str, str]
) -> zygote_lib.Zygote:
  """A hypervisor with a booted machine to fork from; arguments as elsewhere.

  The harness is not used: process 1 of a virtual machine runs no script, for it
  could not be bounded there.

  Raises:
    MissingFacility: QEMU or the image is missing; says what to do.
    MachineError: a machine does not boot.
  """
  del harness
  image = _image(config)
  qemu = _qemu()
  limit = BOOT_S + (SERVICES_S if _recipe(image).start else 0.0)
  settings = _settings(config, image, qemu) | {'boot_s': limit}
  try:
    return zygote_lib.launch(settings, limit + 60.0, 'hypervisor.py')
  except zygote_lib.Missing as error:
    raise MachineError(str(error)) from error


def provenance(
  config: MachineConfig, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """What a trajectory records."""
  return {
    'driver': 'microvm',
    'isolation': 'virtual machine',
    'accelerator': facts['accelerator'],
    'kvm': facts['kvm'],
    'kernel': facts['kernel'],
    'python': facts['python'],
    'image': config.image or IMAGE,
    'image_digest': images.find(config.image or IMAGE).digest,
    'limits': {
      'memory_mb': config.memory_mb,
      'memory': 'a control group of each command, and the machine as a whole',
      'processes': config.processes,
      'disk_mb': config.disk_mb,
      'output_bytes': config.output_bytes,
      'exec_timeout_s': config.exec_timeout_s,
      'exec_cpu_s': config.exec_cpu_s,
    },
  }


def _image(config: MachineConfig) -> images.Image:
  try:
    image = images.find(config.image or IMAGE)
  except ValueError as error:
    raise MissingFacility(str(error)) from error
  if image.folder is None:
    raise MissingFacility(
      f'machine.image={config.image!r} is a plain directory; a virtual machine'
      f' starts from an image that was built: {", ".join(catalog.RECIPES)}'
    )
  return image


def _recipe(image: images.Image) -> catalog.Recipe:
  return catalog.RECIPES[image.name]


def _qemu() -> str:
  if sys.platform != 'linux' or platform.machine() != 'x86_64':
    raise MissingFacility(
      f'machine.driver=microvm works on Linux on x86-64; this is {sys.platform}'
      f' on {platform.machine()}'
    )
  for program, package in (
    ('qemu-system-x86_64', 'qemu-system-x86'),
    ('mke2fs', 'e2fsprogs'),
  ):
    if _which(program) is None:
      raise MissingFacility(
        f'machine.driver=microvm needs {program}; run: apt-get install'
        f' --no-install-recommends {package}'
      )
  return str(_which('qemu-system-x86_64'))


def _which(program: str) -> str | None:
  path = os.environ.get('PATH', '') + ':/usr/sbin:/sbin'
  return shutil.which(program, path=path)


def _settings(
  config: MachineConfig,
  image: images.Image,
  qemu: str,
) -> dict[str, Any]:
  assert image.folder is not None
  cache = catalog.cache() / 'states'
  cache.mkdir(parents=True, exist_ok=True)
  agent = _agent(cache)
  version = subprocess.run(
    [qemu, '--version'], capture_output=True, text=True, check=True, timeout=30
  ).stdout.splitlines()[0]
  return {
    'driver': 'microvm',
    'image': '',
    'qemu': qemu,
    'qemu_version': version,
    'mke2fs': _which('mke2fs'),
    'kernel': str(image.folder / 'vmlinuz'),
    'initrds': [str(image.folder / 'initrd'), str(agent)],
    'root': str(image.folder / 'root.ext4'),
    'image_digest': image.digest,
    'agent': agent.name,
    'start': _recipe(image).start,
    'accelerator': config.accelerator,
    'cache': str(cache),
    'scratch': zygote_lib.scratch(),
    'memory_mb': config.memory_mb,
    'processes': config.processes,
    'disk_mb': config.disk_mb,
    'disk_bytes': max(config.disk_mb, 8) << 20,
    'output_bytes': config.output_bytes,
    'cpu_s': config.exec_cpu_s,
  }


def _agent(cache: pathlib.Path) -> pathlib.Path:
  """The agent's files as an archive that the kernel unpacks."""
  files = {
    f'agent/{name}': (0o644, (zygote_lib.INSIDE / name).read_bytes())
    for name in AGENT
  }
  data = initrd.archive_of(files)
  path = cache / f'agent-{hashlib.sha256(data).hexdigest()[:16]}'
  if not path.exists():
    temporary = path.with_suffix(f'.{os.getpid()}')
    temporary.write_bytes(data)
    temporary.rename(path)
  return path
