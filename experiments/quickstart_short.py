"""The quick start in its shortest form: every part turns, nothing is learnt.

What continuous integration runs, once per machine driver.

Takes: about a minute on 2 cores.
Expect: a report; solve rates near those of an untrained model.
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
      base.midtrain, steps=20, demonstrations=500, source_bytes=200_000
    ),
    rl=dataclasses.replace(
      base.rl, steps=4, groups_per_step=2, group_size=4, audit_every=2
    ),
    eval=dataclasses.replace(
      base.eval, sessions=16, during_sessions=8, every=2
    ),
    checkpoint=dataclasses.replace(base.checkpoint, every=2),
  )
