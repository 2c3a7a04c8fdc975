"""The quick start in its shortest form: every part turns, nothing is learnt.

What continuous integration runs, once per machine driver.

Takes: one to two minutes on 2 cores.
Expect: a report; solve rates near those after mid-training. With less of that no
  session is solved, all groups agree, and no step is trained.
Run: composer run experiments/quickstart_short.py
Try: composer run experiments/quickstart_short.py --set machine.driver=process
"""

import dataclasses

from composer import config


def get_config() -> config.Experiment:
  base = config.Experiment(name='quickstart-short')
  return dataclasses.replace(
    base,
    midtrain=dataclasses.replace(
      base.midtrain, steps=80, demonstrations=500, source_bytes=200_000
    ),
    rl=dataclasses.replace(
      base.rl, steps=4, groups_per_step=4, group_size=4, audit_every=2
    ),
    eval=dataclasses.replace(
      base.eval, sessions=16, during_sessions=8, every=2
    ),
    checkpoint=dataclasses.replace(base.checkpoint, every=2),
  )
