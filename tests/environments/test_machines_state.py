"""Snapshots, forks, images and limits of machines that are namespaces."""

import dataclasses
import os
import pathlib
import shutil
import subprocess

import live
import pytest

from composer.config import MachineConfig
from composer.environments.machines import MissingFacility
from composer.environments.machines import machine as machine_lib
from composer.environments.machines import pool as pool_lib
from composer.environments.machines import process

SHELL = (
  'sh',
  'cat',
  'ls',
  'rm',
  'mkdir',
  'id',
  'touch',
  'rmdir',
  'ln',
  'chmod',
)


@pytest.fixture(scope='module', params=('namespace', 'process'))
def world(request):
  process._warned.append(True)
  found = live.open_live(request.param)
  yield found
  found.close()


def sh(world, machine, script):
  result = world.call(machine.run(['sh', '-c', script], 30.0))
  assert result.exit_code == 0, result
  return result.stdout


class TestForks:
  TREE = (
    'mkdir -p a/b empty; echo one > a/b/f; ln -s f a/b/l; ln -s /nowhere out;'
    ' echo 2 > x; chmod 751 x; echo s > secret; chmod 000 secret;'
    ' mkdir shut; echo in > shut/f; chmod 500 shut; echo t > "$TMPDIR/t";'
    ' mkfifo pipe; printf "\\377\\000" > "odd name\n"'
  )
  LOOK = (
    'ls -R . | grep -v -e total -e pipe; cat a/b/l x shut/f "$TMPDIR/t";'
    ' ls -ld x secret shut | cut -c 1-10; readlink out'
  )

  def test_a_fork_is_what_the_machine_was(self, world):
    with world.machine({'given': 'by the host'}) as parent:
      sh(world, parent, self.TREE)
      want = sh(world, parent, self.LOOK)
      assert 'by the host' == world.call(parent.read('given')).decode()
      snapshot = world.call(parent.snapshot())
      assert (
        sh(world, parent, self.LOOK) == want
      )  # closed things are closed again
      sh(world, parent, 'rm -rf a x; echo later > late')
      with (
        world.machine({'more': 'm'}, snapshot) as one,
        world.machine(snapshot=snapshot) as two,
      ):
        got = sh(world, two, self.LOOK)
        assert got == want
        sh(world, one, 'echo changed > a/b/f')
        assert sh(world, two, 'cat a/b/f') == 'one\n'
        assert world.call(two.read('odd name\n')) == b'\xff\0'
        assert world.call(one.read('more')) == b'm'
        assert 'late' not in got and 'pipe' not in sh(world, two, 'ls')

  def test_fork_of_a_live_machine_with_staged_files(self, world):
    with world.machine() as parent:
      parent.stage('staged', 's')
      fork = world.call(world.pool.fork(parent))
      assert world.call(fork.read('staged')) == b's'
      world.call(world.pool.release(fork))
      assert sh(world, parent, 'cat staged') == 's'

  def test_many_files_take_many_requests(self, world):
    with world.machine() as parent:
      sh(
        world, parent, 'for i in $(seq 1500); do echo $i > file-number-$i; done'
      )
      snapshot = world.call(parent.snapshot())
      assert len(list(machine_lib.restorations(snapshot))) > 2
      with world.machine(snapshot=snapshot) as fork:
        script = 'ls | wc -l; cat file-number-1 file-number-1500'
        assert sh(world, fork, script).split() == ['1500', '1', '1500']

  def test_too_much_is_refused_and_the_machine_lives(self, world):
    with world.machine() as parent:
      sh(world, parent, 'for i in 1 2 3; do truncate -s 10M hole$i; done')
      with pytest.raises(OSError, match='more than 16 MB'):
        world.call(parent.snapshot())
      assert sh(world, parent, 'ls | wc -l').strip() == '3'


def test_a_snapshot_cannot_write_outside(tmp_path):
  """A saved tree is data of the model: hostile names are refused inside."""
  world = live.open_live('process')
  try:
    for path in ('../x', f'{tmp_path}/x', 'work/../../x'):
      snapshot = machine_lib.Snapshot(
        'process', [[path, 'f', 420, 1]], data=b'x'
      )
      with pytest.raises(PermissionError):
        world.call(world.pool.acquire({}, snapshot))
    through = [['work/l', 'l', str(tmp_path)], ['work/l/x', 'l', 'y']]
    with pytest.raises(OSError):
      world.call(
        world.pool.acquire({}, machine_lib.Snapshot('process', through))
      )
    assert not list(tmp_path.iterdir())
  finally:
    world.close()


# --- images -------------------------------------------------------------------


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
  """A root filesystem of a shell and a few tools of this system."""
  root = tmp_path_factory.mktemp('image')
  for name in ('usr/bin', 'etc', 'opt'):
    (root / name).mkdir(parents=True)
  (root / 'bin').symlink_to('usr/bin')
  (root / 'etc/motd').write_text('of the image\n')
  (root / 'opt/old').mkdir()
  (root / 'opt/old/file').write_text('old\n')
  wanted = {}
  for name in SHELL:
    path = shutil.which(name, path='/usr/bin:/bin')
    if path is None:
      pytest.skip(f'no {name}')
    wanted[f'usr/bin/{name}'] = path
    said = subprocess.run(['ldd', path], capture_output=True, text=True)
    for word in said.stdout.split():
      if word.startswith('/'):
        wanted[word.lstrip('/')] = word
  for place, source in wanted.items():
    target = root / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
  return root


@pytest.fixture(scope='module')
def imaged(tree):
  found = live.open_live('namespace', image=str(tree))
  yield found
  found.close()


class TestImage:
  def test_it_is_all_that_there_is(self, imaged, tree):
    with imaged.machine({'a': 'b'}) as machine:
      text = sh(imaged, machine, 'cat /etc/motd a; echo; ls /; ls /usr/bin')
      assert text.startswith('of the image\nb\n')
      names = text.split()
      assert set(SHELL) <= set(names)
      assert 'root' not in names and 'home' not in names
      result = imaged.call(machine.run(['python', '-c', 'print(1)'], 10.0))
      assert result.exit_code == 127  # the image has none
      assert machine.provenance['image'] == str(tree)
      assert machine.provenance['overlay'] == 'all of the image'
    assert (tree / 'etc/motd').read_text() == 'of the image\n'

  def test_changes_are_the_machines_own(self, imaged, tree):
    change = (
      'echo new > /etc/motd; rm -r /opt/old; mkdir /opt/dir;'
      ' echo x > /opt/dir/x; rm /usr/bin/touch; ln -s dir /opt/link; id -u'
    )
    look = (
      'cat /etc/motd; ls /opt; ls /opt/link/; ls /usr/bin/touch || echo gone'
    )
    with imaged.machine() as one, imaged.machine() as two:
      assert sh(imaged, one, change) == '0\n'
      want = 'new\ndir\nlink\nx\ngone\n'
      assert sh(imaged, one, look) == want
      assert sh(imaged, two, 'cat /etc/motd; ls /opt') == 'of the image\nold\n'
      snapshot = imaged.call(one.snapshot())
      with imaged.machine(snapshot=snapshot) as fork:
        assert sh(imaged, fork, look) == want
    assert (tree / 'opt/old/file').read_text() == 'old\n'

  def test_its_disk_is_bounded(self, imaged):
    fill = 'while cat /usr/bin/* >> /opt/full; do :; done 2>&1; echo end'
    with imaged.machine() as machine:
      sh(imaged, machine, fill)  # until no space is left, or the file too large
      size = int(sh(imaged, machine, 'ls -l /opt/full').split()[4])
      assert 1 << 20 < size <= 16 << 20
      assert sh(imaged, machine, 'rm /opt/full; echo on') == 'on\n'

  def test_an_image_that_is_none(self, tmp_path):
    config = MachineConfig(image=str(tmp_path))
    with pytest.raises(ValueError, match='neither usr/ nor bin/'):
      pool_lib.probe(config)


# --- limits -------------------------------------------------------------------


def limited(**changes):
  return live.open_live('namespace', **changes)


def test_cpu_of_all_processes_together():
  code = """
import os
for _ in range(3):
  if os.fork() == 0:
    while True: pass
while True: pass
"""
  world = limited(exec_cpu_s=0.5)
  try:
    result = world.run(['python', '-c', code], 30.0)
    assert 'machine: killed, cpu' in result.stderr and not result.timed_out
    assert 0.4 < result.cpu_seconds < 5
    again = world.run(['echo', 'on'])
    assert again.stdout == 'on\n'
  finally:
    world.close()


def test_cpu_of_dead_children_counts():
  count = 'i=0; while [ $i -lt 9999 ]; do i=$((i+1)); done'
  script = f"while :; do sh -c '{count}'; done"
  world = limited(exec_cpu_s=0.5)
  try:
    result = world.run(['sh', '-c', script], 30.0)
    assert 'machine: killed, cpu' in result.stderr, result
  finally:
    world.close()


def test_a_control_group_where_there_is_one():
  """Memory that rises between two looks of the watchdog meets the kernel."""
  world = limited(memory_mb=64, disk_mb=4)
  try:
    with world.machine() as machine:
      if 'control group' not in machine.provenance['limits']['memory']:
        pytest.skip('no control group is delegated to this process')
      prefix = f'composer-{world.pool._zygote.process.pid}-'
      assert groups(prefix)
      script = """
import mmap, os, time
for _ in range(6):
  if os.fork() == 0:
    room = mmap.mmap(-1, 30 << 20)
    for _ in range(30):
      room.write(b'x' * (1 << 20))
    time.sleep(3)
    os._exit(0)
time.sleep(3)
"""
      result = world.call(machine.run(['python', '-c', script], 20.0))
      assert 'machine: killed, memory' in result.stderr, result
      assert world.call(machine.run(['echo', 'on'], 20.0)).stdout == 'on\n'
  finally:
    world.close()
  assert not groups(prefix)


def groups(prefix):
  return list(pathlib.Path('/sys/fs/cgroup').rglob(f'{prefix}*'))


def test_networks_are_used_again_but_never_by_two():
  """More machines than namespaces; those alive at once have different ones."""
  world = limited(concurrent=4)
  try:
    code = 'import os; print(os.stat("/proc/self/ns/net").st_ino)'
    seen, look = [], ['python', '-c', code]
    for _ in range(3):
      with world.machine() as one, world.machine() as two:
        pair = [world.call(m.run(look)).stdout for m in (one, two)]
      assert pair[0] != pair[1]
      seen += pair
    host = os.stat('/proc/self/ns/net').st_ino
    assert f'{host}\n' not in seen
    assert len(set(seen)) < len(seen)
  finally:
    world.close()


def test_new_fields_are_validated():
  with pytest.raises(ValueError, match='machine.exec_cpu_s=0'):
    pool_lib.validate(dataclasses.replace(MachineConfig(), exec_cpu_s=0))
  with pytest.raises(
    ValueError, match="machine.accelerator='gpu'.*auto, kvm, tcg"
  ):
    pool_lib.validate(MachineConfig(accelerator='gpu'))
  with pytest.raises((ValueError, MissingFacility), match='process.*no image'):
    pool_lib.validate(MachineConfig(driver='process', image='base'))
