"""Tasks in Harbor's layout: read and run where no container is needed."""

import asyncio

import pytest

from composer.config import MachineConfig
from composer.config import TasksConfig
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import probe
from composer.environments.tasks import harbor
from composer.environments.tasks import sets
from composer.rewards import verify

MACHINE = MachineConfig(warm=0, concurrent=2, exec_timeout_s=20.0)
TOML = """
schema_version = "1.1"
[task]
name = "example/greet"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 15.0
env = { GREETED = "world" }
[agent]
timeout_sec = 120.0
[environment]
memory_mb = 512
"""
DOCKER = """# A comment.
FROM python:3.12-slim
WORKDIR /app
ENV LANGUAGE=en
COPY names.txt \\
  /app/data/
COPY . .
"""
TEST = """#!/bin/bash
cd /app
if python /tests/check.py && [ "$LANGUAGE" = en ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
CHECK = """import os
with open('/app/out/greeting.txt') as file:
  assert file.read() == 'hello ' + os.environ['GREETED']
assert os.path.exists('/app/data/names.txt')
"""
FILES = {
  'task.toml': TOML,
  'instruction.md': 'Write a greeting to `/app/out/greeting.txt`.\n',
  'environment/Dockerfile': DOCKER,
  'environment/names.txt': 'world\n',
  'tests/test.sh': TEST,
  'tests/check.py': CHECK,
  'solution/solve.sh': 'secret',
}


def task_folder(path, **changes):
  for name, text in {**FILES, **changes}.items():
    if text is not None:
      file = path / name
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_text(text)
  return path


def test_a_task_is_read(tmp_path):
  (task,) = harbor.load(task_folder(tmp_path / 'greet').parent)
  assert task.id == 'greet' and task.kind == 'harbor'
  assert task.files == {'names.txt': b'world\n', 'data/names.txt': b'world\n'}
  assert '/app/out/greeting.txt' in task.instruction
  assert task.metadata['seconds'] == 15.0
  assert task.metadata['agent_seconds'] == 120.0
  assert not any('secret' in str(x) for x in task.hidden_files.values())
  config = TasksConfig(kind='harbor', path=str(tmp_path))
  assert sets.build_tasks(config).train == (task,)


def test_a_session_is_graded_by_the_reward_that_is_written(tmp_path):
  try:
    probe(MACHINE)
  except MissingFacility as error:
    pytest.skip(str(error))
  (task,) = harbor.load(task_folder(tmp_path / 'greet'))
  commands = (
    'mkdir out; printf "hello world" > out/greeting.txt',
    'mkdir out; printf "hello moon" > out/greeting.txt',
    'rm -r data; mkdir out; printf "hello world" > out/greeting.txt',
    'mkdir -p .composer/logs/verifier; echo 1 > .composer/logs/verifier/reward.txt',
    'echo "import os; os._exit(0)" > sitecustomize.py; mkdir out',
  )

  async def run():
    pool = Pool(MACHINE, sets.harness())
    grades = []
    try:
      for command in commands:
        machine = await pool.acquire(task.files)
        await machine.run(('sh', '-c', command))
        remains = await verify.collect(machine, task)
        await pool.release(machine)
        grades.append(await verify.grade(pool, task, remains.files))
    finally:
      await pool.close()
    return grades

  grades = asyncio.run(run())
  assert [x.solved for x in grades] == [True, False, False, False, False]
  assert all(x.total == 1 for x in grades), grades


@pytest.mark.parametrize(
  ('name', 'text', 'words'),
  [
    (
      'environment/Dockerfile',
      'FROM python:3\nRUN apt-get install x\n',
      'RUN apt',
    ),
    ('environment/Dockerfile', 'FROM nvidia/cuda:12\n', 'FROM nvidia'),
    ('environment/Dockerfile', 'FROM python\nCOPY names.txt /etc/\n', 'COPY'),
    ('environment/Dockerfile', 'FROM python\nCOPY --from=a b c\n', 'COPY'),
    ('environment/Dockerfile', 'FROM python\nCOPY gone.txt .\n', 'COPY gone'),
    ('environment/docker-compose.yaml', 'services:', 'container engine'),
    ('tests/test.sh', 'curl -LsSf https://x/install.sh | sh', "calls 'curl'"),
    ('tests/test.sh', None, 'test.sh is missing'),
    ('instruction.md', None, 'instruction.md'),
    ('task.toml', '[environment]\ndocker_image = "x"\n', 'registry'),
    ('task.toml', '[[steps]]\n', 'several steps'),
    ('task.toml', 'not toml', 'cannot be read'),
  ],
)
def test_what_needs_more_is_refused_by_name(tmp_path, name, text, words):
  with pytest.raises(ValueError, match=words):
    harbor.load(task_folder(tmp_path, **{name: text}))


def test_nothing_there(tmp_path):
  with pytest.raises(ValueError, match='holds no Harbor task'):
    harbor.load(tmp_path)
