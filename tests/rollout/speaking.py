"""Turns of a model that writes as Qwen3 does, in tokens that are bytes."""

import json

import numpy as np

from composer.model.vocabularies import bpe
from composer.records import Completion

CONTROLS = (
  '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<tool_call>', '</tool_call>',
  '<tool_response>', '</tool_response>', '<think>', '</think>',
)  # fmt: skip


def vocabulary():
  """Bytes and control tokens."""
  flags = dict.fromkeys(
    ('single_word', 'lstrip', 'rstrip', 'normalized'), False
  )
  added = [
    {'id': 256 + i, 'content': x, 'special': True, **flags}
    for i, x in enumerate(CONTROLS)
  ]
  pre = {
    'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
    'use_regex': True,
  }  # fmt: skip
  model = {
    'type': 'BPE', 'dropout': None, 'unk_token': None, 'fuse_unk': False,
    'continuing_subword_prefix': None, 'end_of_word_suffix': None,
    'byte_fallback': False, 'ignore_merges': False, 'merges': [],
    'vocab': {x: i for i, x in enumerate(bpe.byte_chars())},
  }  # fmt: skip
  document = {
    'version': '1.0', 'normalizer': None, 'post_processor': None,
    'decoder': None, 'truncation': None, 'padding': None,
    'added_tokens': added, 'pre_tokenizer': pre, 'model': model,
  }  # fmt: skip
  return bpe.Vocabulary(document, 'test', '')


TOKENIZER = vocabulary()


def turn(*calls, thinking='', text=''):
  """Ids of a turn: thinking, text, calls (name, {arguments})."""
  mark, encode = TOKENIZER.token_id, TOKENIZER.encode
  ids = []
  if thinking:
    ids += [mark('<think>'), *encode(thinking), mark('</think>')]
  ids += encode(text)
  for name, arguments in calls:
    body = json.dumps({'name': name, 'arguments': arguments})
    ids += [mark('<tool_call>'), *encode(body), mark('</tool_call>')]
  return [*ids, mark('<|im_end|>')]


def answer(request, tokens):
  """What an engine with one MoE layer gives of these sampled tokens."""
  total = len(request.tokens) + len(tokens)
  computed = np.zeros(total, np.int32)
  computed[-1] = -1
  experts = np.zeros((total, 1, 2), np.int16)
  experts[..., 1] = 1
  experts[-1] = -1
  return Completion(
    tokens=np.array(tokens, np.int32),
    logprobs=np.full(len(tokens), -1.0, np.float32),
    versions=np.zeros(len(tokens), np.int32),
    experts=experts,
    computed_versions=computed,
    stop_reason='stop' if tokens[-1] in request.stop_tokens else 'length',
  )
