"""Calls become segments; routes stay those of the time of sampling."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from composer.records import Completion
from composer.rollout.recorder import BadCompletion
from composer.rollout.recorder import Recorder

L, K = 2, 3


def routes(stamps):
  """[T, L, K] experts that say who computed them; stamp -1 is unknown."""
  stamps = np.asarray(stamps, np.int16)
  rows = stamps[:, None, None] * 10 + np.arange(L)[:, None] * 3 + np.arange(K)
  return np.where(stamps[:, None, None] < 0, -1, rows).astype(np.int16)


def completion(context, tokens, version, **changes):
  """What an engine that stayed at one version answers."""
  total = len(context) + len(tokens)
  computed = np.full(total, version, np.int32)
  computed[-1] = -1
  answer = Completion(
    tokens=np.asarray(tokens, np.int32),
    logprobs=-np.ones(len(tokens), np.float32),
    versions=np.full(len(tokens), version, np.int32),
    experts=routes(computed),
    computed_versions=computed,
    stop_reason='stop',
  )
  return dataclasses.replace(answer, **changes)


def record(recorder, context, tokens, version, **changes):
  parent = changes.pop('parent', -1)
  answer = completion(context, tokens, version, **changes)
  return recorder.record(context, answer, 0.5, parent)


def test_one_call():
  recorder = Recorder(L, K)
  assert record(recorder, [5, 6], [7, 8], 4) == 0
  (segment,) = recorder.finish('finished')
  assert segment.tokens.tolist() == [5, 6, 7, 8]
  assert segment.sampled.tolist() == [False, False, True, True]
  assert segment.logprobs.tolist() == [0, 0, -1, -1]
  assert segment.temperatures.tolist() == [1, 1, 0.5, 0.5]
  assert segment.versions.tolist() == [-1, -1, 4, 4]
  assert segment.auditable.tolist() == [False, False, True, True]
  assert (segment.experts == routes([4, 4, 4, -1])).all()
  assert (segment.stop_reason, segment.parent) == ('finished', -1)
  assert {a.dtype.name for a in (segment.tokens, segment.versions)} == {'int32'}
  assert segment.experts.dtype == np.int16
  assert segment.logprobs.dtype == segment.temperatures.dtype == np.float32


def test_the_next_call_fills_what_was_unknown_and_replaces_nothing():
  recorder = Recorder(L, K)
  record(recorder, [5, 6], [7, 8], 1)
  # The prefix is computed again at version 2 before the next tokens.
  record(recorder, [5, 6, 7, 8, 9], [10, 11], 2)
  (segment,) = recorder.finish('turns')
  assert (segment.experts == routes([1, 1, 1, 2, 2, 2, -1])).all()
  # 10 and 11 were sampled with routes of version 2, those recorded are older.
  assert segment.auditable.tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_old_pages_are_not_auditable_either():
  recorder = Recorder(L, K)
  record(recorder, [5, 6], [7, 8], 1)
  computed = np.asarray([1, 1, 1, 2, 2, 2, -1])
  record(
    recorder,
    [5, 6, 7, 8, 9],
    [10, 11],
    2,
    computed_versions=computed,
    experts=routes(computed),
  )
  (segment,) = recorder.finish('turns')
  assert segment.auditable.tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_same_version_stays_auditable_over_calls():
  recorder = Recorder(L, K)
  record(recorder, [5, 6], [7, 8], 3)
  record(recorder, [5, 6, 7, 8, 9], [10], 3)
  (segment,) = recorder.finish('turns')
  assert segment.auditable.tolist() == [0, 0, 1, 1, 0, 1]


def test_a_swap_within_a_completion():
  recorder = Recorder(L, K)
  computed = np.asarray([1, 1, 1, 2, -1])
  record(
    recorder,
    [5, 6],
    [7, 8, 9],
    2,
    versions=np.asarray([1, 1, 2]),
    computed_versions=computed,
    experts=routes(computed),
  )
  (segment,) = recorder.finish('turns')
  assert segment.auditable.tolist() == [0, 0, 1, 1, 0]


def test_tokens_without_any_routes_are_judged_by_versions_alone():
  for layers, experts in ((L, None), (0, np.zeros((4, 0, K), np.int16))):
    recorder = Recorder(layers, K)
    if experts is None:
      experts = routes([-1] * 4)
    record(recorder, [5, 6], [7, 8], 1, experts=experts)
    (segment,) = recorder.finish('turns')
    assert segment.auditable.tolist() == [0, 0, 1, 1]


def test_unknown_routes_filled_at_another_version_unmake_auditability():
  recorder = Recorder(L, K)
  record(recorder, [5, 6], [7, 8], 1, experts=routes([-1, 1, 1, -1]))
  record(recorder, [5, 6, 7, 8], [9], 2)
  (segment,) = recorder.finish('turns')
  assert (segment.experts[0] == routes([2])[0]).all()
  assert not segment.auditable.any()


def test_layers_of_two_versions_are_not_audited():
  recorder = Recorder(L, K)
  half = routes([1, -1])
  half[0, 1] = -1
  record(recorder, [5], [6], 1, experts=half)
  record(recorder, [5, 6], [7], 2)
  (segment,) = recorder.finish('turns')
  assert (segment.experts[0, 1] == routes([2])[0, 1]).all()
  assert segment.auditable.tolist() == [0, 0, 0]


def test_a_row_is_taken_whole():
  recorder = Recorder(L, K)
  half = routes([1, 1, 1, -1])
  half[1, 1] = -1
  record(recorder, [5, 6], [7, 8], 1, experts=half)
  record(recorder, [5, 6, 7, 8], [9], 2)
  (segment,) = recorder.finish('turns')
  assert (segment.experts[1, 0] == routes([1])[0, 0]).all()
  assert (segment.experts[1, 1] == routes([2])[0, 1]).all()
  assert segment.auditable.tolist() == [0, 0, 0, 0, 0]


def test_a_changed_prefix_starts_a_segment():
  recorder = Recorder(L, K)
  assert record(recorder, [5, 6], [7, 8], 1) == 0
  assert record(recorder, [5, 6, 7, 20], [9], 2, parent=0) == 1
  assert record(recorder, [5, 20], [9], 3) == 2
  first, second, third = recorder.finish('context')
  assert [s.stop_reason for s in (first, second, third)] == [
    'summary', 'rewritten', 'context',
  ]  # fmt: skip
  assert [s.parent for s in (first, second, third)] == [-1, 0, -1]
  # 7 was sampled once, and is context the second time.
  assert second.sampled.tolist() == [0, 0, 0, 0, 1]
  assert (second.experts == routes([2, 2, 2, 2, -1])).all()
  assert second.auditable.tolist() == [0, 0, 0, 0, 1]


def test_a_retry_leaves_no_orphan():
  recorder = Recorder(L, K)
  record(recorder, [5, 6], [7, 8], 1)
  record(recorder, [5, 6, 7, 8, 9], [10, 11, 12], 1)
  record(recorder, [5, 6, 7, 8, 9], [13], 2)
  (segment,) = recorder.finish('finished')
  assert segment.tokens.tolist() == [5, 6, 7, 8, 9, 13]
  assert segment.sampled.tolist() == [0, 0, 1, 1, 0, 1]
  assert segment.versions.tolist() == [-1, -1, 1, 1, -1, 2]
  # Nor do the routes that the forgotten call brought.
  assert (segment.experts == routes([1, 1, 1, 2, 2, -1])).all()


def test_a_retried_first_call_is_as_if_it_had_been_the_only_one():
  recorder = Recorder(L, K)
  record(recorder, [5, 6], [7, 8], 1)
  record(recorder, [5, 6], [9], 2)
  (segment,) = recorder.finish('finished')
  assert segment.tokens.tolist() == [5, 6, 9]
  assert (segment.experts == routes([2, 2, -1])).all()
  assert segment.auditable.tolist() == [0, 0, 1]


def test_a_cut_completion_is_continued():
  recorder = Recorder(L, K)
  record(recorder, [5], [6, 7], 1)
  assert record(recorder, [5, 6, 7], [8], 1) == 0
  recorder.append([9, 9])
  (segment,) = recorder.finish('summary')
  assert segment.tokens.tolist() == [5, 6, 7, 8, 9, 9]
  assert segment.sampled.tolist() == [0, 1, 1, 1, 0, 0]
  assert segment.versions.tolist() == [-1, 1, 1, 1, -1, -1]


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'logprobs': np.zeros(3)}, r'logprobs has shape \(3,\)'),
    ({'versions': np.zeros(1, int)}, r'versions has shape \(1,\)'),
    ({'experts': routes([1, 1])}, 'experts has shape'),
    ({'computed_versions': np.ones(5)}, 'computed_versions has shape'),
    ({'logprobs': np.asarray([-1.0, np.nan])}, r'not finite .* \[1\]'),
    ({'logprobs': np.asarray([-np.inf, -1.0])}, r'not finite .* \[0\]'),
    ({'versions': np.asarray([1, -1])}, 'versions holds -1'),
    ({'experts': routes([1, 1, 1, 1])}, 'nothing was computed'),
    ({'experts': np.zeros((4, L, K), np.int16)}, 'one expert twice'),
    ({'experts': routes([1, 1, 1, -1]) - (np.arange(K) == 0) * 99}, 'neither'),
  ],
)
def test_bad_completions_are_refused_and_leave_nothing(changes, message):
  recorder = Recorder(L, K)
  record(recorder, [4], [5], 1)
  with pytest.raises(BadCompletion, match=message):
    record(recorder, [5, 6], [7, 8], 1, **changes)
  assert len(recorder) == 1
  record(recorder, [4, 5, 6], [7], 1)
  (segment,) = recorder.finish('finished')
  assert segment.tokens.tolist() == [4, 5, 6, 7]


def test_bad_temperature_and_empty_context():
  answer = completion([5], [6], 1)
  with pytest.raises(BadCompletion, match='1e-09; it must be 0,.* least 1e-06'):
    Recorder(L, K).record([5], answer, 1e-9)
  with pytest.raises(BadCompletion, match='temperature is nan'):
    Recorder(L, K).record([5], answer, float('nan'))
  with pytest.raises(BadCompletion, match='P >= 1'):
    record(Recorder(L, K), [], [5], 1)


# --- against a naive twin ----------------------------------------------------


@st.composite
def engine_calls(draw):
  """Calls of an engine whose weights change now and then."""
  version, context, calls = 0, [1], []
  for stamp in range(draw(st.integers(1, 5))):
    version += draw(st.integers(0, 1))
    versions = []
    for _ in range(draw(st.integers(0, 4))):
      versions.append(version)
      version += draw(st.sampled_from([0, 0, 0, 1]))
    total = len(context) + len(versions)
    newest = draw(st.booleans())  # computed anew, or kept on older pages
    computed = [
      version if newest else draw(st.integers(0, version)) for _ in range(total)
    ]
    computed[-1] = -1
    known = [
      c >= 0 and draw(st.sampled_from([True, True, False])) for c in computed
    ]
    calls.append((list(context), versions, computed, known, stamp))
    context = context + [50 + stamp] * len(versions)
    context = context + [7] * draw(st.integers(0, 2))
  return calls


@given(engine_calls())
def test_recorder_equals_its_naive_twin(calls):
  recorder = Recorder(L, K)
  sampled = {}  # position -> (version, versions of the context then)
  kept = {}  # position -> (stamp, version) of the recorded route
  for context, versions, computed, known, stamp in calls:
    stamps = [stamp if k else -1 for k in known]
    answer = Completion(
      tokens=np.full(len(versions), 50 + stamp, np.int32),
      logprobs=np.full(len(versions), -stamp, np.float32),
      versions=np.asarray(versions, np.int32),
      experts=routes(stamps),
      computed_versions=np.asarray(computed, np.int32),
      stop_reason='stop',
    )
    recorder.record(context, answer, 1.0)
    for s, version in enumerate(versions):
      at = len(context) + s
      sampled[at] = (version, computed[:at])
    for at, (k, c) in enumerate(zip(known, computed, strict=True)):
      if k:
        kept.setdefault(at, (stamp, c))
  (segment,) = recorder.finish('turns')
  length = len(segment.tokens)
  assert np.flatnonzero(segment.sampled).tolist() == sorted(sampled)
  want = routes([kept.get(at, (-1, -1))[0] for at in range(length)])
  assert (segment.experts == want).all()
  for at in range(length):
    audited = at in sampled
    if audited:
      version, seen = sampled[at]
      assert segment.versions[at] == version
      audited = all(c == version for c in seen) and all(
        kept[j][1] == version for j in range(at) if j in kept
      )
    assert segment.auditable[at] == audited


def test_an_older_segment_goes_on():
  """A harness asks a helper between two turns, and goes on where it was."""
  recorder = Recorder(L, K)
  assert record(recorder, [1, 2], [3], 1) == 0
  assert record(recorder, [8], [9], 1) == 1
  assert record(recorder, [1, 2, 3, 4], [5], 1) == 0
  assert record(recorder, [8, 9], [7], 1) == 1
  assert record(recorder, [8, 9], [6], 1) == 1  # a retry, of the newest
  assert record(recorder, [1, 2, 3, 4], [0], 1) == 0  # and of an older one
  first, second = recorder.finish('turns')
  assert first.tokens.tolist() == [1, 2, 3, 4, 0]
  assert second.tokens.tolist() == [8, 9, 6]
  assert second.sampled.tolist() == [False, True, True]
  assert (first.stop_reason, second.stop_reason) == ('turns', 'rewritten')
  assert recorder.lengths() == [5, 3]


def test_retracted_answers_leave_nothing():
  recorder = Recorder(L, K)
  recorder.retract()
  record(recorder, [1], [2], 1)
  (want,) = recorder.finish('finished')
  record(recorder, [7], [8], 1)
  recorder.retract()
  recorder.retract()  # there is no other
  (got,) = recorder.finish('finished')
  assert got.tokens.tolist() == want.tokens.tolist()
  assert got.stop_reason == 'finished'
  record(recorder, [1, 2, 3], [4], 2)
  recorder.retract()
  (got,) = recorder.finish('finished')
  assert got.tokens.tolist() == [1, 2, 3]
  assert got.sampled.tolist() == [False, True, False]
  # The route of the sampled token, found by the call that is gone, is too.
  assert (got.experts == routes([1, -1, -1])).all()
  record(recorder, [1, 2, 3], [5], 1)
  (got,) = recorder.finish('finished')
  assert got.tokens.tolist() == [1, 2, 3, 5] and got.auditable[3]


def test_kept_ids():
  """They go with their tokens, and away with an answer that is forgotten."""
  recorder = Recorder(L, K)
  cut = {'kept_ids': [3, 4, 2, 5], 'kept_offsets': [0, 2, 4]}
  cut = {name: np.array(x, np.int32) for name, x in cut.items()}
  record(recorder, [1], [4, 5], 1, **cut)
  record(recorder, [1, 4, 5, 9], [6], 1)
  (segment,) = recorder.finish('turns')
  assert segment.kept_ids.tolist() == [3, 4, 2, 5]
  assert segment.kept_offsets.tolist() == [0, 0, 2, 4, 4, 4]
  assert segment.kept_ids.dtype == segment.kept_offsets.dtype == np.int32
  retried = Recorder(L, K)
  record(retried, [1], [4, 5], 1, **cut)
  record(retried, [1], [7, 8, 9], 1)
  (segment,) = retried.finish('turns')
  assert segment.kept_ids is None and segment.kept_offsets is None
  for wrong in (
    {'kept_offsets': np.array([0, 4], np.int32)},
    {'kept_offsets': np.array([0, 3, 2], np.int32)},
    {'kept_ids': np.array([3, 4, 2, 6], np.int32)},
    {'kept_ids': None},
  ):
    with pytest.raises(BadCompletion, match='kept'):
      record(Recorder(L, K), [1], [4, 5], 1, **cut | wrong)


def test_tokens_of_an_unknown_distribution_are_context():
  """Their routes are kept; a retry of them, and what follows, is sampled."""
  recorder = Recorder(L, K)
  context = [1, 2]
  answer = completion(context, [3, 4], 5)
  recorder.record(context, answer, 0.7, trainable=False)
  (segment,) = recorder.finish('finished')
  assert segment.tokens.tolist() == [1, 2, 3, 4]
  assert not segment.sampled.any() and not segment.auditable.any()
  assert segment.logprobs.tolist() == [0.0] * 4
  assert segment.temperatures.tolist() == [1.0] * 4
  assert segment.versions.tolist() == [-1] * 4
  np.testing.assert_array_equal(segment.experts, answer.experts)
  record(recorder, [1, 2, 3, 4, 9], [6], 5)
  (segment,) = recorder.finish('finished')
  assert segment.sampled.tolist() == [False] * 5 + [True]
  recorder.retract()
  (segment,) = recorder.finish('finished')
  assert segment.tokens.tolist() == [1, 2, 3, 4, 9]
