"""Virtual machines: forks that differ, state that stays, a database inside."""

import asyncio
import io
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import tarfile
import time

import live
import pytest

from composer import __main__ as cli
from composer.bench import sessions
from composer.config import MachineConfig
from composer.environments import images
from composer.environments.images import build
from composer.environments.images import catalog
from composer.environments.images import initrd
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import microvm
from composer.environments.machines import pool as pool_lib
from composer.environments.tasks import migration
from composer.rewards import verify


@pytest.fixture(scope='module', params=('qemu', 'firecracker'))
def base(request):
  found = live.open_live('microvm', hypervisor=request.param)
  yield found
  found.close()


@pytest.fixture(scope='module')
def postgres():
  found = live.open_live(
    'microvm',
    image='postgres',
    disk_mb=128,
    exec_timeout_s=60.0,
  )
  yield found
  found.close()


@pytest.fixture
def inside(monkeypatch):
  """The machine's own modules can be imported."""
  monkeypatch.syspath_prepend(str(pool_lib.zygote_lib.INSIDE))


def _user(pid):
  """The one user that a process is, in every way, without any power."""
  lines = pathlib.Path(f'/proc/{pid}/status').read_text().splitlines()
  fields = dict(line.split(':', 1) for line in lines)
  [user] = set(map(int, fields['Uid'].split()))
  assert int(fields['CapEff'], 16) == 0 or user == 0
  return user


def out(world, machine, script):
  result = world.call(machine.run(['sh', '-c', script], 60.0))
  assert result.exit_code == 0, result
  return result.stdout


# --- machines -----------------------------------------------------------------


@live.needs_microvm()
class TestForks:
  CHANCE = (
    'cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1;'
    ' python -c "import random; print(random.random())"'
  )

  def test_two_forks_differ_and_have_their_own_disk(self, base):
    with base.machine({'kept': 'before'}) as parent:
      out(base, parent, 'echo more >> kept; mkdir d; touch -d 2001-02-03 d')
      snapshot = base.call(parent.snapshot())
      with (
        base.machine(snapshot=snapshot) as one,
        base.machine(snapshot=snapshot) as two,
      ):
        chance = [out(base, m, self.CHANCE).split('\n') for m in (one, two)]
        for a, b in zip(*chance, strict=True):
          assert a != b or not a, chance
        for machine, word in ((one, 'one'), (two, 'two'), (parent, 'parent')):
          out(base, machine, f'echo {word} >> kept; echo {word} > /etc/{word}')
        for machine, word in ((one, 'one'), (two, 'two'), (parent, 'parent')):
          text = out(base, machine, 'cat kept; ls /etc/one /etc/two || true')
          assert text.startswith(f'beforemore\n{word}\n')
          assert ('/etc/one' in text) == (word == 'one')
          assert out(base, machine, 'date -r d +%Y').strip() == '2001'
      snapshot.discard()
      assert not pathlib.Path(snapshot.folder).exists()
      assert out(base, parent, 'echo on') == 'on\n'

  def test_its_clock_is_mended(self, base):
    with base.machine() as parent:
      snapshot = base.call(parent.snapshot())
      time.sleep(2)  # in which nothing of the snapshot runs
      with base.machine(snapshot=snapshot) as fork:
        for machine in (fork, parent):  # it stood still while it was saved
          before = time.time()
          inside = float(out(base, machine, 'date +%s.%N'))
          assert before - 0.3 < inside < time.time() + 0.3

  def test_time_goes_by_as_outside(self, base):
    code = (
      'import time; t = time.monotonic(); time.sleep(1); print(time.time())'
    )
    with base.machine() as machine:
      began = time.monotonic()
      result = base.call(machine.run(['python', '-c', code], 60.0))
      assert 1.0 <= result.seconds <= time.monotonic() - began + 0.1

  def test_a_snapshot_of_a_fork_of_a_snapshot(self, base):
    with base.machine({'n': '0'}) as machine:
      forks = [machine]
      for number in (1, 2):
        fork = base.call(base.pool.fork(forks[-1]))
        out(base, fork, f'echo {number} >> n')
        forks.append(fork)
      texts = [out(base, m, 'cat n') for m in forks]
      for fork in forks[1:]:
        base.call(base.pool.release(fork))
    assert texts == ['0', '01\n', '01\n2\n']

  def test_provenance_says_how_strong_it_was(self, base):
    with base.machine() as machine:
      about = machine.provenance
    json.dumps(about)
    assert about['driver'] == 'microvm' and about['kernel'].count('.') >= 2
    assert about['accelerator'] in ('kvm', 'tcg')
    assert (about['kvm'] == 'works') == (about['accelerator'] == 'kvm')
    assert len(about['image_digest']) == 64

  def test_a_roots_machines_are_users_of_their_own(self, base):
    """Who own neither folders nor the states that others go on from."""
    if 'QEMU' not in base.pool._provenance['hypervisor']:
      pytest.skip("Firecracker's are shown with a program in its place")
    with base.machine() as one, base.machine(), base.machine() as three:
      fork = base.call(base.pool.fork(three))
      pids = sessions._children(base.pool._zygote.process.pid)
      users = [_user(pid) for pid in pids]
      said = one.provenance['hypervisor_user']
      held = [os.stat(f'/proc/{pid}/cwd').st_uid for pid in pids]
      base.call(base.pool.release(fork))
    assert len(users) >= 4 and set(held) == {os.geteuid()}
    if said in ('who started it', 'root'):
      assert set(users) == {os.geteuid()}
      assert (said == 'root') == (os.geteuid() == 0)
    elif said == 'nobody':
      assert set(users) == {65534}
    else:
      assert said == 'one of its own' and min(users) >= 0x70000000
      assert len(set(users)) == len(users)

  def test_kvm_by_name_works_or_is_refused(self, base):
    works = base.pool._provenance['kvm'] == 'works'
    config = MachineConfig(driver='microvm', accelerator='kvm', **live.SIZES)
    if works:
      assert pool_lib.probe(config)['accelerator'] == 'kvm'
    else:
      with pytest.raises(MissingFacility, match='set machine.accelerator=tcg'):
        pool_lib.probe(config)

  def test_a_killed_machine_is_infrastructure_and_replaced(self, base):
    def kill(machine):
      number = next(
        x.cell_contents
        for x in machine._handle.stop.__closure__
        if isinstance(x.cell_contents, int)
      )
      pool_lib.zygote_lib.ask_stop(base.pool._zygote, number)

    with base.machine() as machine:
      kill(machine)
      with pytest.raises(MachineError, match='died'):
        base.call(machine.run(['true'], 10.0))
    assert base.run(['echo', 'on'], 60.0).stdout == 'on\n'

  def test_a_killed_host_leaves_nothing(self, base):
    """Not even killed outright, while a command runs."""
    code = f"""
import asyncio
from composer.config import MachineConfig
from composer.environments.machines import Pool
async def main():
  pool = Pool(MachineConfig(driver='microvm', **{live.SIZES!r}))
  machine = await pool.acquire({{}})
  task = asyncio.ensure_future(machine.run(['sleep', '60'], 60))
  await asyncio.sleep(0.3)
  print(pool._zygote.scratch, pool._zygote.process.pid, flush=True)
  await task
asyncio.run(main())
"""
    with subprocess.Popen(
      [sys.executable, '-c', code], stdout=subprocess.PIPE, text=True
    ) as host:
      scratch, hypervisor = host.stdout.readline().split()
      machines = sessions._children(int(hypervisor))
      assert machines and pathlib.Path(scratch).is_dir()
      host.kill()
    deadline = time.monotonic() + 60
    left = [
      pathlib.Path(scratch),
      *(pathlib.Path(f'/proc/{x}') for x in machines),
    ]
    while any(x.exists() for x in left) and time.monotonic() < deadline:
      time.sleep(0.05)
    assert not [x for x in left if x.exists()]

  def test_many_at_once(self, base):
    """More than may be alive together."""

    async def one(number):
      machine = await base.pool.acquire({'n': str(number)})
      try:
        return int(await machine.read('n'))
      finally:
        await base.pool.release(machine)

    async def everything():
      return await asyncio.gather(*map(one, range(20)))

    assert base.call(everything()) == list(range(20))


@live.needs_microvm('postgres')
def test_a_service_starts_no_more_than_it_may(postgres):
  """A command has the database fork on its behalf, out of its own group."""
  bomb = 'for i in $(seq 200); do sleep 300 & done; wait'
  query = f"copy (select 1) to program '{bomb}'"
  with postgres.machine() as machine:
    result = postgres.call(machine.run(['psql', '-qc', query], 3.0))
    assert result.timed_out or result.exit_code, result
    count = (
      'cat /proc/[0-9]*/cmdline | tr "\\0" " " | grep -o "sleep 300" | wc -l'
    )
    result = postgres.call(machine.run(['sh', '-c', count], 60.0))
    config = postgres.pool.config
    assert int(result.stdout) <= config.processes + 32, result


@live.needs_microvm('postgres')
def test_a_migration_against_a_live_database(postgres):
  task = migration.build()
  grade = verify.grade
  with postgres.machine(task.files) as machine:
    before = postgres.call(machine.run(task.test_command))
    assert before.stdout.splitlines()[-1].startswith('passed 0 of')
    postgres.call(machine.write('migration.sql', migration.SOLUTION))
    after = postgres.call(machine.run(task.test_command))
    assert after.stdout == 'passed 8 of 8\n', after
    answer = postgres.call(machine.read('migration.sql'))
    # The server is of the machine, and lives on in a fork of it.
    postgres.call(machine.run(['psql', '-qc', 'create table mine (x int)']))
    fork = postgres.call(postgres.pool.fork(machine))
    count = [
      'psql',
      '-Atc',
      "select count(*) from pg_class where relname='mine'",
    ]
    assert postgres.call(fork.run(count)).stdout == '1\n'
    postgres.call(postgres.pool.release(fork))
  good = postgres.call(grade(postgres.pool, task, {'migration.sql': answer}))
  assert good.solved and good.passed == good.total == 8, good
  cut = answer.replace(b'round(', b'trunc(0.5 + 0 * (').replace(
    b'* 100)', b'* 100))'
  )
  bad = postgres.call(grade(postgres.pool, task, {'migration.sql': cut}))
  assert not bad.solved and bad.passed < bad.total, bad
  # The server, which the answer commands, reads none of the hidden checks.
  peek = b"select pg_read_file('/machine/work/rows.json');" + answer
  bad = postgres.call(grade(postgres.pool, task, {'migration.sql': peek}))
  assert not bad.solved and 'Permission denied' in bad.output, bad


def test_a_command_has_so_much_cpu(inside):
  """All its processes together; the kernel counts them in its control group."""

  class Group:
    def get(self, kind, name):
      assert name == 'cpu.stat'
      return f'usage_usec {self.used}\nuser_usec 1\nsystem_usec 2\n'

  import guest

  machine = guest.Machine.__new__(guest.Machine)
  machine.cpu_limit, machine.group = 3.0, Group()
  machine.group.used = 2_999_999
  assert machine.pressure() == ''
  machine.group.used = 3_100_000
  assert machine.pressure() == 'cpu: 3.1 s used, 3.0 allowed'


def test_the_newest_connection_counts(inside, tmp_path):
  """A saved machine's is one that nobody holds; the next takes its place."""
  import guest

  with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(tmp_path / 's'))
    listener.listen(4)

    def connect():
      sock = socket.socket(socket.AF_UNIX)
      sock.connect(str(tmp_path / 's'))
      return sock

    with connect() as first:
      port = guest.Vsock(listener)
      first.sendall(b'one')
      assert port.recv(10) == b'one'
      with connect() as second:  # the first is still there, and silent
        second.sendall(b'two')
        assert port.recv(10) == b'two'
        port.sendall(b'answer')
        assert second.recv(10) == b'answer'
        assert first.recv(10) == b''
      with connect() as third:  # the second has ended
        third.sendall(b'three')
        view = bytearray(10)
        assert port.recv_into(memoryview(view)) == 5
    port.sock.close()


# --- what is missing ----------------------------------------------------------


class TestMissing:
  def test_no_qemu(self, monkeypatch):
    monkeypatch.setattr(microvm, '_which', lambda _: None)
    monkeypatch.setattr(microvm, '_image', lambda _: None)
    with pytest.raises(
      MissingFacility, match='apt-get install.*qemu-system-x86'
    ):
      microvm.launch(MachineConfig(driver='microvm'), {})

  def test_no_image(self, monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    with pytest.raises(MissingFacility, match='composer images build base'):
      microvm.launch(MachineConfig(driver='microvm'), {})

  def test_a_directory_is_no_disk(self, tmp_path):
    (tmp_path / 'usr').mkdir()
    config = MachineConfig(driver='microvm', image=str(tmp_path))
    with pytest.raises(MissingFacility, match='plain directory'):
      microvm.launch(config, {})

  def test_a_snapshot_of_another_driver(self):
    pool = pool_lib.Pool(MachineConfig())
    snapshot = pool_lib.Snapshot('microvm')
    with pytest.raises(
      ValueError, match="driver 'microvm'.*driver='namespace'"
    ):
      asyncio.run(pool.acquire({}, snapshot))


# --- images -------------------------------------------------------------------


class TestImages:
  def test_names(self, tmp_path):
    with pytest.raises(ValueError, match='unknown.*base, postgres'):
      images.find('windows')
    with pytest.raises(ValueError, match='no root filesystem'):
      images.find(str(tmp_path))
    with pytest.raises(ValueError, match='unknown.*base, postgres'):
      build.build('windows')

  def test_the_command(self, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert cli.main(['images', 'ls']) == 0
    assert capsys.readouterr().out == ''
    folder = tmp_path / 'composer' / 'images' / 'base-1'
    folder.mkdir(parents=True)
    about = {'name': 'base', 'digest': 'd' * 64, 'built': 1, 'packages': {}}
    (folder / 'image.json').write_text(json.dumps(about))
    assert cli.main(['images', 'ls']) == 0
    assert capsys.readouterr().out == f'base       {"d" * 12}  {folder}\n'
    assert images.find('base').folder == folder
    assert cli.main(['images', 'build', 'windows']) == 2
    assert 'base, postgres' in capsys.readouterr().err

  def test_members_go_where_the_distribution_has_them(self):
    for name, place in (
      ('./bin/sh', 'usr/bin/sh'),
      ('./usr/bin/env', 'usr/bin/env'),
      ('./lib64/ld.so', 'usr/lib64/ld.so'),
      ('./lib', ''),
      ('./var/run/x', ''),
      ('./', ''),
    ):
      assert build.place(name) == place
    with pytest.raises(OSError, match=r'\.\.'):
      build.place('./usr/../../etc/passwd')

  @pytest.mark.parametrize(
    'members',
    [
      # A link out, and a file, a folder and a name written through it.
      [('a', 'link', '{out}'), ('a/f', 'file', '')],
      [('a', 'link', '{out}'), ('a/d', 'folder', '')],
      [('a', 'link', '{out}'), ('f', 'file', ''), ('a/f', 'name', 'f')],
      [('b/a', 'link', '../../out'), ('b/a/f', 'file', '')],
      [('a', 'link', '{out}'), ('a', 'folder', ''), ('a/f', 'file', '')],
      [('a', 'link', '{out}/f'), ('a', 'file', '')],
      [('s', 'name', '{out}/secret')],
      [('a', 'link', '{out}'), ('s', 'name', 'a/secret')],
      [('a', 'link', 'b'), ('b', 'link', 'a'), ('a/f', 'file', '')],
    ],
  )
  def test_no_member_leaves_the_tree(self, members, tmp_path):
    out, tree = tmp_path / 'out', tmp_path / 'tree'
    out.mkdir()
    tree.mkdir()
    (out / 'secret').write_text('kept')
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode='w') as tar:
      for name, kind, link in members:
        member = tarfile.TarInfo(name)
        member.type = {
          'file': tarfile.REGTYPE,
          'folder': tarfile.DIRTYPE,
          'link': tarfile.SYMTYPE,
          'name': tarfile.LNKTYPE,
        }[kind]
        member.linkname = link.format(out=out)
        member.size = 4 if kind == 'file' else 0
        tar.addfile(member, io.BytesIO(b'trap'))
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
      try:
        for member in tar:
          build._extract(tar, member, tree)
      except OSError:
        pass
    assert [x.name for x in out.iterdir()] == ['secret']
    assert (out / 'secret').read_text() == 'kept'
    assert (out / 'secret').stat().st_nlink == 1

  def test_links_inside_the_tree_are_followed(self, tmp_path):
    (tmp_path / 'usr' / 'lib').mkdir(parents=True)
    (tmp_path / 'lib').symlink_to('/usr/lib')
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode='w') as tar:
      for name, kind in (('lib', tarfile.DIRTYPE), ('lib/f', tarfile.REGTYPE)):
        member = tarfile.TarInfo(name)
        member.type, member.mode = kind, 0o755
        tar.addfile(member)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
      for member in tar:
        build._extract(tar, member, tmp_path)
    assert (tmp_path / 'lib').is_symlink()
    assert (tmp_path / 'usr' / 'lib' / 'f').is_file()

  def test_what_apt_says_is_read(self, monkeypatch):
    said = (
      'Inst libc6 (2.36-9 Debian:12/stable [amd64])\n'
      'Inst perl-base (5.36 Debian:12/stable [amd64]) [x]\n'
      'Conf libc6 (2.36-9 Debian:12/stable [amd64])\n'
    )
    monkeypatch.setattr(build, '_run', lambda *_: said)
    assert build.resolve(['libc6']) == {'libc6': '2.36-9'}
    monkeypatch.setattr(build, '_run', lambda *_: '')
    with pytest.raises(OSError, match='apt-get update'):
      build.resolve(['libc6'])

  def test_modules_come_after_what_they_need(self, tmp_path):
    def module(name, *needs):
      text = f'name={name}\0depends={",".join(needs)}\0'
      (tmp_path / f'{name}.ko').write_bytes(b'\x7fELF\0' + text.encode())

    module('virtio')
    module('virtio_ring', 'virtio')
    module('virtio-blk', 'virtio', 'virtio_ring')
    order = list(initrd.load_order(tmp_path, ['virtio-blk', 'built_in']))
    assert order == ['virtio.ko', 'virtio_ring.ko', 'virtio_blk.ko']

  def test_archive_is_newc(self):
    """Read back by a reader of our own, after the format's description."""
    files = {'a/b/c': (0o755, b'hello'), 'd': (0o644, b'')}
    data = initrd.archive_of(files)
    assert len(data) % 512 == 0
    found, at = {}, 0
    while True:
      assert data[at : at + 6] == b'070701'
      fields = [
        int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)
      ]
      name = data[at + 110 : at + 110 + fields[11] - 1].decode()
      at += (110 + fields[11] + 3) // 4 * 4
      if name == 'TRAILER!!!':
        break
      found[name] = (fields[1], data[at : at + fields[6]])
      at += (fields[6] + 3) // 4 * 4
    assert found['a/b/c'] == (0o100755, b'hello')
    assert found['d'] == (0o100644, b'')
    assert found['a'][0] == found['a/b'][0] == 0o040755

  def test_recipes_name_what_they_start(self):
    for name, recipe in catalog.RECIPES.items():
      assert 'python3' in recipe.packages, name
      for user in recipe.users:
        assert user in recipe.start

  @pytest.mark.parametrize(
    ('user', 'powers', 'spans', 'becomes'),
    [
      (1000, 0, '0 0 4294967295', 0),  # no root: stays who it is
      (0, 0xE3, '0 0 4294967295', 0x70000000),
      (0, 0xE3, '0 100000 65536', 65534),  # a root of few users
      (0, 0xE3, '0 1000 1', 0),  # of one
      (0, 0xA3, '0 0 4294967295', 0),  # who may not change its groups
      (0, 0xC3, '0 0 4294967295', 0),  # who could not end what it started
    ],
  )
  def test_who_a_hypervisor_becomes(
    self, inside, monkeypatch, user, powers, spans, becomes
  ):
    import vm

    status = f'Name:\tpython\nCapEff:\t{powers:016x}\n'
    texts = {'status': status, 'uid_map': spans, 'gid_map': spans}
    monkeypatch.setattr(vm.os, 'geteuid', lambda: user)
    monkeypatch.setattr(
      vm, 'open', lambda path: io.StringIO(texts[path[11:]]), raising=False
    )
    assert vm.user_for(0x70000000) == becomes

  def test_overlay_header(self, tmp_path, inside):
    """Fields of a qcow2 header where the format's description has them."""
    import qemu

    (tmp_path / 'disk0').write_bytes(bytes(1 << 20))
    path = qemu.write_overlay(str(tmp_path), 1, 1 << 20)
    data = pathlib.Path(path).read_bytes()
    assert data[:4] == b'QFI\xfb' and struct.unpack('>I', data[4:8]) == (3,)
    start, length, bits, size = struct.unpack('>QIIQ', data[8:32])
    assert data[start : start + length].decode() == 'disk0'
    assert (bits, size) == (16, 1 << 20)
    l1_size, l1, table, clusters = struct.unpack('>IQQI', data[36:60])
    assert l1_size == 1 and not any(data[l1 : l1 + 8]) and clusters == 1
    [block] = struct.unpack('>Q', data[table : table + 8])
    counts = struct.unpack('>8H', data[block : block + 16])
    assert counts == (1, 1, 1, 1, 0, 0, 0, 0)
    assert b'raw' in data[104:128] and len(data) == 4 << 16
