"""Repositories as bytes: what is kept, what is left out, what is refused."""

import gc
import io
import sys
import tarfile
import threading
import time
import zipfile

import pytest

from composer.environments.tasks import sources

FILES = {
  'PKG-INFO': b'Name: box\nVersion: 1.2\nLicense-Expression: MIT\n\ntext',
  'box/__init__.py': b'def one():\n  return 1\n',
  'box/__pycache__/__init__.cpython-311.pyc': b'secret',
  'box/data.txt': b'x',
  'box/tests/test_box.py': b'def test_one():\n  pass\n',
  'box/tests/conftest.py': b'',
  'box.egg-info/SOURCES.txt': b'secret',
  '.git/objects/ab/cd': b'secret',
  'docs/conf.py': b'x = 1\n',
  'setup.py': b'',
}


def tar(path, files, extra=()):
  with tarfile.open(path, 'w:gz') as archive:
    for name, data in files.items():
      member = tarfile.TarInfo(f'box-1.2/{name}')
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))
    for member in extra:
      archive.addfile(member)
  return path


def folder(path, files):
  for name, data in files.items():
    file = path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
  return path


def archive(path, files):
  with zipfile.ZipFile(path, 'w') as file:
    for name, data in files.items():
      file.writestr(f'box-1.2/{name}', data)
  return path


def test_all_forms_give_the_same(tmp_path):
  found = [
    sources.read(tar(tmp_path / 'box-1.2.tar.gz', FILES)),
    sources.read(folder(tmp_path / 'box', FILES)),
    sources.read(archive(tmp_path / 'box.zip', FILES)),
  ]
  assert found[0] == found[1] == found[2]
  source = found[0]
  assert (source.name, source.version, source.licence) == ('box', '1.2', 'MIT')
  assert source.tests == ('box/tests/test_box.py',)
  assert source.modules == ('box/__init__.py',)
  assert source.roots == ('.',)


def test_what_may_hold_answers_is_left_out(tmp_path):
  source = sources.read(folder(tmp_path, FILES))
  assert not any(data == b'secret' for data in source.files.values())
  assert 'box/data.txt' in source.files


def test_members_that_lead_out_are_left_out(tmp_path):
  link = tarfile.TarInfo('box-1.2/box/link.py')
  link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
  out = tarfile.TarInfo('box-1.2/../../evil.py')
  root = tarfile.TarInfo('box-1.2//etc/evil.py')
  path = tar(tmp_path / 'x.tar.gz', FILES, (link, out, root))
  kept = sources.read(path).files
  assert not [x for x in kept if 'evil' in x or 'link' in x]


def test_src_layout(tmp_path):
  files = {
    'src/box/a.py': b'x = 1\n',
    'tests/test_a.py': b'',
    'pyproject.toml': b'[project]\nname = "box"\nversion = "3"\nlicense = "X"\n',
    'tool.py': b'',
  }
  source = sources.read(folder(tmp_path, files))
  assert source.roots == ('src', '.')
  assert source.modules == ('src/box/a.py',)
  assert (source.name, source.version, source.licence) == ('box', '3', 'X')


@pytest.mark.parametrize(
  ('files', 'words'),
  [
    ({'box/a.py': b''}, 'carries no tests'),
    ({'test_a.py': b''}, 'no Python modules'),
    (
      {'a.py': b'x' * (1 << 20)}
      | {f'{i}.bin': bytes(1 << 20) for i in range(24)},
      'more than 24 MB',
    ),
  ],
)
def test_refused(tmp_path, files, words):
  with pytest.raises(ValueError, match=words):
    sources.read(folder(tmp_path, files))


def test_neither_folder_nor_archive(tmp_path):
  with pytest.raises(ValueError, match='no folder and no source'):
    sources.read(tmp_path / 'nothing.whl')
  (tmp_path / 'x.tar.gz').write_bytes(b'no archive')
  with pytest.raises(ValueError, match='cannot be read'):
    sources.read(tmp_path / 'x.tar.gz')


@pytest.mark.parametrize(
  ('path', 'test', 'configuration'),
  [
    ('tests/data/x.json', True, False),
    ('a/test_x.py', True, False),
    ('conftest.py', True, True),
    ('setup.cfg', False, True),
    ('a/x.pth', False, True),
    ('a/contest.py', False, False),
    ('latest/x.py', False, False),
  ],
)
def test_kinds_of_paths(path, test, configuration):
  assert sources.is_test(path) == test
  assert sources.is_configuration(path) == configuration


class _Slow:
  """Lets other threads in, where the garbage collector finds it."""

  def __init__(self):
    self.itself = self

  def __del__(self):
    time.sleep(0)


def test_threads_may_parse_at_once():
  text = 'x = ' + '(' * 30 + '1' + ')' * 30 + '\n'
  text += '\n'.join(f'def f{i}(a):\n  return [a + {i}]' for i in range(60))
  errors = []

  def run():
    for _ in range(60):
      try:
        sources.parse(text)
      except SystemError as error:
        errors.append(error)
      _Slow()

  before, interval = gc.get_threshold(), sys.getswitchinterval()
  try:
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
  finally:
    gc.set_threshold(*before)
    sys.setswitchinterval(interval)
  assert not errors
