"""Mid-training data: documents to packed rows, through grain.

Two sources of documents (source files of the interpreter's own standard
library, and rendered sessions) are each shuffled, cut, and packed into rows;
the rows are mixed by weight and batched:

    documents -> shuffle -> repeat -> cut -> pack ┐
                                                  ├ mix -> batch -> finish
    documents -> shuffle -> repeat -> cut -> pack ┘

A document is a dict of `tokens` int32 [n] and `loss` bool [n] (where a loss is
wanted). Everything is a function of the seed; the position in the stream is
the iterator's state, plain JSON, which the checkpoint carries. A source is
anything with a length and random access, so files on disk serve as well.

grain takes half a second to import, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import pathlib
import sysconfig
import typing
from typing import Any

import numpy as np

if typing.TYPE_CHECKING:
  import grain

Document = dict[str, np.ndarray]

# Tables and other packages' code, tests, and text that is no program.
_SKIPPED = frozenset(
  {
    'test',
    'tests',
    'idle_test',
    'site-packages',
    'dist-packages',
    '__pycache__',
    'encodings',
    'pydoc_data',
  }
)
_CHUNK_CHARACTERS = 4096  # of source text encoded at once


def python_source(
  max_bytes: int, root: str | None = None
) -> list[tuple[str, str]]:
  """Python files of this interpreter's standard library: (name, text).

  Which ones are taken is decided by a hash of their names, so that `max_bytes`
  of them are spread over the whole library; they come sorted by name. Tests,
  installed packages and undecodable files are left out.

  Args:
    max_bytes: of UTF-8 text, in all.
    root: another directory to read; None is the standard library.

  Raises:
    ValueError: nothing was found that fits.
  """
  top = pathlib.Path(root or sysconfig.get_paths()['stdlib'])
  names = sorted(
    path.relative_to(top).as_posix()
    for path in top.rglob('*.py')
    if _SKIPPED.isdisjoint(path.relative_to(top).parts)
  )
  chosen, total = [], 0
  for name in sorted(names, key=_digest):
    data = _read(top / name)
    if data and total + len(data) <= max_bytes:
      try:
        chosen.append((name, data.decode('utf-8')))
      except UnicodeDecodeError:
        continue
      total += len(data)
  if not chosen:
    raise ValueError(
      f'no Python source of at most midtrain.source_bytes={max_bytes} bytes'
      f' under {top} ({len(names)} files); raise source_bytes, or set'
      ' midtrain.python_share=0'
    )
  return sorted(chosen)


def _digest(name: str) -> bytes:
  return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _read(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError:  # a broken link, or a file we may not read
    return b''


@dataclasses.dataclass(frozen=True)
class TextSource:
  """Random access to pieces of text, encoded when they are asked for."""

  pieces: tuple[str, ...]
  encode: Callable[[str], Sequence[int]]

  def __len__(self) -> int:
    return len(self.pieces)

  def __getitem__(self, index: int) -> Document:
    tokens = np.asarray(self.encode(self.pieces[index]), np.int32)
    return {'tokens': tokens, 'loss': np.ones(len(tokens), bool)}


@dataclasses.dataclass(frozen=True)
class SessionSource:
  """Random access to rendered sessions: (tokens [n], sampled [n]).

  With `sampled_only` a loss is wanted at the sampled tokens alone: supervised
  training. Otherwise at all of them.
  """

  sessions: Sequence[tuple[np.ndarray, np.ndarray]]
  sampled_only: bool = False

  def __len__(self) -> int:
    return len(self.sessions)

  def __getitem__(self, index: int) -> Document:
    tokens, sampled = self.sessions[index]
    loss = np.asarray(sampled, bool)
    if loss.shape != np.shape(tokens):
      raise ValueError(
        f'session {index} has {len(tokens)} tokens and a mask of {loss.shape};'
        ' the mask is aligned with the tokens'
      )
    if not self.sampled_only:
      loss = np.ones_like(loss)
    return {'tokens': np.asarray(tokens, np.int32), 'loss': loss}


def text_source(
  files: Sequence[tuple[str, str]], encode: Callable[[str], Sequence[int]]
) -> TextSource:
  """Cuts files at line ends into pieces that are quick to encode."""
  pieces = []
  for _, text in files:
    piece, size = [], 0
    for line in text.splitlines(keepends=True):
      if piece and size + len(line) > _CHUNK_CHARACTERS:
        pieces.append(''.join(piece))
        piece, size = [], 0
      piece.append(line)
      size += len(line)
    if piece:
      pieces.append(''.join(piece))
  return TextSource(tuple(pieces), encode)


def rows(
  source: Any,
  sequence_length: int,
  *,
  align: int,
  seed: int,
  packing_bins: int = 32,
) -> grain.IterDataset:
  """An endless stream of packed rows of one source.

  Each epoch is another permutation of the documents. A document longer than a
  row is cut; documents start at multiples of `align` (the KV block).

  Args:
    source: `__len__` and `__getitem__(i) -> Document`.
    sequence_length: T, a multiple of `align`.
    align: tokens.
    seed: of the order.
    packing_bins: rows that are open at once; more waste less padding.

  Returns:
    dicts of `tokens`, `segment_ids` and `positions`, int32 [T], and `loss`,
    bool [T]; segments count from 1 in a row, 0 is padding.
  """
  import grain

  if align < 1 or sequence_length < 1 or sequence_length % align:
    raise ValueError(
      f'midtrain.sequence_length={sequence_length} is not a multiple of'
      f' numerics.kv_block={align}; set it to one'
    )
  if not len(source):
    raise ValueError(
      'a mid-training source has no documents; give it some, or the share 0'
    )
  lengths = {'tokens': sequence_length, 'loss': sequence_length}
  documents = (
    grain.MapDataset.source(source)
    .seed(seed)
    .shuffle()
    .repeat()
    # The stream must not depend on how many threads read ahead.
    .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
  )
  pieces = grain.experimental.FlatMapIterDataset(
    documents, _cutter(sequence_length)
  )
  packed = grain.experimental.FirstFitPackIterDataset(
    pieces,
    length_struct=lengths,
    num_packing_bins=packing_bins,
    seed=seed,
    pack_alignment_struct={name: align for name in lengths},
  )
  return packed.map(_row)


def _cutter(length: int) -> Any:
  import grain

  class Cut(grain.experimental.FlatMapTransform):
    """A document into pieces of at most `length` tokens."""

    max_fan_out = 1 << 20

    def flat_map(self, document: Document) -> list[Document]:
      return [
        {
          name: value[start : start + length]
          for name, value in document.items()
        }
        for start in range(0, len(document['tokens']), length)
      ]

  return Cut()


def _row(packed: Mapping[str, np.ndarray]) -> Document:
  return {
    'tokens': packed['tokens'],
    'segment_ids': packed['tokens_segment_ids'],
    'positions': packed['tokens_positions'],
    'loss': packed['loss'],
  }


def mixture(
  parts: Mapping[str, tuple[grain.IterDataset, float]], batch_size: int
) -> grain.IterDataset:
  """Mixes streams of rows by weight into batches.

  Args:
    parts: name -> (rows, weight); a part of weight 0 is left out.
    batch_size: B, rows of a batch (the global one).

  Returns:
    dicts of int32 [B, T] `tokens`, `segment_ids` and `positions` and of bool
    [B, T] `loss_mask`, which is true where a loss is wanted and an earlier
    token of the segment predicts the token.
  """
  import grain

  if batch_size < 1:
    raise ValueError(f'midtrain.batch_size={batch_size}; set it to 1 or more')
  bad = {name: weight for name, (_, weight) in parts.items() if weight < 0}
  used = {name: part for name, part in parts.items() if part[1] > 0}
  if bad or not used:
    raise ValueError(
      f'mixture weights { ({n: w for n, (_, w) in parts.items()}) }; none may be'
      ' negative, and one must be positive'
    )
  names = sorted(used)
  mixed = grain.IterDataset.mix(
    [used[name][0] for name in names], [used[name][1] for name in names]
  )
  return mixed.batch(batch_size).map(_finish)


def _finish(batch: Mapping[str, np.ndarray]) -> Document:
  mask = batch['loss'] & (batch['segment_ids'] > 0) & (batch['positions'] > 0)
  return {
    'tokens': np.ascontiguousarray(batch['tokens'], np.int32),
    'segment_ids': np.ascontiguousarray(batch['segment_ids'], np.int32),
    'positions': np.ascontiguousarray(batch['positions'], np.int32),
    'loss_mask': mask,
  }


def midtraining(
  sessions: Sequence[tuple[np.ndarray, np.ndarray]],
  files: Sequence[tuple[str, str]],
  encode: Callable[[str], Sequence[int]],
  *,
  batch_size: int,
  sequence_length: int,
  python_share: float,
  align: int,
  seed: int,
  sampled_only: bool = False,
) -> grain.IterDataset:
  """The mixture of the mid-training stage; see `rows` and `mixture`.

  Args:
    sessions: rendered demonstrations, (tokens [n], sampled [n]).
    files: from `python_source`.
    encode: text -> token ids.
    batch_size: rows a step.
    sequence_length: tokens a row.
    python_share: of the rows that are Python source, 0 to 1.
    align: the KV block.
    seed: of everything.
    sampled_only: the supervised stage: a loss at sampled tokens alone.

  Raises:
    ValueError: a session is longer than a row (cut, it would teach acts
      without their prompt), or a setting is out of range.
  """
  if not 0 <= python_share <= 1:
    raise ValueError(f'midtrain.python_share={python_share}; set it in [0, 1]')
  longest = max((len(tokens) for tokens, _ in sessions), default=0)
  if longest > sequence_length:
    raise ValueError(
      f'midtrain.sequence_length={sequence_length} is shorter than a session of'
      f' {longest} tokens; raise it, or lower session.context_tokens'
    )
  parts = {}
  if python_share < 1:
    source = SessionSource(sessions, sampled_only)
    packed = rows(source, sequence_length, align=align, seed=seed)
    parts['sessions'] = (packed, 1 - python_share)
  if python_share > 0:
    source = text_source(files, encode)
    packed = rows(source, sequence_length, align=align, seed=seed + 1)
    parts['python'] = (packed, python_share)
  return mixture(parts, batch_size)
