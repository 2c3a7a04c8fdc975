"""Logprobs of given tokens under a model: `composer score`.

Lists are padded to a few lengths and scored many at a time, in the numerics in
which a row's bits do not depend on what stands beside it: a list has the same
answer alone and in a file of a thousand. (Not so of models that are too large
for `experts_dense`: the ragged products that these take promise no bits.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer

ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
SHORTEST = 64  # tokens that a list is padded to, at least
BATCH_TOKENS = 4096  # of one forward pass, where lists are shorter
DENSE_EXPERTS = 16_384  # E x F up to which every expert meets every row
WIDE = 4  # bytes of a float32
Report = Callable[[int, int], None]


def read_lists(
  path: str | os.PathLike[str], vocab_size: int
) -> list[list[int]]:
  """The lists of tokens in a JSON file.

  Raises:
    ValueError: no file, not JSON, not a list of lists of whole numbers, an
      empty list, or a token that is not in the vocabulary; says where.
  """
  try:
    with open(path, encoding='utf-8') as file:
      lists = json.load(file)
  except OSError as error:
    raise ValueError(f'--tokens {path}: {error.strerror}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'--tokens {path} is not JSON: {error}') from error
  wanted = 'a list of lists of token ids, as [[1, 2, 3], [4, 5]]'
  if not isinstance(lists, list):
    raise ValueError(f'{path} holds a {type(lists).__name__}; write {wanted}')
  for i, tokens in enumerate(lists):
    if not isinstance(tokens, list) or not tokens:
      raise ValueError(
        f'{path}: entry {i} is {json.dumps(tokens)[:40]}; write {wanted}'
      )
    for j, token in enumerate(tokens):
      if type(token) is not int or not 0 <= token < vocab_size:
        raise ValueError(
          f'{path}: entry {i} has {json.dumps(token)[:40]} at place {j}; token ids of'
          f' this model are whole numbers from 0 to {vocab_size - 1}'
        )
  return lists


def numerics(config: ModelConfig, compute: str = 'float32') -> NumericsConfig:
  """In which a list's answer does not depend on the other lists."""
  small = config.experts * config.expert_hidden <= DENSE_EXPERTS
  return NumericsConfig(
    mode='bitwise',
    row_block=64,
    kv_block=32,
    moe='dense' if small else 'sorted',
    mla='expanded',
    compute=compute,
  )


def score(
  params: Any,
  config: ModelConfig,
  lists: Sequence[Sequence[int]],
  *,
  experts: bool = False,
  compute: str = 'float32',
  report: Report = lambda done, total: None,
) -> list[dict[str, np.ndarray]]:
  """Scores lists of tokens.

  Args:
    params, config: of the model.
    lists: token ids, each list of at least one.
    experts: the routes too.
    compute: dtype of activations and products.
    report: gets (tokens done, tokens in all).

  Returns:
    for each list of n tokens, `logprobs` float32 [n - 1] of those after the
    first, at temperature 1, and with `experts` the routes int16 [n, L, K].
  """
  fixed = numerics(config, compute)
  out: list[dict[str, np.ndarray]] = [{} for _ in lists]
  total, done = sum(map(len, lists)), 0
  for batch, length in _batches(lists):
    rows = _rows(len(batch), length)
    tokens = np.zeros((rows, length), np.int32)
    segments = np.zeros((rows, length), np.int32)
    for row, i in enumerate(batch):
      tokens[row, : len(lists[i])] = lists[i]
      segments[row, : len(lists[i])] = 1
    logprobs, routes = jax.device_get(
      _forward(params, config, fixed, tokens, segments)
    )
    for row, i in enumerate(batch):
      n = len(lists[i])
      out[i]['logprobs'] = logprobs[row, 1:n]
      if experts:
        out[i]['experts'] = routes[row, :n]
      done += n
    report(done, total)
  return out


@functools.partial(jax.jit, static_argnums=(1, 2))
def _forward(params, config, fixed, tokens, segments):
  positions = jnp.broadcast_to(
    jnp.arange(tokens.shape[1])[None, :], tokens.shape
  )
  output = transformer.forward(
    params, config, fixed, tokens, segments, positions, audit=False
  )
  logprobs, _ = transformer.token_logprob(
    params, config, fixed, output.hidden, tokens, jnp.ones(tokens.shape)
  )
  return logprobs, output.experts


def _batches(
  lists: Sequence[Sequence[int]],
) -> Iterator[tuple[list[int], int]]:
  """(indices, padded length): lists of one length go together."""
  by_length: dict[int, list[int]] = {}
  for i, tokens in enumerate(lists):
    length = SHORTEST
    while length < len(tokens):
      length *= 2
    by_length.setdefault(length, []).append(i)
  for length, indices in sorted(by_length.items()):
    most = max(BATCH_TOKENS // length, 1)
    for start in range(0, len(indices), most):
      yield indices[start : start + most], length


def _rows(count: int, length: int) -> int:
  """Rows of a batch: a power of two, so that few shapes are compiled."""
  rows = 1
  while rows < count or rows * length < 2 * SHORTEST:
    rows *= 2
  return rows


def run(
  checkpoint: str | os.PathLike[str],
  tokens: str | os.PathLike[str],
  *,
  experts: bool = False,
  compute: str = 'float32',
  report: Report = lambda done, total: None,
) -> str:
  """The JSON that `composer score` prints.

  Raises:
    ValueError: no model, unreadable tokens, or logprobs that are no numbers.
  """
  source = checkpoints.open_source(checkpoint)
  lists = read_lists(tokens, source.config.vocab_size)
  require_memory(source.config, lists, _memory())
  params = checkpoints.read_params(source, dtype=jnp.float32)
  if source.kind == 'run':  # its masters are rounded before they compute
    params = params_lib.as_computed(transformer.spec(source.config), params)
  results = score(
    params,
    source.config,
    lists,
    experts=experts,
    compute=compute,
    report=report,
  )
  for i, result in enumerate(results):
    bad = np.flatnonzero(~np.isfinite(result['logprobs']))
    if bad.size:
      raise ValueError(
        f'the logprob of token {bad[0] + 1} of entry {i} is'
        f' {result["logprobs"][bad[0]]}: the weights of {checkpoint} give no'
        ' number there (composer convert names weights that are none)'
      )
  return json.dumps(
    [{k: v.tolist() for k, v in result.items()} for result in results],
    allow_nan=False,
  )


def require_memory(
  config: ModelConfig, lists: Sequence[Sequence[int]], memory: int
) -> None:
  """Refuses what would not fit: the parameters, or a list that is too long.

  Args:
    config: of the model.
    lists: token ids.
    memory: bytes that there are.
  """
  held = WIDE * params_lib.count(transformer.spec(config))
  if held > memory:
    raise ValueError(
      f'the model takes {held / 1e9:.1f} GB in float32, and there are'
      f' {memory / 1e9:.1f} GB; score it on a larger machine'
    )
  # Of a layer: its input and output, queries, heads, keys and values.
  heads = config.nope_dim + config.rope_dim or config.head_dim
  wide = 4 * config.width + 4 * config.heads * heads
  most = (memory - held) // (WIDE * wide)
  for i, tokens in enumerate(lists):
    if len(tokens) > most:
      raise ValueError(
        f'entry {i} has {len(tokens)} tokens; beside the model'
        f' there is memory for about {most}, split the list'
      )


def _memory() -> int:
  """Bytes of the device that computes; of the machine, if that is a CPU."""
  device = jax.local_devices()[0]
  limit = (device.memory_stats() or {}).get('bytes_limit')
  return limit or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
