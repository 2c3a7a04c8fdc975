"""A repository as bytes: a folder or a source distribution, and what it holds.

Nothing of it runs here, and nothing is unpacked to disk: members of an archive
that are links, devices, or lead out of it are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
import dataclasses
import email.parser
import fnmatch
import pathlib
import re
import tarfile
import threading
import tomllib
import warnings
import zipfile

MOST_BYTES = 24 << 20  # of all files that are kept
MOST_FILE = 2 << 20
MOST_FILES = 3_000
# What may hold the answers, or is of no use to a machine.
DROPPED_FOLDERS = (
  '.git',
  '.hg',
  '.svn',
  '.tox',
  '.nox',
  '.eggs',
  '.venv',
  'venv',
  'node_modules',
  '__pycache__',
  '.pytest_cache',
  '.mypy_cache',
  '.ruff_cache',
  '.hypothesis',
  '.composer',
  'build',
  'dist',
  '*.egg-info',
  '*.dist-info',
)
DROPPED_FILES = (
  '*.pyc',
  '*.pyo',
  '*.so',
  '*.pyd',
  '*.orig',
  '*.rej',
  '.cover*',
)
TEST_FOLDERS = ('test', 'tests', 'testing')
TEST_FILES = ('test_*.py', '*_test.py', 'test.py', 'tests.py', 'conftest.py')
# What decides how tests run, and which; restored before grading.
CONFIGURATION = (
  'conftest.py',
  'pytest.ini',
  '.pytest.ini',
  'pytest.toml',
  '.pytest.toml',
  'tox.ini',
  'setup.cfg',
  'setup.py',
  'pyproject.toml',
  'noxfile.py',
  'sitecustomize.py',
  'usercustomize.py',
  '.coveragerc',
  '*.pth',
)
NOT_SOURCE = (
  'setup.py',
  'conf.py',
  'noxfile.py',
  'versioneer.py',
  '__main__.py',
)
NOT_SOURCE_FOLDERS = (
  'doc',
  'docs',
  'example',
  'examples',
  'bench',
  'benchmark',
  'benchmarks',
  'tools',
  'scripts',
  'misc',
  'vendor',
  '_vendor',
)


@dataclasses.dataclass(frozen=True)
class Source:
  """A repository.

  Attributes:
    name, version, licence: as its metadata says; '' where it does not.
    files: path -> contents of all that a machine gets.
    roots: folders for sys.path.
    tests: files that pytest collects.
    modules: Python files of the package, tests left out.
  """

  name: str
  version: str
  licence: str
  files: Mapping[str, bytes]
  roots: tuple[str, ...]
  tests: tuple[str, ...]
  modules: tuple[str, ...]


def read(path: pathlib.Path) -> Source:
  """Reads a folder, a .tar.gz or a .zip.

  Raises:
    ValueError: it is none of these, too large, or has no tests or no modules.
  """
  if path.is_dir():
    members = _of_folder(path)
  elif path.name.endswith(('.tar.gz', '.tgz', '.tar.bz2', '.tar.xz')):
    members = _of_tar(path)
  elif path.suffix == '.zip':
    members = _of_zip(path)
  else:
    raise ValueError(
      f'{str(path)!r} is no folder and no source distribution (.tar.gz, .zip)'
    )
  return describe(_keep(members, path), path.name)


def describe(files: Mapping[str, bytes], fallback: str) -> Source:
  """What the files say of themselves; `fallback` names what has no name."""
  name, version, licence = _metadata(files)
  tests = tuple(
    sorted(
      x
      for x in files
      if is_test(x) and _matches(x, TEST_FILES) and _base(x) != 'conftest.py'
    )
  )
  src = any(x.startswith('src/') and x.endswith('.py') for x in files)
  modules = tuple(sorted(x for x in files if _is_module(x, files[x], src)))
  if not tests:
    raise ValueError(
      f'{fallback} carries no tests (files {", ".join(TEST_FILES[:4])}); use a'
      ' source distribution or a checkout that does'
    )
  if not modules:
    raise ValueError(f'{fallback} has no Python modules beside its tests')
  return Source(
    name=name or re.sub(r'(\.tar)?\.\w+$', '', fallback),
    version=version,
    licence=licence,
    files=files,
    roots=('src', '.') if src else ('.',),
    tests=tests,
    modules=modules,
  )


def is_test(path: str) -> bool:
  """Whether a path belongs to the tests, fixtures and their data included."""
  folders = path.split('/')[:-1]
  return any(x in TEST_FOLDERS for x in folders) or _matches(path, TEST_FILES)


def is_configuration(path: str) -> bool:
  """Whether a path decides how tests run."""
  return _matches(path, CONFIGURATION)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
  return any(fnmatch.fnmatchcase(_base(path), x) for x in patterns)


_PARSING = threading.Lock()


def parse(text: str | bytes) -> ast.Module:
  """`ast.parse`, by one thread at a time.

  CPython 3.11 counts the depth of the trees that all threads make as one, and
  raises a SystemError where another thread came between. What the parser warns
  of (an escape that is none) is the author's business.
  """
  with _PARSING, warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return ast.parse(text)


def _base(path: str) -> str:
  return path.rsplit('/', 1)[-1]


def _is_module(path: str, data: bytes, src: bool) -> bool:
  folders = path.split('/')[:-1]
  if not path.endswith('.py') or is_test(path) or is_configuration(path):
    return False
  if _base(path) in NOT_SOURCE or (src and folders[:1] != ['src']):
    return False
  if any(x in NOT_SOURCE_FOLDERS or x.startswith('.') for x in folders):
    return False
  try:
    parse(data)
  except (SyntaxError, ValueError):
    return False
  return True


# --- members -----------------------------------------------------------------

Members = Iterator[tuple[str, int, 'pathlib.Path | bytes']]


def _of_folder(folder: pathlib.Path) -> Members:
  for path in sorted(folder.rglob('*')):
    if path.is_file() and not path.is_symlink():
      name = path.relative_to(folder).as_posix()
      yield name, path.stat().st_size, path


def _of_tar(path: pathlib.Path) -> Members:
  try:
    with tarfile.open(path) as archive:
      for member in archive:
        if member.isreg():
          data = b''
          if member.size <= MOST_FILE:
            file = archive.extractfile(member)
            data = file.read() if file else b''
          yield _below(member.name), member.size, data
  except (tarfile.TarError, EOFError, OSError) as error:
    raise ValueError(f'{str(path)!r} cannot be read: {error}') from error


def _of_zip(path: pathlib.Path) -> Members:
  try:
    with zipfile.ZipFile(path) as archive:
      for about in archive.infolist():
        kind = about.external_attr >> 28
        if not about.is_dir() and kind in (0, 8):  # a regular file
          small = about.file_size <= MOST_FILE
          data = archive.read(about) if small else b''
          yield _below(about.filename), about.file_size, data
  except (zipfile.BadZipFile, OSError) as error:
    raise ValueError(f'{str(path)!r} cannot be read: {error}') from error


def _below(name: str) -> str:
  """Without the one folder that a distribution stands in."""
  return name.removeprefix('./').partition('/')[2]


def _keep(members: Members, path: pathlib.Path) -> dict[str, bytes]:
  kept: dict[str, bytes] = {}
  total = 0
  for name, size, data in members:
    parts = name.split('/')
    if not name or name.startswith('/') or '..' in parts or '\0' in name:
      continue
    if any(
      fnmatch.fnmatchcase(x, y) for x in parts[:-1] for y in DROPPED_FOLDERS
    ):
      continue
    if _matches(name, DROPPED_FILES) or size > MOST_FILE:
      continue
    kept[name] = data.read_bytes() if isinstance(data, pathlib.Path) else data
    total += len(kept[name])
    if total > MOST_BYTES or len(kept) > MOST_FILES:
      raise ValueError(
        f'{str(path)!r} holds more than {MOST_BYTES >> 20} MB or {MOST_FILES}'
        ' files; a machine gets all of it, so choose a smaller part'
      )
  return kept


# --- metadata ----------------------------------------------------------------


def _metadata(files: Mapping[str, bytes]) -> tuple[str, str, str]:
  """(name, version, licence) of PKG-INFO, else of pyproject.toml."""
  if 'PKG-INFO' in files:
    text = files['PKG-INFO'].decode(errors='replace')
    about = email.parser.HeaderParser().parsestr(text)
    licence = about.get('License-Expression') or about.get('License') or ''
    if not licence or len(licence) > 60:
      classes = about.get_all('Classifier') or ()
      found = [x for x in classes if x.startswith('License ::')]
      licence = found[0].rsplit(' :: ', 1)[-1] if found else licence[:60]
    return about.get('Name', ''), about.get('Version', ''), licence
  try:
    text = files.get('pyproject.toml', b'').decode()
    project = tomllib.loads(text).get('project', {})
  except (tomllib.TOMLDecodeError, UnicodeDecodeError):
    project = {}
  licence = project.get('license', '')
  if isinstance(licence, dict):
    licence = str(licence.get('text', ''))[:60]
  return project.get('name', ''), project.get('version', ''), licence
