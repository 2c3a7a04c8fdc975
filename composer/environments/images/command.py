"""`composer images`: builds an image of a machine, or lists them."""

from __future__ import annotations

import argparse


def add_to(commands: argparse._SubParsersAction) -> None:
  text = 'build an image of a machine, or list them'
  parser = commands.add_parser('images', help=text, description=text)
  parser.set_defaults(handler=run)
  parser.add_argument('action', choices=('build', 'ls'), metavar='build|ls')
  parser.add_argument(
    'name', nargs='?', default='base', metavar='NAME', help='base or postgres'
  )


def run(arguments: argparse.Namespace) -> int:
  from composer.environments import images
  from composer.environments.images import build

  if arguments.action == 'ls':
    for image in images.found():
      print(f'{image.name:10} {image.digest[:12]}  {image.folder}')
    return 0
  image = build.build(arguments.name)
  print(f'{image.name}: {len(image.packages)} packages, {image.folder}')
  return 0
