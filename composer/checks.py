"""What the fields of an experiment must satisfy; `config.validate` calls these.

Every check raises `ValueError` with the field, its value and the remedy.
"""

from __future__ import annotations

import re
import typing

from composer.rewards import rubric

if typing.TYPE_CHECKING:
  from composer import config

MOST_EXPERTS = 2**15 - 1
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')


def require(holds: bool, what: str, remedy: str) -> None:
  if not holds:
    raise ValueError(f'{what}; {remedy}')


def check_model(model: config.ModelConfig) -> None:
  require(
    model.dense_layers <= model.layers,
    f'model.dense_layers={model.dense_layers} exceeds'
    f' model.layers={model.layers}',
    'dense layers are the first of all layers',
  )
  if model.kv_lora:
    _check_latent_attention(model)
  else:
    _check_grouped_attention(model)
  if model.dense_layers < model.layers:
    _check_experts(model)
  yarn = model.yarn
  require(
    yarn.factor >= 1,
    f'model.yarn.factor={yarn.factor} is under 1',
    'it stretches positions, 1 is plain RoPE',
  )
  require(
    yarn.beta_slow <= yarn.beta_fast,
    f'model.yarn.beta_slow={yarn.beta_slow} exceeds'
    f' model.yarn.beta_fast={yarn.beta_fast}',
    'fast frequencies turn more often, exchange them',
  )
  require(
    model.mtp_layers <= 1,
    f'model.mtp_layers={model.mtp_layers}',
    'one layer drafts, run once for each token that it drafts; use 0 or 1',
  )


def _check_grouped_attention(model: config.ModelConfig) -> None:
  require(
    model.heads % model.kv_heads == 0,
    f'model.heads={model.heads} is not divisible by'
    f' model.kv_heads={model.kv_heads}',
    'set kv_heads to a divisor of heads',
  )
  require(
    model.head_dim % 2 == 0,
    f'model.head_dim={model.head_dim} is odd',
    'rotary positions turn pairs, use an even number',
  )
  for name in ('q_lora', 'nope_dim', 'rope_dim', 'value_dim'):
    value = getattr(model, name)
    require(
      value == 0,
      f'model.{name}={value} without model.kv_lora',
      'only latent attention reads it; set kv_lora, or leave it 0',
    )


def _check_latent_attention(model: config.ModelConfig) -> None:
  for name in ('nope_dim', 'rope_dim', 'value_dim'):
    require(
      getattr(model, name) > 0,
      f'model.{name}=0 with model.kv_lora={model.kv_lora}',
      'latent attention needs it',
    )
  require(
    model.rope_dim % 2 == 0,
    f'model.rope_dim={model.rope_dim} is odd',
    'rotary positions turn pairs, use an even number',
  )
  require(
    not model.qk_norm,
    f'model.qk_norm=true with model.kv_lora={model.kv_lora}',
    'latent attention norms its latents instead, set it to false',
  )


def _check_experts(model: config.ModelConfig) -> None:
  groups, top = model.router_groups, model.router_top_groups
  require(
    model.experts_per_token <= model.experts,
    f'model.experts_per_token={model.experts_per_token} exceeds'
    f' model.experts={model.experts}',
    'a token cannot use an expert twice',
  )
  require(
    model.experts <= MOST_EXPERTS,
    f'model.experts={model.experts} exceeds {MOST_EXPERTS}',
    'routes are recorded as int16',
  )
  require(
    top <= groups,
    f'model.router_top_groups={top} exceeds model.router_groups={groups}',
    'a token chooses among groups that exist',
  )
  if groups == 1:
    return
  require(
    model.router == 'sigmoid',
    f'model.router_groups={groups} with model.router={model.router!r}',
    'groups belong to the sigmoid router, use 1 group',
  )
  require(
    model.experts % groups == 0 and model.experts // groups >= 2,
    f'model.experts={model.experts} in model.router_groups={groups}',
    'groups are of one size, two experts or more',
  )
  require(
    model.experts_per_token <= top * (model.experts // groups),
    f'model.experts_per_token={model.experts_per_token} exceeds the experts of'
    f' model.router_top_groups={top} groups',
    'let a token choose from more groups',
  )


def check_numerics(numerics: config.NumericsConfig) -> None:
  require(
    numerics.mode != 'bitwise' or numerics.mla != 'split',
    "numerics.mla='split' with numerics.mode='bitwise'",
    'the two forms differ in last bits; use absorbed or expanded on both sides,'
    ' or numerics.mode=fast',
  )


def check_parallel(experiment: config.Experiment) -> None:
  parallel, model = experiment.parallel, experiment.model
  wide = parallel.expert * parallel.context
  require(
    experiment.numerics.mode != 'bitwise' or wide == 1,
    f'parallel.expert={parallel.expert} and parallel.context='
    f"{parallel.context} with numerics.mode='bitwise'",
    'rows of other devices would change the order of addition; leave both 1, or'
    ' set numerics.mode=fast',
  )
  sparse = model.dense_layers < model.layers
  across = wide if parallel.rules == 'folded' else parallel.expert
  for name, size in (
    ('expert' + ' x context' * (parallel.rules == 'folded'), across),
    ('rollout_expert', parallel.rollout_expert),
  ):
    require(
      not sparse or model.experts % size == 0,
      f'parallel.{name}={size} does not divide model.experts={model.experts}',
      'every device holds as many experts',
    )
  chunks = 2 * parallel.context
  for path in ('midtrain', 'rl'):
    length = getattr(experiment, path).sequence_length
    require(
      parallel.context == 1 or length % chunks == 0,
      f'{path}.sequence_length={length} does not divide into 2 x'
      f' parallel.context={chunks} chunks',
      f'use {-(-length // chunks) * chunks}',
    )
  require(
    parallel.slack >= 1,
    f'parallel.slack={parallel.slack} is under 1',
    'the buffers would not hold the mean load',
  )


def check_tool_servers(session: config.SessionConfig) -> None:
  if session.tool_servers:
    from composer.environments import mcp  # few experiments have one

    mcp.read_servers(session.tool_servers)


def check_judge(judge: config.JudgeConfig) -> None:
  """A rubric needs somebody who judges by it."""
  criteria = rubric.read_rubric(judge.rubric)
  if not criteria:
    return
  known = judge.endpoint.startswith(('http://', 'https://'))
  require(
    known or judge.endpoint == 'scripted',
    f'judge.rubric has criteria and judge.endpoint={judge.endpoint!r}',
    'give an OpenAI-compatible one, as https://HOST/v1, or scripted',
  )
  require(
    not known or bool(judge.model),
    f'judge.endpoint={judge.endpoint!r} without judge.model',
    'name the model that judges',
  )
  for criterion in criteria if judge.endpoint == 'scripted' else ():
    try:
      re.compile(criterion.question)
    except re.error as error:
      raise ValueError(
        f'judge.rubric: {criterion.name} is no regular expression ({error});'
        ' judge.endpoint=scripted takes questions for patterns'
      ) from error


def check_tasks(experiment: config.Experiment) -> None:
  tasks, machine = experiment.tasks, experiment.machine
  if tasks.kind == 'repair':
    return
  if tasks.kind == 'migration':
    require(
      (machine.driver, machine.image) == ('microvm', 'postgres')
      and machine.disk_mb >= 128,
      f'tasks.kind={tasks.kind!r} with machine.driver={machine.driver!r},'
      f' machine.image={machine.image!r} and machine.disk_mb={machine.disk_mb}',
      'set machine.driver=microvm, machine.image=postgres and'
      ' machine.disk_mb=128, which its database server needs',
    )
  else:
    require(
      bool(tasks.path),
      f'tasks.path is empty and tasks.kind={tasks.kind!r}',
      'name the folder that holds the tasks',
    )


def check_rows(experiment: config.Experiment) -> None:
  """`bitwise` maps blocks of one number of rows, with two trips or more."""
  if experiment.numerics.mode != 'bitwise':
    return
  block = experiment.numerics.row_block
  midtrain, rl = experiment.midtrain, experiment.rl
  for what, rows in (
    ('engine.rows', experiment.engine.rows),
    (
      'rl.micro_batch x rl.sequence_length',
      rl.micro_batch * rl.sequence_length,
    ),
    (
      'midtrain.batch_size x midtrain.sequence_length',
      midtrain.batch_size * midtrain.sequence_length,
    ),
  ):
    require(
      rows % block == 0 and rows >= 2 * block,
      f'{what}={rows} is not a multiple, at least the double, of'
      f' numerics.row_block={block}',
      'bitwise numerics need blocks of one size, two or more; change either, or'
      ' set numerics.mode=fast',
    )


def check_names(experiment: config.Experiment) -> None:
  for path, value in (
    ('name', experiment.name),
    ('fleet.cluster', experiment.fleet.cluster),
  ):
    require(
      _NAME.fullmatch(value) is not None,
      f'{path}={value!r} cannot name a directory',
      'use letters, digits, ".", "_" and "-", a letter or digit first',
    )
  exchange = experiment.weights.exchange
  schemes = ('memory://', 'file://', 'gs://', 's3://')
  require(
    not exchange or exchange.startswith(schemes),
    f'weights.exchange={exchange!r} is of an unknown scheme',
    f'use one of {", ".join(schemes)}, or leave it empty for'
    ' file://<workdir>/exchange',
  )


def check_rl(experiment: config.Experiment) -> None:
  rl, fleet = experiment.rl, experiment.fleet
  require(
    rl.group_size >= 2,
    f'rl.group_size={rl.group_size}',
    'the advantage of a group of one is always 0 and nothing would be learnt,'
    ' use 2 or more',
  )
  for path, rows in (
    ('rl.micro_batch', rl.micro_batch),
    ('midtrain.batch_size', experiment.midtrain.batch_size),
  ):
    require(
      rows % fleet.trainer_processes == 0,
      f'{path}={rows} is not divisible by'
      f' fleet.trainer_processes={fleet.trainer_processes}',
      'every process takes as many rows',
    )
  require(
    2 * fleet.heartbeat_s <= fleet.lease_s,
    f'fleet.lease_s={fleet.lease_s} is under twice'
    f' fleet.heartbeat_s={fleet.heartbeat_s}',
    'leases are renewed with the heartbeat and would expire under their holder',
  )


def check_lengths(experiment: config.Experiment) -> None:
  session, engine = experiment.session, experiment.engine
  block = experiment.numerics.kv_block
  for path, value in (
    ('midtrain.sequence_length', experiment.midtrain.sequence_length),
    ('rl.sequence_length', experiment.rl.sequence_length),
    ('engine.max_context', engine.max_context),
  ):
    require(
      value % block == 0,
      f'{path}={value} is not a multiple of numerics.kv_block={block}',
      f'use {-(-value // block) * block}',
    )
  # A summary is asked for by one token and may need an <end> of the harness's.
  summary = session.summary_tokens + 2 if session.max_summaries else 0
  require(
    engine.max_context >= session.context_tokens + summary,
    f'engine.max_context={engine.max_context} does not hold'
    f' session.context_tokens={session.context_tokens} and {summary} tokens of'
    ' a summary',
    'raise it, or lower session.context_tokens or session.summary_tokens',
  )
  require(
    experiment.rl.sequence_length >= engine.max_context,
    f'rl.sequence_length={experiment.rl.sequence_length} is shorter than'
    f' engine.max_context={engine.max_context}',
    'a segment must fit into one packed row, raise it',
  )
  pages = engine.max_context // block + 1  # one is scratch
  require(
    engine.pages >= pages,
    f'engine.pages={engine.pages} does not hold one sequence of'
    f' engine.max_context={engine.max_context} tokens',
    f'use {pages} or more',
  )


def check_drafts(experiment: config.Experiment) -> None:
  require(
    experiment.engine.draft != 'mtp' or experiment.model.mtp_layers > 0,
    "engine.draft='mtp' with model.mtp_layers=0",
    'give the model the layer that drafts (1), or draft by ngram',
  )
  stage = experiment.midtrain
  require(
    stage.mtp_depth < stage.sequence_length,
    f'midtrain.mtp_depth={stage.mtp_depth} with'
    f' midtrain.sequence_length={stage.sequence_length}',
    'a row has to hold what is predicted, predict fewer tokens further',
  )
