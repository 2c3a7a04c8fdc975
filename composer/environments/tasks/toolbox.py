"""What tests need in a machine that has no packages: pytest, as bytes.

Compiled files stand in place of their sources (`x.pyc` beside nothing), which
Python imports as they are: a machine writes no caches, and compiling pytest
anew would be most of the time of a short test run. They hold for the Python
that made them; a machine of another one gets sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import py_compile
import subprocess
import sys
import tempfile
from typing import Any

FOLDER = '.composer'
COMMAND = ('python', f'{FOLDER}/check.py', f'{FOLDER}/spec.json')
PACKAGES = ('pytest',)
COVERAGE = ('coverage',)
OUTPUT_BYTES = 6_000
LISTING = """
import json, sys
import {names}
print(json.dumps(sorted(
  [name, module.__spec__.origin, bool(module.__spec__.submodule_search_locations)]
  for name, module in list(sys.modules.items())
  if module and getattr(module, '__spec__', None)
  and str(module.__spec__.origin).endswith(('.py', '.so'))
)))
"""
CANARIES = '''"""Every test here must fail; see check.py."""
import unittest

import pytest


def test_false():
  value = 0
  assert value


def test_equal():
  one, other = [1, 2], [1, 3]
  assert one == other


def test_raises():
  with pytest.raises(ValueError):
    pass


def test_close():
  assert 1.0 == pytest.approx(2.0)


class Case(unittest.TestCase):
  def test_equal(self):
    self.assertEqual((1, 'a'), (1, 'b'))

  def test_true(self):
    self.assertTrue([])

  def test_raises(self):
    with self.assertRaises(KeyError):
      pass
'''
INI = '[pytest]\npython_files = test_*.py *_test.py test.py tests.py\n'


@functools.lru_cache(maxsize=1)
def script() -> str:
  path = pathlib.Path(__file__).with_name('check.py')
  return path.read_text(encoding='utf-8')


def harness() -> dict[str, str]:
  """Scripts that a pool's machines are to know (`Pool(config, harness)`)."""
  return {COMMAND[1]: script()}


@functools.lru_cache(maxsize=4)
def files(packages: Sequence[str] = PACKAGES) -> dict[str, bytes]:
  """The runner, pytest and `packages`, by their place in a workspace.

  Raises:
    ValueError: a package is not installed here.
  """
  for name in PACKAGES + COVERAGE:
    if name in packages and importlib.util.find_spec(name) is None:
      raise ValueError(
        f'{name} is not installed; tasks of repositories need it: pip install'
        " 'composer[tasks]'"
      )
  found = {
    COMMAND[1]: script().encode(),
    f'{FOLDER}/canary_check.py': CANARIES.encode(),
    f'{FOLDER}/pytest.ini': INI.encode(),
  }
  for name in _with_dependencies(packages):
    for path, data in _package(name).items():
      found[f'{FOLDER}/lib/{path}'] = data
  return found


def spec(**fields: Any) -> str:
  """The spec of `check.py` as JSON; what is not given has its default."""
  known: dict[str, Any] = {
    'roots': ['.'],
    'files': [],
    'ids': None,
    'suspects': [],
    'guarded': [],
    'allowed': [],
    'canaries': False,
    'failing': [],
    'seconds': 30.0,
    'output': OUTPUT_BYTES,
    'asserts': 'plain',
    'cover': None,
  }
  unknown = sorted(set(fields) - set(known))
  assert not unknown, unknown
  return json.dumps(known | fields)


def _with_dependencies(packages: Sequence[str]) -> list[str]:
  """The packages and those installed ones that they say they need.

  pytest and coverage are taken as they are: what they need lies with them.
  """
  from packaging.requirements import Requirement

  found, todo = [], list(packages)
  while todo:
    name = todo.pop(0)
    if name in found:
      continue
    found.append(name)
    if name in PACKAGES + COVERAGE:
      continue
    try:
      needed = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
      continue  # `_package` says so
    for requirement in map(Requirement, needed):
      marker = requirement.marker
      if marker is None or marker.evaluate({'extra': ''}):
        todo.append(requirement.name)
  return found


@functools.lru_cache(maxsize=32)
def _package(name: str) -> dict[str, bytes]:
  if name == 'pytest':
    found = _loaded('pytest, packaging.version')
    for top in ('pytest', '_pytest', 'pluggy', 'iniconfig'):
      found |= _tree(top)  # plugins are imported by name
    return found
  if name == 'coverage':
    return _tree('coverage')
  try:
    tops = importlib.metadata.distribution(name).files or ()
  except importlib.metadata.PackageNotFoundError as error:
    raise ValueError(
      f'--with {name}: no such package is installed here; pip install it first'
    ) from error
  found: dict[str, bytes] = {}
  for top in sorted({x.parts[0] for x in tops}):
    if top.endswith('.py'):
      found |= _tree(top.removesuffix('.py'))
    elif not top.endswith(('.dist-info', '.egg-info')) and top not in (
      '..',
      '__pycache__',
    ):
      found |= _tree(top)
  return found


def _loaded(names: str) -> dict[str, bytes]:
  """Modules that `import names` loads, the standard library's left out."""
  said = subprocess.run(
    [sys.executable, '-c', LISTING.format(names=names)],
    check=True,
    capture_output=True,
    timeout=60,
  )
  places = {}
  for name, origin, package in json.loads(said.stdout):
    path = pathlib.Path(origin)
    if {'site-packages', 'dist-packages'} & set(path.parts):
      place = name.replace('.', '/') + ('/__init__' if package else '')
      places[place + ''.join(path.suffixes)] = path
  return _read(places)


def _tree(name: str) -> dict[str, bytes]:
  """All of an importable package or module."""
  about = importlib.util.find_spec(name)
  if about is None:
    return {}
  if not about.submodule_search_locations:
    path = pathlib.Path(str(about.origin))
    return _read({path.name: path})
  folder = pathlib.Path(next(iter(about.submodule_search_locations)))
  return _read(
    {
      (pathlib.Path(name) / path.relative_to(folder)).as_posix(): path
      for path in sorted(folder.rglob('*'))
      if path.is_file() and '__pycache__' not in path.parts
    }
  )


def _read(places: Mapping[str, pathlib.Path]) -> dict[str, bytes]:
  """Place -> contents; a source's are its compiled form, under `.pyc`."""
  found = {}
  with tempfile.TemporaryDirectory() as folder:
    compiled = pathlib.Path(folder, 'compiled')
    for place, path in places.items():
      if path.suffix != '.py':
        found[place] = path.read_bytes()
        continue
      py_compile.compile(
        str(path),
        str(compiled),
        dfile=place,
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
      )
      found[f'{place}c'] = compiled.read_bytes()
  return found
