"""The roles in processes of their own, over file://."""

import json
import signal
import socket

# With no staleness allowed a step needs every draw there is, those of the dead
# included.
STRICT = ('--set', 'rl.staleness=0')


def test_separate_roles_do_the_same_and_a_rollout_may_die(runs, audit):
  workdir = runs.directory / 'run'
  arguments = ('--workdir', str(workdir), *STRICT)
  # Dies with a group written whose lease has not moved yet.
  second = runs.start(*arguments, '--role', 'rollout', die=('commit', 1))
  evaluator = runs.start(*arguments, '--role', 'eval')
  trainer = runs.start(*arguments, '--role', 'trainer')
  # The other joins it at work: sooner, it may have all groups before that one is.
  runs.until(second, 'version 0 active')
  first = runs.start(*arguments, '--role', 'rollout')
  runs.end(second, -signal.SIGKILL)
  text = runs.end(trainer)
  runs.end(first)
  evaluated = runs.end(evaluator)
  audit(workdir)
  assert 'no evaluation: the trainer alone has no machines' in text
  lives = list((workdir / 'exchange' / 'clusters' / 'local').iterdir())
  beats = [json.loads(path.read_bytes())['counters'] for path in lives]
  assert len(beats) == 2
  assert sum(beat['abandoned'] for beat in beats) > 0
  head = json.loads((workdir / 'exchange' / 'HEAD').read_bytes())
  last = head['forms']['bf16']['version']
  versions = [
    json.loads(line)['step']
    for line in (workdir / 'eval' / 'metrics.jsonl').read_text().splitlines()
  ]
  assert versions[-1] == last and versions == sorted(versions)
  assert f'version {last}: held_out_bugs' in evaluated


def test_a_trainer_of_two_processes_trains_publishes_and_resumes(runs, audit):
  """Two processes of four devices each are one trainer, killed in the middle."""
  workdir = runs.directory / 'run'
  common = ('--workdir', str(workdir), '--set', 'fleet.trainer_processes=2')

  def trainers(*arguments, die=('never', 0)):
    with socket.socket() as probe:
      probe.bind(('localhost', 0))
      coordinator = f'localhost:{probe.getsockname()[1]}'
    return [
      runs.start(
        *common,
        *('--role', 'trainer', *arguments),
        devices=4,
        die=die if index == 0 else ('never', 0),
        env={
          'COMPOSER_COORDINATOR': coordinator,
          'COMPOSER_PROCESS': str(index),
        },
      )
      for index in range(2)
    ]

  rollout = runs.start(*common, '--role', 'rollout')
  lead, other = trainers(die=('cursor', 4))
  runs.end(lead, -signal.SIGKILL)
  assert other.wait(120) != 0, 'the other ends too'
  for process in trainers('--resume'):
    runs.end(process)
  runs.end(rollout)
  # What the dead one handed over last may or may not have been published.
  audit(workdir)
