"""Byte-level BPE, as a `tokenizer.json` of Hugging Face describes it.

`tokenizers` does the splitting and the merging. What differs from using it
directly is what must not depend on the text:

  control tokens   Added tokens that are special, or that are written in
                   brackets ('<tool_call>', '[BOS]'), are taken out of the
                   encoder. Text that spells one is encoded as ordinary
                   characters; `token_id` gives the token itself. (Hugging Face
                   turns the spelling into the token, so that a file or a tool's
                   output could end a turn.)
  bytes            A token is its bytes, so that decoding is concatenation, and
                   any ids decode. Some vocabularies lack a byte (SmolLM2 has no
                   0x04): a character that needs it becomes U+FFFD rather than
                   vanish.

`decode(encode(x)) == x` for every text of which no byte is lacking, unless the
file has a normaliser (Qwen's composes characters, NFC), which is applied as it
is there, because the model was trained on its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import functools
import hashlib
import json
import re
from typing import Any

import tokenizers

CACHED_TEXTS = 4096
CACHED_LENGTH = 256  # characters; longer texts are encoded anew
PADDING = 1024  # rows that an embedding may have beyond its vocabulary
_BRACKETED = re.compile(r'<\S*>|\[\S*\]', re.S)
_REPLACEMENTS = ('\ufffd', '?', ' ')


class Vocabulary:
  """Text to token ids and back.

  Attributes:
    fingerprint: hash of the description, to tell vocabularies apart.
    vocab_size: the largest id plus one, V; the model's embedding may have more
      rows (`check_embedding`).
    controls: control token -> id, read-only.
    names: id -> control token.
    missing: bytes that no token holds.
    chat_template: the Jinja text that came with the vocabulary, or ''.
  """

  def __init__(
    self,
    document: Mapping[str, Any],
    where: str,
    chat_template: str = '',
    cut: Callable[[str], Iterable[str]] | None = None,
  ):
    """Builds the encoder of a `tokenizer.json`.

    Args:
      document: its contents.
      where: what to call it in messages.
      chat_template: see the attribute.
      cut: cuts a long text into parts that are encoded one by one.

    Raises:
      ValueError: no byte-level BPE, or ids that cannot be.
    """
    _check_kind(document, where)
    vocabulary = document['model']['vocab']
    added = _added_tokens(document, where)
    self.controls = {t: i for t, i in added.items() if _is_control(document, t)}
    self.names = {i: t for t, i in self.controls.items()}
    self._bytes = _token_bytes(vocabulary, added, where)
    self.vocab_size = max(self._bytes) + 1
    self.missing = _missing(vocabulary)
    self.chat_template = chat_template
    self.fingerprint = _fingerprint(document)
    self._where = where
    self._lacking = bytes(sorted(self.missing))
    self._replacement = _replacement(self.missing, where)
    self._cut = cut
    try:
      text = json.dumps(_without_controls(document, self.controls))
      self._encoder = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        f'{where}: the tokenizers library cannot read it ({error})'
      ) from error
    self._encode_cached = functools.lru_cache(CACHED_TEXTS)(self._encode)

  def encode(self, text: str) -> list[int]:
    """Token ids of `text`; never a control token.

    Lone surrogates, which no UTF-8 text holds, become '?'.
    """
    if len(text) > CACHED_LENGTH:
      return list(self._encode(text))
    return list(self._encode_cached(text))

  def _encode(self, text: str) -> tuple[int, ...]:
    data = text.encode('utf-8', 'replace')
    text = data.decode('utf-8')
    if self.missing and len(data.translate(None, self._lacking)) < len(data):
      text = ''.join(
        self._replacement if self.missing & set(x.encode('utf-8')) else x
        for x in text
      )
    parts = (text,) if self._cut is None else self._cut(text)
    return tuple(
      i
      for part in parts
      for i in self._encoder.encode(part, add_special_tokens=False).ids
    )

  def decode(self, ids: Iterable[int]) -> str:
    """Text of token ids; bytes that are no UTF-8 become U+FFFD.

    A control token is its name.

    Raises:
      ValueError: an id is of no token.
    """
    return self.to_bytes(ids).decode('utf-8', 'replace')

  def to_bytes(self, ids: Iterable[int]) -> bytes:
    """The bytes that token ids stand for; raises as `decode` does."""
    try:
      return b''.join([self._bytes[int(i)] for i in ids])
    except KeyError as error:
      raise ValueError(
        f'token id {error.args[0]} is of no token of {self._where} (V ='
        f' {self.vocab_size}); was it sampled from another model?'
      ) from None

  def has(self, i: int) -> bool:
    """Whether `i` is the id of a token (embeddings have rows beyond)."""
    return i in self._bytes

  def token_id(self, piece: str) -> int:
    """Id of a control token, or of a text that is one token.

    Raises:
      KeyError: it is neither.
    """
    if piece in self.controls:
      return self.controls[piece]
    ids = self.encode(piece)
    if len(ids) != 1:
      raise KeyError(
        f'{piece!r} is no control token of {self._where}, and not a single'
        ' token of text'
      )
    return ids[0]


def check_embedding(tokenizer: Any, rows: int, where: str = 'model') -> None:
  """Refuses a vocabulary that is not the one of the model.

  Embeddings are often padded to a round number of rows (Qwen3: 267 more than
  tokens); up to `PADDING` more are accepted.

  Args:
    tokenizer: has `vocab_size`.
    rows: of the embedding, V.
    where: the model, for the message.

  Raises:
    ValueError: ids beyond the embedding, or an embedding far beyond the ids.
  """
  size = tokenizer.vocab_size
  if not size <= rows <= size + PADDING:
    why = (
      'its ids pass the embedding' if size > rows else 'most would have no text'
    )
    raise ValueError(
      f'the tokenizer has {size} ids and vocab_size of the {where} is {rows}:'
      f' {why}; use the tokenizer that belongs to the model (tokenizer=DIR) or'
      ' set model.vocab_size'
    )


# --- reading the description -------------------------------------------------


def _check_kind(document: Mapping[str, Any], where: str) -> None:
  """Refuses what is no tokenizer.json, and kinds of it that are not BPE."""
  model = document.get('model') if isinstance(document, Mapping) else None
  if not isinstance(model, Mapping) or 'vocab' not in model:
    raise ValueError(
      f'{where}: not a tokenizer.json, which has a model with a vocab'
    )
  kinds = {x['type'] for x in _walk(document.get('pre_tokenizer'))}
  kind = model.get('type', 'BPE')
  vocabulary = model['vocab']
  if (
    kind != 'BPE'
    or 'ByteLevel' not in kinds
    or not isinstance(vocabulary, Mapping)
    or not vocabulary
  ):
    raise ValueError(
      f'{where}: model {kind} behind {", ".join(sorted(kinds)) or "nothing"};'
      ' only byte-level BPE is read (Qwen, DeepSeek, Kimi, SmolLM2, Llama 3)'
    )
  faults = [
    f'{token!r}: {i!r}' for token, i in vocabulary.items() if not _is_id(i)
  ]
  if faults:
    raise ValueError(f'{where}: ids that are no numbers: {faults[0]}')


def _is_id(i: Any) -> bool:
  return isinstance(i, int) and not isinstance(i, bool) and i >= 0


def _walk(step: Any) -> Iterable[Mapping[str, Any]]:
  """A pre-tokenizer and those inside it."""
  if isinstance(step, Mapping) and isinstance(step.get('type'), str):
    yield step
    for inner in step.get('pretokenizers') or ():
      yield from _walk(inner)


def _added_tokens(document: Mapping[str, Any], where: str) -> dict[str, int]:
  added = {}
  for token in document.get('added_tokens') or ():
    try:
      content, i = token['content'], token['id']
    except (TypeError, KeyError):
      raise ValueError(
        f'{where}: an added token without content or id: {token!r}'
      ) from None
    if not isinstance(content, str) or not content or not _is_id(i):
      raise ValueError(f'{where}: an added token that cannot be: {token!r}')
    added[content] = i
  return added


def _is_control(document: Mapping[str, Any], content: str) -> bool:
  """Special, or written in brackets; others (runs of spaces) are text."""
  if _BRACKETED.fullmatch(content):
    return True
  return any(
    token['content'] == content and token.get('special')
    for token in document['added_tokens']
  )


def _without_controls(
  document: Mapping[str, Any], controls: Mapping[str, int]
) -> dict[str, Any]:
  """The description of an encoder that knows no control token."""
  added = _added_tokens(document, '')
  text = {token: i for token, i in added.items() if token not in controls}
  vocabulary = {
    token: i
    for token, i in document['model']['vocab'].items()
    if token not in controls
  }
  made = dict(document)
  made['model'] = {
    **document['model'],
    # A dropout would encode one text in several ways; an unknown token would
    # be a control token that arises from text.
    'dropout': None,
    'unk_token': None,
    # Added tokens are numbered anew unless the model knows them.
    'vocab': {**vocabulary, **text},
  }
  made['added_tokens'] = [
    token
    for token in document.get('added_tokens') or ()
    if token['content'] in text
  ]
  made.update(post_processor=None, truncation=None, padding=None)
  return made


def _token_bytes(
  vocabulary: Mapping[str, int], added: Mapping[str, int], where: str
) -> dict[int, bytes]:
  """Id -> the bytes that it stands for; of an added token, its text."""
  of_char = {char: byte for byte, char in enumerate(byte_chars())}
  table: dict[int, bytes] = {}
  for token, i in vocabulary.items():
    if i in table:
      raise ValueError(
        f'{where}: {token!r} and another token have the same id {i}'
      )
    try:
      table[i] = bytes([of_char[char] for char in token])
    except KeyError:  # written as it is, not byte by byte
      table[i] = token.encode('utf-8', 'replace')
  owner = {i: token for token, i in vocabulary.items()}
  for token, i in added.items():
    if owner.get(i, token) != token:
      raise ValueError(
        f'{where}: {token!r} and {owner[i]!r} have the same id {i}'
      )
    owner[i] = token
    table[i] = token.encode('utf-8', 'replace')
  return table


def _missing(vocabulary: Mapping[str, int]) -> frozenset[int]:
  """Bytes that no token stands for alone, so that no text may need them."""
  return frozenset(
    byte for byte, char in enumerate(byte_chars()) if char not in vocabulary
  )


def _replacement(missing: frozenset[int], where: str) -> str:
  for text in _REPLACEMENTS:
    if missing.isdisjoint(text.encode('utf-8')):
      return text
  raise ValueError(
    f'{where}: the vocabulary lacks the bytes of '
    + ', '.join(map(repr, _REPLACEMENTS))
    + '; it cannot spell text'
  )


def _fingerprint(document: Mapping[str, Any]) -> str:
  data = json.dumps(document, sort_keys=True).encode()
  return hashlib.blake2b(data, digest_size=8).hexdigest()


@functools.lru_cache(maxsize=1)
def byte_chars() -> tuple[str, ...]:
  """The printable character by which byte-level BPE writes each byte (GPT-2).

  Bytes that are printable in Latin-1 stand for themselves; the others take the
  characters from U+0100 on, in order.
  """
  plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
  shifted = iter(range(256, 512))
  return tuple(chr(b if b in plain else next(shifted)) for b in range(256))
