"""`composer`, killed with SIGKILL at a named moment.

python child.py MOMENT N composer arguments... dies when MOMENT comes for the
N-th time; MOMENT 'never' lets it live, 'engine' breaks the engine instead. Here no group counts as equal and the
later of its sessions are the better ones, so that a model that solves nothing
trains all the same.
"""

import functools
import importlib
import os
import signal
import sys

import numpy as np

from composer import __main__ as cli
from composer.rl import buffer

# name -> (module, function, whether after the call)
MOMENTS = {
  'midtrain step': ('composer.midtrain', '_report', True),
  'saving': ('composer.checkpoint', '_start', True),
  'evaluation': ('composer.fleet.evaluator', 'evaluate_params', False),
  'evaluated': ('composer.fleet.evaluator', 'evaluate_params', True),
  'scripted': ('composer.fleet.evaluator', 'evaluate_scripted', True),
  'mismatch': ('composer.bench.mismatch', 'measure', False),
  'fence': ('composer.weights.store', 'claim_fence', True),
  'head': ('composer.weights.store', 'move_head', False),
  'publish': ('composer.fleet.trainer', 'record_published', True),
  'cursor': ('composer.fleet.trainer', 'write_cursor', True),
  'engine': ('composer.inference.programs', 'mixed', False),
  'judged': ('composer.fleet.trainer', 'train_step', False),
  'commit': ('composer.groups', '_commit_lease', False),
  'committed': ('composer.groups', 'commit', True),
  'delete': ('composer.groups', 'delete_groups', False),
  'report': ('composer.report', 'write', False),
}


def die_at(moment: str, count: int) -> None:
  module, name, after = MOMENTS[moment]
  module = importlib.import_module(module)
  act, calls = getattr(module, name), []

  @functools.wraps(act)
  def wrapped(*arguments, **named):
    calls.append(None)
    last = len(calls) == count
    if last and moment == 'engine':
      raise RuntimeError('broken by the test')
    if last and not after:
      os.kill(os.getpid(), signal.SIGKILL)
    result = act(*arguments, **named)
    if last:
      os.kill(os.getpid(), signal.SIGKILL)
    return result

  setattr(module, name, wrapped)


if __name__ == '__main__':
  buffer.is_equal = lambda values: False
  buffer.group_advantages = lambda rewards: np.linspace(
    -1, 1, len(rewards), dtype=np.float32
  )
  if sys.argv[1] != 'never':
    die_at(sys.argv[1], int(sys.argv[2]))
  sys.exit(cli.main(sys.argv[3:]))
