"""Runs `test.sh` of a Harbor task in a machine: `python harbor_run.py spec.json`.

Scripts name the places of a container: `/tests`, `/logs` and the working folder.
They are rewritten to where these are here, in the tests alone. The verdict is
the reward that the tests write, `/logs/verifier/reward.txt` or `reward.json`
(its 'reward', else all of its values): 1 or more is a pass. Printed is what the
tests wrote and, last, `passed X of 1`. Standard library only.
"""

import json
import os
import re
import shutil
import subprocess
import sys

MOST = 6000  # characters of output


def main(path):
  with open(path) as file:
    spec = json.load(file)
  work = os.getcwd()
  here = os.path.abspath(os.path.dirname(path))
  logs = os.path.join(here, 'logs')
  shutil.rmtree(logs, ignore_errors=True)
  for name in ('verifier', 'agent', 'artifacts'):
    os.makedirs(os.path.join(logs, name))
  tests = os.path.join(here, 'tests')
  places = {'/tests': tests, '/logs': logs, spec['workdir']: work}
  for folder, _, names in os.walk(tests):
    for name in names:
      rewrite(os.path.join(folder, name), places)
  shell = shutil.which('bash') or 'sh'
  try:
    done = subprocess.run(
      [shell, os.path.join(tests, 'test.sh')],
      env={**os.environ, **spec['environment']},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      timeout=spec['seconds'],
    )
    said = done.stdout
  except subprocess.TimeoutExpired as error:
    said = (error.stdout or b'') + b'\n(tests: out of time)'
  passed = int(reward(os.path.join(logs, 'verifier')) >= 1)
  text = said.decode(errors='replace').strip()[-MOST:]
  return 1 - passed, f'{text}\npassed {passed} of 1\n'


def rewrite(path, places):
  """Points the container's places to those of the machine, in one pass."""
  with open(path, 'rb') as file:
    data = file.read()
  try:
    text = data.decode()
  except UnicodeDecodeError:
    return
  names = '|'.join(re.escape(x) for x in sorted(places, key=len, reverse=True))
  pattern = rf'(?<![\w./-])(?:{names})(?![\w-])'
  text = re.sub(pattern, lambda match: places[match[0]], text)
  with open(path, 'wb') as file:
    file.write(text.encode())


def reward(folder):
  """The reward that was written; 0 where there is none."""
  try:
    with open(os.path.join(folder, 'reward.txt')) as file:
      return float(file.read())
  except (OSError, ValueError):
    pass
  try:
    with open(os.path.join(folder, 'reward.json')) as file:
      found = json.load(file)
    values = [found['reward']] if 'reward' in found else list(found.values())
    return min(float(x) for x in values)
  except (OSError, ValueError, TypeError, AttributeError):
    return 0.0


if __name__ == '__main__':
  code, output = main(sys.argv[1])
  sys.stdout.write(output)
  sys.exit(code)
