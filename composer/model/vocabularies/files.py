"""Finds and reads the vocabulary of a model directory or file."""

from __future__ import annotations

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from composer.model.vocabularies import bpe
from composer.model.vocabularies import kimi

JSON, TIKTOKEN = 'tokenizer.json', 'tiktoken.model'
CONFIG, JINJA = 'tokenizer_config.json', 'chat_template.jinja'


def load(path: str | pathlib.Path) -> bpe.Vocabulary:
  """Reads a vocabulary.

  Args:
    path: a `tokenizer.json`, a `tiktoken.model`, a `.gguf` file, or a directory
      that holds one of the first two. `tokenizer_config.json` and
      `chat_template.jinja` beside it are read as well.

  Raises:
    ValueError: there is none, or it is of a kind that is not read.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = _inside(path)
  elif not path.is_file():
    raise ValueError(
      f'tokenizer is {str(path)!r}, which is not a file; leave it empty for the'
      ' built-in one'
    )
  if path.suffix == '.gguf':
    return _of_gguf(path)
  config = _config(path.parent / CONFIG)
  template = _chat_template(path.parent, config)
  if path.suffix == '.model':
    document = kimi.document(path, config)
    return bpe.Vocabulary(document, str(path), template, kimi.cut)
  document = _read_json(path)
  return bpe.Vocabulary(_with_added(document, config), str(path), template)


def _inside(folder: pathlib.Path) -> pathlib.Path:
  for name in (JSON, TIKTOKEN):
    if (folder / name).is_file():
      return folder / name
  raise ValueError(
    f'tokenizer is {str(folder)!r}, a directory without {JSON} and {TIKTOKEN};'
    ' a sentencepiece tokenizer.model is not read'
  )


def _of_gguf(path: pathlib.Path) -> bpe.Vocabulary:
  # Imported here: the readers of checkpoints take most of a second.
  from composer.model.checkpoints import gguf
  from composer.model.checkpoints import gguf_tokenizer

  file = gguf.read_file(path)
  found = gguf_tokenizer.tokenizer_files(file)
  if JSON not in found:
    kind = file.metadata.get('tokenizer.ggml.model')
    cut = file.metadata.get('tokenizer.ggml.pre')
    raise ValueError(
      f'{path}: its tokenizer is {kind!r} with text cut as {cut!r}; of GGUF'
      ' files, byte-level BPE (gpt2) cut as '
      + ', '.join(map(repr, gguf_tokenizer.DIGITS))
      + ' is read. Give a tokenizer.json'
    )
  config = json.loads(found.get(CONFIG, b'{}'))
  document = json.loads(found[JSON])
  return bpe.Vocabulary(document, str(path), _template_of(config))


def _read_json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'tokenizer: not a tokenizer.json ({path}: {error}); build one with'
      ' python -m composer.model.tokenizer'
    ) from error


def _config(path: pathlib.Path) -> Mapping[str, Any]:
  if not path.is_file():
    return {}
  found = _read_json(path)
  if not isinstance(found, dict):
    raise ValueError(f'{path} is no JSON object')
  return found


def _chat_template(folder: pathlib.Path, config: Mapping[str, Any]) -> str:
  if (folder / JINJA).is_file():
    return (folder / JINJA).read_text('utf-8')
  return _template_of(config)


def _template_of(config: Mapping[str, Any]) -> str:
  """The default one, where several are named."""
  found = config.get('chat_template')
  if isinstance(found, list):
    named = {x.get('name'): x.get('template') for x in found}
    found = named.get('default')
  return found if isinstance(found, str) else ''


def _with_added(document: Any, config: Mapping[str, Any]) -> Any:
  """Tokens that only `tokenizer_config.json` names are tokens as well."""
  decoder = config.get('added_tokens_decoder')
  if not isinstance(document, dict) or not isinstance(decoder, dict):
    return document
  added = list(document.get('added_tokens') or ())
  known = {x.get('id') for x in added if isinstance(x, dict)}
  for key, entry in decoder.items():
    if key.isdecimal() and int(key) not in known and isinstance(entry, dict):
      added.append({'id': int(key), **entry})
  return {**document, 'added_tokens': added}
