"""Small vocabularies with the control tokens of each family."""

import pytest

from composer.model.vocabularies import bpe

QWEN = (
  '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<tool_call>', '</tool_call>',
  '<tool_response>', '</tool_response>', '<think>', '</think>',
)  # fmt: skip
KIMI_K2 = (
  '[BOS]', '[EOS]', '<|im_end|>', '<|im_user|>', '<|im_assistant|>',
  '<|im_system|>', '<|im_middle|>', '<|tool_calls_section_begin|>',
  '<|tool_calls_section_end|>', '<|tool_call_begin|>',
  '<|tool_call_argument_begin|>', '<|tool_call_end|>',
)  # fmt: skip
# A template of the tests' own, with all that is read out of a published one.
JINJA = (
  '{% if tools %}<|im_start|>system\n{% if messages[0].role == "system" %}'
  '{{ messages[0].content }}\n\n{% endif %}TOOLS:{% for tool in tools %}'
  '{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ "\n" }}CALL IN <tool_call></tool_call>'
  '<|im_end|>\n{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n'
  '{% if enable_thinking is defined and not enable_thinking %}'
  '<think>\n\n</think>\n\n{% endif %}{% endif %}'
)


def vocabulary(controls, chat_template=''):
  """Bytes, '\\n\\n' as one token, and control tokens."""
  tokens = [*bpe.byte_chars(), 'ĊĊ']
  added = [
    {'id': 257 + i, 'content': x, 'special': x.startswith('<|')}
    for i, x in enumerate(controls)
  ]
  flags = dict.fromkeys(
    ('single_word', 'lstrip', 'rstrip', 'normalized'), False
  )
  byte_level = {
    'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
    'use_regex': True,
  }  # fmt: skip
  document = {
    'version': '1.0', 'normalizer': None, 'post_processor': None,
    'decoder': None, 'truncation': None, 'padding': None,
    'added_tokens': [{**x, **flags} for x in added],
    'pre_tokenizer': byte_level,
    'model': {
      'type': 'BPE', 'dropout': None, 'unk_token': None, 'fuse_unk': False,
      'continuing_subword_prefix': None, 'end_of_word_suffix': None,
      'byte_fallback': False, 'ignore_merges': False,
      'vocab': {x: i for i, x in enumerate(tokens)}, 'merges': [['Ċ', 'Ċ']],
    },
  }  # fmt: skip
  return bpe.Vocabulary(document, 'test', chat_template)


@pytest.fixture(scope='session')
def make():
  return vocabulary


@pytest.fixture(scope='session')
def qwen():
  return vocabulary(QWEN, JINJA)


@pytest.fixture(scope='session')
def smollm():
  """Has no tokens for calls."""
  return vocabulary(QWEN[:3])


@pytest.fixture(scope='session')
def kimi():
  return vocabulary((*KIMI_K2, '<think>', '</think>'))


@pytest.fixture(scope='session')
def kimi_k2():
  return vocabulary(KIMI_K2)


@pytest.fixture(scope='session')
def tokenizers(qwen, smollm, kimi, kimi_k2):
  """Template -> a tokenizer for it."""
  return {
    'chatml': qwen,
    'qwen3': qwen,
    'qwen3-thinking': qwen,
    'smollm2': smollm,
    'kimi-k2': kimi_k2,
    'kimi-k2.5': kimi,
  }
