"""A small mixture whose weights the tests of this folder publish."""

from composer import config as config_lib

MODEL = config_lib.ModelConfig(
  vocab_size=64,
  width=32,
  layers=3,
  dense_layers=1,
  heads=2,
  kv_heads=1,
  head_dim=16,
  dense_hidden=32,
  experts=4,
  experts_per_token=2,
  expert_hidden=16,
)
