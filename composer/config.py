"""The experiment: frozen dataclasses, read from a Python file, checked whole.

An experiment file has a docstring and `get_config() -> Experiment`. `load`
reads it, `override` applies `path=value` strings, `validate` refuses what
cannot work before anything starts. Every field is listed here, with its unit.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import os
import pathlib
import typing
from typing import Any

from composer import checks
from composer.checks import require as _require


@dataclasses.dataclass(frozen=True)
class YarnConfig:
  """Rotary positions stretched beyond the trained context (Peng et al., 2023).

  `factor` 1 is plain RoPE. m(s) = 0.1 s ln(factor) + 1: cos and sin are scaled
  by m(mscale) / m(mscale_all_dim), and, in MLA, the softmax scale by
  m(mscale_all_dim)^2.
  """

  factor: float = 1.0
  original_context: int = 4096  # tokens that the base model was trained on
  beta_fast: float = 32.0  # rotations within it above which nothing changes
  beta_slow: float = 1.0  # and below which a frequency is divided by `factor`
  mscale: float = 1.0
  mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of the transformer (axis letters as in `composer/__init__.py`).

  Attention is grouped-query, or multi-head latent (MLA) where `kv_lora` is not
  0; MLA reads `q_lora`, `nope_dim`, `rope_dim` and `value_dim` and not
  `kv_heads` and `head_dim`.
  """

  vocab_size: int = 768  # V
  layers: int = 3
  dense_layers: int = 0  # leading layers with a dense feed-forward
  width: int = 128  # D
  heads: int = 4  # H
  kv_heads: int = 1  # G
  head_dim: int = 32
  qk_norm: bool = False  # RMSNorm of each query and key head (Qwen3)
  q_lora: int = 0  # rank of the queries' down-projection; 0: none
  kv_lora: int = 0  # rank of the latent that keys and values share; 0: no MLA
  nope_dim: int = 0  # part of a query or key head without positions
  rope_dim: int = 0  # part with rotary positions; the key's is shared by heads
  value_dim: int = 0
  dense_hidden: int = 256  # F of a dense layer
  experts: int = 8  # E
  experts_per_token: int = 2  # K
  expert_hidden: int = 64  # F of an expert
  shared_experts: int = 1
  router: str = 'sigmoid'  # with a selection bias (DeepSeek-V3); or 'softmax'
  router_groups: int = 1  # experts are chosen from the best groups of these
  router_top_groups: int = 1  # groups that a token may choose from
  router_scale: float = 1.0  # routed scaling factor
  normalise_gates: bool = True
  rope_theta: float = 10_000.0
  rope_float32: bool = False  # angles rounded as published models were trained
  yarn: YarnConfig = YarnConfig()
  norm_eps: float = 1e-5
  tie_embeddings: bool = False
  mtp_layers: int = 0  # 1: a layer behind the last drafts (`model/mtp.py`)


@dataclasses.dataclass(frozen=True)
class NumericsConfig:
  """How both sides compute.

  `mla` names the form of multi-head latent attention: 'expanded' makes keys and
  values of every head from the latent; 'absorbed' moves those products to the
  query and the output, and attends over the latent itself; 'split' trains
  expanded and decodes absorbed (not in `bitwise`: the two differ in last bits).
  """

  mode: str = 'bitwise'  # or 'aligned', 'fast'
  row_block: int = 64  # rows mapped at once in `bitwise`
  kv_block: int = 16  # tokens a KV block; segments start at its multiples
  moe: str = 'dense'  # or 'sorted': dropless dispatch by ragged products
  mla: str = 'absorbed'  # or 'expanded', 'split'
  compute: str = 'float32'  # or 'bfloat16': of activations and products
  kernels: str = ''  # an implementation of `pallas_kernels`; '': by the mode


@dataclasses.dataclass(frozen=True)
class MidtrainConfig:
  """Next-token training on Python source and rendered sessions."""

  steps: int = 400
  batch_size: int = 16  # packed rows a step
  sequence_length: int = 256
  python_share: float = 0.1  # of rows that are Python source
  sampled_only: bool = False  # sessions: a loss at sampled tokens alone
  learning_rate: float = 3e-3
  warmup_steps: int = 10
  schedule: str = 'constant'  # or 'cosine', to 0 at the last step
  max_grad_norm: float = 1.0
  weight_decay: float = 0.0
  router_bias_rate: float = 1e-2  # step of the selection bias towards balance
  demonstrations: int = 0  # sessions; 0: as many as the kind of tasks bears
  solutions: int = 3_000  # functions without a bug, as plain documents
  demo_right_edit: float = 0.3  # how often the scripted agent edits right
  demo_test: float = 0.5  # how often it tests after an edit
  demo_give_up: float = 0.3  # chance a turn that it submits early
  source_bytes: int = 2_000_000  # of standard library read at most
  mtp_depth: int = 1  # tokens further that `model.mtp_layers` learns to predict
  mtp_weight: float = 0.1  # of its loss; 0 does not train it
  mtp_start: int = 0  # steps before it is trained
  mtp_joint: bool = False  # whether its loss moves the model as well


@dataclasses.dataclass(frozen=True)
class TasksConfig:
  kind: str = 'repair'
  # Of kind 'repository', what `composer tasks build` wrote; of 'harbor', tasks.
  path: str = ''
  only: str = ''  # a pattern; tasks in whose id it is not found are left out
  tools: str = ''  # names of those that are offered; '': all that a task has
  seed: int = 0  # of the split and of the variable names
  held_out_bug_share: float = 0.25
  held_out_function_share: float = 0.2


@dataclasses.dataclass(frozen=True)
class SessionConfig:
  """Budgets of one session."""

  max_turns: int = 8
  max_act_tokens: int = 8  # sampled tokens a turn
  context_tokens: int = 120  # summarise before a turn would pass this
  summary_tokens: int = 16  # sampled tokens of a summary
  max_summaries: int = 1
  temperature: float = 1.0
  max_seconds: float = 60.0
  observation_tokens: int = 6  # rendered first, then cut in the middle
  max_tokens: int = 0  # sampled in all; 0: no limit but that of the turns
  tool_servers: str = ''  # MCP, one a line: NAME [in machine] = COMMAND


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """How much the engine does at once.

  Pages are taken as a sequence grows. Where they run out, the sequence that
  started last gives its own back and is computed again from its tokens later.
  """

  rows: int = 128  # tokens (prefill and decode) of one step
  sequences: int = 128  # running at once
  pages: int = 2048  # KV pages of `numerics.kv_block` tokens
  max_context: int = 192  # tokens of one sequence
  run_ahead: int = 0  # decode steps a dispatch; 0: 1 on a CPU, 16 elsewhere
  on_new_weights: str = 'continue'  # on older keys and values; or 'restart'
  draft: str = ''  # 'ngram' or 'mtp': proposes what one step verifies
  draft_tokens: int = 4  # proposed at most a sequence and step


@dataclasses.dataclass(frozen=True)
class MachineConfig:
  driver: str = 'namespace'  # or 'microvm'; 'process': trusted code only
  image: str = ''  # name or root filesystem; '': this system, or `base`
  hypervisor: str = 'auto'  # of microvm: firecracker, qemu, or what boots
  accelerator: str = 'auto'  # of microvm: kvm, tcg, or kvm if it boots
  start_timeout_s: float = 10.0
  exec_timeout_s: float = 10.0
  exec_cpu_s: float = 20.0  # of a command, all its processes together
  memory_mb: int = 256
  processes: int = 32
  disk_mb: int = 16
  output_bytes: int = 16_384
  warm: int = 4  # machines kept ready
  concurrent: int = 160  # alive at once


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
  """What a signal of `rewards/monitors.py` costs, by its name.

  'zero' takes all that the tests have earned, 'penalise' the share `penalty` of
  it, 'report' nothing. Every signal is recorded.
  """

  edited_tests: str = 'penalise'
  edited_configuration: str = 'penalise'
  read_caches: str = 'report'
  peeked: str = 'zero'
  hard_coded: str = 'zero'
  skipped_tests: str = 'penalise'
  early_exit: str = 'zero'
  tampered: str = 'zero'
  probed: str = 'report'
  penalty: float = 0.5


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """How parts make a reward (`rewards/combine.py`).

  C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), the concave effort penalty.
  """

  tests_weight: float = 1.0
  effort_weight: float = 0.02
  effort_k: float = 0.5
  effort_q: float = 0.5
  effort_per_turn: float = 0.5
  effort_per_call: float = 0.5
  effort_per_token: float = 0.02
  effort_per_thinking_token: float = 0.0  # these four beside the one above
  effort_per_call_token: float = 0.0
  effort_per_output_token: float = 0.0  # what tools answered
  effort_per_message_token: float = 0.0
  judge_weight: float = 0.2  # of the part 'judge', where there is a rubric
  kl_weight: float = 0.0
  monitors: MonitorConfig = MonitorConfig()  # of cheating


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
  """A rubric, and the model behind an endpoint that judges by it.

  The endpoint's key is in the environment variable `key_env`, never in here.
  """

  rubric: str = ''  # one criterion a line: NAME | WEIGHT | QUESTION; '': none
  endpoint: str = ''  # http(s)://HOST/v1, or 'scripted': questions are patterns
  model: str = ''  # as the endpoint names it
  key_env: str = 'OPENAI_API_KEY'
  cache: str = ''  # directory of verdicts; '' keeps them in memory
  timeout_s: float = 60.0  # of one call
  retries: int = 4
  backoff_s: float = 1.0  # before the first retry, doubled after each
  max_tokens: int = 512  # of an answer
  concurrent: int = 8  # calls at once
  characters: int = 40_000  # of the work that is judged


@dataclasses.dataclass(frozen=True)
class RLConfig:
  steps: int = 130
  groups_per_step: int = 8
  group_size: int = 16  # G
  staleness: int = 2  # S, versions
  loss: str = 'clip'
  clip_low: float = 0.2
  clip_high: float = 0.28
  loss_tokens: int = 2048  # N, a constant: tokens of a global step
  learning_rate: float = 5e-4
  warmup_steps: int = 3
  max_grad_norm: float = 1.0
  weight_decay: float = 0.0
  micro_batch: int = 16  # packed rows
  sequence_length: int = 256
  router_replay: bool = True
  plausibility: float = 0.0  # c; 0 replays always
  audit_every: int = 10  # steps
  max_kept: int = 0  # ids at most that a cut token was drawn among; 0: none is
  lineage: str = 'drop'  # groups of an abandoned lineage: 'drop' or 'keep'


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  sessions: int = 512  # before and after, per set
  during_sessions: int = 128
  every: int = 45  # steps; 0 never
  baselines: bool = True
  temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
  form: str = 'bf16'  # that trainer and engine compute from
  also: str = ''  # another form that is published beside it
  base_every: int = 25  # versions between full bases
  chain_ratio: float = 8.0  # bytes of deltas, over their base, before the next
  exchange: str = ''  # '' is file://<workdir>/exchange
  cache: str = ''  # directory in which a rollout keeps weights; '' does not


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  every: int = 20  # steps
  keep: int = 2


@dataclasses.dataclass(frozen=True)
class FleetConfig:
  cluster: str = 'local'
  lease_s: float = 20.0
  heartbeat_s: float = 2.0
  trainer_processes: int = 1


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
  """How the devices of a trainer, or of an engine, share the work.

  Which devices there are is no part of an experiment: the sizes divide what
  the process finds, or what `composer plan --topology` names. More than `data`
  needs `numerics.mode=fast`.
  """

  data: int = 0  # rows and FSDP; 0: what is left
  expert: int = 1  # experts of a layer, and rows
  context: int = 1  # the sequence, in 2 x context chunks
  rules: str = 'train'  # or 'folded': experts over expert x context
  chunk: int = 0  # tokens a device sends to experts at once; 0: all
  slack: float = 2.0  # buffers of that exchange, over the mean load
  rollout_expert: int = 1  # experts of a layer, in the engine


@dataclasses.dataclass(frozen=True)
class Experiment:
  name: str
  seed: int = 0
  tokenizer: str = ''  # tokenizer file or its directory; '' is the built-in
  template: str = ''  # how turns are written; '' is what the tokenizer tells
  init_from: str = ''  # a model to start from, as `composer convert` reads it
  model: ModelConfig = ModelConfig()
  numerics: NumericsConfig = NumericsConfig()
  midtrain: MidtrainConfig = MidtrainConfig()
  tasks: TasksConfig = TasksConfig()
  session: SessionConfig = SessionConfig()
  engine: EngineConfig = EngineConfig()
  machine: MachineConfig = MachineConfig()
  reward: RewardConfig = RewardConfig()
  judge: JudgeConfig = JudgeConfig()
  rl: RLConfig = RLConfig()
  eval: EvalConfig = EvalConfig()
  weights: WeightsConfig = WeightsConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  fleet: FleetConfig = FleetConfig()
  parallel: ParallelConfig = ParallelConfig()


# --- Reading -----------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Experiment:
  """The `Experiment` that the file's `get_config()` returns, not yet validated.

  Raises:
    ValueError: there is no such file, it does not import, it has no
      `get_config`, or that returns something else.
  """
  path = pathlib.Path(path)
  if path.suffix != '.py' or not path.is_file():
    near = difflib.get_close_matches(
      path.name, [other.name for other in path.parent.glob('*.py')], 1
    )
    hint = f'; did you mean {path.parent / near[0]}?' if near else ''
    fault = 'is not a Python file' if path.exists() else 'does not exist'
    raise ValueError(f'experiment {str(path)!r} {fault}{hint}')
  spec = importlib.util.spec_from_file_location(
    f'composer_experiment_{path.stem}', path
  )
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    raise ValueError(
      f'experiment {str(path)!r} does not import:'
      f' {type(error).__name__}: {error}'
    ) from error
  if not callable(getattr(module, 'get_config', None)):
    raise ValueError(
      f'experiment {str(path)!r} has no get_config(); define get_config() that'
      ' returns a composer.config.Experiment'
    )
  experiment = module.get_config()
  if not isinstance(experiment, Experiment):
    raise ValueError(
      f'get_config() of {str(path)!r} returned a {type(experiment).__name__};'
      ' return a composer.config.Experiment'
    )
  return experiment


def override(experiment: Experiment, settings: Sequence[str]) -> Experiment:
  """Applies 'path=value' strings in order, e.g. 'rl.steps=3'.

  Values are read by the type of the field: `true` or `false`, an integer, a
  finite number, or the text as it stands.

  Raises:
    ValueError: no '=', no such field (names the nearest), or a value of another
      type.
  """
  for setting in settings:
    path, separator, text = setting.partition('=')
    if not separator:
      raise ValueError(f'setting {setting!r} has no value; write path=value')
    path = path.strip()
    kind = _kind_of(path)
    experiment = _replace(experiment, path.split('.'), _parse(path, kind, text))
  return experiment


def fields() -> dict[str, type]:
  """Dotted path -> type of every field that can be set, in order."""
  return dict(_fields(Experiment, ''))


@functools.cache
def _fields(cls: type, prefix: str) -> tuple[tuple[str, type], ...]:
  found: list[tuple[str, type]] = []
  for name, kind in typing.get_type_hints(cls).items():
    if dataclasses.is_dataclass(kind):
      found.extend(_fields(kind, f'{prefix}{name}.'))
    else:
      found.append((prefix + name, kind))
  return tuple(found)


def _kind_of(path: str) -> type:
  known = fields()
  if path in known:
    return known[path]
  inside = [name for name in known if name.startswith(path + '.')]
  if path and inside:
    raise ValueError(
      f'{path} is a section, not a field; set one of its fields:'
      f' {", ".join(inside)}'
    )
  # The last part alone is what people remember: 'steps', 'rl.stalenes'.
  same = [name for name in known if name.rpartition('.')[2] == path]
  near = same or difflib.get_close_matches(path, known, 1, 0.5)
  if not near:
    last = {name.rpartition('.')[2]: name for name in known}
    names = difflib.get_close_matches(path.rpartition('.')[2], last, 1)
    near = [last[name] for name in names]
  hint = f'; did you mean {" or ".join(near)}?' if near else ''
  raise ValueError(f'there is no field {path!r}{hint}')


def _parse(path: str, kind: type, text: str) -> bool | int | float | str:
  if kind is str:
    return text
  word = text.strip()
  try:
    if kind is bool:
      return {'true': True, 'false': False}[word.lower()]
    value = kind(word)
  except (KeyError, ValueError):
    value = math.nan
  if not math.isfinite(value):
    raise ValueError(f'{path}={text!r} is not {_EXPECTED[kind]}')
  return value


_EXPECTED = {
  bool: 'true or false',
  int: 'a whole number',
  float: 'a finite number',
  str: 'text',
}


def _replace(record: Any, path: Sequence[str], value: Any) -> Any:
  if len(path) > 1:
    value = _replace(getattr(record, path[0]), path[1:], value)
  return dataclasses.replace(record, **{path[0]: value})


def _get(record: Any, path: str) -> Any:
  for name in path.split('.'):
    record = getattr(record, name)
  return record


# --- JSON --------------------------------------------------------------------


def to_json(experiment: Experiment) -> str:
  """Every field, as a person may read it; `from_json` gives an equal one."""
  return json.dumps(dataclasses.asdict(experiment), indent=2) + '\n'


def from_json(text: str) -> Experiment:
  """Reads what `to_json` wrote.

  Raises:
    ValueError: not JSON, or a field is unknown, missing or of another type.
  """
  try:
    values = json.loads(text)
  except ValueError as error:
    raise ValueError(f'the config is not JSON: {error}') from error
  return _from_values(Experiment, values, '')


def model_from_values(values: Any) -> ModelConfig:
  """A model from the fields that a file holds; absent ones take defaults.

  So a model that is stored stays readable when the class gets a new field,
  whose default is what was computed before.

  Raises:
    ValueError: no object, a field that is unknown or of another type, or a
      model that cannot be.
  """
  known = dataclasses.asdict(ModelConfig())
  if isinstance(values, dict):
    yarn = values.get('yarn', {})
    if isinstance(yarn, dict):
      yarn = {**known['yarn'], **yarn}
    values = {**known, **values, 'yarn': yarn}
  model = _from_values(ModelConfig, values, 'model.')
  checks.check_model(model)
  return model


def _from_values(cls: type, values: Any, prefix: str) -> Any:
  kinds = typing.get_type_hints(cls)
  if not isinstance(values, dict):
    raise ValueError(f'config section {prefix[:-1] or "(whole)"} is no object')
  unknown = [name for name in values if name not in kinds]
  if unknown:
    near = difflib.get_close_matches(unknown[0], kinds, 1)
    hint = f'; did you mean {prefix}{near[0]}?' if near else ''
    raise ValueError(f'there is no field {prefix + unknown[0]!r}{hint}')
  missing = [name for name in kinds if name not in values]
  if missing:
    raise ValueError(
      f'the config has no field {prefix + missing[0]!r}; it is of another'
      ' version of composer'
    )
  read = {}
  for name, kind in kinds.items():
    value = values[name]
    if dataclasses.is_dataclass(kind):
      value = _from_values(kind, value, f'{prefix}{name}.')
    else:
      value = _check_type(prefix + name, kind, value)
    read[name] = value
  return cls(**read)


def _check_type(path: str, kind: type, value: Any) -> Any:
  """The value; a whole number stands for a float, a bool for nothing else."""
  accepted = (int, float) if kind is float else (kind,)
  if isinstance(value, bool) and kind is not bool:
    accepted = ()
  if not isinstance(value, accepted):
    raise ValueError(f'{path}={value!r} is not {_EXPECTED[kind]}')
  if kind is float and not math.isfinite(value):
    raise ValueError(f'{path}={value!r} is not {_EXPECTED[kind]}')
  return value


# --- Validation --------------------------------------------------------------

CHOICES: dict[str, tuple[str, ...]] = {
  'model.router': ('sigmoid', 'softmax'),
  'numerics.mode': ('bitwise', 'aligned', 'fast'),
  'numerics.kernels': (
    '',
    'xla',
    'reference',
    'gpu',
    'tpu',
    'gpu_interpret',
    'tpu_interpret',
  ),
  'numerics.moe': ('dense', 'sorted'),
  'numerics.mla': ('absorbed', 'expanded', 'split'),
  'numerics.compute': ('float32', 'bfloat16'),
  'template': (
    '',
    'compact',
    'chatml',
    'qwen3',
    'qwen3-thinking',
    'smollm2',
    'kimi-k2',
    'kimi-k2.5',
  ),
  'engine.on_new_weights': ('continue', 'restart'),
  'engine.draft': ('', 'ngram', 'mtp'),
  'tasks.kind': ('repair', 'repository', 'harbor', 'migration'),
  **{
    f'reward.monitors.{field.name}': ('zero', 'penalise', 'report')
    for field in dataclasses.fields(MonitorConfig)
    if field.name != 'penalty'
  },
  'machine.driver': ('namespace', 'microvm', 'process'),
  'rl.loss': ('clip', 'none', 'tis', 'icepop', 'cispo', 'gspo', 'decoupled'),
  'rl.lineage': ('drop', 'keep'),
  'weights.form': ('bf16', 'nvfp4'),
  'weights.also': ('', 'bf16', 'nvfp4'),
  'parallel.rules': ('train', 'folded'),
}

# Numbers that may be 0; all others that are not shares must be above 0.
MAY_BE_ZERO = frozenset(
  {
    'seed',
    'model.dense_layers',
    'model.q_lora',
    'model.kv_lora',
    'model.nope_dim',
    'model.rope_dim',
    'model.value_dim',
    'model.shared_experts',
    'model.yarn.mscale_all_dim',
    'model.mtp_layers',
    'midtrain.steps',
    'midtrain.mtp_weight',
    'midtrain.mtp_start',
    'midtrain.warmup_steps',
    'midtrain.weight_decay',
    'midtrain.demonstrations',
    'midtrain.router_bias_rate',
    'engine.run_ahead',
    'tasks.seed',
    'session.max_summaries',
    'session.max_tokens',
    'machine.warm',
    'reward.effort_weight',
    'reward.effort_k',
    'reward.effort_q',
    'reward.effort_per_turn',
    'reward.effort_per_call',
    'reward.effort_per_token',
    'reward.effort_per_thinking_token',
    'reward.effort_per_call_token',
    'reward.effort_per_output_token',
    'reward.effort_per_message_token',
    'reward.kl_weight',
    'reward.judge_weight',
    'judge.retries',
    'rl.max_kept',
    'rl.steps',
    'rl.staleness',
    'rl.warmup_steps',
    'rl.weight_decay',
    'rl.audit_every',
    'eval.during_sessions',
    'eval.every',
    'parallel.data',
    'parallel.chunk',
  }
)

GREEDY = 1e-6  # temperatures below this take the argmax; all but 0 are refused

# Between 0 and 1, both included.
SHARES = frozenset(
  {
    'midtrain.python_share',
    'midtrain.demo_right_edit',
    'midtrain.demo_test',
    'midtrain.demo_give_up',
    'tasks.held_out_bug_share',
    'tasks.held_out_function_share',
    'reward.monitors.penalty',
    'rl.clip_low',
    'rl.plausibility',
  }
)


def validate(experiment: Experiment) -> Experiment:
  """Returns the experiment if it can work.

  Raises:
    ValueError: the first fault found: the field, its value and the remedy.
  """
  for path, kind in fields().items():
    value = _check_type(path, kind, _get(experiment, path))
    if path in CHOICES:
      _check_choice(path, value)
    elif kind in (int, float):
      _check_range(path, value)
  checks.check_names(experiment)
  checks.check_tasks(experiment)
  checks.check_tool_servers(experiment.session)
  checks.check_judge(experiment.judge)
  checks.check_model(experiment.model)
  checks.check_numerics(experiment.numerics)
  checks.check_parallel(experiment)
  checks.check_rl(experiment)
  checks.check_lengths(experiment)
  checks.check_rows(experiment)
  checks.check_drafts(experiment)
  return experiment


def _check_choice(path: str, value: str) -> None:
  known = CHOICES[path]
  near = difflib.get_close_matches(value, known, 1)
  _require(
    value in known,
    f'{path}={value!r} is not known',
    (f'did you mean {near[0]!r}? ' if near else '')
    + f'choose one of {", ".join(known)}',
  )


def _check_range(path: str, value: float) -> None:
  if path in SHARES:
    _require(0 <= value <= 1, f'{path}={value}', 'it lies between 0 and 1')
  elif path in MAY_BE_ZERO:
    _require(value >= 0, f'{path}={value} is negative', 'use 0 or more')
  else:
    _require(value > 0, f'{path}={value} is not positive', 'use more than 0')
  if path in ('session.temperature', 'eval.temperature'):
    _require(
      value >= GREEDY,
      f'{path}={value} is so low that nothing would be drawn',
      f'use {GREEDY:g} or more',
    )
