"""The `microvm` driver: a real kernel in Firecracker, or QEMU's microvm machine.

For what a namespace cannot give: services that run on (a database), processes
and memory that a snapshot keeps, root, and a kernel between the program and the
host. There is no network device. A machine is a fork of a booted one: its memory
is that of the saved state until it writes to it. Firecracker is taken where it is
installed and KVM boots a machine in it, else QEMU. Under emulation (where a boot
under KVM fails, whatever /dev/kvm promises) a machine is some ten times slower
than its host; provenance says which it was. A root's hypervisors are users of
their own, one for each machine.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from typing import Any

from composer.config import MachineConfig
from composer.environments import images
from composer.environments.images import catalog
from composer.environments.images import initrd
from composer.environments.images import kernel as kernel_lib
from composer.environments.machines import zygote as zygote_lib
from composer.environments.machines.machine import MachineError
from composer.environments.machines.machine import MissingFacility

IMAGE = 'base'  # where the config names none
BOOT_S = 90.0
SERVICES_S = 300.0
START_S = 60.0  # of a fork, on a host that starts many at once
HYPERVISORS = ('auto', 'firecracker', 'qemu')
PROGRAMS = {'firecracker': 'firecracker', 'qemu': 'qemu-system-x86_64'}
# Devices by ACPI, which Debian's kernel needs, and a restored machine that is
# told of its lost connections.
OLDEST_FIRECRACKER = (1, 9, 1)
KVM = '/dev/kvm'
AGENT = ('execute.py', 'files.py', 'groups.py', 'guest.py', 'isolate.py')
AGENT += ('seccomp.py', 'serve.py')


def launch(
  config: MachineConfig, harness: Mapping[str, str]
) -> zygote_lib.Zygote:
  """A hypervisor with a booted machine to fork from; arguments as elsewhere.

  The harness is not used: process 1 of a virtual machine runs no script, for it
  could not be bounded there.

  Raises:
    MissingFacility: a hypervisor or the image is missing; says what to do.
    MachineError: a machine does not boot.
  """
  del harness
  image = _image(config)
  programs = _programs(config.hypervisor, config.accelerator)
  limit = BOOT_S + (SERVICES_S if _recipe(image).start else 0.0)
  settings = _settings(config, image, programs) | {'boot_s': limit}
  try:
    zygote = zygote_lib.launch(settings, limit + 60.0, 'hypervisor.py')
  except zygote_lib.Missing as error:
    raise MachineError(str(error)) from error
  removed = zygote.facts.get('removed', ())
  if removed:
    size = sum(size for _, size in removed) / 1e6
    print(
      f'composer: of the virtual machines in {settings["cache"]},'
      f' {len(removed)} that were not used for long have been removed'
      f' ({size:.0f} MB): {", ".join(name for name, _ in removed)}',
      file=sys.stderr,
    )
  return zygote


def provenance(
  config: MachineConfig, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """What a trajectory records."""
  return {
    'driver': 'microvm',
    'isolation': 'virtual machine',
    'hypervisor': facts['version'],
    'hypervisor_user': facts['user'],
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


def _programs(hypervisor: str, accelerator: str = 'auto') -> dict[str, str]:
  """Hypervisors that are installed and wanted: name -> path of the program."""
  if sys.platform != 'linux' or platform.machine() != 'x86_64':
    raise MissingFacility(
      f'machine.driver=microvm works on Linux on x86-64; this is {sys.platform}'
      f' on {platform.machine()}'
    )
  if hypervisor == 'firecracker' and accelerator == 'tcg':
    raise ValueError(
      "machine.accelerator=tcg is QEMU's, and machine.hypervisor=firecracker;"
      ' set machine.hypervisor=qemu'
    )
  found = {
    name: path
    for name, program in PROGRAMS.items()
    if hypervisor in ('auto', name) and (path := _which(program))
  }
  if hypervisor == 'firecracker' and not found:
    raise MissingFacility(
      'machine.hypervisor=firecracker needs the program firecracker'
      f' ({_dotted(OLDEST_FIRECRACKER)} or later) on the PATH: its releases are at'
      ' github.com/firecracker-microvm/firecracker; or set'
      ' machine.hypervisor=qemu'
    )
  if not found:
    raise MissingFacility(_install('qemu-system-x86_64', 'qemu-system-x86'))
  if _which('mke2fs') is None:
    raise MissingFacility(_install('mke2fs', 'e2fsprogs'))
  return found


def _install(program: str, package: str) -> str:
  return (
    f'machine.driver=microvm needs {program}; run: apt-get install'
    f' --no-install-recommends {package}'
  )


def _dotted(version: tuple[int, ...]) -> str:
  return '.'.join(map(str, version))


def _versions(
  programs: Mapping[str, str], image: images.Image, wanted: str
) -> tuple[dict[str, str], str]:
  """What each says of itself, and why a Firecracker is left out, or ''.

  Raises:
    MissingFacility: it was asked for by name, or no other is there.
  """
  versions = {name: _version(path) for name, path in programs.items()}
  failure = ''
  if 'firecracker' in versions:
    failure = _unfit(versions['firecracker'], image)
  if failure:
    del versions['firecracker']
    if wanted == 'firecracker' or not versions:
      raise MissingFacility(
        f'machine.hypervisor={wanted} cannot work here: {failure}'
      )
  return versions, failure


def _version(program: str) -> str:
  """The first line of what a program says of itself, or ''."""
  try:
    said = subprocess.run(
      [program, '--version'],
      capture_output=True,
      text=True,
      timeout=30,
      check=False,
    ).stdout
  except (OSError, subprocess.SubprocessError):
    said = ''
  return said.partition('\n')[0]


def _unfit(version: str, image: images.Image) -> str:
  """Why this Firecracker cannot serve this image, or ''."""
  found = re.search(r'v(\d+)\.(\d+)\.(\d+)', version)
  if not found or tuple(map(int, found.groups())) < OLDEST_FIRECRACKER:
    return (
      f'{version or "firecracker"!r} is too old; install'
      f' {_dotted(OLDEST_FIRECRACKER)} or later, or set machine.hypervisor=qemu'
    )
  assert image.folder is not None
  if (
    b'vmw_vsock_virtio_transport.ko'
    not in (image.folder / 'initrd').read_bytes()
  ):
    return (
      f'the image {image.name} was built without vsock; run: composer images'
      f' build {image.name}'
    )
  return ''


def _which(program: str) -> str | None:
  path = os.environ.get('PATH', '') + ':/usr/sbin:/sbin'
  return shutil.which(program, path=path)


def _settings(
  config: MachineConfig,
  image: images.Image,
  programs: Mapping[str, str],
) -> dict[str, Any]:
  assert image.folder is not None
  cache = catalog.cache() / 'states'
  cache.mkdir(parents=True, exist_ok=True)
  agent = _agent(cache)
  versions, failure = _versions(programs, image, config.hypervisor)
  kernel = image.folder / 'vmlinuz'
  kernels = {'qemu': str(kernel)}
  if 'firecracker' in versions:
    kernels['firecracker'] = str(_uncompressed(kernel, cache))
  return {
    'driver': 'microvm',
    'image': '',
    'programs': {name: programs[name] for name in versions},
    'versions': versions,
    'unfit': failure,
    'mke2fs': _which('mke2fs'),
    'kernels': kernels,
    'initrds': [str(image.folder / 'initrd'), str(agent)],
    'root': str(image.folder / 'root.ext4'),
    'image_digest': image.digest,
    'agent': agent.name,
    'start': _recipe(image).start,
    'accelerator': config.accelerator,
    'kvm_device': KVM,
    'cache': str(cache),
    'scratch': zygote_lib.scratch(),
    'memory_mb': config.memory_mb,
    'processes': config.processes,
    'disk_mb': config.disk_mb,
    'disk_bytes': max(config.disk_mb, 8) << 20,
    'output_bytes': config.output_bytes,
    'cpu_s': config.exec_cpu_s,
  }


def _uncompressed(kernel: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
  """The kernel as Firecracker takes it, made once."""
  data = kernel.read_bytes()
  path = cache / f'vmlinux-{hashlib.sha256(data).hexdigest()[:16]}'
  if not _touched(path):
    try:
      _write_whole(path, kernel_lib.uncompressed(data))
    except ValueError as error:
      raise MissingFacility(
        f'{kernel}: {error}; set machine.hypervisor=qemu'
      ) from error
  return path


def _write_whole(path: pathlib.Path, data: bytes) -> None:
  """Whole or not at all: another process may look meanwhile."""
  temporary = path.with_suffix(f'.{os.getpid()}')
  temporary.write_bytes(data)
  temporary.rename(path)


def _agent(cache: pathlib.Path) -> pathlib.Path:
  """The agent's files as an archive that the kernel unpacks."""
  files = {
    f'agent/{name}': (0o644, (zygote_lib.INSIDE / name).read_bytes())
    for name in AGENT
  }
  data = initrd.archive_of(files)
  path = cache / f'agent-{hashlib.sha256(data).hexdigest()[:16]}'
  if not _touched(path):
    _write_whole(path, data)
  return path


def _touched(path: pathlib.Path) -> bool:
  """Whether it is there; it is in use, and stays for an hour at least."""
  try:
    os.utime(path)
  except FileNotFoundError:
    return False
  return True
