"""Names of images, and where they are kept."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

BASE = (
  'base-files',
  'base-passwd',
  'coreutils',
  'dash',
  'diffutils',
  'findutils',
  'grep',
  'gzip',
  'hostname',
  'mount',
  'patch',
  'procps',
  'python3',
  'sed',
  'tar',
  'util-linux',
)
# Needed by scripts that run when a package is installed, and by nothing else.
# PostgreSQL's compiler of queries (LLVM, 150 MB) is left out: jit is off.
UNUSED = (
  'adduser',
  'debconf',
  'dpkg',
  'libllvm*',
  'libz3-4',
  'perl*',
  'libperl*',
  'lib*-perl',
  'locales',
  'passwd',
  'ssl-cert',
  'ucf',
  'usrmerge',
  'usr-is-merged',
)


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What an image is made of.

  Attributes:
    packages: of the distribution; what they depend on comes with them.
    users: name -> numeric id, besides root and nobody.
    start: a shell script that process 1 runs as root at boot, before the first
      snapshot: it may start services. Empty: none.
  """

  packages: tuple[str, ...]
  users: Mapping[str, int] = dataclasses.field(default_factory=dict)
  start: str = ''


# The server listens on its socket only, and believes the machine's users.
POSTGRES = r"""set -e
bin=$(ls -d /usr/lib/postgresql/*/bin)
mkdir -p /var/lib/pg /run/postgresql
chown postgres /var/lib/pg /run/postgresql
as='setpriv --reuid=postgres --clear-groups'
$as $bin/initdb -D /var/lib/pg -A trust --no-sync --no-locale -E UTF8 >/dev/null
cat >>/var/lib/pg/postgresql.conf <<'END'
listen_addresses = ''
unix_socket_directories = '/run/postgresql'
shared_buffers = 16MB
max_connections = 20
jit = off
fsync = off
autovacuum = off
END
$as $bin/pg_ctl -D /var/lib/pg -l /var/lib/pg/log -w -t 300 start >/dev/null
mkdir -p /usr/local/bin
ln -sf $bin/psql $bin/pg_dump $bin/createdb /usr/local/bin/
psql -q -U postgres -c 'create role root superuser login' postgres
createdb -U postgres root
"""

RECIPES: Mapping[str, Recipe] = {
  'base': Recipe(BASE),
  'postgres': Recipe((*BASE, 'postgresql'), {'postgres': 101}, POSTGRES),
}


@dataclasses.dataclass(frozen=True)
class Image:
  """An image that exists.

  Attributes:
    name: of its recipe, or the path that was given.
    tree: the root filesystem.
    folder: with the disk, the kernel and its first filesystem; None for a plain
      directory, which no virtual machine can start from.
    digest: of everything that it was made of; '' for a plain directory.
    packages: name -> version.
  """

  name: str
  tree: pathlib.Path
  folder: pathlib.Path | None
  digest: str
  packages: Mapping[str, str]


def cache() -> pathlib.Path:
  """`composer` in the user's cache directory."""
  root = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return pathlib.Path(root, 'composer')


def find(name: str) -> Image:
  """The newest image of a recipe's name, or a directory tree by its path.

  Raises:
    ValueError: there is none; says how to build it.
  """
  if '/' in name:
    tree = pathlib.Path(name).expanduser().resolve()
    if not (tree / 'usr').is_dir() and not (tree / 'bin').is_dir():
      raise ValueError(
        f'machine.image={name!r} is no root filesystem: it has neither usr/ nor'
        ' bin/'
      )
    return Image(name, tree, None, '', {})
  if name not in RECIPES:
    raise ValueError(
      f'machine.image={name!r} is unknown; the known ones are'
      f' {", ".join(RECIPES)}, or the path of a directory'
    )
  images = [image for image in found() if image.name == name]
  if not images:
    raise ValueError(
      f'machine.image={name!r} is not built; run: composer images build {name}'
    )
  return images[-1]


def found() -> list[Image]:
  """Images in the cache, the newest of a name last."""
  images: list[tuple[float, Image]] = []
  for path in (cache() / 'images').glob('*/image.json'):
    about: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
    folder = path.parent
    image = Image(
      about['name'],
      folder / 'tree',
      folder,
      about['digest'],
      about['packages'],
    )
    images.append((about['built'], image))
  return [image for _, image in sorted(images, key=lambda pair: pair[0])]
