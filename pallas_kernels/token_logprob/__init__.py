"""Log-probability of a given token, without ever holding the logits [T, V].

  z[t, v] = hidden[t] . unembed[:, v] / temperature[t]
  logprob[t] = z[t, token[t]] - log sum_v exp z[t, v]
  entropy[t] = -sum_v p[t, v] log p[t, v],  p = softmax(z)

The sum runs over all v, or over the recorded ids that sampling had kept. The
gradients are computed a block of the vocabulary at a time, from z again.

Who has yet to draw the token calls `scored`, which gives z as well, and reads of
it the logprob of whatever is drawn, with the bits of `token_logprob`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels.token_logprob import reference

NAME = 'token_logprob'


class Scored(NamedTuple):
  """Rows of logits over the temperature, and what their softmax hangs on."""

  logits: jax.Array  # float32 [T, V]
  log: jax.Array  # float32 [T], log-sum-exp
  entropy: jax.Array  # float32 [T]

  def logprob(self, tokens: jax.Array) -> jax.Array:
    """float32 [T] of a token of each row."""
    z = jnp.take_along_axis(self.logits, tokens[:, None], axis=1)[:, 0]
    return z - self.log


def token_logprob(
  hidden: jax.Array,
  unembed: jax.Array,
  tokens: jax.Array,
  temperatures: jax.Array | None = None,
  *,
  kept: jax.Array | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-probability of each token, in nats, and the entropy.

  Args:
    hidden: [T, D].
    unembed: [D, V], of the same dtype.
    tokens: int [T], 0 to V - 1.
    temperatures: float32 [T], above 0; None: 1. No gradient reaches them.
    kept: what to renormalise over: int [T, J], ids, -1 where there are fewer
      (-1 alone: the whole vocabulary); or uint8 [T, ceil(V / 8)], the bits of
      `numpy.packbits`. The token must be among them. A row that keeps all has
      the bits that it has without `kept`.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    logprob and entropy, float32 [T]. Differentiable in hidden and unembed.

  Raises:
    ValueError: shapes, dtypes, tokens or temperatures that cannot be.
  """
  if temperatures is None:
    temperatures = jnp.ones(hidden.shape[:1], jnp.float32)
  _check(hidden, unembed, tokens, temperatures, kept)
  chosen = _choose(hidden, unembed, implementation)
  words = None
  if kept is not None:
    words = reference.kept_words(kept, unembed.shape[1])
  return _token_logprob(hidden, unembed, tokens, temperatures, words, chosen)


def scored(
  hidden: jax.Array,
  unembed: jax.Array,
  temperatures: jax.Array,
  *,
  implementation: str | None = None,
) -> Scored | None:
  """The logits of few rows, and their statistics, in one pass over `unembed`.

  `logprob` and `entropy` of it have the bits of `token_logprob`. Arguments and
  errors are those there; not differentiable.

  Returns:
    `Scored`; None where only the GPU's kernel could, and another was chosen.
  """
  tokens = jnp.zeros(hidden.shape[:1], jnp.int32)
  _check(hidden, unembed, tokens, temperatures, None)
  chosen = _choose(hidden, unembed, implementation)
  if not chosen.startswith('gpu'):
    return None
  from pallas_kernels.token_logprob import gpu_scored

  interpret = chosen.endswith('interpret')
  return Scored(
    *gpu_scored.scored(hidden, unembed, temperatures, interpret=interpret)
  )


def renormalised(
  whole: Scored, kept: jax.Array, *, implementation: str | None = None
) -> Scored:
  """The same rows over what is kept of them, as `token_logprob` takes `kept`.

  The logits stay as they were: those of what is not kept mean nothing.
  """
  t, v = whole.logits.shape
  _check_kept(kept, t, v)
  faults = dict(gpu=None, tpu='it keeps no logits')
  if not t:  # nothing to launch
    implementation = 'reference'
  chosen = dispatch.choose(NAME, implementation, **faults)
  words = reference.kept_words(kept, v)
  if chosen == 'reference':
    log, entropy = reference.renormalised(whole.logits, words)
    return Scored(whole.logits, log, entropy)
  from pallas_kernels.token_logprob import gpu_scored

  log, entropy = gpu_scored.renormalised(
    whole.logits, words, interpret=chosen.endswith('interpret')
  )
  return Scored(whole.logits, log, entropy)


def _check(hidden, unembed, tokens, temperatures, kept) -> None:
  check_arrays(hidden, unembed, tokens, temperatures)
  t, v = hidden.shape[0], unembed.shape[1]
  known = checks.known(tokens)
  if known is not None and t:
    low, high = known.min(), known.max()
    if low < 0 or high >= v:
      raise ValueError(
        f'tokens from {low} to {high}; they must be in 0..{v - 1}'
      )
  _check_kept(kept, t, v)
  if kept is not None and known is not None:
    _check_among(checks.known(kept), known)
  known = checks.known(temperatures)
  if known is not None and t and not known.min() > 0:
    raise ValueError(
      f'the least temperature is {known.min()}; it must be above 0: for greedy'
      ' sampling there is no distribution to score'
    )


def check_arrays(hidden, unembed, tokens, temperatures) -> None:
  """ValueError for shapes and dtypes that do not fit each other."""
  if hidden.ndim != 2 or unembed.ndim != 2:
    raise ValueError(
      f'hidden {hidden.shape} must be [T, D], unembed {unembed.shape} [D, V]'
    )
  if hidden.shape[1] != unembed.shape[0]:
    raise ValueError(
      f'hidden {hidden.shape} and unembed {unembed.shape} differ in D; unembed'
      ' must be [D, V]'
    )
  if hidden.dtype != unembed.dtype:
    raise ValueError(
      f'hidden is {hidden.dtype} and unembed {unembed.dtype}; cast one'
    )
  size = hidden.shape[:1]
  checks.shape('[T]', size, tokens=tokens, temperatures=temperatures)
  checks.integers(tokens=tokens)
  checks.floats(hidden=hidden, temperatures=temperatures)


def _check_kept(kept, t: int, v: int) -> None:
  if kept is None:
    return
  if kept.ndim != 2 or kept.shape[0] != t:
    raise ValueError(f'kept {kept.shape} must be [T, J] with T = {t}')
  if kept.dtype == jnp.uint8:
    if kept.shape[1] != -(-v // 8):
      raise ValueError(
        f'kept {kept.shape} of uint8 are bits; {-(-v // 8)} bytes a row hold a'
        f' vocabulary of {v}'
      )
    return
  if not jnp.issubdtype(kept.dtype, jnp.signedinteger):
    raise ValueError(
      f'kept is {kept.dtype}; give ids of int32, or bits of uint8'
    )
  known = checks.known(kept)
  if known is None or not known.size:
    return
  if known.max() >= v:
    raise ValueError(f'kept ids go to {known.max()}; they must be below {v}')
  if known.min() < -1:
    raise ValueError(
      f'kept ids go down to {known.min()}; they must be at least 0, or -1 where'
      ' there are fewer'
    )


def _check_among(kept: np.ndarray | None, tokens: np.ndarray) -> None:
  """ValueError for a token [T] that its row of `kept` has not."""
  if kept is None or not len(tokens):
    return
  if kept.dtype == np.uint8:
    byte = np.take_along_axis(kept, tokens[:, None] // 8, axis=1)[:, 0]
    among = (byte >> (7 - tokens % 8)) & 1 > 0
  else:
    among = (kept == tokens[:, None]).any(axis=1) | (kept < 0).all(axis=1)
  if not among.all():
    row = int(np.argmin(among))
    raise ValueError(
      f'token {tokens[row]} of row {row} is not among those that its kept has;'
      ' what was sampled is always one of them'
    )


def _choose(hidden, unembed, implementation) -> str:
  faults = dict(gpu=None, tpu=None)
  if not hidden.shape[0]:  # nothing to launch
    implementation = 'reference'
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.token_logprob import gpu
    from pallas_kernels.token_logprob import tpu

    faults = dict(
      gpu=gpu.unsupported(hidden, unembed), tpu=tpu.unsupported(hidden, unembed)
    )
  return dispatch.choose(NAME, implementation, **faults)


def _statistics(hidden, unembed, tokens, temperatures, words, chosen):
  arguments = hidden, unembed, tokens, temperatures, words
  if chosen == 'reference':
    return reference.statistics(*arguments)
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.token_logprob import tpu

    return tpu.statistics(*arguments, interpret=interpret)
  from pallas_kernels.token_logprob import gpu

  return gpu.statistics(*arguments, interpret=interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _token_logprob(hidden, unembed, tokens, temperatures, words, chosen):
  return _forward(hidden, unembed, tokens, temperatures, words, chosen)[0]


def _forward(hidden, unembed, tokens, temperatures, words, chosen):
  z, log, entropy = _statistics(
    hidden, unembed, tokens, temperatures, words, chosen
  )
  saved = hidden, unembed, tokens, temperatures, words, log, entropy
  return (z - log, entropy), saved


def _product(x, w, chosen, transpose=False):
  """float32 x @ w (or w^T), by the kernel where one was chosen."""
  if chosen == 'reference':
    w = w.T if transpose else w
    return jnp.dot(x, w, preferred_element_type=jnp.float32)
  return grouped_matmul.product(x, w, chosen, transpose)


def _outer(x, dy, chosen):
  """x^T @ dy in x's dtype, summed in float32."""
  if chosen == 'reference':
    dw = jnp.dot(x.T, dy, preferred_element_type=jnp.float32)
    return dw.astype(x.dtype)
  rows = jnp.full((1,), x.shape[0], jnp.int32)
  return grouped_matmul.weight_gradient(x, dy, rows, implementation=chosen)[0]


def _gradients(chosen, saved, cotangents):
  """(dhidden in float32, dunembed) of the columns of `unembed`.

  dz = p (-g_logprob - g_entropy (log p + entropy)) + onehot g_logprob, where
  `log` and `entropy` may be those of more columns than are there.
  """
  hidden, unembed, tokens, temperatures, words, log, entropy = saved
  g, h = (c.astype(jnp.float32) for c in cotangents)
  scale = 1.0 / temperatures.astype(jnp.float32)

  def block(first, size, dhidden, dunembed):
    part = lax.dynamic_slice_in_dim(unembed, first, size, 1)
    log_p = _product(hidden, part, chosen) * scale[:, None] - log[:, None]
    p = jnp.exp(log_p)
    if words is not None:
      inside = reference.is_kept(words, first, size)
      p, log_p = jnp.where(inside, p, 0.0), jnp.where(inside, log_p, 0.0)
    place = jnp.arange(size)[None, :] == (tokens - first)[:, None]
    dz = jnp.where(place, g[:, None], 0.0)
    dz = dz - p * (g[:, None] + h[:, None] * (log_p + entropy[:, None]))
    dz = (dz * scale[:, None]).astype(hidden.dtype)
    dhidden = dhidden + _product(dz, part, chosen, transpose=True)
    dunembed = lax.dynamic_update_slice_in_dim(
      dunembed, _outer(hidden, dz, chosen), first, 1
    )
    return dhidden, dunembed

  found = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(unembed)
  for first, size, count in reference.chunks(unembed.shape[1]):

    def step(found, i, first=first, size=size):
      return block(first + i * size, size, *found), None

    found, _ = lax.scan(step, found, jnp.arange(count))
  return found


def _backward(chosen, saved, cotangents):
  hidden, _, tokens, temperatures, words, _, _ = saved
  dhidden, dunembed = _gradients(chosen, saved, cotangents)
  return (
    dhidden.astype(hidden.dtype),
    dunembed,
    np.zeros(tokens.shape, jax.dtypes.float0),
    jnp.zeros_like(temperatures),
    None if words is None else np.zeros(words.shape, jax.dtypes.float0),
  )


_token_logprob.defvjp(_forward, _backward)
