"""Kimi's vocabulary: `tiktoken.model`, and control tokens beside it.

`tiktoken.model` has a line per token: its bytes in base64 and its rank, which
is its id. There is no list of merges: of all neighbours whose bytes together
are a token, those with the lowest rank merge first, the leftmost of equals.
The 256 ids behind the ranks are control tokens; `tokenizer_config.json` names
some of them (`added_tokens_decoder`), the others are reserved.

`document` writes the same as a `tokenizer.json`. That takes the pair that each
token is merged from, and there is exactly one: where a token's bytes come
together in a text, no merge has crossed their ends, so that the merges within
are those of the bytes alone, in the same order, until two parts are left. A
token whose bytes stop at more parts arises only as a whole piece of text, which
is looked up before any merge (`ignore_merges`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
import pathlib
import re
from typing import Any

from composer.model.vocabularies import bpe

RESERVED = 256
MOST_TEXT = 400_000  # characters that are encoded at once
MOST_RUN = 25_000  # of them, in one run of spaces, or of anything else
_RUN = re.compile(r'\s+|\S+')

# How text is cut into pieces before merging. Han characters stand apart from
# all other letters; a word is letters with at most one sign before them, upper
# case before lower case; at most three digits belong together.
_UPPER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
_LOWER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
_SIGN = r'[^\r\n\p{L}\p{N}]?'
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = '|'.join(
  (
    r'[\p{Han}]+',
    f'{_SIGN}{_UPPER}*{_LOWER}+{_ENDING}',
    f'{_SIGN}{_UPPER}+{_LOWER}*{_ENDING}',
    r'\p{N}{1,3}',
    r' ?[^\s\p{L}\p{N}]+[\r\n]*',
    r'\s*[\r\n]+',
    r'\s+(?!\S)',
    r'\s+',
  )
)


def document(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """`tiktoken.model` and its configuration as a `tokenizer.json`.

  Raises:
    ValueError: a line that is no token, ranks with gaps or repeats, or control
      tokens outside the reserved ids.
  """
  ranks = read_ranks(path)
  chars = bpe.byte_chars()
  spelt = {token: ''.join(chars[byte] for byte in token) for token in ranks}
  merges = []
  for token in ranks:
    pair = last_pair(token, ranks)
    if pair is not None:
      merges.append([spelt[pair[0]], spelt[pair[1]]])
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': True,
    'use_regex': False,
  }
  split = {
    'type': 'Split',
    'pattern': {'Regex': PATTERN},
    'behavior': 'Isolated',
    'invert': False,
  }
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': _control_tokens(path, config, len(ranks)),
    'normalizer': None,
    'pre_tokenizer': {
      'type': 'Sequence',
      'pretokenizers': [split, byte_level],
    },
    'post_processor': None,
    'decoder': byte_level,
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'ignore_merges': True,
      'vocab': {spelt[token]: rank for token, rank in ranks.items()},
      'merges': merges,
    },
  }


def read_ranks(path: pathlib.Path) -> dict[bytes, int]:
  """Token -> rank, in the order of ranks, which are 0 to n - 1."""
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(path.read_bytes().splitlines(), 1):
    if not line.strip():
      continue
    try:
      text, rank = line.split()
      token, value = base64.b64decode(text, validate=True), int(rank)
    except (ValueError, binascii.Error):
      raise ValueError(
        f'{path}, line {number}: not a token in base64 and its rank:'
        f' {line[:60]!r}; get the file again'
      ) from None
    if token in ranks or not token:
      raise ValueError(f'{path}, line {number}: the token {token!r} again')
    ranks[token] = value
  found = sorted(ranks.values())
  if found != list(range(len(ranks))) or not ranks:
    raise ValueError(
      f'{path}: {len(ranks)} tokens whose ranks are not 0 to n - 1; the file is'
      ' cut or is of another kind'
    )
  return dict(sorted(ranks.items(), key=lambda item: item[1]))


def last_pair(
  token: bytes, ranks: Mapping[bytes, int]
) -> tuple[bytes, bytes] | None:
  """The two parts from which merging makes `token`, or None."""
  parts = [token[i : i + 1] for i in range(len(token))]
  none = len(ranks)
  pairs = [
    ranks.get(token[i : i + 2], none) for i in range(len(token) - 1)
  ]  # rank of parts[i] + parts[i + 1]
  while len(parts) > 2:
    best = min(pairs)
    if best == none:
      return None
    at = pairs.index(best)
    parts[at : at + 2] = [parts[at] + parts[at + 1]]
    del pairs[at]
    if at:
      pairs[at - 1] = ranks.get(parts[at - 1] + parts[at], none)
    if at < len(pairs):
      pairs[at] = ranks.get(parts[at] + parts[at + 1], none)
  if len(parts) < 2 or any(part not in ranks for part in parts):
    return None
  return parts[0], parts[1]


def _control_tokens(
  path: pathlib.Path, config: Mapping[str, Any], first: int
) -> list[dict[str, Any]]:
  named = {}
  decoder = config.get('added_tokens_decoder')
  if not isinstance(decoder, Mapping):
    raise ValueError(
      f'{path.parent}: tokenizer_config.json has no added_tokens_decoder, which'
      ' names the control tokens of tiktoken.model'
    )
  for key, entry in decoder.items():
    try:
      named[int(key)] = str(entry['content'])
    except (ValueError, TypeError, KeyError):
      raise ValueError(
        f'{path.parent}: added_tokens_decoder has {key!r}: {entry!r}, which is'
        ' no id and token'
      ) from None
  outside = [i for i in named if not first <= i < first + RESERVED]
  if outside:
    raise ValueError(
      f'{path.parent}: control token {named[outside[0]]!r} has id {outside[0]};'
      f' behind {first} tokens it lies in [{first}, {first + RESERVED})'
    )
  return [
    {
      'id': i,
      'content': named.get(i, f'<|reserved_token_{i}|>'),
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
      'special': True,
    }
    for i in range(first, first + RESERVED)
  ]


def cut(text: str) -> Iterator[str]:
  """Parts of a long text, as Kimi's own tokenizer cuts it before encoding."""
  for start in range(0, len(text), MOST_TEXT):
    part = text[start : start + MOST_TEXT]
    if len(part) <= MOST_RUN:
      yield part
      continue
    begin = 0
    for run in _RUN.finditer(part):
      for at in range(run.start() + MOST_RUN, run.end(), MOST_RUN):
        yield part[begin:at]
        begin = at
    yield part[begin:]
