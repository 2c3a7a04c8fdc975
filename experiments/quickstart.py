"""A small MoE learns to repair code with tools, on a CPU, in minutes.

Two stages: mid-training from scratch on real Python source and on sessions of
a sloppy scripted agent, then asynchronous GRPO over groups of whole sessions
whose tools run in real sandboxes. The reward comes from hidden tests, run in a
second, clean sandbox.

Takes: some 8 minutes on 2 cores, under 4 GB of memory.
Expect: held-out bugs solved rise from about 0.25 to above 0.7, well above the
  scripted agent and a blind guesser; `mismatch/kl` is exactly 0.
Run: composer run experiments/quickstart.py
Try: composer run experiments/quickstart.py --set numerics.mode=fast
"""

from composer import config


def get_config() -> config.Experiment:
  return config.Experiment(name='quickstart')
