"""A run of a few seconds in which every part turns; the subject of the tests.

Takes: some ten seconds.
Expect: nothing is learnt.
Run: composer run tests/fleet/tiny.py
Try: composer run tests/fleet/tiny.py --set rl.steps=3
"""

from composer import config


def get_config() -> config.Experiment:
  return config.Experiment(
    name='tiny',
    model=config.ModelConfig(
      layers=1, width=32, heads=2, head_dim=16, experts=2, expert_hidden=16
    ),
    numerics=config.NumericsConfig(row_block=16),
    midtrain=config.MidtrainConfig(
      steps=4, batch_size=8, demonstrations=60, source_bytes=20_000
    ),
    session=config.SessionConfig(max_turns=2, max_act_tokens=4),
    engine=config.EngineConfig(rows=32, sequences=8, pages=128),
    machine=config.MachineConfig(driver='process', warm=1, concurrent=16),
    rl=config.RLConfig(
      steps=6, groups_per_step=2, group_size=2, micro_batch=8, audit_every=3
    ),
    eval=config.EvalConfig(sessions=4, during_sessions=4, every=2),
    weights=config.WeightsConfig(base_every=3),
    checkpoint=config.CheckpointConfig(every=2),
    fleet=config.FleetConfig(lease_s=3.0, heartbeat_s=0.5),
  )
