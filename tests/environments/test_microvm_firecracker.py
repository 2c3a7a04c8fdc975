"""Firecracker: a driver that asks it for the right things in the right order.

The interface is stood in for by a program that refuses what Firecracker's own
description does not have; where the real one and a KVM that boots are present,
the same machines run for real.
"""

import dataclasses
import gzip
import json
import lzma
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

import live
import pytest

from composer.bench import sessions
from composer.config import MachineConfig
from composer.environments import images
from composer.environments.images import kernel as kernel_lib
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import microvm
from composer.environments.machines import pool as pool_lib

HERE = pathlib.Path(__file__).parent
# One that whoever Firecracker runs as may start.
PYTHON = shutil.which('python3', path='/usr/bin:/usr/local/bin')
CONFIG = MachineConfig(
  driver='microvm', hypervisor='firecracker', memory_mb=128, disk_mb=8, warm=0
)
SIMPLE = {'name': 'base', 'digest': 'd' * 64, 'built': 1, 'packages': {}}


def needs_a_stand_in():
  missing = [x for x in ('mke2fs',) if not microvm._which(x)]
  if not PYTHON or missing or os.uname().machine != 'x86_64':
    pytest.skip('needs Linux on x86-64, mke2fs, and a python3 of the system')


@pytest.fixture
def place(monkeypatch):
  """A cache with an image, and a Firecracker on the PATH; its log of requests.

  Not in pytest's own folder, which is closed to other users.
  """
  needs_a_stand_in()
  folder = pathlib.Path(tempfile.mkdtemp())
  folder.chmod(0o755)
  install(folder, monkeypatch, '1.12.1')
  image = folder / 'cache' / 'composer' / 'images' / 'base-1'
  image.mkdir(parents=True)
  (image / 'image.json').write_text(json.dumps(SIMPLE))
  (image / 'vmlinuz').write_bytes(b'\x7fELF, as far as the stand-in looks')
  (image / 'initrd').write_bytes(b'vmw_vsock_virtio_transport.ko')
  (image / 'root.ext4').write_bytes(bytes(4096))
  monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
  monkeypatch.setattr(microvm, 'KVM', '/dev/null')
  yield folder
  shutil.rmtree(folder)


def install(folder, monkeypatch, version):
  log = folder / 'requests'
  log.touch()
  log.chmod(0o666)
  source = (HERE / 'fake_firecracker.py').read_text()
  text = source.replace('@LOG@', str(log)).replace('@VERSION@', version)
  (folder / 'firecracker').write_text(f'#!{PYTHON}\n{text}')
  (folder / 'firecracker').chmod(0o755)
  monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')


def requests_of(folder):
  """What was asked for since the last look."""
  log = folder / 'requests'
  lines = [json.loads(line) for line in log.read_text().splitlines()]
  log.write_text('')
  return lines


@pytest.fixture
def world(place):
  found = live.Live(CONFIG)
  yield found
  found.close()


def say(world, machine, *words):
  return world.call(machine.run(words, 20.0)).stdout


class TestRequests:
  def test_a_boot_is_described_and_then_started(self, place):
    world = live.Live(CONFIG)
    world.close()
    # The probe of KVM, the machine that is kept, and the trial of a fork.
    probe, kept, fork = split_at(requests_of(place), '/machine-config')
    assert (
      [x[:2] for x in probe]
      == [x[:2] for x in kept]
      == [
        ['PUT', '/machine-config'],
        ['PUT', '/boot-source'],
        ['PUT', '/drives/root'],
        ['PUT', '/drives/own'],
        ['PUT', '/entropy'],
        ['PUT', '/vsock'],
        ['PUT', '/actions'],
        ['PATCH', '/vm'],
        ['PUT', '/snapshot/create'],
      ]
    )
    bodies = {path: body for _, path, body in kept}
    size = CONFIG.memory_mb + 96
    assert bodies['/machine-config'] == {'vcpu_count': 1, 'mem_size_mib': size}
    words = bodies['/boot-source']['boot_args'].split()
    assert {'ro', 'reboot=t', 'agent.vsock=1024'} <= set(words)
    assert bodies['/drives/root']['is_read_only']
    assert not bodies['/drives/own']['is_read_only']
    assert bodies['/vm'] == {'state': 'Paused'}
    assert bodies['/snapshot/create']['snapshot_type'] == 'Full'
    [load] = fork
    assert load[1] == '/snapshot/load'
    assert load[2]['mem_backend']['backend_type'] == 'File'
    assert load[2]['resume_vm'] is True

  def test_a_second_pool_boots_nothing(self, place):
    for _ in range(2):
      live.Live(CONFIG).close()
      asked = [path for _, path, _ in requests_of(place)]
    assert asked == ['/snapshot/load']

  def test_a_save_stops_and_goes_on(self, place, world):
    with world.machine({'a': '1'}) as machine:
      requests_of(place)
      snapshot = world.call(machine.snapshot())
      asked = [
        [path, body.get('state')] for _, path, body in requests_of(place)
      ]
      assert asked == [
        ['/vm', 'Paused'],
        ['/snapshot/create', None],
        ['/vm', 'Resumed'],
      ]
      names = sorted(x.name for x in pathlib.Path(snapshot.folder).iterdir())
      assert names == ['disk0', 'memory', 'state']
      snapshot.discard()


def split_at(lines, path):
  """Requests of each machine: one begins with `path`, or by loading."""
  groups = []
  for line in lines:
    if line[1] in (path, '/snapshot/load'):
      groups.append([])
    groups[-1].append(line)
  return groups


class TestMachines:
  def test_forks_go_on_and_part(self, world):
    with world.machine({'a': 'before'}) as parent:
      assert say(world, parent, 'cat', 'a') == 'before'
      fork = world.call(world.pool.fork(parent))
      # Both have lost the connection that was there, and found another.
      assert say(world, fork, 'cat', 'a') == 'before'
      world.call(fork.write('a', 'fork'))
      world.call(parent.write('a', 'parent'))
      assert say(world, fork, 'cat', 'a') == 'fork'
      assert say(world, parent, 'cat', 'a') == 'parent'
      entropy = [say(world, x, 'cat', 'resumed') for x in (fork, parent)]
      assert len(set(entropy)) == 2 and all(len(x) == 128 for x in entropy)
      world.call(world.pool.release(fork))
    with world.machine() as clean:
      assert say(world, clean, 'cat', 'a') == 'none'

  def test_each_has_a_disk_and_a_user_of_its_own(self, world):
    with world.machine() as one, world.machine() as other:
      for machine in (one, other):
        world.call(machine.run(['true'], 20.0))
      root = pathlib.Path(world.pool._zygote.scratch)
      disks = [x / 'disk0' for x in sorted(root.iterdir()) if x.is_dir()]
      assert len({x.stat().st_ino for x in disks}) == len(disks) >= 2
      owners = {x.stat().st_uid for x in disks}
      if os.geteuid() == 0:
        assert 0 not in owners and len(owners) == len(disks)
      for disk in disks:
        assert disk.stat().st_blocks * 512 < disk.stat().st_size == 8 << 20

  def test_it_holds_no_socket_of_ours(self, world):
    with world.machine() as machine:
      world.call(machine.run(['true'], 20.0))
      hypervisor = world.pool._zygote.process.pid
      [beside] = children(hypervisor)
      [firecracker] = children(beside)
      assert sockets(beside) and sockets(firecracker)
      assert not sockets(firecracker) & (sockets(hypervisor) | sockets(beside))

  def test_a_machine_that_dies_is_infrastructure(self, world):
    with world.machine() as machine:
      with pytest.raises(MachineError, match='died'):
        world.call(machine.run(['die'], 20.0))
    with world.machine({'a': 'on'}) as machine:
      assert say(world, machine, 'cat', 'a') == 'on'

  def test_nothing_is_left(self, place):
    before = sessions.leftovers()
    world = live.Live(dataclasses.replace(CONFIG, warm=1))
    with world.machine() as machine:
      world.call(machine.run(['true'], 20.0))
    world.close()
    deadline = time.monotonic() + 60
    while sessions.leftovers() - before and time.monotonic() < deadline:
      time.sleep(0.05)
    assert sessions.leftovers() - before == set()

  def test_provenance_names_it(self, world):
    about = world.pool._provenance
    assert about['hypervisor'] == 'Firecracker v1.12.1'
    assert about['accelerator'] == 'kvm' and about['kvm'] == 'works'


def children(pid):
  text = pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text()
  return [int(x) for x in text.split()]


def sockets(pid):
  links = [os.readlink(x) for x in pathlib.Path(f'/proc/{pid}/fd').iterdir()]
  return {x for x in links if x.startswith('socket:')}


def test_none_outlives_who_ended_before_it_could_say_so():
  """A signal at the end of a parent comes only of one that is still there."""
  code = 'import os, vm; vm.die_with_parent(os.getpid()); print("on")'
  done = subprocess.run(
    [sys.executable, '-c', code],
    env={'PYTHONPATH': str(pool_lib.zygote_lib.INSIDE)},
    capture_output=True,
    check=False,
  )
  assert (done.returncode, done.stdout, done.stderr) == (1, b'', b'')


def no_real_one():
  """'' where Firecracker itself can start a machine, else what is missing."""
  try:
    [program] = microvm._programs('firecracker').values()
    os.close(os.open(microvm.KVM, os.O_RDWR))
    why = microvm._unfit(microvm._version(program), images.find('base'))
  except (MissingFacility, OSError, ValueError) as error:
    why = str(error)
  return why


@pytest.mark.skipif(bool(no_real_one()), reason=no_real_one())
def test_the_real_one_takes_what_it_is_asked(tmp_path, monkeypatch):
  """All requests but those to the agent, so even a KVM that boots nothing does:
  a machine starts, is saved, goes on from that, and is saved once more.
  """
  monkeypatch.syspath_prepend(str(pool_lib.zygote_lib.INSIDE))
  import firecracker
  import hypervisor
  import vm as vm_lib

  config = microvm._settings(
    CONFIG, images.find('base'), microvm._programs('firecracker')
  )
  os.rmdir(config['scratch'])
  first, second, saved = (str(tmp_path / x) for x in ('a', 'b', 'saved'))
  os.mkdir(first)
  hypervisor.make_blank(config, f'{first}/disk0')
  names = {
    firecracker.ROOT: (config['root'], os.O_RDONLY),
    firecracker.OWN: (f'{first}/disk0', os.O_RDWR),
    firecracker.FIRST: (config['kernels']['firecracker'], os.O_RDONLY),
    firecracker.SECOND: (config['initrds'][0], os.O_RDONLY),
  }
  vm = vm_lib.Vm(firecracker.launch(config, first, names), first)
  try:
    for path, body in firecracker.first_requests(config):
      firecracker.ask(first, 'PUT', path, body)
    with pytest.raises(firecracker.Refusal, match='fault|not supported'):
      firecracker.ask(first, 'PUT', '/entropy', {})
    firecracker.keep(config, vm, first)
  finally:
    vm.end()
  os.mkdir(second)
  vm_lib.copy_sparse(f'{first}/disk0', f'{second}/disk0')
  names[firecracker.OWN] = (f'{second}/disk0', os.O_RDWR)
  names[firecracker.FIRST] = (f'{first}/memory', os.O_RDONLY)
  names[firecracker.SECOND] = (f'{first}/state', os.O_RDONLY)
  vm = vm_lib.Vm(firecracker.launch(config, second, names), second)
  try:
    firecracker.ask(second, 'PUT', '/snapshot/load', firecracker.load_request())
    assert firecracker.ask(second, 'GET', '/', {})['state'] == 'Running'
    own = os.readlink(f'/proc/{vm.pid}/fd/{firecracker.OWN}')
    assert own == f'{second}/disk0'
    status = pathlib.Path(f'/proc/{vm.pid}/status').read_text()
    if os.geteuid() == 0:
      assert f'Uid:\t{os.stat(second).st_uid}\t' in status
      assert os.stat(second).st_uid != 0
    beside = vm_lib.Vm(
      os.posix_spawn('/bin/sleep', ['sleep', '60'], {}), second
    )
    firecracker.save(config, beside, saved)
    os.waitpid(beside.pid, 0)  # it is told that its connections ended
  finally:
    vm.end()
  assert sorted(os.listdir(saved)) == ['disk0', 'memory', 'state']


class TestChoice:
  """The best that boots, and what is known of the rest."""

  @pytest.fixture
  def hypervisor(self, monkeypatch):
    monkeypatch.syspath_prepend(str(pool_lib.zygote_lib.INSIDE))
    import hypervisor

    return hypervisor

  @pytest.mark.parametrize(
    'programs, accelerator, works, chosen',
    [
      ('firecracker qemu', 'auto', 'firecracker', ('firecracker', 'kvm', '')),
      ('firecracker qemu', 'auto', 'host', ('qemu', 'kvm', 'host')),
      (
        'qemu',
        'kvm',
        'host,arch-capabilities=off',
        ('qemu', 'kvm', 'host,arch-capabilities=off'),
      ),
      ('firecracker qemu', 'auto', '', ('qemu', 'tcg', 'max')),
      ('firecracker qemu', 'tcg', 'firecracker', ('qemu', 'tcg', 'max')),
    ],
  )
  def test_of_what_boots(
    self, hypervisor, monkeypatch, programs, accelerator, works, chosen
  ):
    def verdict(config):
      name = config['cpu'] or config['hypervisor']
      return 'works' if name == works else f'{name} crashed'

    monkeypatch.setattr(hypervisor, 'verdict_on', verdict)
    config = {'programs': dict.fromkeys(programs.split()), 'unfit': ''}
    config['accelerator'] = accelerator
    hypervisor.choose(config)
    names = ('hypervisor', 'accelerator', 'cpu')
    assert tuple(config[x] for x in names) == chosen
    if accelerator == 'auto' and not works:
      assert 'host crashed' in config['kvm']
      assert 'firecracker: firecracker crashed' in config['kvm']

  def test_nothing_boots(self, hypervisor, monkeypatch):
    monkeypatch.setattr(hypervisor, 'verdict_on', lambda _: 'it crashed')
    config = {'programs': {'qemu': ''}, 'unfit': '', 'accelerator': 'kvm'}
    with pytest.raises(hypervisor.Refused, match='qemu: it crashed.*tcg'):
      hypervisor.choose(config)

  def test_a_verdict_is_kept_for_every_size(
    self, hypervisor, monkeypatch, tmp_path
  ):
    probed = []

    def probe(config):
      probed.append(config['memory_mb'])
      return 'works'

    monkeypatch.setattr(hypervisor, 'probe_kvm', probe)
    config = {'hypervisor': 'qemu', 'cpu': 'host', 'agent': 'a'}
    config |= {'image_digest': 'd', 'versions': {'qemu': '7.2'}}
    for size in (128, 256):
      config |= {'memory_mb': size, 'cache': str(tmp_path)}
      assert hypervisor.verdict_on(config) == 'works'
    assert probed == [128]
    [kept] = tmp_path.iterdir()
    assert kept.read_text() == 'works' and '.' not in kept.name

  def test_a_refusal_is_doubted_after_an_hour(
    self, hypervisor, monkeypatch, tmp_path
  ):
    found = ['the boot took too long', 'works']
    monkeypatch.setattr(hypervisor, 'probe_kvm', lambda _: found.pop(0))
    config = {'hypervisor': 'qemu', 'cpu': 'host', 'agent': 'a'}
    config |= {'image_digest': 'd', 'versions': {'qemu': '7.2'}}
    config |= {'cache': str(tmp_path)}
    for _ in range(2):
      assert hypervisor.verdict_on(config) == 'the boot took too long'
    [kept] = tmp_path.iterdir()
    long_ago = time.time() - 2 * hypervisor.DOUBT_S
    for verdict in ('works', 'works'):
      os.utime(kept, (long_ago, long_ago))
      assert hypervisor.verdict_on(config) == verdict
    assert not found

  def test_one_that_is_unfit_is_left_out_and_said(self, place):
    [initrd] = place.glob('cache/composer/images/*/initrd')
    initrd.write_bytes(b'virtio_console.ko')
    program = str(place / 'firecracker')
    programs = {'firecracker': program, 'qemu': '/nonexistent'}
    image = images.find('base')
    versions, why = microvm._versions(programs, image, 'auto')
    assert versions == {'qemu': ''} and 'without vsock' in why

  def test_a_boot_that_fails_leaves_nothing(
    self, hypervisor, monkeypatch, tmp_path
  ):
    def boot(config, folder):
      os.mkdir(folder)
      raise hypervisor.Broken('it hung')

    monkeypatch.setattr(hypervisor, 'boot', boot)
    monkeypatch.setattr(hypervisor, 'choose', lambda _: None)
    monkeypatch.setattr(hypervisor, 'key_of', lambda _: 'key')
    with pytest.raises(hypervisor.Broken, match='hung'):
      hypervisor.find_template(
        {'cache': str(tmp_path), 'kernels': {}, 'initrds': []}
      )
    assert [x.name for x in tmp_path.iterdir()] == ['key.lock']

  def test_a_state_whose_facts_were_not_written_is_made_again(
    self, hypervisor, monkeypatch, tmp_path
  ):
    """The disk was full, or somebody ended us."""
    config = {'cache': str(tmp_path), 'kernels': {}, 'initrds': []}
    names = {'kvm': '', 'accelerator': 'tcg', 'hypervisor': 'qemu'}
    names['versions'] = {'qemu': '7.2'}
    boots = []

    def boot(config, folder):
      os.mkdir(folder)
      boots.append(folder)
      return {'kernel': '6'}

    def full(facts, file):
      raise OSError('no space left')

    monkeypatch.setattr(hypervisor, 'boot', boot)
    monkeypatch.setattr(hypervisor, 'choose', lambda x: x.update(names))
    monkeypatch.setattr(hypervisor, 'key_of', lambda _: 'key')
    with monkeypatch.context() as patch:
      patch.setattr(hypervisor.json, 'dump', full)
      with pytest.raises(OSError, match='no space'):
        hypervisor.find_template({**config})
    for _ in range(2):
      _, facts = hypervisor.find_template({**config})
      assert facts['kernel'] == '6' and len(boots) == 2

  def test_a_state_is_of_one_user(self, hypervisor, monkeypatch):
    """Whose memory a root's machines, users of their own, could not open."""
    names = 'image_digest accelerator cpu memory_mb processes disk_mb'.split()
    names += ['output_bytes', 'cpu_s', 'start', 'agent']
    config = dict.fromkeys(names, '') | {'hypervisor': 'qemu', 'khz': 2e6}
    config['versions'] = {'qemu': '7.2'}
    keys = set()
    for user in (0, 1000, 1000):
      monkeypatch.setattr(hypervisor.os, 'geteuid', lambda user=user: user)
      keys.add(hypervisor.key_of(config))
    assert len(keys) == 2

  def test_old_verdicts_go_while_another_process_does_the_same(
    self, hypervisor, monkeypatch, tmp_path
  ):
    for name, age in (('kvm-old', 8 * 86_400), ('kvm-new', 0), ('state', 1e7)):
      (tmp_path / name).write_text('works')
      os.utime(tmp_path / name, (time.time() - age,) * 2)
    names = [*os.listdir(tmp_path), 'kvm-gone']
    monkeypatch.setattr(hypervisor.os, 'listdir', lambda _: names)
    hypervisor.prune_verdicts(str(tmp_path))
    left = sorted(x.name for x in os.scandir(tmp_path))
    assert left == ['kvm-new', 'state']


class TestDistrust:
  """A Firecracker that a machine has taken over owns its folder, no more."""

  @pytest.fixture
  def inside(self, monkeypatch):
    monkeypatch.syspath_prepend(str(pool_lib.zygote_lib.INSIDE))

  def test_no_link_is_followed(self, inside, tmp_path):
    import firecracker
    import vm

    secret = tmp_path / 'secret'
    secret.write_text('secret')
    secret.chmod(0o600)
    folder = tmp_path / 'vm'
    folder.mkdir()
    for name in ('log', 'disk0', 'state', 'memory'):
      (folder / name).symlink_to(secret)
    assert vm.log_of(str(folder)) == ''
    with pytest.raises(OSError):
      vm.copy_sparse(str(folder / 'disk0'), str(tmp_path / 'copy'))
    with pytest.raises(OSError):
      firecracker.readable(str(folder))
    assert secret.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / 'copy').exists()

  @pytest.mark.skipif(os.geteuid() != 0, reason='needs another user')
  def test_only_the_owner_of_the_folder_is_spoken_to(self, inside, tmp_path):
    import firecracker

    with socket.socket(socket.AF_UNIX) as ours:
      ours.bind(str(tmp_path / 'ours'))
      ours.listen()
      folder = tmp_path / 'vm'
      folder.mkdir()
      (folder / 'api').symlink_to(tmp_path / 'ours')
      os.chown(folder, 65534, 65534)
      with pytest.raises(firecracker.Refusal, match='another than user 65534'):
        firecracker.ask(str(folder), 'PUT', '/vm', {'state': 'Paused'})

  def test_a_copy_keeps_holes_and_contents(self, inside, tmp_path):
    import vm

    source, target = tmp_path / 'a', tmp_path / 'b'
    with open(source, 'wb') as file:
      file.truncate(8 << 20)
      for place in (0, 3 << 20, (8 << 20) - 5):
        file.seek(place)
        file.write(b'data!')
    vm.copy_sparse(str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks <= source.stat().st_blocks


class TestMissing:
  def test_no_program(self, monkeypatch):
    monkeypatch.setattr(microvm, '_which', lambda _: None)
    monkeypatch.setattr(microvm, '_image', lambda _: None)
    with pytest.raises(MissingFacility, match='machine.hypervisor=qemu'):
      microvm.launch(CONFIG, {})

  def test_too_old(self, place, monkeypatch):
    install(place, monkeypatch, '1.7.0')
    with pytest.raises(MissingFacility, match=r'v1.7.0.*too old.*1\.9\.1'):
      pool_lib.probe(CONFIG)

  def test_an_image_without_vsock(self, place):
    [initrd] = place.glob('cache/composer/images/*/initrd')
    initrd.write_bytes(b'virtio_console.ko')
    with pytest.raises(MissingFacility, match='composer images build base'):
      pool_lib.probe(CONFIG)

  def test_a_kernel_that_it_cannot_take(self, place):
    [kernel] = place.glob('cache/composer/images/*/vmlinuz')
    kernel.write_bytes(bytes(1024))
    with pytest.raises(MissingFacility, match='no Linux kernel'):
      pool_lib.probe(CONFIG)

  def test_no_kvm(self, place, monkeypatch):
    monkeypatch.setattr(microvm, 'KVM', str(place / 'nothing'))
    with pytest.raises(MissingFacility, match='No such file.*hypervisor=qemu'):
      pool_lib.probe(CONFIG)

  def test_what_cannot_go_together(self):
    with pytest.raises(ValueError, match="hypervisor='xen'.*firecracker, qemu"):
      pool_lib.validate(dataclasses.replace(CONFIG, hypervisor='xen'))
    config = dataclasses.replace(CONFIG, accelerator='tcg')
    with pytest.raises(ValueError, match='machine.hypervisor=qemu'):
      microvm._programs(config.hypervisor, config.accelerator)


# --- the kernel ---------------------------------------------------------------


def bz_image(payload):
  """As the boot protocol lays it out: four sectors of setup, then the rest."""
  head = bytearray(5 * 512)
  head[0x1F1] = 4
  head[0x202:0x206] = b'HdrS'
  struct.pack_into('<II', head, 0x248, 100, len(payload))
  return bytes(head) + bytes(100) + payload + b'checksums and the like'


def lz4_literals(data):
  """A block of one sequence without a copy."""
  count = len(data)
  if count < 15:
    return bytes([count << 4]) + data
  rest = count - 15
  return bytes([0xF0]) + b'\xff' * (rest // 255) + bytes([rest % 255]) + data


class TestKernel:
  ELF = b'\x7fELF' + bytes(range(256)) * 5

  @pytest.mark.parametrize(
    'packed',
    [
      gzip.compress(ELF),
      lzma.compress(ELF),
      kernel_lib.LZ4_LEGACY
      + b''.join(
        struct.pack('<I', len(block)) + block
        for block in (lz4_literals(ELF[:700]), lz4_literals(ELF[700:]))
      )
      + struct.pack('<I', len(ELF)),
    ],
    ids=['gzip', 'xz', 'lz4'],
  )
  def test_is_taken_out(self, packed):
    assert kernel_lib.uncompressed(bz_image(packed)) == self.ELF
    assert kernel_lib.uncompressed(self.ELF) == self.ELF

  def test_lz4_copies(self):
    """`abc`, 11 bytes from 3 back (over themselves), `d`; then a long one."""
    block = bytes([0x37]) + b'abc' + struct.pack('<H', 3)
    block += bytes([0x10]) + b'd'
    assert kernel_lib.lz4_block(block) == b'abcabcabcabcabd'
    block = bytes([0x1F]) + b'x' + struct.pack('<H', 1) + bytes([255, 2, 0])
    assert kernel_lib.lz4_block(block) == b'x' * (1 + 15 + 257 + 4)
    with pytest.raises(ValueError, match='2 bytes back, of 1'):
      kernel_lib.lz4_block(bytes([0x10]) + b'x' + struct.pack('<H', 2))

  def test_what_it_is_not(self):
    with pytest.raises(ValueError, match='no Linux kernel'):
      kernel_lib.uncompressed(bytes(2048))
    with pytest.raises(ValueError, match='begins 28b52ffd'):
      kernel_lib.uncompressed(bz_image(bytes.fromhex('28b52ffd00')))
    with pytest.raises(ValueError, match='no ELF'):
      kernel_lib.uncompressed(bz_image(gzip.compress(b'something else')))

  @live.needs_microvm()
  def test_of_the_distribution(self):
    [path] = images.find('base').folder.glob('vmlinuz')
    elf = kernel_lib.uncompressed(path.read_bytes())
    kind, machine = struct.unpack_from('<HH', elf, 16)
    assert (kind, machine) == (2, 62)  # an executable, of x86-64
    sections, size, count = struct.unpack_from('<Q10xHH', elf, 40)
    assert sections + size * count <= len(elf)
