"""Rules of the source tree, by reading it: imports, sizes, the README's tree.

`python tests/test_layout.py` prints the lines that the README's tree lacks.
"""

import ast
from collections.abc import Iterator
import fnmatch
from pathlib import Path
import re

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ('composer', 'pallas_kernels', 'experiments', 'tests')

FILE_LINES = 800
FUNCTION_LINES = 80
KERNEL_LINES = 150
COMPILED = 'composer/weights/compiled.py'  # loops for numba, kernels too

# Importer -> what it must not reach. Through other modules counts as well.
FORBIDDEN = {
  'composer.rl': ('composer.inference',),
  'composer.inference': ('composer.rl',),
  'composer.rollout': ('composer.inference', 'composer.rl'),
  'composer.environments': ('composer.rl', 'composer.inference'),
  'composer.rewards': ('composer.rl', 'composer.inference'),
  'composer.model': ('composer.rl', 'composer.inference'),
  'pallas_kernels': ('composer',),
}
# Not imported by the module itself (`composer.records` may import jax).
FORBIDDEN_DIRECTLY = {
  'composer.environments': ('jax', 'jaxlib', 'flax', 'optax'),
  'composer.rewards': ('jax', 'jaxlib', 'flax', 'optax'),
}
PICKLES = ('pickle', 'cloudpickle', 'dill', 'joblib', 'marshal', 'shelve')


def modules(root: Path) -> dict[str, Path]:
  """Dotted name -> file, of the packages under `root`."""
  found = {}
  for top in ('composer', 'pallas_kernels'):
    for path in sorted((root / top).rglob('*.py')):
      parts = path.relative_to(root).with_suffix('').parts
      parts = parts[:-1] if parts[-1] == '__init__' else parts
      found['.'.join(parts)] = path
  return found


def within(name: str, package: str) -> bool:
  return name == package or name.startswith(package + '.')


def imports(name: str, path: Path) -> set[str]:
  """Everything that the file imports, wherever in it, and names it imports by.

  Imports for type checking count, and so does a module named in a string (for
  `importlib`).
  """
  found = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        package = name.split('.')
        cut = node.level - (path.name == '__init__.py')
        package = package[: len(package) - cut]
        base = '.'.join([*package, *([base] if base else [])])
      found.add(base)
      found |= {f'{base}.{alias.name}' for alias in node.names}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      if re.fullmatch(r'composer(\.\w+)+', node.value):
        found.add(node.value)
  return found


def import_faults(root: Path) -> list[str]:
  known = modules(root)
  direct = {name: imports(name, path) for name, path in known.items()}
  faults = []
  for name in known:
    for package, banned in FORBIDDEN_DIRECTLY.items():
      if within(name, package):
        faults += [
          f'{name} imports {target}'
          for target in sorted(direct[name])
          if target.split('.')[0] in banned
        ]
    for package, banned in FORBIDDEN.items():
      if within(name, package):
        for target, route in reached(name, direct):
          if any(within(target, top) for top in banned):
            faults.append(f'{name} reaches {target} through {route}')
    faults += [
      f'{name} imports {target}: nothing is pickled'
      for target in sorted(direct[name])
      if target.split('.')[0] in PICKLES
    ]
  return faults


def reached(
  start: str, direct: dict[str, set[str]]
) -> Iterator[tuple[str, str]]:
  """Modules of the tree that importing `start` may import, and the route."""
  seen, ahead = {start}, [(start, start)]
  while ahead:
    name, route = ahead.pop()
    for target in sorted(direct[name]):
      if target.split('.')[0] in ('composer', 'pallas_kernels'):
        if target not in seen:
          seen.add(target)
          yield target, route
          if target in direct:
            ahead.append((target, f'{route} > {target}'))


def size_faults(root: Path) -> list[str]:
  faults = []
  for top in SOURCES:
    for path in sorted((root / top).rglob('*.py')):
      text = path.read_text(encoding='utf-8')
      name = path.relative_to(root).as_posix()
      lines = len(text.splitlines())
      if lines > FILE_LINES:
        faults.append(f'{name} has {lines} lines (at most {FILE_LINES})')
      kernels = top == 'pallas_kernels' or name == COMPILED
      most = KERNEL_LINES if kernels else FUNCTION_LINES
      for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
          size = node.end_lineno - node.lineno + 1
          if size > most:
            faults.append(
              f'{name}:{node.lineno} {node.name} has {size} lines (at most'
              f' {most})'
            )
  return faults


# --- The README's tree -------------------------------------------------------
#
# The first fenced block after the heading 'The tree'. A line is the path of a
# file, spaces, and what the file is; nothing else may stand in the block.


def readme_tree(root: Path) -> dict[str, str]:
  """Path -> description, of every line of the README's tree."""
  text = (root / 'README.md').read_text(encoding='utf-8')
  match = re.search(r'^## The tree$.*?^```\w*\n(.*?)^```$', text, re.M | re.S)
  assert match, 'README.md has no fenced block after the heading "The tree"'
  tree = {}
  for line in match[1].splitlines():
    path, _, description = line.strip().partition(' ')
    if path:
      assert path not in tree, f'{path} stands twice in the tree of README.md'
      tree[path] = description.strip()
  return tree


def files(root: Path) -> set[str]:
  """Every file of the project, by the patterns of .gitignore."""
  ignored = ['.git']
  for line in (root / '.gitignore').read_text(encoding='utf-8').splitlines():
    if line and not line.startswith('#'):
      ignored.append(line.rstrip('/'))

  def walk(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
      if any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored):
        continue
      if path.is_dir():
        yield from walk(path)
      else:
        yield path.relative_to(root).as_posix()

  return set(walk(root))


def missing_lines(root: Path) -> list[str]:
  """Lines for the README's tree: what each file says of itself, or '?'."""
  lines = []
  for name in sorted(files(root) - set(readme_tree(root))):
    about = '?'
    if name.endswith('.py'):
      text = (root / name).read_text(encoding='utf-8')
      docstring = ast.get_docstring(ast.parse(text)) or '?'
      about = docstring.splitlines()[0].rstrip('.')
    lines.append(f'{name:<42} {about}')
  return lines


# --- Tests -------------------------------------------------------------------


def test_imports():
  assert import_faults(ROOT) == []


def test_sizes():
  assert size_faults(ROOT) == []


def test_readme_tree_has_a_line_per_file():
  missing = missing_lines(ROOT)
  assert not missing, 'README.md lacks these lines:\n' + '\n'.join(missing)
  gone = sorted(set(readme_tree(ROOT)) - files(ROOT))
  assert not gone, f'README.md lists files that do not exist: {gone}'
  bare = [path for path, about in readme_tree(ROOT).items() if len(about) < 8]
  assert not bare, f'README.md says nothing of these files: {bare}'


def test_every_package_has_an_init_with_a_docstring():
  for folder in {path.parent for path in modules(ROOT).values()}:
    init = folder / '__init__.py'
    assert init.is_file(), f'{folder} has no __init__.py'
    assert ast.get_docstring(ast.parse(init.read_text(encoding='utf-8'))), init


def test_documented_commands_stand_in_the_readme():
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  blocks = re.findall(r'```bash\n(.*?)\n```', text, re.S)
  for command in (
    'pip install -e . && composer run experiments/quickstart.py',
    "pip install -e '.[test]' && pytest",
  ):
    assert blocks.count(command) == 1


def write(root, name, text):
  path = root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('composer/rl/x.py', 'from composer.inference import engine'),
    ('composer/rl/x.py', 'def f():\n  import composer.inference.engine'),
    ('composer/rl/x.py', 'from composer import inference'),
    ('composer/rl/x.py', 'from ..inference import engine'),
    ('composer/rl/x.py', 'from composer import middle'),
    ('composer/rl/x.py', "load('composer.inference.engine')"),
    ('composer/inference/y.py', 'import composer.rl.loss'),
    ('composer/rollout/x.py', 'import composer.inference'),
    ('composer/environments/tasks/x.py', 'import jax.numpy as jnp'),
    ('composer/rewards/x.py', 'from composer.rl import loss'),
    ('pallas_kernels/moe/x.py', 'from composer.config import ModelConfig'),
    ('composer/weights/x.py', 'import pickle'),
  ],
)
def test_forbidden_import_is_found(tmp_path, name, text):
  write(tmp_path, 'composer/__init__.py', '')
  write(tmp_path, 'composer/rl/loss.py', 'import jax')
  write(tmp_path, 'composer/middle.py', 'from composer.inference import engine')
  write(tmp_path, 'composer/inference/engine.py', 'import composer.records')
  write(tmp_path, 'composer/records.py', 'import jax')
  write(tmp_path, 'composer/rewards/fine.py', 'import composer.records')
  assert import_faults(tmp_path) == []
  write(tmp_path, name, text)
  faults = import_faults(tmp_path)
  dotted = name.removesuffix('.py').replace('/', '.')
  assert faults and all(fault.startswith(dotted) for fault in faults)


def test_oversize_is_found(tmp_path):
  write(tmp_path, 'composer/fine.py', 'def f():\n' + '  pass\n' * 79)
  assert size_faults(tmp_path) == []
  write(tmp_path, 'composer/long.py', 'def f():\n' + '  pass\n' * 80)
  write(tmp_path, 'composer/large.py', 'x = 1\n' * 801)
  write(tmp_path, 'pallas_kernels/k.py', 'def f():\n' + '  pass\n' * 149)
  assert [fault.split()[0] for fault in size_faults(tmp_path)] == [
    'composer/large.py',
    'composer/long.py:1',
  ]


def test_tree_is_compared_with_the_disk(tmp_path):
  write(tmp_path, '.gitignore', 'runs/\n*.pyc\n')
  write(tmp_path, 'a/b.py', '"""What b is."""\n')
  write(tmp_path, 'a/b.pyc', '')
  write(tmp_path, 'runs/x/metrics.jsonl', '')
  write(
    tmp_path,
    'README.md',
    '## The tree\n\n```text\nREADME.md   this file\n.gitignore  left out\n```\n',
  )
  assert [line.split() for line in missing_lines(tmp_path)] == [
    ['a/b.py', 'What', 'b', 'is']
  ]


if __name__ == '__main__':
  print('\n'.join(missing_lines(ROOT)))
