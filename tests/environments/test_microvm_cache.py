"""The cache of virtual machines: what is old and of nobody goes, nothing else."""

import fcntl
import os
import subprocess
import sys
import threading
import time
import types

import pytest

from composer.config import MachineConfig
from composer.environments.machines import microvm
from composer.environments.machines import zygote
from composer.environments.machines.inside import cache

MB = 1 << 20
HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
import cache
cache.hold(sys.argv[2])
print('held', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
  """Five entries of a megabyte each, b the one used last, then c, d, e, a."""
  for place, name in enumerate(('a', 'e', 'd', 'c', 'b')):
    path = tmp_path / name
    if name in 'ad':
      path.write_bytes(os.urandom(MB))
    else:
      path.mkdir()
      (path / 'memory').write_bytes(os.urandom(MB))
      (tmp_path / f'{name}.lock').touch()
    os.utime(path, (place, place))
  (tmp_path / 'kvm-1').write_text('works')
  os.utime(tmp_path / 'kvm-1', (0, 0))
  return tmp_path


def names(folder):
  return sorted(x.name for x in os.scandir(folder))


def test_what_was_used_longest_ago_goes_beyond_the_bound(folder):
  removed = cache.prune(str(folder), 3 * MB + MB // 2)
  assert sorted(name for name, _ in removed) == ['a', 'e']
  assert all(MB <= size < MB + MB // 8 for _, size in removed)
  # With its lock; a verdict on KVM is none of this.
  assert names(folder) == ['b', 'b.lock', 'c', 'c.lock', 'd', 'kvm-1']
  assert cache.prune(str(folder), 3 * MB + MB // 2) == []


def test_holes_take_no_room(tmp_path):
  with (tmp_path / 'memory').open('wb') as file:
    file.truncate(1 << 40)
  assert cache.size_of(str(tmp_path)) < MB


def test_nothing_goes_within_an_hour(folder):
  for name in 'abcde':
    os.utime(folder / name, (time.time() - 3000,) * 2)
  assert cache.prune(str(folder), 0) == []


@pytest.mark.parametrize('name', ['a', 'c'])
def test_what_another_process_uses_stays_until_it_ends(folder, name):
  held = str(folder / name)
  with subprocess.Popen(
    [sys.executable, '-c', HOLDER, str(zygote.INSIDE), held],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as process:
    assert process.stdout.readline() == b'held\n'
    os.utime(held, (0, 0))
    cache.prune(str(folder), 0)
    assert os.path.exists(held)
    assert set(names(folder)) == {name, 'kvm-1'} | (
      {'c.lock'} & {name + '.lock'}
    )
    process.stdin.close()
    process.wait(60)
  assert [x for x, _ in cache.prune(str(folder), 0)] == [name]
  assert names(folder) == ['kvm-1']


def test_what_is_being_made_stays(folder):
  with cache.making(str(folder / 'b')):
    removed = dict(cache.prune(str(folder), 0))
  assert 'b' not in removed and 'c' in removed
  assert (folder / 'b' / 'memory').exists()


def test_whoever_waited_for_a_lock_that_went_makes_another(folder, monkeypatch):
  """Else two would make one state: each with a lock of its own."""
  path, opened, seen = str(folder / 'b'), threading.Event(), []

  def opening(name, mode):
    file = open(name, mode)
    opened.set()
    return file

  def make():
    with cache.making(path):
      seen.append(os.stat(path + cache.LOCK).st_ino)

  monkeypatch.setattr(cache, 'open', opening, raising=False)
  with open(path + cache.LOCK, 'w') as ours:
    fcntl.flock(ours, fcntl.LOCK_EX)
    waiting = threading.Thread(target=make)
    waiting.start()
    assert opened.wait(60)  # the file that goes now
    os.unlink(path + cache.LOCK)
    fcntl.flock(ours, fcntl.LOCK_UN)
    waiting.join(60)
    assert seen and seen != [os.fstat(ours.fileno()).st_ino]


def test_nothing_goes_that_a_link_leads_to(folder):
  away = folder.parent / f'{folder.name}-away'
  away.mkdir()
  (away / cache.FACTS).touch()
  (folder / 'f').symlink_to(away)
  (folder / 'g').symlink_to(away / cache.FACTS)
  (folder / 'b' / 'link').symlink_to(away)
  os.utime(folder / 'b', (0, 0))
  assert len(cache.prune(str(folder), 0)) == 5
  assert names(folder) == ['f', 'g', 'kvm-1']
  assert (away / cache.FACTS).exists()


def test_half_removed_is_no_state(folder, monkeypatch):
  """Whoever removes may be ended, or may not go on: the rest goes later."""
  (folder / 'e' / cache.FACTS).touch()
  os.utime(folder / 'e', (1, 1))

  def refuse(path):
    raise PermissionError(path)

  with monkeypatch.context() as patch:
    patch.setattr(cache.shutil, 'rmtree', refuse)
    removed = cache.prune(str(folder), 3 * MB + MB // 2)
  assert [name for name, _ in removed] == ['a']
  assert [x.name for x in (folder / 'e').iterdir()] == ['memory']


def test_what_has_gone_is_not_held(folder):
  with pytest.raises(FileNotFoundError):
    cache.hold(str(folder / 'gone'))


def test_two_prune_at_once(folder, monkeypatch):
  """What the other removes meanwhile is passed over."""
  listed = os.listdir(folder)
  monkeypatch.setattr(cache.os, 'listdir', lambda _: [*listed, 'gone'])
  assert len(cache.prune(str(folder), 0)) == 5
  assert cache.prune(str(folder), 0) == []


def test_what_is_used_meanwhile_stays(folder, monkeypatch):
  """Its user has touched it and is on the way to its lock."""
  size_of = cache.size_of

  def touched(path):
    if path == str(folder / 'a'):
      os.utime(path)
    return size_of(path)

  monkeypatch.setattr(cache, 'size_of', touched)
  assert 'a' not in dict(cache.prune(str(folder), 0))
  assert (folder / 'a').exists()


def test_what_was_removed_is_said(monkeypatch, capsys):
  facts = {'removed': [['agent-1', 2_000_000], ['abc', 90_000_000]]}
  recipe = types.SimpleNamespace(start='')
  monkeypatch.setattr(microvm, '_image', lambda _: None)
  monkeypatch.setattr(microvm, '_recipe', lambda _: recipe)
  monkeypatch.setattr(microvm, '_programs', lambda *_: {})
  monkeypatch.setattr(microvm, '_settings', lambda *_: {'cache': '/c'})
  for told in (facts, {'removed': []}, {}):
    made = types.SimpleNamespace(facts=told)
    monkeypatch.setattr(zygote, 'launch', lambda *_, made=made: made)
    assert microvm.launch(MachineConfig(driver='microvm'), {}) is made
    said = capsys.readouterr().err
    if told is facts:
      assert '/c, 2 that' in said and '(92 MB): agent-1, abc' in said
    else:
      assert said == ''
