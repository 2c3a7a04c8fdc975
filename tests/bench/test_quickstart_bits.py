"""No bit differs at the quick start's vocabulary, through the engine's whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.bench import mismatch
from composer.model import transformer

# Small, but with the quick start's vocabulary: an unequal reduction over 768
# logits shows in one token of two hundred.
EXPERIMENT = config_lib.Experiment(
  name='mismatch',
  model=config_lib.ModelConfig(
    layers=1, width=32, heads=2, head_dim=16, experts=4, expert_hidden=16
  ),
  numerics=config_lib.NumericsConfig(row_block=16),
  engine=config_lib.EngineConfig(
    rows=64, sequences=64, pages=512, max_context=64
  ),
  rl=config_lib.RLConfig(micro_batch=8, sequence_length=64),
)


@pytest.mark.slow
def test_bitwise_is_zero_and_fast_is_not():
  spec = transformer.spec(EXPERIMENT.model)
  drawn = params_lib.init(spec, jax.random.key(0))
  params = params_lib.to_published(
    spec, jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)
  )
  rng = np.random.default_rng(0)
  contexts = [
    rng.integers(16, EXPERIMENT.model.vocab_size, size=n).astype(np.int32)
    for n in rng.integers(4, 36, size=64)
  ]
  found = mismatch.measure(EXPERIMENT, params, contexts, new_tokens=24)
  for row in (found['bitwise'].replay, found['bitwise'].no_replay):
    assert row['audited_tokens'] == 64 * 24
    assert (row['differing'], row['max_abs_logprob'], row['kl']) == (0, 0, 0)
    assert row['route_flip_rate'] == 0
  assert found['fast'].replay['differing'] > 0, 'the comparison sees nothing'
