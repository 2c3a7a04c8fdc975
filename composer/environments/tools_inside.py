"""What `list` and `search` do inside a machine; its text is sent there.

    python -c TEXT '{"do": "list", "path": "src", ...}'

It imports nothing of this project and nothing of the workspace, and never looks
outside of it: a link that leads out is named and not followed. What a person
would not want listed (caches, the insides of `.git`) is left out. Faults of the
request go to stderr, with exit code 3.
"""

import fnmatch
import json
import os
import re
import sys

HIDDEN = ('.git', '.hg', '__pycache__', '.mypy_cache', '.pytest_cache')
WIDTH = 240  # characters of a matching line that are shown
BINARY = 4096  # bytes that are looked at for a NUL


def main(request):
  root = os.path.realpath('.')
  path = request['path']
  parts = path.split('/')
  if path.startswith('/') or '..' in parts or '\0' in path:
    fail(f'{path}: not a path inside the workspace (relative, without ..)')
  real = os.path.realpath(path)
  if real != root and not real.startswith(root + '/'):
    fail(f'{path}: a link on the way leads out of the workspace')
  if not os.path.lexists(path):
    fail(f'{path}: no such file or directory')
  lines = {'list': tree, 'search': search}[request['do']](request, path)
  write(lines, request['most'])


def fail(text):
  sys.stderr.write(text)
  sys.stderr.flush()
  os._exit(3)


def write(lines, most):
  """At most `most` lines, and a word on how many more there are."""
  shown, left = [], 0
  for line in lines:
    if len(shown) < most:
      shown.append(line)
    else:
      left += 1
      if left == 100 * most:
        break
  if left:
    more = f'{left} more' if left < 100 * most else 'many more'
    shown.append(f'({more} left out; ask for less)')
  text = '\n'.join(shown) + '\n' * bool(shown)
  sys.stdout.buffer.write(text.encode('utf-8', 'replace'))
  sys.stdout.flush()


def clean(path):
  return path[2:] if path.startswith('./') else path


def tree(request, top):
  """Entries below a directory, `depth` levels deep; sizes in bytes."""
  if not os.path.isdir(top):
    fail(f'{top}: not a directory')
  yield from entries(top, request['depth'])


def entries(folder, depth):
  try:
    found = sorted(os.scandir(folder), key=lambda entry: entry.name)
  except OSError as error:
    yield f'{clean(folder)}/ ({error.strerror})'
    return
  for entry in found:
    path = clean(os.path.join(folder, entry.name))
    if entry.is_symlink():
      yield f'{path} -> {os.readlink(entry.path)}'
    elif entry.is_dir():
      inside = depth > 1 and entry.name not in HIDDEN
      yield path + '/'
      if inside:
        yield from entries(os.path.join(folder, entry.name), depth - 1)
    else:
      yield f'{path} {entry.stat(follow_symlinks=False).st_size}'


def search(request, top):
  """Lines that match, as path:number: line, file by file."""
  try:
    pattern = re.compile(request['pattern'])
  except re.error as error:
    fail(f'the pattern is no regular expression: {error}')
  for path in files(top):
    name = clean(path)
    glob = request['glob']
    if glob and not (
      fnmatch.fnmatch(name, glob)
      or fnmatch.fnmatch(os.path.basename(name), glob)
    ):
      continue
    for number, line in enumerate(text_lines(path), 1):
      if pattern.search(line):
        shown = line if len(line) <= WIDTH else line[:WIDTH] + ' ...'
        yield f'{name}:{number}: {shown}'


def files(top):
  if os.path.isfile(top):
    yield top
  for folder, inner, names in os.walk(top):
    inner[:] = sorted(name for name in inner if name not in HIDDEN)
    for name in sorted(names):
      path = os.path.join(folder, name)
      if os.path.isfile(path) and not os.path.islink(path):
        yield path


def text_lines(path):
  """Lines of a text file; a file that cannot be read has none."""
  try:
    with open(path, 'rb') as file:
      if b'\0' in file.read(BINARY):
        return
      file.seek(0)
      for line in file:
        yield line.decode('utf-8', 'replace').rstrip('\r\n')
  except OSError:
    return


if __name__ == '__main__':
  sys.path[:] = [x for x in sys.path if x not in ('', '.', os.getcwd())]
  main(json.loads(sys.argv[1]))
