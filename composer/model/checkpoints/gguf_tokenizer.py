"""The byte-level BPE inside a GGUF file, as a tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

from composer.model.checkpoints import gguf

CONTROL, USER_DEFINED = 3, 4  # token types


def tokenizer_files(file: gguf.File) -> dict[str, bytes]:
  """tokenizer.json and tokenizer_config.json of the BPE inside, if it is one.

  Byte-level BPE of the kinds in `DIGITS`; for any other the result is empty,
  and the model is converted without a tokenizer.
  """
  kind = file.metadata.get('tokenizer.ggml.model')
  cut = file.metadata.get('tokenizer.ggml.pre', 'default')
  tokens = file.metadata.get('tokenizer.ggml.tokens')
  merges = file.metadata.get('tokenizer.ggml.merges')
  if kind != 'gpt2' or cut not in DIGITS or not tokens or merges is None:
    return {}
  types = file.metadata.get('tokenizer.ggml.token_type') or [1] * len(tokens)
  added = [
    {
      'id': i,
      'content': token,
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
      'special': types[i] == CONTROL,
    }
    for i, token in enumerate(tokens)
    if types[i] in (CONTROL, USER_DEFINED)
  ]
  bytelevel = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': True,
    'use_regex': True,
  }
  document = {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': added,
    'normalizer': None,
    'pre_tokenizer': {
      'type': 'Sequence',
      'pretokenizers': [*DIGITS[cut], bytelevel],
    },
    'post_processor': None,
    'decoder': bytelevel,
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'ignore_merges': False,
      'vocab': {token: i for i, token in enumerate(tokens)},
      'merges': [pair.split(' ', 1) for pair in merges],
    },
  }
  return {
    'tokenizer.json': _json(document),
    'tokenizer_config.json': _json(_tokenizer_config(file, tokens)),
  }


# How text is cut before byte-level BPE: 'smollm' sets every digit apart first.
DIGITS: dict[str, list[dict[str, Any]]] = {
  'smollm': [{'type': 'Digits', 'individual_digits': True}],
  'gpt-2': [],
}


def _tokenizer_config(file: gguf.File, tokens: list[str]) -> dict[str, Any]:
  config: dict[str, Any] = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,
    'model_max_length': file.metadata.get('llama.context_length'),
  }
  for name, key in (
    ('bos_token', 'bos_token_id'),
    ('eos_token', 'eos_token_id'),
    ('unk_token', 'unknown_token_id'),
    ('pad_token', 'padding_token_id'),
  ):
    i = file.metadata.get(f'tokenizer.ggml.{key}')
    if i is not None and i < len(tokens):
      config[name] = tokens[i]
  template = file.metadata.get('tokenizer.chat_template')
  if template is not None:
    config['chat_template'] = template
  return config


def _json(document: Any) -> bytes:
  return json.dumps(document, ensure_ascii=False).encode('utf-8', 'replace')
