"""The README: its commands parse, its links exist, its numbers are real."""

from pathlib import Path
import re
import shlex

import pytest

from composer import __main__ as cli
from composer import config

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / 'README.md').read_text(encoding='utf-8')
LARGEST_PICTURE = 400_000  # bytes


def commands():
  """Every `composer ...` of the fenced bash blocks and of the prose."""
  blocks = re.findall(r'^```bash\n(.*?)^```$', TEXT, re.M | re.S)
  lines = [
    part
    for b in blocks
    for line in b.splitlines()
    for part in line.split(' && ')
  ]
  lines += re.findall(r'`(composer\s[^`]+)`', TEXT)
  found = [' '.join(line.split()) for line in lines]
  return sorted({line for line in found if line.startswith('composer ')})


def test_there_are_commands():
  names = {command.split()[1] for command in commands()}
  assert names >= {'run', 'eval', 'weights', 'bench', 'view'}


@pytest.mark.parametrize('command', commands())
def test_command_parses(command):
  words = shlex.split(command)[1:]
  if len(words) == 1:
    return  # a command's name in the prose
  arguments = cli._parser().parse_args(words)
  experiment = getattr(arguments, 'experiment', None)
  if experiment is not None:
    loaded = config.load(ROOT / experiment)
    config.validate(config.override(loaded, arguments.set))


def test_fields_exist():
  """`section.field` in backticks, with a value or without."""
  sections = {name.partition('.')[0] for name in config.fields() if '.' in name}
  for name in re.findall(r'`(?:--set )?(\w+\.\w+)(?:=[^`]*)?`', TEXT):
    if name.split('.')[0] in sections and not name.endswith('.json'):
      assert name in config.fields(), name


def test_links_exist():
  for target in re.findall(r'\]\(([^)#]+)\)', TEXT):
    if '://' not in target:
      assert (ROOT / target).is_file(), target
  for target in re.findall(
    r'`((?:composer|experiments|notebooks)/[^`<]+)`', TEXT
  ):
    assert (ROOT / target).exists(), target


def test_pictures_are_small():
  pictures = [
    p for p in (ROOT / 'docs').iterdir() if p.suffix in ('.png', '.svg')
  ]
  assert {p.name for p in pictures} >= {'loop.svg', 'report.png'}
  for picture in pictures:
    assert picture.stat().st_size <= LARGEST_PICTURE, picture
    assert picture.name in TEXT, f'{picture.name} is not shown'


def test_every_result_is_filled_in():
  left = re.findall(r'^RESULTS \d+$', TEXT, re.M)
  assert not left, f'README.md still holds the places {left}'
