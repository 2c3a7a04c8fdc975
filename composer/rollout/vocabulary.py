"""A small vocabulary for sessions of code: `python -m composer.rollout.vocabulary`.

Models that learn from nothing need one that is small, in which code, JSON calls
and the schemas of tools are short. Merges are counted over source of the running
interpreter's standard library, as it stands and as JSON writes it in a call, and
over the prompt that lists the tools (for template `compact`, whose acts are words,
over the first alone); with `--tasks DIR` over those tasks too. What comes out is a
`tokenizer.json` that `vocabularies.load` reads as it reads a published one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import json
import pathlib

import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from composer import chat
from composer import data
from composer.environments.tasks import repository
from composer.environments.tools_code import CODE_TOOLS
from composer.model.vocabularies import bpe
from composer.rollout import player
from composer.templates import compact

SIZE = 2048  # ids, the template's control tokens included
TEMPLATE = 'qwen3'  # whose control tokens those of ChatML are as well
SOURCE_BYTES = 2_000_000
WEIGHT = 200  # how often the schemas of the tools are counted


def texts(
  template: str, source_bytes: int, folder: pathlib.Path | None = None
) -> Iterator[str]:
  """What is counted; of a folder of tasks also what they say and change."""
  for task in repository.load(folder) if folder else ():
    yield task.instruction
    yield ' '.join(task.allowed)
    for path in task.allowed:
      source = task.files[path]
      yield source if isinstance(source, str) else source.decode()
  for _, text in data.python_source(source_bytes):
    yield text
    if template != compact.COMPACT.name:
      yield json.dumps(text[: len(text) // 4])
  if template == compact.COMPACT.name:  # its acts are words
    return
  schemas = [json.dumps(chat.json_schema(tool.spec)) for tool in CODE_TOOLS]
  call = json.dumps({'name': 'edit', 'arguments': {'path': '', 'old': ''}})
  for _ in range(WEIGHT):
    yield '\n'.join((*schemas, call))


def build(
  size: int = SIZE,
  template: str = TEMPLATE,
  source_bytes: int = SOURCE_BYTES,
  folder: pathlib.Path | None = None,
) -> str:
  """The text of a `tokenizer.json` with `size` ids.

  Raises:
    ValueError: `size` leaves no room for bytes and control tokens, there is too
      little text for as many, or the folder holds no tasks.
  """
  free = size - len(player.document(template)['added_tokens']) - 256
  if free < 0:
    raise ValueError(
      f'--size={size} is below {size - free}: bytes and controls'
    )
  trained = tokenizers.Tokenizer(models.BPE())
  trained.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=True
  )
  trainer = trainers.BpeTrainer(
    vocab_size=256 + free,
    initial_alphabet=sorted(bpe.byte_chars()),
    show_progress=False,
  )
  trained.train_from_iterator(texts(template, source_bytes, folder), trainer)
  merges = json.loads(trained.to_str())['model']['merges'][:free]
  if len(merges) < free:
    raise ValueError(
      f'--size={size} needs {free} merges and the text gives {len(merges)};'
      ' raise --source-bytes'
    )
  pairs = [tuple(x.split(' ') if isinstance(x, str) else x) for x in merges]
  return json.dumps(player.document(template, pairs), ensure_ascii=False) + '\n'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', type=pathlib.Path, required=True, metavar='FILE')
  parser.add_argument('--size', type=int, default=SIZE, metavar='N')
  parser.add_argument('--template', default=TEMPLATE, metavar='NAME')
  parser.add_argument(
    '--source-bytes', type=int, default=SOURCE_BYTES, metavar='N'
  )
  parser.add_argument(
    '--tasks', type=pathlib.Path, metavar='DIR', help='count its words too'
  )
  arguments = parser.parse_args()
  text = build(
    arguments.size,
    arguments.template,
    arguments.source_bytes,
    arguments.tasks,
  )
  arguments.out.write_text(text, encoding='utf-8')


if __name__ == '__main__':
  main()
