"""Policy losses against a naive twin, token by token, in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer.rl import loss

LOW, HIGH = 0.2, 0.28
SHAPE = (3, 12)


def make_inputs(seed=0, spread=0.3):
  """Two segments a row, unsampled tokens between, padding at the end."""
  rng = np.random.default_rng(seed)
  behaviour = -rng.uniform(0.1, 3.0, SHAPE)
  logprobs = np.minimum(behaviour + spread * rng.normal(size=SHAPE), -1e-3)
  ids = np.zeros(SHAPE, np.int32)
  ids[:, :5], ids[:, 6:11] = 1, 2
  mask = (ids > 0) & (rng.uniform(size=SHAPE) < 0.7)
  mask[:, 1] = mask[:, 7] = True
  advantages = np.where(ids == 1, rng.normal(size=(3, 1)), rng.normal())
  # Keep away from the kinks of clip, where no derivative exists.
  for bound in (1 - LOW, 1 + HIGH):
    close = np.abs(np.exp(logprobs - behaviour) - bound) < 1e-3
    logprobs = np.where(close, logprobs - 0.01, logprobs)
  weights = np.where(mask, 1 / 50, 0.0)
  proximal = logprobs + 0.1 * rng.normal(size=SHAPE)
  entropy = rng.uniform(0, 2, SHAPE)
  return {
    'logprobs': logprobs,
    'behaviour': behaviour,
    'advantages': advantages,
    'mask': mask,
    'weights': weights,
    'ids': ids,
    'proximal': proximal,
    'entropy': entropy,
  }


def clamp(x, low, high):
  return max(low, min(high, x))


def naive_loss(name, x, frozen, low=LOW, high=HIGH):
  """The equations, one token at a time; `frozen` are the detached logprobs."""
  total = 0.0
  for row in range(SHAPE[0]):
    for t in range(SHAPE[1]):
      if not x['mask'][row, t]:
        continue
      here, b = x['logprobs'][row, t], x['behaviour'][row, t]
      f, p = frozen[row, t], x['proximal'][row, t]
      a = x['advantages'][row, t]
      w, wf = math.exp(here - b), math.exp(f - b)
      if name == 'clip':
        value = min(w * a, clamp(w, 1 - low, 1 + high) * a)
      elif name == 'none':
        value = w * a
      elif name == 'tis':
        value = min(wf, 1 + high) * a * math.exp(here - f)
      elif name == 'icepop':
        kept = wf if 1 - low <= wf <= 1 + high else 0.0
        value = kept * a * math.exp(here - f)
      elif name == 'cispo':
        value = clamp(wf, 1 - low, 1 + high) * a * here
      elif name == 'decoupled':
        r = math.exp(here - p)
        value = min(r * a, clamp(r, 1 - low, 1 + high) * a)
        value *= math.exp(p - b)
      elif name == 'gspo':
        where = [
          u
          for u in range(SHAPE[1])
          if x['ids'][row, u] == x['ids'][row, t] and x['mask'][row, u]
        ]
        gaps = [x['logprobs'][row, u] - x['behaviour'][row, u] for u in where]
        s = math.exp(sum(gaps) / len(gaps))
        value = min(s * a, clamp(s, 1 - low, 1 + high) * a)
      total -= x['weights'][row, t] * value
  return total


ARRAYS = ('behaviour', 'advantages', 'mask', 'weights')
FLOATS = ('behaviour', 'advantages', 'weights')


@functools.cache
def differentiated(name, jit):
  def f(logprobs, arrays, extra):
    return loss.policy_loss(name)(
      logprobs, *arrays, clip_low=LOW, clip_high=HIGH, extra=extra
    )

  f = jax.value_and_grad(f, has_aux=True)
  return jax.jit(f) if jit else f


def value_and_grad(name, x, jit=True):
  arrays = [jnp.asarray(x[key]) for key in ARRAYS]
  extra = loss.Extra(
    segment_ids=jnp.asarray(x['ids']),
    proximal_logprobs=jnp.asarray(x['proximal']),
    entropy=jnp.asarray(x['entropy']),
  )
  f = differentiated(name, jit)
  with jax.disable_jit(not jit):
    (value, sums), grad = f(jnp.asarray(x['logprobs']), arrays, extra)
  return float(value), {k: float(v) for k, v in sums.items()}, np.asarray(grad)


@pytest.mark.parametrize('name', sorted(loss.LOSSES))
def test_value_and_gradient_equal_the_naive_twin(name):
  for seed in range(3):
    x = make_inputs(seed)
    with jax.enable_x64(True):
      value, _, grad = value_and_grad(name, x)
    frozen = x['logprobs']
    assert value == pytest.approx(naive_loss(name, x, frozen), rel=1e-12)
    step = 1e-6
    for row, t in np.ndindex(SHAPE):
      ends = []
      for sign in (1, -1):
        moved = frozen.copy()
        moved[row, t] += sign * step
        ends.append(naive_loss(name, {**x, 'logprobs': moved}, frozen))
      want = (ends[0] - ends[1]) / (2 * step)
      assert grad[row, t] == pytest.approx(want, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize('name', sorted(loss.LOSSES))
def test_nothing_under_the_mask_is_read(name):
  x = make_inputs(1)
  # Not jitted too: XLA's CPU turns the fault `x * mask` into a select.
  for jit, poison in (
    (True, np.nan),
    (True, np.inf),
    (True, 1e30),
    (False, np.nan),
    (False, -np.inf),
  ):
    value, sums, grad = value_and_grad(name, x, jit)
    dirty = dict(x)
    for key in ('logprobs', 'proximal', 'entropy', *FLOATS):
      dirty[key] = np.where(x['mask'], x[key], poison)
    got_value, got_sums, got_grad = value_and_grad(name, dirty, jit)
    assert got_value == value and math.isfinite(value)
    assert got_sums == sums
    np.testing.assert_array_equal(got_grad, grad)
    assert not got_grad[~x['mask']].any()


@pytest.mark.parametrize('name', sorted(loss.LOSSES))
def test_all_losses_are_the_policy_gradient_on_policy(name):
  x = make_inputs(2)
  x['logprobs'] = x['proximal'] = x['behaviour']
  _, sums, grad = value_and_grad(name, x)
  want = -np.where(x['mask'], x['weights'] * x['advantages'], 0.0)
  if name == 'gspo':  # one advantage a segment: the mean is of equal values
    for row in range(SHAPE[0]):
      for i in (1, 2):
        inside = (x['ids'][row] == i) & x['mask'][row]
        want[row, inside] = want[row, inside].mean()
  np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-8)
  assert sums['k1'] == sums['k3'] == sums['max_abs_logprob'] == 0.0
  assert sums['ratio'] == sums['count'] == x['mask'].sum()


@pytest.mark.parametrize('name', sorted(loss.LOSSES))
def test_micro_batches_add_up(name):
  x = make_inputs(3)
  value, sums, grad = value_and_grad(name, x)
  total, joined, rows = 0.0, loss.zero_sums(), []
  for row in range(SHAPE[0]):
    part = {key: array[row : row + 1] for key, array in x.items()}
    value_, sums_, grad_ = value_and_grad(name, part)
    total += value_
    joined = loss.add_sums(joined, sums_)
    rows.append(grad_)
  assert total == pytest.approx(value, rel=1e-5)
  np.testing.assert_allclose(np.concatenate(rows), grad, rtol=1e-6, atol=1e-9)
  for key, want in sums.items():
    assert float(joined[key]) == pytest.approx(want, rel=1e-5, abs=1e-6), key


def test_sums_by_hand_and_before_clipping():
  x = {
    'logprobs': np.log([[0.5, 0.2, 0.3, 0.9]]),
    'behaviour': np.log([[0.25, 0.4, 0.24, 0.1]]),
    'advantages': np.array([[1.0, -1.0, 1.0, 1.0]]),
    'mask': np.array([[True, True, True, False]]),
    'weights': np.array([[1.0, 1.0, 1.0, 1.0]]) / 3,
    'ids': np.ones((1, 4), np.int32),
    'proximal': np.zeros((1, 4)),
    'entropy': np.array([[1.0, 2.0, 3.0, np.nan]]),
  }
  value, sums, grad = value_and_grad('clip', x)
  # Ratios 2, 1/2, 5/4: the first two are out of bounds and clipped.
  assert value == pytest.approx(-(1.28 - 0.8 + 1.25) / 3, rel=1e-6)
  np.testing.assert_allclose(grad, [[0, 0, -1.25 / 3, 0]], atol=1e-6)
  assert sums['count'] == 3
  assert sums['ratio'] == pytest.approx(3.75)
  assert sums['clipped_high'] == 1 and sums['clipped_low'] == 1
  # KL(behaviour || trainer): the mean of b - l, not of l - b.
  assert sums['k1'] == pytest.approx(-math.log(1.25), rel=1e-5)
  assert sums['k3'] == pytest.approx(0.75 - math.log(1.25), rel=1e-5)
  assert sums['entropy'] == pytest.approx(6.0)
  assert sums['max_abs_logprob'] == pytest.approx(math.log(2), rel=1e-5)
  means = loss.means(sums)
  assert float(means['clipped_high']) == pytest.approx(1 / 3)
  assert float(means['count']) == 3
  assert float(means['max_abs_logprob']) == sums['max_abs_logprob']


@pytest.mark.parametrize('name', sorted(loss.LOSSES))
def test_huge_ratios_stay_finite(name):
  x = make_inputs(4)
  x['behaviour'] = np.where(x['mask'], -200.0, x['behaviour'])
  for sign in (1, -1):
    x['advantages'] = np.full(SHAPE, float(sign))
    value, _, grad = value_and_grad(name, x)
    assert math.isfinite(value) and np.isfinite(grad).all()


def test_a_broken_trainer_is_not_hidden():
  x = make_inputs(5)
  x['logprobs'] = x['logprobs'].copy()
  x['logprobs'][0, 1] = np.nan  # a sampled token
  value, sums, _ = value_and_grad('clip', x)
  assert math.isnan(value) and math.isnan(sums['max_abs_logprob'])


def test_empty_mask():
  x = make_inputs(6)
  x['mask'] = np.zeros(SHAPE, bool)
  for name in loss.LOSSES:
    value, sums, grad = value_and_grad(name, x)
    assert value == 0 and sums['count'] == 0 and not grad.any()
    assert all(float(v) == 0 for v in loss.means(sums).values())


def test_jitted_and_not_jitted_agree():
  x = make_inputs(9)
  for name in ('clip', 'gspo'):
    value, _, grad = value_and_grad(name, x)
    eager_value, _, eager_grad = value_and_grad(name, x, jit=False)
    assert value == pytest.approx(eager_value, rel=1e-6)
    np.testing.assert_allclose(grad, eager_grad, rtol=1e-5, atol=1e-8)


def test_bfloat16_inputs_are_computed_in_float32():
  x = make_inputs(7)

  def run(dtype):
    low = [jnp.asarray(x[k], jnp.bfloat16) for k in ('logprobs', *ARRAYS)]
    low = [v.astype(dtype) for v in low]
    low[3] = jnp.asarray(x['mask'])
    return loss.clip_loss(*low, clip_low=LOW, clip_high=HIGH)[0]

  got = run(jnp.bfloat16)
  assert got.dtype == jnp.float32 and got == run(jnp.float32)


def test_gspo_ignores_padding_and_unsampled_tokens():
  x = make_inputs(8)
  base, _, _ = value_and_grad('gspo', x)
  moved = {**x, 'logprobs': np.where(x['mask'], x['logprobs'], -77.0)}
  assert value_and_grad('gspo', moved)[0] == base


def test_decoupled_freezes_the_proximal_policy():
  a = jnp.zeros((1, 1))

  def f(logprobs):  # r = e, over the bound: no gradient may be left
    return loss.decoupled_loss(
      logprobs,
      a,
      a + 1,
      a == 0,
      a + 1,
      clip_low=LOW,
      clip_high=HIGH,
      extra=loss.Extra(proximal_logprobs=logprobs - 1),
    )[0]

  assert float(f(a)) == pytest.approx(-1.28 / math.e, rel=1e-6)
  assert float(jax.grad(f)(a)[0, 0]) == 0.0


def test_names_and_missing_arrays():
  with pytest.raises(ValueError, match="rl.loss='clyp'.*'clip'"):
    loss.policy_loss('clyp')
  a = jnp.zeros((1, 2))
  for name, field in (('gspo', 'segment_ids'), ('decoupled', 'proximal')):
    with pytest.raises(ValueError, match=field):
      loss.policy_loss(name)(a, a, a, a > 1, a, clip_low=LOW, clip_high=HIGH)


def test_misaligned_arrays_are_refused():
  a = jnp.zeros((1, 2))
  with pytest.raises(AssertionError):
    loss.clip_loss(a, a[:, :1], a, a > 1, a, clip_low=LOW, clip_high=HIGH)
