"""Builds an image from packages: resolved by apt, unpacked, never installed.

No script of a package runs and no root is needed: apt resolves the packages
against an empty system and fetches them, their archives are unpacked here, and
`mke2fs -d` makes a disk of the result. What an installation would have done
beyond that (users, a few links) is done below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import time

from composer.environments.images import catalog
from composer.environments.images import initrd

KERNEL = 'linux-image-cloud-amd64'
FETCH_S = 600.0
UNPACK_S = 120.0
KEPT = 2  # images of a name
LINKS = 40  # followed on one path, as the kernel does
SPARE_MB = 32  # free space of a disk that is never written
MERGED = ('bin', 'sbin', 'lib', 'lib32', 'lib64', 'libx32')  # links into /usr
LEFT_OUT = (
  'usr/share/doc/*',
  'usr/share/info/*',
  'usr/share/lintian/*',
  'usr/share/locale/*',
  'usr/share/man/*',
  'usr/share/postgresql/*/man/*',
)
INSTALLED = re.compile(r'^Inst (\S+) \((\S+) ', re.M)


def build(name: str) -> catalog.Image:
  """Builds the image of a recipe, or finds that it is there already.

  Raises:
    ValueError: an unknown name, or a program is missing; says what to install.
    OSError: packages could not be fetched or unpacked.
  """
  if name not in catalog.RECIPES:
    raise ValueError(
      f'image {name!r} is unknown; the known ones are'
      f' {", ".join(catalog.RECIPES)}'
    )
  _need_programs()
  recipe = catalog.RECIPES[name]
  root = catalog.cache()
  (root / 'images').mkdir(parents=True, exist_ok=True)
  packages = resolve(recipe.packages)
  boot = resolve_boot()
  digest = digest_of(recipe, {**packages, **boot})
  final = root / 'images' / f'{name}-{digest[:12]}'
  if (final / 'image.json').exists():
    return catalog.find(name)
  archives = fetch({**packages, **boot}, root / 'packages')
  with tempfile.TemporaryDirectory(dir=root / 'images') as temporary:
    folder = pathlib.Path(temporary, name)
    (folder / 'tree').mkdir(parents=True)
    populate(folder / 'tree', [archives[x] for x in sorted(packages)])
    finish(folder / 'tree', recipe)
    make_disk(folder / 'tree', folder / 'root.ext4')
    initrd.make(folder, [archives[x] for x in sorted(boot)])
    about = {
      'name': name,
      'digest': digest,
      'built': time.time(),
      'packages': packages,
      'kernel': boot,
      'start': recipe.start,
    }
    (folder / 'image.json').write_text(json.dumps(about, indent=1) + '\n')
    try:
      folder.rename(final)
    except OSError:
      if not (final / 'image.json').exists():  # else another built it meanwhile
        raise
  prune(name)
  return catalog.find(name)


def prune(name: str) -> None:
  """Removes images of a name but the two newest; one may still be in use."""
  for image in [x for x in catalog.found() if x.name == name][:-KEPT]:
    shutil.rmtree(image.folder, ignore_errors=True)


def _need_programs() -> None:
  for program, package in (
    ('apt-get', 'apt (a Debian or Ubuntu system)'),
    ('dpkg-deb', 'dpkg'),
    ('mke2fs', 'e2fsprogs'),
  ):
    if not shutil.which(program, path=_path()):
      raise ValueError(
        f'building an image needs {program}; install the package {package}'
      )


def _path() -> str:
  return os.environ.get('PATH', '') + ':/usr/sbin:/sbin'


def _run(argv: Sequence[str], cwd: pathlib.Path, limit_s: float) -> str:
  """Standard output; OSError with the program's own words where it failed."""
  environment = {'PATH': _path(), 'LC_ALL': 'C', 'HOME': '/nonexistent'}
  proxies = {k: v for k, v in os.environ.items() if k.endswith('_proxy')}
  try:
    done = subprocess.run(
      argv,
      cwd=cwd,
      env=environment | proxies,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=limit_s,
      text=True,
      check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise OSError(f'{argv[0]} did not end within {limit_s:.0f} s') from error
  if done.returncode:
    raise OSError(f'{" ".join(argv[:3])} failed: {done.stderr.strip()[-600:]}')
  return done.stdout


# --- packages ----------------------------------------------------------------


def resolve(packages: Iterable[str], drop: bool = True) -> dict[str, str]:
  """Packages and what they depend on, name -> version, on an empty system."""
  with tempfile.TemporaryDirectory() as temporary:
    pathlib.Path(temporary, 'status').touch()
    text = _run(
      [
        *('apt-get', '--simulate', '--no-install-recommends'),
        *('-o', f'Dir::State::status={temporary}/status'),
        *('-o', f'Dir::Cache={temporary}', '-o', 'Debug::NoLocking=1'),
        *('install', *packages),
      ],
      pathlib.Path(temporary),
      UNPACK_S,
    )
  chosen = dict(INSTALLED.findall(text))
  if not chosen:
    raise OSError('apt knows no packages; run: apt-get update')
  unused = catalog.UNUSED if drop else ()
  return {
    name: version
    for name, version in sorted(chosen.items())
    if not any(fnmatch.fnmatch(name, pattern) for pattern in unused)
  }


def resolve_boot() -> dict[str, str]:
  """The kernel's package and the shell of the first filesystem."""
  everything = resolve((KERNEL, 'busybox-static'), drop=False)
  return {
    name: version
    for name, version in everything.items()
    if name == 'busybox-static'
    or (name.startswith('linux-image-') and name != KERNEL)
  }


def digest_of(recipe: catalog.Recipe, packages: Mapping[str, str]) -> str:
  """Of all that an image is made of, this code included."""
  sources = [
    pathlib.Path(module).read_text(encoding='utf-8')
    for module in (__file__, initrd.__file__)
  ]
  parts = [sorted(packages.items()), sorted(recipe.users.items())]
  text = json.dumps([parts, recipe.packages, recipe.start, sources])
  return hashlib.sha256(text.encode()).hexdigest()


def fetch(
  packages: Mapping[str, str], folder: pathlib.Path
) -> dict[str, pathlib.Path]:
  """Archives by package name; what is in `folder` is not fetched again."""
  folder.mkdir(parents=True, exist_ok=True)
  wanted = [
    f'{name}={version}'
    for name, version in packages.items()
    if not _archive(folder, name, version)
  ]
  if wanted:
    _run(
      ['apt-get', '-o', 'Debug::NoLocking=1', 'download', *wanted],
      folder,
      FETCH_S,
    )
  archives = {}
  for name, version in packages.items():
    archive = _archive(folder, name, version)
    if archive is None:
      raise OSError(f'the package {name}={version} was not fetched')
    archives[name] = archive
  return archives


def _archive(
  folder: pathlib.Path, name: str, version: str
) -> pathlib.Path | None:
  spelled = version.replace(':', '%3a')
  return next(iter(folder.glob(f'{name}_{spelled}_*.deb')), None)


# --- the tree ----------------------------------------------------------------


def populate(tree: pathlib.Path, archives: Sequence[pathlib.Path]) -> None:
  """Unpacks archives over each other, with /bin and the like inside /usr."""
  for name in MERGED[:4]:
    (tree / 'usr' / name).mkdir(parents=True, exist_ok=True)
    (tree / name).symlink_to(f'usr/{name}')
  (tree / 'usr' / 'lib64').mkdir(exist_ok=True)
  if not (tree / 'lib64').exists():
    (tree / 'lib64').symlink_to('usr/lib64')
  for archive in archives:
    unpack(archive, tree)


def unpack(
  archive: pathlib.Path, tree: pathlib.Path, only: Sequence[str] = ()
) -> None:
  """Unpacks an archive's files; `only` is patterns of paths, () for all."""
  with subprocess.Popen(
    ['dpkg-deb', '--fsys-tarfile', str(archive)], stdout=subprocess.PIPE
  ) as process:
    assert process.stdout is not None
    with tarfile.open(fileobj=process.stdout, mode='r|') as tar:
      for member in tar:
        path = place(member.name)
        if path and _wanted(path, only):
          member.name = path
          if member.islnk():
            member.linkname = place(member.linkname)
          _extract(tar, member, tree)
  if process.returncode:
    raise OSError(f'{archive.name} could not be unpacked')


def place(name: str) -> str:
  """Where a member belongs: relative, and inside /usr where Debian merges."""
  parts = [x for x in name.split('/') if x not in ('', '.')]
  if '..' in parts:
    raise OSError(f'a package holds the path {name!r}')
  if parts and parts[0] in MERGED:
    parts = ['usr', *parts] if len(parts) > 1 else []
  if parts[:2] == ['var', 'run']:  # a link; what it leads to is made at boot
    parts = []
  return '/'.join(parts)


def _wanted(path: str, only: Sequence[str]) -> bool:
  if only:
    return any(fnmatch.fnmatch(path, pattern) for pattern in only)
  return not any(fnmatch.fnmatch(path, pattern) for pattern in LEFT_OUT)


def _extract(
  tar: tarfile.TarFile, member: tarfile.TarInfo, tree: pathlib.Path
) -> None:
  """One member; owned by this user, special files and special bits left out.

  Links may lead anywhere, since nothing is written or linked through one that
  leads out of the tree.

  Raises:
    OSError: a member that would have been.
  """
  target = _inside(tree, member.name)
  if member.isdir():
    # Where a link to a folder stands already, the folder is its target.
    _inside(tree, f'{member.name}/.').mkdir(parents=True, exist_ok=True)
    return
  target.parent.mkdir(parents=True, exist_ok=True)
  if target.is_dir() and not target.is_symlink():
    raise OSError(f'a package has a file for the folder {member.name!r}')
  target.unlink(missing_ok=True)
  if member.issym():
    target.symlink_to(member.linkname)
  elif member.islnk():
    source = _inside(tree, member.linkname)
    os.link(source, target, follow_symlinks=False)
  elif member.isreg():
    _write_new(tar, member, target)


def _inside(tree: pathlib.Path, name: str) -> pathlib.Path:
  """Where a member stands: its folder with links followed, inside the tree.

  An absolute link is one from the tree's own root; so it is read here too, a
  link at a time, and never by the system.
  """
  parts, place, steps = name.split('/'), tree, 0
  while len(parts) > 1:
    part = parts.pop(0)
    if part in ('', '.'):
      continue
    if part == '..':
      if place == tree:
        raise OSError(f'a package leads out of its tree by {name!r}')
      place = place.parent
    elif (place / part).is_symlink():
      steps += 1
      link = os.readlink(place / part)
      if steps > LINKS:
        raise OSError(f'a package has links without end at {name!r}')
      place = tree if link.startswith('/') else place
      parts = [*link.split('/'), *parts]
    else:
      place = place / part
  return place / parts[0]


def _write_new(
  tar: tarfile.TarFile, member: tarfile.TarInfo, target: pathlib.Path
) -> None:
  source = tar.extractfile(member)
  assert source is not None
  with open(target, 'xb') as file:
    shutil.copyfileobj(source, file)
  target.chmod(member.mode & 0o777)


def finish(tree: pathlib.Path, recipe: catalog.Recipe) -> None:
  """What the scripts of the packages would have done."""
  for path in (
    'dev',
    'etc',
    'proc',
    'run',
    'sys',
    'tmp',
    'machine',
    'root',
    'var/tmp',
  ):
    (tree / path).mkdir(parents=True, exist_ok=True)
  users = {'root': 0, 'nobody': 65534, **recipe.users}
  passwd = [
    f'{name}:x:{uid}:{uid}:{name}:{_home(name)}:/bin/sh\n'
    for name, uid in users.items()
  ]
  groups = [f'{name}:x:{uid}:\n' for name, uid in users.items()]
  texts = {
    'passwd': ''.join(passwd),
    'group': ''.join(groups),
    'hosts': '127.0.0.1 localhost\n',
    'hostname': 'machine\n',
  }
  for name, text in texts.items():
    (tree / 'etc' / name).write_text(text)
  for link, target in (
    ('usr/bin/sh', 'dash'),
    ('usr/bin/awk', 'mawk'),
    ('usr/bin/python', 'python3'),
    ('usr/bin/which', 'which.debianutils'),
    ('var/run', '/run'),
  ):
    if not (tree / link).exists() and not (tree / link).is_symlink():
      (tree / link).symlink_to(target)


def _home(name: str) -> str:
  return {'root': '/machine/work'}.get(name, '/nonexistent')


def make_disk(tree: pathlib.Path, disk: pathlib.Path) -> None:
  """A read-only ext4 disk of a tree, everything in it owned by root."""
  used = sum(
    (os.lstat(os.path.join(folder, name)).st_size + 4095) // 4096 * 4096
    for folder, _, names in os.walk(tree)
    for name in names
  )
  size = (used >> 20) * 21 // 20 + SPARE_MB
  own = [] if os.geteuid() == 0 else ['unshare', '--map-root-user']
  _run(
    [
      *own,
      *('mke2fs', '-q', '-t', 'ext4', '-O', '^has_journal', '-m', '0'),
      *('-E', 'root_owner=0:0,lazy_itable_init=0,nodiscard'),
      *('-d', str(tree), str(disk), f'{size}M'),
    ],
    disk.parent,
    UNPACK_S,
  )
