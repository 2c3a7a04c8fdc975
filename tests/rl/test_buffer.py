"""The trainer's books: verdicts, staleness, lineage and conservation."""

import dataclasses
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from composer.config import RewardConfig
from composer.records import Group
from composer.records import Segment
from composer.records import Trajectory
from composer.records import group_id
from composer.rl import buffer as b
from composer.rl.pack import pack

REWARD = RewardConfig()
EMPTY = b.Ledger()


def make_segment(versions):
  """A segment from versions per token; -1 is a token that was not sampled."""
  versions = np.asarray(versions, np.int32)
  sampled = versions >= 0
  size = len(versions)
  return Segment(
    tokens=np.arange(size, dtype=np.int32),
    sampled=sampled,
    logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
    temperatures=np.ones(size, np.float32),
    versions=versions,
    experts=np.full((size, 1, 1), -1, np.int16),
    auditable=sampled,
    stop_reason='finished',
    parent=-1,
  )


def make_trajectory(gid, index, reward, segments, stop='finished', tests=None):
  return Trajectory(
    task_id='t',
    group_id=gid,
    index=index,
    segments=tuple(make_segment(s) for s in segments),
    turns=(),
    reward=reward,
    reward_parts={'tests': reward if tests is None else tests, 'effort': 0.0},
    stop_reason=stop,
    provenance={},
    timings={},
  )


def make_group(draw, rewards=(1.0, 0.0), version=5, stops=None, gid=None):
  gid = gid or group_id('t', 0, draw)
  stops = stops or ['finished'] * len(rewards)
  return Group(
    group_id=gid,
    task_id='t',
    draw=draw,
    trajectories=tuple(
      make_trajectory(gid, i, r, [[-1, -1, version, version, -1]], stop)
      for i, (r, stop) in enumerate(zip(rewards, stops, strict=True))
    ),
    cluster='local',
    incarnation='a',
    produced_index=draw + 1,
  )


def judge(group, ledger=EMPTY, version=6, bound=2, **kwargs):
  return b.judge(
    group, ledger, trainer_version=version, staleness_bound=bound, **kwargs
  )


def select(groups, ledger=EMPTY, count=2, version=6, bound=2):
  return b.select(
    groups,
    ledger,
    groups_per_step=count,
    trainer_version=version,
    staleness_bound=bound,
  )


def test_verdicts():
  assert judge(make_group(0)) == 'train'
  assert judge(make_group(0, (1.0, 1.0))) == 'equal'
  assert judge(make_group(0, version=4)) == 'train'
  assert judge(make_group(0, version=3)) == 'stale'
  assert judge(make_group(0, version=5), bound=0) == 'stale'
  assert judge(make_group(0, version=6), bound=0) == 'train'
  assert judge(make_group(0, version=7)) == 'lineage'  # never published


def test_what_cannot_be_packed_is_dropped_and_told():
  """Among others: the step goes on with them, and the books agree."""
  good, bad, long = (make_group(i, gid=f'g{i}') for i in range(3))
  fit = b.Fit(length=8, layers=1, experts_per_token=1, max_kept=2)

  def but(group, **changed):
    """The second trajectory's segment, which is changed."""
    first, second = group.trajectories
    segment = dataclasses.replace(second.segments[0], **changed)
    second = dataclasses.replace(second, segments=(segment,))
    return dataclasses.replace(group, trajectories=(first, second))

  size = len(bad.trajectories[1].segments[0].tokens)
  offsets = np.r_[np.zeros(size), 3].astype(np.int32)
  ids = np.arange(size - 3, size, dtype=np.int32)
  bad = but(bad, kept_ids=ids, kept_offsets=offsets)
  chosen = b.select(
    [good, bad, long],
    EMPTY,
    groups_per_step=2,
    trainer_version=6,
    staleness_bound=2,
    fit=fit,
  )
  assert dict(chosen.verdicts) == {'g0': 'train', 'g1': 'unfit'}
  assert chosen.train == (good,)
  assert 'group g1: segment 0 of trajectory 1' in chosen.unfit['g1']
  assert 'among 3 kept ids and rl.max_kept is 2' in chosen.unfit['g1']
  ledger = b.record(EMPTY, chosen)
  assert b.scalars(ledger)['groups/dropped/unfit'] == 1
  assert b.check_conservation(3, ledger, ['g2']) is None
  assert judge(long, fit=fit._replace(length=4)) == 'unfit'
  assert judge(long, fit=fit._replace(layers=2)) == 'unfit'
  assert judge(make_group(0, (1.0, 1.0)), fit=fit) == 'equal'


def test_equality_is_of_the_verifiable_part_alone():
  group = make_group(0, (1.0, 1.0, 1.0))
  cheaper = dataclasses.replace(group.trajectories[0], reward=0.9)
  group = dataclasses.replace(
    group, trajectories=(cheaper, *group.trajectories[1:])
  )
  assert judge(group) == 'equal'
  clearer = dataclasses.replace(
    cheaper, reward_parts={**cheaper.reward_parts, 'judge': 0.5}
  )
  judged = (clearer, *group.trajectories[1:])
  assert judge(dataclasses.replace(group, trajectories=judged)) == 'train'
  untested = dataclasses.replace(cheaper, reward_parts={'effort': 0.0})
  group = dataclasses.replace(
    group, trajectories=(untested, *group.trajectories[1:])
  )
  with pytest.raises(ValueError, match="no reward part 'tests'"):
    judge(group)


def test_what_infrastructure_leaves_is_trained_if_two_remain():
  stops = ['infrastructure', 'finished', 'turns']
  group = make_group(0, (0.0, 1.0, 0.0), stops=stops)
  assert judge(group) == 'train'
  np.testing.assert_allclose(b.advantages_for(group, REWARD), [0.5, -0.5])
  group = make_group(0, (0.0, 1.0), stops=stops[:2])
  assert judge(group) == 'infrastructure'
  assert judge(make_group(0, ())) == 'infrastructure'
  # The lost one neither ages the group nor makes it unequal.
  group = make_group(0, (0.0, 1.0, 1.0), stops=stops)
  assert judge(group) == 'equal'


def test_staleness_is_the_maximum_over_sampled_tokens_only():
  gid = group_id('t', 0, 0)
  group = dataclasses.replace(
    make_group(0),
    trajectories=(
      make_trajectory(gid, 0, 1.0, [[-1, 6, 6], [-1, -1, 4, 5]]),
      make_trajectory(gid, 1, 0.0, [[-1, -1, 6]]),
    ),
  )
  assert b.staleness(group, 6) == (2, pytest.approx((0 + 0 + 2 + 1 + 0) / 5))
  unsampled = dataclasses.replace(
    group, trajectories=(make_trajectory(gid, 0, 1.0, [[-1, -1]]),) * 2
  )
  assert b.staleness(unsampled, 6) == (0, 0.0)


def test_a_sampled_token_without_version_is_refused():
  group = make_group(0)
  segment = group.trajectories[0].segments[0]
  segment = dataclasses.replace(segment, sampled=np.ones(5, bool))
  broken = dataclasses.replace(group.trajectories[0], segments=(segment,))
  group = dataclasses.replace(
    group, trajectories=(broken, *group.trajectories[1:])
  )
  with pytest.raises(ValueError, match='3 sampled tokens have version -1'):
    judge(group)


def test_lineage():
  ledger = b.abandon(b.Ledger(), restored=3, head=5)
  assert ledger.abandoned == ((4, 5),)
  for version, want in ((3, 'train'), (4, 'lineage'), (5, 'lineage')):
    group = make_group(0, version=version)
    assert judge(group, ledger, bound=9) == want
    assert judge(group, ledger, bound=9, lineage='keep') == 'train'
  assert judge(make_group(0, version=6), ledger) == 'train'
  assert judge(make_group(0, version=7), ledger, lineage='keep') == 'lineage'
  # One token of the abandoned lineage is enough.
  gid = group_id('t', 0, 0)
  mixed = dataclasses.replace(
    make_group(0),
    trajectories=(
      make_trajectory(gid, 0, 1.0, [[-1, 6, 6], [-1, 5, 6]]),
      make_trajectory(gid, 1, 0.0, [[-1, 6]]),
    ),
  )
  assert judge(mixed, ledger) == 'lineage'
  assert b.abandon(ledger, 6, 6) is ledger
  with pytest.raises(ValueError, match='HEAD at 2'):
    b.abandon(ledger, 3, 2)
  with pytest.raises(ValueError, match="'kep'"):
    judge(mixed, ledger, lineage='kep')


def test_select_consumes_in_draw_order_and_leaves_the_rest():
  groups = [make_group(d, (1.0, float(d % 2))) for d in (4, 1, 3, 0)]
  chosen = select(groups)
  ids = [group_id('t', 0, d) for d in (0, 1)]
  assert list(chosen.verdicts) == ids
  assert list(chosen.verdicts.values()) == ['train', 'equal']
  assert [g.draw for g in chosen.train] == [0]
  ledger = b.record(b.Ledger(), chosen)
  again = select(groups, ledger)
  assert [g.draw for g in again.train] == [4]
  assert sorted(again.duplicates) == sorted(ids)
  assert select(groups, b.record(ledger, again)) is None
  assert select(groups[:1]) is None


def test_a_step_of_equal_groups_is_skipped_and_counted():
  groups = [make_group(d, (1.0, 1.0)) for d in range(2)]
  chosen = select(groups)
  assert chosen.skipped and len(chosen.verdicts) == 2
  ledger = b.record(b.Ledger(), chosen)
  assert ledger.skipped_steps == 1 and len(ledger.dropped['equal']) == 2
  assert b.to_items(chosen.train, REWARD) == []
  assert pack([], 2, 16, 8, 1, 1) == ([], [])
  mixed = b.record(ledger, select([make_group(7), make_group(8)]))
  assert mixed.skipped_steps == 1


def test_a_group_is_never_counted_twice():
  twin = [make_group(0), make_group(0), make_group(1)]
  chosen = select(twin)
  assert chosen.duplicates == (group_id('t', 0, 0),)
  ledger = b.record(b.Ledger(), chosen)
  assert len(ledger.trained) == 2
  assert judge(make_group(0), ledger) == 'duplicate'
  with pytest.raises(AssertionError, match='already have a verdict'):
    b.record(ledger, chosen)


def test_conservation_speaks():
  chosen = select([make_group(0), make_group(1, (0.0, 0.0))])
  ledger = b.record(b.Ledger(), chosen)
  assert b.check_conservation(4, ledger, ['x', 'y']) is None
  message = b.check_conservation(5, ledger, ['x', 'y'])
  assert '1 groups lost' in message and '1 trained' in message
  assert '1 equal' in message and '2 queued' in message
  message = b.check_conservation(3, ledger, ['x', 'y'])
  assert 'never produced' in message
  message = b.check_conservation(4, ledger, ['x', group_id('t', 0, 0)])
  assert 'have a verdict' in message


def test_pending_is_the_listing_without_verdicts():
  ledger = b.record(b.Ledger(), select([make_group(0), make_group(1)]))
  listing = [group_id('t', 0, d) for d in (2, 0, 3, 1, 2)]
  want = [group_id('t', 0, d) for d in (2, 3)]
  assert b.pending(listing, ledger) == want


@settings(max_examples=40, deadline=None)
@given(
  st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from([0.0, 1.0]), st.booleans()),
    max_size=24,
  ),
  st.integers(1, 4),
  st.integers(0, 3),
  st.randoms(use_true_random=False),
)
def test_conservation_over_a_whole_run(drawn, count, bound, random):
  """Any order of arrival, kills between checkpoints, objects kept till then."""
  arriving = [
    make_group(
      d, (1.0, r), v, stops=['infrastructure', 'finished'] if lost else None
    )
    for d, (v, r, lost) in enumerate(drawn)
  ]
  random.shuffle(arriving)
  exchange, produced, version = {}, 0, 6
  ledger = saved = b.Ledger()
  while arriving or select(exchange.values(), ledger, count, version, bound):
    if arriving:
      group = arriving.pop()
      exchange[group.group_id] = group
      produced += 1
    chosen = select(exchange.values(), ledger, count, version, bound)
    if chosen:
      assert len(chosen.verdicts) == count
      ledger = b.record(ledger, chosen)
      version += not chosen.skipped
    event = random.random()
    if event < 0.2:  # killed: back to the checkpoint, at a new version
      ledger = b.from_json(json.loads(json.dumps(b.to_json(saved))))
      assert ledger == saved
      version += 1
    elif event < 0.5:  # checkpoint, then delete what it contains
      saved = ledger
      for gid in b.consumed(saved):
        exchange.pop(gid, None)
    queued = b.pending(exchange, ledger)
    assert b.check_conservation(produced, ledger, queued) is None
    figures = b.scalars(ledger)
    dropped = sum(v for k, v in figures.items() if '/dropped/' in k)
    assert figures['groups/trained'] + dropped + len(queued) == produced


def test_json_round_trip_and_damage():
  ledger = b.record(b.Ledger(), select([make_group(0), make_group(1, (0, 0))]))
  ledger = b.abandon(ledger, 2, 9)
  values = json.loads(json.dumps(b.to_json(ledger)))
  assert b.from_json(values) == ledger
  # A checkpoint that is older than a reason.
  del values['dropped']['unfit']
  assert b.from_json(values) == ledger
  for broken, match in (
    ({k: v for k, v in values.items() if k != 'trained'}, 'fields'),
    ({**values, 'dropped': {'odd': []}}, 'reasons'),
    ({**values, 'trained': values['trained'] * 2}, 'counted once'),
  ):
    with pytest.raises(ValueError, match=match):
      b.from_json(broken)


@pytest.mark.parametrize('size', [2, 3, 5])
def test_one_advantage_for_every_sampled_token_of_every_segment(size):
  """A summarised rollout counts once in the mean, whatever the group's size."""
  gid = group_id('t', 0, 0)
  segments = [[-1, 5, 5], [-1, -1, 5], [-1, -1], [5, -1]]
  trajectories = [make_trajectory(gid, 0, 1.0, segments)] + [
    make_trajectory(gid, i, 0.0, [[-1, 5, -1]]) for i in range(1, size)
  ]
  group = dataclasses.replace(make_group(0), trajectories=tuple(trajectories))
  want = np.array([1 - 1 / size] + [-1 / size] * (size - 1), np.float32)
  np.testing.assert_allclose(b.advantages_for(group, REWARD), want, rtol=1e-6)
  items = b.to_items([group], REWARD)
  assert len(items) == 3 + size - 1  # nothing was sampled in one segment
  assert [i.origin for i in items[:3]] == [
    (gid, 0, 0),
    (gid, 0, 1),
    (gid, 0, 3),
  ]
  batches, _ = pack(items, 4, 16, 4, 1, 1)
  found = np.concatenate([x.advantages[x.loss_mask] for x in batches])
  assert sorted(found.tolist()) == sorted(
    [float(want[0])] * 4 + [float(want[1])] * (size - 1)
  )


def test_kl_joins_the_reward_at_the_trainer():
  config = RewardConfig(kl_weight=0.5, effort_weight=0.0)
  gid = group_id('t', 0, 0)
  group = dataclasses.replace(
    make_group(0),
    trajectories=(
      make_trajectory(gid, 0, 1.0, [[-1, 5], [-1, 5]]),
      make_trajectory(gid, 1, 0.0, [[-1, 5]]),
    ),
  )
  garbage = np.nan  # where nothing was sampled
  references = [
    [np.array([garbage, -1.5]), np.array([garbage, -2.0])],
    [np.array([garbage, -1.0])],
  ]
  # k1: 0.5 + 1.0 and 0; rewards 1 - 0.75 and 0.
  got = b.advantages_for(group, config, references)
  np.testing.assert_allclose(got, [0.125, -0.125])
  items = b.to_items([group], config, [references])
  assert items[1].reference_logprobs[1] == -2.0
  with pytest.raises(ValueError, match='reward.kl_weight=0.5 needs'):
    b.advantages_for(group, config)
