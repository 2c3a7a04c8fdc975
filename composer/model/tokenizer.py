"""A byte-level BPE tokenizer in which every piece of an act is one token.

Text is cut into words (an optional leading space, then an identifier, a number
or a run of punctuation), and a word that is in the vocabulary is one token,
whatever the merges say. So ' L3', ' <=' and ' squares' are single tokens in
code, in a description and in an act, while ' summation' never contains ' sum'.
All other text falls back to merges, and in the end to its bytes: any text
comes back exactly.

The ten special tokens are in the vocabulary only as ids. No text encodes to
them: '<end>' in a file or in a tool's output is five ordinary characters.

`python -m composer.model.tokenizer --out PATH` builds the file from the source
of the running interpreter's own standard library.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
import functools
import hashlib
import importlib.resources
import json
import pathlib

import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from composer.model import vocabularies

SPECIALS = (
  '<pad>',
  '<bos>',
  '<end>',
  '<task>',
  '<tools>',
  '<act>',
  '<obs>',
  '<summarize>',
  '<summary>',
  '<file>',
)
VOCAB_SIZE = 768
CACHED_TEXTS = 4096
CACHED_LENGTH = 256  # characters; longer texts are encoded anew

WORD = r' ?[\p{L}_][\p{L}\p{N}_]*| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+'


class Tokenizer:
  """Text to token ids and back. Ids of the specials are their places.

  Attributes:
    fingerprint: hash of the file, to tell tokenizers apart in checkpoints.
    vocab_size: number of ids, V.
    names: id -> special token.
  """

  names = dict(enumerate(SPECIALS))

  def __init__(self, text: str):
    self.fingerprint = hashlib.blake2b(
      text.encode('utf-8'), digest_size=8
    ).hexdigest()
    try:
      self._encoder = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        f'tokenizer: not a tokenizer.json ({error}); build one with'
        ' python -m composer.model.tokenizer'
      ) from error
    vocabulary = self._encoder.get_vocab()
    self.vocab_size = len(vocabulary)
    wrong = [x for i, x in enumerate(SPECIALS) if vocabulary.get(x) != i]
    if wrong or sorted(vocabulary.values()) != list(range(self.vocab_size)):
      raise ValueError(
        f'tokenizer: special tokens {wrong or "[]"} are misplaced or ids have'
        ' gaps; build the file with python -m composer.model.tokenizer'
      )
    self._bytes = _token_bytes(vocabulary)
    self._ids = {
      data.decode('utf-8', 'replace'): i
      for i, data in reversed(list(enumerate(self._bytes)))
    }
    self._encode_cached = functools.lru_cache(CACHED_TEXTS)(self._encode)

  def encode(self, text: str) -> list[int]:
    """Token ids of `text`; never the id of a special token.

    Lone surrogates, which no UTF-8 text holds, become '?'.
    """
    if len(text) > CACHED_LENGTH:
      return list(self._encode(text))
    return list(self._encode_cached(text))

  def _encode(self, text: str) -> tuple[int, ...]:
    text = text.encode('utf-8', 'replace').decode('utf-8')
    return tuple(self._encoder.encode(text).ids)

  def decode(self, ids: Iterable[int]) -> str:
    """Text of any token ids; bytes that are no UTF-8 become U+FFFD.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    ids = [int(i) for i in ids]
    outside = [i for i in ids if not 0 <= i < self.vocab_size]
    if outside:
      raise ValueError(
        f'token id {outside[0]} is outside the vocabulary of'
        f' {self.vocab_size}; was it sampled from another model?'
      )
    return self.to_bytes(ids).decode('utf-8', 'replace')

  def to_bytes(self, ids: Iterable[int]) -> bytes:
    """The bytes that token ids, all of them in the vocabulary, stand for."""
    return b''.join([self._bytes[i] for i in ids])

  def has(self, i: int) -> bool:
    """Whether `i` is the id of a token."""
    return 0 <= i < self.vocab_size

  def token_id(self, piece: str) -> int:
    """Id of a special ('<end>') or of a piece with its space (' L3').

    Raises:
      KeyError: the piece is not one token.
    """
    if piece not in self._ids or '\ufffd' in piece:
      raise KeyError(
        f'{piece!r} is not a single token; pieces begin with one space, and'
        ' the tokenizer must be built with them'
      )
    return self._ids[piece]


@functools.lru_cache(maxsize=4)
def load(path: str = '') -> Tokenizer | vocabularies.Vocabulary:
  """Reads a tokenizer; '' is the built-in one.

  Args:
    path: a file of this module's making, or whatever `vocabularies.load` reads:
      the tokenizer of a published model, or the directory that holds it.

  Raises:
    ValueError: there is no such file, or it is not a tokenizer that is read.
  """
  if not path:
    folder = importlib.resources.files('composer.model')
    return Tokenizer(folder.joinpath('tokenizer.json').read_text('utf-8'))
  file = pathlib.Path(path)
  if file.is_file() and file.suffix == '.json':
    text = file.read_text('utf-8', 'replace')
    if not _is_published(text):
      return Tokenizer(text)
  return vocabularies.load(path)


def _is_published(text: str) -> bool:
  """Whether a tokenizer.json has none of the special tokens that only we have."""
  try:
    return '<summarize>' not in json.loads(text)['model']['vocab']
  except (ValueError, KeyError, TypeError, RecursionError):
    return False


def _token_bytes(vocabulary: dict[str, int]) -> tuple[bytes, ...]:
  """The bytes that every id stands for; a special's are its name."""
  of_char = {char: byte for byte, char in enumerate(_byte_chars())}
  table = [b''] * len(vocabulary)
  for token, i in vocabulary.items():
    if i < len(SPECIALS):
      table[i] = token.encode()
    else:
      table[i] = bytes(of_char[char] for char in token)
  return tuple(table)


@functools.lru_cache(maxsize=1)
def _byte_chars() -> tuple[str, ...]:
  """The printable character by which byte-level BPE writes each byte (GPT-2).

  Bytes that are printable in Latin-1 stand for themselves; the others take the
  characters from U+0100 on, in order.
  """
  plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
  shifted = iter(range(256, 512))
  return tuple(chr(b if b in plain else next(shifted)) for b in range(256))


def _spell(text: str) -> str:
  """`text` in the characters of byte-level BPE."""
  return ''.join(_byte_chars()[byte] for byte in text.encode('utf-8'))


# --- building ----------------------------------------------------------------


def _splitter() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Split(tokenizers.Regex(WORD), 'isolated')


def _train_merges(
  texts: Iterable[str], pieces: frozenset[str]
) -> list[list[str]]:
  """Merges by frequency over the words that are not pieces already."""
  # A byte that no word of source holds keeps the words apart.
  apart = '\x00'
  splitter = _splitter()
  trained = tokenizers.Tokenizer(models.BPE())
  trained.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(apart, 'removed'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  trainer = trainers.BpeTrainer(
    vocab_size=256 + VOCAB_SIZE,
    initial_alphabet=sorted(_byte_chars()),
    show_progress=False,
  )

  def words(text: str) -> str:
    split = splitter.pre_tokenize_str(text.replace(apart, ''))
    return apart.join(word for word, _ in split if word not in pieces)

  trained.train_from_iterator((words(text) for text in texts), trainer)
  return json.loads(trained.to_str())['model']['merges']


def build(texts: Iterable[str], pieces: Sequence[str]) -> str:
  """A tokenizer.json of `VOCAB_SIZE` ids: specials, pieces, bytes, merges."""
  splitter = _splitter()
  for piece in pieces:
    words = [word for word, _ in splitter.pre_tokenize_str(piece)]
    if words != [piece] or not piece.startswith(' '):
      raise ValueError(
        f'piece {piece!r} is not one word with a leading space but {words};'
        ' split it or change WORD'
      )
  tokens = dict.fromkeys([
    *SPECIALS, *map(_spell, pieces), *sorted(_byte_chars())
  ])  # fmt: skip
  # A merge that made ' in' would find it inside ' index'. Single letters may
  # be made, as most words of source begin with one.
  whole = {_spell(piece) for piece in pieces if len(piece) > 2}
  merges = []
  parts = set(_byte_chars())
  for left, right in _train_merges(texts, frozenset(pieces)):
    if len(tokens) == VOCAB_SIZE:
      break
    if left + right not in whole and {left, right} <= parts:
      parts.add(left + right)
      tokens[left + right] = None
      merges.append((left, right))
  if len(tokens) != VOCAB_SIZE:
    raise ValueError(
      f'the text gives a vocabulary of {len(tokens)}, not {VOCAB_SIZE}; train'
      ' on more text'
    )
  model = models.BPE(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=merges,
    ignore_merges=True,
  )
  built = tokenizers.Tokenizer(model)
  built.pre_tokenizer = pre_tokenizers.Sequence(
    [
      splitter,
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  return json.dumps(json.loads(built.to_str()), separators=(',', ':'))


def main(argv: Sequence[str] | None = None) -> None:
  from composer import data
  from composer.environments.tasks import repair

  parser = argparse.ArgumentParser(description='Builds tokenizer.json.')
  parser.add_argument('--out', required=True, type=pathlib.Path)
  parser.add_argument('--source-bytes', default=4_000_000, type=int)
  arguments = parser.parse_args(argv)
  files = data.python_source(arguments.source_bytes)
  text = build((source for _, source in files), repair.PIECES)
  arguments.out.write_text(text, 'utf-8')
  print(f'{arguments.out}: {len(text)} bytes, {Tokenizer(text).fingerprint}')


if __name__ == '__main__':
  main()
