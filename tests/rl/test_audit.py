"""Audits: an engine's own answers scored by the trainer at their version."""

import asyncio
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.inference import engine as engine_lib
from composer.model import presets
from composer.model import transformer
from composer.rl import audit
from composer.rl import trainer

MODEL = presets.TINY
SPEC = transformer.spec(MODEL)
NUMERICS = config_lib.NumericsConfig(row_block=8, kv_block=4)
ENGINE = config_lib.EngineConfig(
  rows=32, sequences=12, pages=160, max_context=48
)
CONFIG = config_lib.RLConfig(micro_batch=4, sequence_length=48)


@functools.cache
def published(version):
  drawn = params_lib.init(SPEC, jax.random.key(version))
  sharper = jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)
  return jax.jit(lambda p: params_lib.to_published(SPEC, p))(sharper)


@functools.cache
def make_step():
  return trainer.make_step(MODEL, NUMERICS, CONFIG)


def to_segment(request, c):
  """As the recorder does: auditable where the whole prefix is of one version."""
  size = len(request.tokens)
  versions = np.concatenate([np.full(size, -1, np.int32), c.versions])
  sampled = versions >= 0
  same = np.array(
    [
      sampled[t] and np.all(c.computed_versions[:t] == versions[t])
      for t in range(len(versions))
    ]
  )
  return records.Segment(
    tokens=np.concatenate([request.tokens, c.tokens]),
    sampled=sampled,
    logprobs=np.concatenate([np.zeros(size, np.float32), c.logprobs]),
    temperatures=np.where(sampled, request.temperature, 1).astype(np.float32),
    versions=versions,
    experts=c.experts,
    auditable=same,
    stop_reason='finished',
    parent=-1,
  )


@functools.cache
def make_segments():
  """Eight of version 0, one that saw the swap, four of version 1."""
  rng = np.random.default_rng(0)
  requests = [
    records.SampleRequest(
      rng.integers(0, 64, rng.integers(3, 20)).astype(np.int32),
      int(rng.integers(4, 20)),
      (),
      float(rng.choice([0.7, 1.0, 1.4])),
      i,
    )
    for i in range(13)
  ]
  requests[8] = dataclasses.replace(requests[8], max_tokens=28)
  engine = engine_lib.Engine(MODEL, NUMERICS, ENGINE)
  first, second = (engine_lib.widen(published(v)) for v in (0, 1))
  engine.activate(0, first)
  plain = engine._send

  def swapping(
    plan, steps
  ):  # in the engine's own thread: between two steps for sure
    plain(plan, steps)
    (sequence,) = engine._running or (None,)
    if sequence and sequence.length == sequence.prompt + 9:
      engine.activate(1, second)

  async def go():
    done = await asyncio.gather(*(engine.sample(r) for r in requests[:8]))
    engine._send = swapping
    done.append(await engine.sample(requests[8]))
    engine._send = plain
    return done + await asyncio.gather(
      *(engine.sample(r) for r in requests[9:])
    )

  try:
    done = asyncio.run(asyncio.wait_for(go(), 60))
  finally:
    engine.close()
  return tuple(map(to_segment, requests, done))


def run(segments, versions):
  return audit.audit(
    make_step(),
    segments,
    {v: published(v) for v in versions},
    CONFIG,
    MODEL,
    NUMERICS.kv_block,
  )


def test_no_token_differs():
  segments = make_segments()
  crossing = segments[8]
  assert set(crossing.versions[crossing.sampled]) == {0, 1}
  audited = run(segments, (0, 1))
  for segment, a in zip(segments, audited, strict=True):
    keep = segment.auditable
    np.testing.assert_array_equal(a.audited, keep)
    np.testing.assert_array_equal(a.logprobs[keep], segment.logprobs[keep])
    np.testing.assert_array_equal(
      a.native_logprobs[keep], segment.logprobs[keep]
    )
    assert np.all(np.isnan(a.logprobs[~keep]))
    last = np.flatnonzero(keep)[-1]
    assert np.all(a.flips[:last] == 0) and np.all(a.flips[last:] == -1)
  found = audit.summary(segments, audited)
  total = sum(int(s.auditable.sum()) for s in segments)
  assert found['mismatch/audited_tokens'] == total > 100
  assert total < sum(int(s.sampled.sum()) for s in segments)
  for name, value in found.items():
    if name != 'mismatch/audited_tokens':
      assert value == 0, name


def test_versions_not_kept_are_not_audited():
  segments = make_segments()
  audited = run(segments, (1,))
  for segment, a in zip(segments, audited, strict=True):
    if np.any(segment.versions[segment.auditable] == 1):
      np.testing.assert_array_equal(a.audited, segment.auditable)
    else:
      assert not np.any(a.audited)
      assert np.all(np.isnan(a.logprobs)) and np.all(a.flips == -1)
  count = sum(int(s.auditable.sum()) for s in segments[9:])
  assert audit.summary(segments, audited)['mismatch/audited_tokens'] == count


def test_the_wrong_version_is_noticed():
  """The zero above is no matter of course."""
  segments = make_segments()[:4]
  audited = audit.audit(
    make_step(), segments, {0: published(1)}, CONFIG, MODEL, NUMERICS.kv_block
  )
  found = audit.summary(segments, audited)
  assert found['mismatch/differing'] > 0.9
  assert found['mismatch/max_abs_logprob'] > 0.1
  assert found['mismatch/route_flip_rate'] > 0.05


def test_altered_routes_are_flips_and_change_replayed_logprobs_only():
  segment = make_segments()[0]
  experts = segment.experts.copy()
  at = 2
  wrong = sorted(set(range(6)) - set(experts[at, 0].tolist()))[:2]
  experts[at, 0] = wrong
  experts[at + 1, 1] = experts[at + 1, 1][::-1]  # the same set: no flip
  (a,) = run([dataclasses.replace(segment, experts=experts)], (0,))
  keep = segment.auditable
  assert a.flips[at] == 1 and a.flips[at + 1] == 0
  np.testing.assert_array_equal(a.native_logprobs[keep], segment.logprobs[keep])
  assert np.any(a.logprobs[keep] != segment.logprobs[keep])


def test_auditable_tokens_of_two_versions_are_refused():
  segment = make_segments()[0]
  versions = segment.versions.copy()
  versions[np.flatnonzero(segment.sampled)[-1]] = 1
  torn = dataclasses.replace(segment, versions=versions)
  with pytest.raises(ValueError, match=r'segment 1 .*versions \[0, 1\]'):
    run([segment, torn], (0, 1))


def test_nothing_to_audit():
  segment = dataclasses.replace(
    make_segments()[0], auditable=np.zeros_like(make_segments()[0].sampled)
  )
  audited = run([segment], (0, 1))
  assert audit.summary([segment], audited) == {
    'mismatch/audited_tokens': 0.0,
    'mismatch/route_flip_rate': 0.0,
  }
  assert audit.summary([], [])['mismatch/audited_tokens'] == 0


# --- numbers ------------------------------------------------------------------


def made_up(seed, size):
  """A segment and an audit of it, of made-up numbers."""
  rng = np.random.default_rng(seed)
  keep = rng.uniform(size=size) < 0.6
  keep[-1] = True
  logprobs = np.where(keep, -rng.uniform(0.1, 3, size), 0).astype(np.float32)
  segment = records.Segment(
    tokens=np.zeros(size, np.int32),
    sampled=keep,
    logprobs=logprobs,
    temperatures=np.ones(size, np.float32),
    versions=np.where(keep, 0, -1),
    experts=np.zeros((size, 3, 2), np.int16),
    auditable=keep,
    stop_reason='finished',
    parent=-1,
  )
  noise = rng.normal(size=(2, size)) * 0.2 * (rng.uniform(size=size) < 0.7)
  replayed, native = (
    np.where(keep, logprobs + n, np.nan).astype(np.float32) for n in noise
  )
  known = rng.integers(0, 4, size)
  flips = np.minimum(rng.integers(0, 4, size), known)
  flips[-1] = known[-1] = -1
  return segment, audit.Audited(keep, replayed, native, flips, known)


def naive_differences(pairs):
  gaps = [t - b for b, t in pairs]
  size = sorted(abs(g) for g in gaps)
  place = 0.99 * (len(size) - 1)
  low = math.floor(place)
  high = min(low + 1, len(size) - 1)
  return {
    'kl': -sum(gaps) / len(gaps),
    'k3': sum(math.exp(g) - 1 - g for g in gaps) / len(gaps),
    'max_abs_logprob': size[-1],
    'p99_abs_logprob': size[low] + (place - low) * (size[high] - size[low]),
    'differing': sum(g != 0 for g in gaps) / len(gaps),
  }


def test_summary_against_a_naive_twin():
  segments, audited = zip(
    *(made_up(i, 30 + 9 * i) for i in range(5)), strict=True
  )
  found = audit.summary(segments, audited)
  for prefix, field in (('', 'logprobs'), ('no_replay/', 'native_logprobs')):
    pairs = [
      (float(segment.logprobs[t]), float(getattr(a, field)[t]))
      for segment, a in zip(segments, audited, strict=True)
      for t in np.flatnonzero(segment.auditable)
    ]
    assert found['mismatch/audited_tokens'] == len(pairs)
    want = naive_differences(pairs)
    assert 0.3 < want['differing'] < 0.9
    for name, value in want.items():
      np.testing.assert_allclose(
        found[f'mismatch/{prefix}{name}'], value, rtol=1e-5, err_msg=name
      )
  flips, known = (
    sum(int(v) for a in audited for v in getattr(a, name) if v >= 0)
    for name in ('flips', 'known')
  )
  np.testing.assert_allclose(found['mismatch/route_flip_rate'], flips / known)


@pytest.mark.parametrize('bad', (np.nan, -np.inf))
def test_a_trainer_logprob_that_is_not_finite_is_never_left_out(bad):
  segment, a = made_up(0, 30)
  logprobs = a.logprobs.copy()
  logprobs[-1] = bad
  found = audit.summary([segment], [dataclasses.replace(a, logprobs=logprobs)])
  assert found['mismatch/audited_tokens'] == segment.auditable.sum()
  assert not np.isfinite(found['mismatch/kl'])
  assert not np.isfinite(found['mismatch/max_abs_logprob'])


def test_zero_is_written_without_a_sign():
  same = np.array([-1.0, -2.0])
  found = audit.differences(same, same)
  assert found == dict.fromkeys(found, 0.0)
  assert math.copysign(1, found['kl']) == 1
  assert audit.differences(np.zeros(0), np.zeros(0)) == {}
