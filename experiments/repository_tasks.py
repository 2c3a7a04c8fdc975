"""A small MoE on a real package: sessions of somebody who can, then RL.

The tasks are faults in humanize (MIT), made by `composer tasks build`. In
mid-training the model sees sessions of somebody who knows the solutions and is
sloppy: he runs the tests, reads, edits, runs the tests and ends, for real, and
often edits wrong and gives up. Then it acts by itself, and is paid where the
hidden tests pass in a second machine. The vocabulary beside this file is of
`python -m composer.rollout.vocabulary`.

Takes: on 2 cores under 4 GB of memory; 5 minutes for the demonstrations beside
  other programs, then by the steps; and two minutes to make the tasks:
  pip download --no-deps --no-binary :all: humanize==4.12.1
  composer tasks build humanize-4.12.1.tar.gz --out tasks/humanize --limit 80
Expect: every part turns on real tasks. So small a model learns the form of a
  session first (it runs the tests and reads the right lines): after a quarter of
  the steps below, as far as it was tried, its edits were still broken and next
  to nothing was solved. To solve such tasks, start from a model that can code.
Run: composer run experiments/repository_tasks.py
Try: composer run experiments/repository_tasks.py --set midtrain.steps=800
"""

import pathlib

from composer import config


def get_config() -> config.Experiment:
  here = pathlib.Path(__file__)
  return config.Experiment(
    name='repository-tasks',
    tokenizer=str(here.with_name('repository_tasks_tokenizer.json')),
    template='chatml',
    model=config.ModelConfig(vocab_size=2048),
    tasks=config.TasksConfig(
      kind='repository',
      path='tasks/humanize',
      only='^number-(clamp|fractional|ordinal)-(?!body_removed)',
      tools='read edit run_tests finish',
      held_out_function_share=0.0,
      held_out_bug_share=0.2,
    ),
    midtrain=config.MidtrainConfig(
      steps=400,
      batch_size=2,
      sequence_length=1280,
      python_share=0.0,
      sampled_only=True,
      demonstrations=96,
      demo_right_edit=0.35,
      demo_give_up=0.7,
    ),
    session=config.SessionConfig(
      max_turns=9,
      max_act_tokens=128,
      context_tokens=1664,
      max_summaries=0,
      observation_tokens=80,
    ),
    engine=config.EngineConfig(sequences=16, pages=1800, max_context=1664),
    machine=config.MachineConfig(
      exec_timeout_s=60.0,
      memory_mb=1024,
      processes=64,
      disk_mb=64,
      warm=2,
      concurrent=6,
    ),
    reward=config.RewardConfig(effort_weight=0.0),
    rl=config.RLConfig(
      steps=30,
      groups_per_step=4,
      group_size=4,
      loss_tokens=2048,
      micro_batch=4,
      sequence_length=1664,
      audit_every=10,
    ),
    eval=config.EvalConfig(
      sessions=16, during_sessions=8, every=0, baselines=False
    ),
    checkpoint=config.CheckpointConfig(every=100),
  )
