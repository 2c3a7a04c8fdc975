"""Vocabularies of published models: text to token ids, control tokens apart.

  bpe.py    a byte-level BPE as `tokenizer.json` describes it (`Vocabulary`)
  kimi.py   Kimi's `tiktoken.model` and `tokenizer_config.json`, as the same
  files.py  `load`: any of the above, or the BPE inside a GGUF file

Text never encodes to a control token, whatever it spells: control tokens are
written by a template, by name (`Vocabulary.token_id`), and by nothing else.
"""

from composer.model.vocabularies.bpe import Vocabulary
from composer.model.vocabularies.bpe import check_embedding
from composer.model.vocabularies.files import load

__all__ = ['Vocabulary', 'check_embedding', 'load']
