"""Sessions with a scripted agent while their machines are killed at random.

    composer bench sessions [--json FILE]

1,000 sessions over the tasks of the kind `repair`, all asked for at once, with
real tools, machines and grading; only the model is a script. Meanwhile machines
are killed (their process 1, from outside, whatever it is doing), and now and then
the zygote with all of them. Every session has to end in a typed failure of
infrastructure or in the reward that the script earns where nothing is killed; none
may hang, and nothing may be left over: no process, mount, scratch folder or
control group.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import tempfile
import time

from composer.config import Experiment
from composer.config import MachineConfig
from composer.config import MidtrainConfig
from composer.config import ModelConfig
from composer.config import SessionConfig
from composer.config import TasksConfig
from composer.environments.machines import Pool
from composer.environments.tasks import repair
from composer.model import tokenizer as tokenizer_lib
from composer.records import Trajectory
from composer.rollout import scripted
from composer.rollout import session as session_lib

SESSIONS = 1000
KILLS_PER_S = 20.0  # processes of machines
ZYGOTE_EVERY = 100  # kills; then the zygote instead
LIMIT_S = 600.0  # for all; a session that has not ended then hangs
EXPERIMENT = Experiment(
  name='sessions',
  model=ModelConfig(layers=3, dense_layers=1, experts_per_token=2),
  midtrain=MidtrainConfig(demo_right_edit=0.5, demo_test=0.9, demo_give_up=0.1),
  session=SessionConfig(context_tokens=144),
)


@dataclasses.dataclass
class Result:
  """What came of the sessions.

  Attributes:
    rewards: of the sessions that were graded.
    wrong: graded sessions whose reward is not what the script earns undisturbed.
    failed: reason -> sessions that ended in a failure of infrastructure.
    hung: sessions that had not ended in time.
    broken: other errors, as text.
    repeated: graded sessions that needed more than one attempt.
    kills: processes of machines that were killed.
    zygotes: zygotes that were killed.
    machine_failures: machines that the pool replaced.
    seconds: wall time of all.
    left: what was left over, as text.
  """

  rewards: list[float] = dataclasses.field(default_factory=list)
  wrong: int = 0
  failed: dict[str, int] = dataclasses.field(default_factory=dict)
  hung: int = 0
  broken: list[str] = dataclasses.field(default_factory=list)
  repeated: int = 0
  kills: int = 0
  zygotes: int = 0
  machine_failures: int = 0
  seconds: float = 0.0
  left: list[str] = dataclasses.field(default_factory=list)


def run(json_path: str | None = None) -> int:
  """Prints what came of the sessions; 1 if any rule was broken."""
  result = measure(MachineConfig(concurrent=64), SESSIONS)
  for line in lines_of(result):
    print(line)
  if json_path:
    text = json.dumps(dataclasses.asdict(result), indent=1)
    pathlib.Path(json_path).write_text(text + '\n')
  bad = result.hung or result.broken or result.left or result.wrong
  return 1 if bad else 0


def lines_of(result: Result) -> list[str]:
  graded = len(result.rewards)
  failed = ', '.join(f'{k} {v}' for k, v in result.failed.items()) or 'none'
  return [
    f'{graded} sessions graded (mean reward'
    f' {sum(result.rewards) / max(1, graded):.3f}, {result.repeated} of them'
    f' after a failed attempt), failed by reason: {failed}',
    f'{result.wrong} had another reward than undisturbed, {result.hung} hung,'
    f' {len(result.broken)} broke {result.broken[:2]}',
    f'{result.kills} machines and {result.zygotes} zygotes killed,'
    f' {result.machine_failures} machines replaced by the pool',
    f'{result.seconds:.1f} s; left over: {result.left or "nothing"}',
  ]


def measure(config: MachineConfig, sessions: int, seed: int = 0) -> Result:
  """Runs sessions on machines of `config` under fire."""
  before = leftovers()
  result = asyncio.run(_run(config, sessions, seed))
  deadline = time.monotonic() + 5.0
  while (left := leftovers() - before) and time.monotonic() < deadline:
    time.sleep(0.05)  # the last to die are dying
  result.left = sorted(map(str, left))
  return result


async def _run(config: MachineConfig, sessions: int, seed: int) -> Result:
  tokenizer = tokenizer_lib.load()
  tasks = repair.build_tasks(TasksConfig())
  answers = scripted.answers(tasks.train)
  agent = scripted.Demonstrator(tokenizer, EXPERIMENT, answers)
  rng = random.Random(seed)
  result = Result()
  drawn = [
    repair.redraw(rng.choice(tasks.train), number) for number in range(sessions)
  ]
  pool = Pool(config, wait_s=LIMIT_S)

  async def one(number: int) -> tuple[Trajectory, bool]:
    task = drawn[number]
    played = scripted.play(task, agent.act, tokenizer, EXPERIMENT, number)
    trajectory = await session_lib.run_session(
      agent,
      pool,
      task,
      tokenizer,
      EXPERIMENT,
      group_id='bench',
      index=number,
      seed=number,
      provenance={},
    )
    return trajectory, played.solved

  began = time.monotonic()
  try:
    await pool.open()
    running = [asyncio.create_task(one(n)) for n in range(sessions)]
    killer = asyncio.create_task(_kill(pool, rng, result))
    done, hung = await asyncio.wait(running, timeout=LIMIT_S)
    killer.cancel()
    for task in hung:
      task.cancel()
    result.hung = len(hung)
    _count(result, done)
    result.machine_failures = pool.counters.failures
  finally:
    await pool.close()
  result.seconds = time.monotonic() - began
  return result


def _count(result: Result, done: set[asyncio.Task]) -> None:
  reasons: collections.Counter[str] = collections.Counter()
  for task in done:
    error = task.exception()
    if error is None:
      trajectory, solved = task.result()
      reward = trajectory.reward_parts['tests']
      result.rewards.append(reward)
      result.wrong += reward != float(solved)
      result.repeated += trajectory.provenance['attempt'] > 0
    elif isinstance(error, session_lib.SessionFailed):
      reasons[error.reason] += 1
    else:
      result.broken.append(repr(error))
  result.failed = dict(reasons)


async def _kill(pool: Pool, rng: random.Random, result: Result) -> None:
  """Kills until it is cancelled."""
  count = 0
  while True:
    await asyncio.sleep(rng.expovariate(KILLS_PER_S))
    zygote = pool._zygote
    if zygote is None:
      continue
    count += 1
    if count % ZYGOTE_EVERY == 0:
      zygote.process.kill()
      result.zygotes += 1
      continue
    machines = [y for x in _children(zygote.process.pid) for y in _children(x)]
    if machines:
      with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(machines), signal.SIGKILL)
        result.kills += 1


def _children(pid: int) -> list[int]:
  found: list[int] = []
  try:
    for task in os.listdir(f'/proc/{pid}/task'):
      with open(f'/proc/{pid}/task/{task}/children') as file:
        found += map(int, file.read().split())
  except OSError:
    pass  # it ended meanwhile
  return found


def _descendants(pid: int) -> list[int]:
  children = _children(pid)
  return [*children, *(y for x in children for y in _descendants(x))]


def leftovers() -> set[tuple[str, str]]:
  """What machines of this process may leave: processes, mounts, folders, groups.

  Other runs of this host have machines too, so a process counts if it is below
  this one, or has lost its parent.
  """
  found: set[tuple[str, str]] = set()
  below = set(_descendants(os.getpid()))
  for entry in pathlib.Path('/proc').iterdir():
    if not entry.name.isdigit():
      continue
    try:
      line = (entry / 'cmdline').read_bytes()
      state, parent = (
        (entry / 'stat').read_text().rpartition(')')[2].split()[:2]
      )
    except OSError:
      continue
    ours = int(entry.name) in below or parent == '1'
    inside = b'/inside/' in line or b'qemu-system' in line
    if ours and inside and state != 'Z':
      found.add(('process', entry.name))
  mounts = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
  found.update(('mount', line.split()[4]) for line in mounts)
  folders = f'composer-machines-{os.getpid()}-*'
  for path in pathlib.Path(tempfile.gettempdir()).glob(folders):
    found.add(('folder', str(path)))
  for path in pathlib.Path('/sys/fs/cgroup').rglob('composer-*'):
    alive = pathlib.Path('/proc', path.name.split('-')[1]).exists()
    if not alive:  # of a zygote that has ended
      found.add(('group', str(path)))
  return found
