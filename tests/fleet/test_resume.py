"""kill -9 at the worst moments, and --resume."""

import signal

# One run, killed at each of these in turn. A life begins where the checkpoint
# of the one before lies, so the order follows the course of a run.
MOMENTS = (
  ('midtrain step', 3),  # past a checkpoint of mid-training
  ('evaluated', 1),  # before its row is kept
  ('publish', 1),  # HEAD is there, no cursor yet
  ('committed', 2),  # groups in the queue that no checkpoint knows
  ('cursor', 3),  # a step done, before the first checkpoint
  ('saving', 1),  # while a checkpoint is being written
  ('delete', 3),  # a checkpoint written, its groups not deleted
  ('mismatch', 1),  # in the evaluation at the end
  ('report', 1),
)


def kill_through(runs, workdir, moments) -> None:
  for index, moment in enumerate(moments):
    resume = ['--resume'] if index else []
    arguments = ['--workdir', str(workdir), *resume]
    runs.run(*arguments, die=moment, code=-signal.SIGKILL)
    assert not (workdir / 'done').exists()


def test_a_run_killed_everywhere_ends_as_one_that_was_not(runs, audit):
  workdir = runs.directory / 'run'
  kill_through(runs, workdir, MOMENTS)
  text = runs.run('--workdir', str(workdir), '--resume')
  ledger = audit(workdir)
  # Rows found before a kill are there once, and were not measured again.
  assert {who for _, who in ledger['rows']} == {
    'after mid-training',
    'after RL',
    'demonstrator',
    'blind guesser',
  }
  assert 'after mid-training' not in text.split('Solve rate')[0]
  assert ledger['abandoned'], 'no lineage was abandoned in all these kills'
  versions = [v for first, last in ledger['abandoned'] for v in (first, last)]
  assert versions == sorted(versions)
