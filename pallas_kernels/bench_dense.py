"""The rows of the benchmark for token_logprob and norm."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_rows
from pallas_kernels import norm
from pallas_kernels import token_logprob
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows
from pallas_kernels.norm import shapes as norm_shapes
from pallas_kernels.token_logprob import shapes as logprob_shapes

CHECKED = 64  # rows whose logits float32 takes, and columns of gradients
ENTROPY = 0.1  # weight in the sum that is differentiated


def naive_logprob(hidden, unembed, tokens, temperatures):
  """What a trainer writes first: it holds the logits."""
  z = jnp.dot(hidden, unembed, preferred_element_type=jnp.float32)
  log_p = jax.nn.log_softmax(z / temperatures[:, None])
  chosen = jnp.take_along_axis(log_p, tokens[:, None], 1)[:, 0]
  return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


def _gradient(function):
  """Of a sum of logprobs and entropies, to hidden states and unembedding."""

  def total(hidden, unembed, tokens, temperatures):
    logprob, entropy = function(hidden, unembed, tokens, temperatures)
    return jnp.sum(logprob) + ENTROPY * jnp.sum(entropy)

  return jax.grad(total, (0, 1))


def _gradient_error(hidden, unembed, tokens, temperatures, found, gradients):
  """Of a row of dhidden or a column of dunembed, whichever is the larger.

  Each counts as much as another, by the root of the mean of squares: of one alone
  the error can be that of a single dz, to half of bfloat16's last digit.

  Rows: the first, against float32 of whole logits. Columns: some from the first
  to the last, and those of the first tokens; most of the former are of no row's
  token, where nothing hides what probabilities contribute. They take the
  log-sum-exp and the entropy of all rows from `found`: that has its own check.
  """
  some = slice(0, CHECKED)
  rows, w = hidden[some].astype(jnp.float32), unembed.astype(jnp.float32)
  with jax.default_matmul_precision('highest'):
    exact = _gradient(naive_logprob)
    dhidden = exact(rows, w, tokens[some], temperatures[some])[0]
  spread = np.linspace(0, unembed.shape[1] - 1, CHECKED).astype(np.int32)
  columns = jnp.concatenate([jnp.asarray(spread), tokens[some]])
  dunembed = _dunembed(hidden, unembed, tokens, temperatures, *found, columns)
  return jnp.maximum(
    _off(gradients[0][some].T, dhidden.T),
    _off(gradients[1][:, columns], dunembed),
  )


def _dunembed(hidden, unembed, tokens, heat, logprob, entropy, columns):
  """Gradient [D, C] to columns of the unembedding, float32."""
  own = unembed[:, tokens].astype(jnp.float32).T
  own = jnp.sum(hidden.astype(jnp.float32) * own, axis=1) / heat
  z = bench_rows.exact(hidden, unembed[:, columns]) / heat[:, None]
  log_p = z - (own - logprob)[:, None]
  weight = 1 + ENTROPY * (log_p + entropy[:, None])
  chosen = tokens[:, None] == columns[None, :]
  dz = (chosen - jnp.exp(log_p) * weight) / heat[:, None]
  return bench_rows.exact(hidden.T, dz)


def _off(got, want):
  """Relative error of a column."""
  off = jnp.linalg.norm(got.astype(jnp.float32) - want, axis=0)
  off = off / jnp.linalg.norm(want, axis=0)
  return jnp.sqrt(jnp.mean(jnp.square(off)))


def logprobs(shape: logprob_shapes.Shape) -> Rows:
  """Forward and, of shapes for training, the gradients; time and memory."""
  t, d, v = shape.tokens, shape.depth, shape.vocabulary
  ours = token_logprob.token_logprob

  def draw(seed):
    keys = bench_rows.keys(seed, 4)
    return (
      bench_rows.normal(keys[0], t, d),
      bench_rows.normal(keys[1], d, v) * jnp.bfloat16(2 / d**0.5),
      jax.random.randint(keys[2], (t,), 0, v),
      jax.random.uniform(keys[3], (t,), minval=0.5, maxval=1.5),
    )

  def error(hidden, unembed, tokens, temperatures, found):
    some = slice(0, min(t, CHECKED))
    z = bench_rows.exact(hidden[some], unembed) / temperatures[some, None]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(z), tokens[some, None], 1)
    return bench_rows.relative(found[0][some], chosen[:, 0])

  def few(hidden, unembed, tokens, temperatures, found):
    other = ours(hidden[:7], unembed, tokens[:7], temperatures[:7])
    return bench_rows.differing(other, [one[:7] for one in found])

  arguments = jax.eval_shape(draw, bench_rows.SEED)
  found = (jax.ShapeDtypeStruct((t,), jnp.float32),) * 2
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (ours, *arguments),
    'error': (error, *arguments, found),
    'few': (few, *arguments, found),
  }
  # By name: a CPU's are cut down.
  training = shape.name in {one.name for one in logprob_shapes.TRAINING}
  if training:
    programs['gradient'] = _gradient(ours), *arguments
    off = _gradient_error, *arguments, found, arguments[:2]
    programs['gradient error'] = off
  ready = bench_rows.ahead(programs, {'draw', 'error', 'gradient error'})
  yield None
  yield from _logprobs(shape, ready, bench_rows.draw(ready['draw']), training)


def _logprobs(shape, ready, arguments, training: bool) -> Iterator[Row]:
  size = dict(flops=shape.flops, bytes=2 * shape.depth * shape.vocabulary)
  found = ready['ours'](*arguments)
  row = Row('token_logprob', shape.name, 'ours', **size)
  own = bench_rows.checked(
    row,
    error=lambda: ready['error'](*arguments, found),
    differing=lambda: ready['few'](*arguments, found),
  )
  yield _with_memory(own, ready['ours'], arguments)
  # What it holds goes back before the gradient is asked for.
  theirs = dataclasses.replace(row, who='xla')
  yield _with_memory(theirs, *_now(naive_logprob, arguments))
  if not training:
    return
  size = dict(flops=3 * shape.flops)
  row = Row('token_logprob + gradient', shape.name, 'ours', **size)

  def error():
    gradients = ready['gradient'](*arguments)
    return ready['gradient error'](*arguments, found, gradients)

  own = bench_rows.checked(row, error=error)
  yield _with_memory(own, ready['gradient'], arguments)
  theirs = dataclasses.replace(row, who='xla')
  yield _with_memory(theirs, *_now(_gradient(naive_logprob), arguments))


def _now(function, arguments):
  """(compiled, arguments), or what raises why it could not be compiled."""
  return bench_rows.ahead({'it': (function, *arguments)})['it'], arguments


def _with_memory(row: Row, ready, arguments) -> Row:
  row = dataclasses.replace(row, memory=bench_rows.memory(ready))
  return bench_rows.timed(row, ready, *arguments)


def norms(shape: norm_shapes.Shape) -> Rows:
  def draw(seed):
    keys = bench_rows.keys(seed, 2)
    x = bench_rows.normal(keys[0], shape.rows, shape.depth)
    return x, bench_rows.normal(keys[1], shape.depth)

  plain = functools.partial(norm.reference.rms_norm, epsilon=1e-6)

  def error(x, scale, y):
    return bench_rows.relative(y, plain(x.astype(jnp.float32), scale))

  def few(x, scale, y):
    return bench_rows.differing(norm.rms_norm(x[:7], scale), y[:7])

  x, scale = jax.eval_shape(draw, bench_rows.SEED)
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (norm.rms_norm, x, scale),
    'error': (error, x, scale, x),
    'few': (few, x, scale, x),
  }
  ready = bench_rows.ahead(programs, {'draw', 'error'})
  yield None
  x, scale = bench_rows.draw(ready['draw'])
  y = ready['ours'](x, scale)
  row = Row('norm', shape.name, 'ours', bytes=4 * shape.rows * shape.depth)
  own = bench_rows.checked(
    row,
    error=lambda: ready['error'](x, scale, y),
    differing=lambda: ready['few'](x, scale, y),
  )
  yield bench_rows.timed(own, ready['ours'], x, scale)
  theirs = dataclasses.replace(row, who='xla')
  yield bench_rows.timed(theirs, plain, x, scale)
