"""Checkpoints of models: Hugging Face's, GGUF, and our own.

    config, params = checkpoints.load('path/of/a/model')   # whatever kind it is
    checkpoints.save('DIR', config, params)                # ours, or to='hf'
    checkpoints.convert('smollm2', 'DIR')                  # streamed

`names` says where every number lies, `tensors`, `rows` and `gguf` read files,
`architectures` reads configurations, `store` is our layout, `sources` opens any
of them, and `conversion` and `loading` are what others call.
"""

from composer.model.checkpoints.conversion import convert
from composer.model.checkpoints.conversion import save
from composer.model.checkpoints.loading import differences
from composer.model.checkpoints.loading import load
from composer.model.checkpoints.loading import read_config
from composer.model.checkpoints.loading import read_params
from composer.model.checkpoints.sources import open_source
from composer.model.checkpoints.telling import describe
from composer.model.checkpoints.telling import progress

__all__ = [
  'convert',
  'describe',
  'differences',
  'load',
  'open_source',
  'progress',
  'read_config',
  'read_params',
  'save',
]
