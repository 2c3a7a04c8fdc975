"""Whether an experiment fits a pod, and what bounds it: `composer plan`.

The experiment's real functions (mid-training step; gradient and update of
reinforcement; the engine's step) are compiled ahead of time for a named
topology with libtpu, which needs no TPU. Memory is what the compiler allots;
FLOPs and bytes of collectives are counted by `costs`, since a compiler counts
the body of a loop once. The bounds that they imply are of the chip's published
peaks: no step is faster than the largest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import os
import re
import resource
import time
from typing import Any

# Before jax: another process may hold libtpu, and there is no TPU to ask.
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from composer import config as config_lib
from composer import costs
from composer import mesh as mesh_lib
from composer import midtrain
from composer import params as params_lib
from composer.inference import batches
from composer.inference import drafts
from composer.inference import programs as programs_lib
from composer.inference import speculate
from composer.model import transformer
from composer.rl import pack
from composer.rl import trainer

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published peaks of one chip (cloud.google.com/tpu/docs, by generation)."""

  hbm: float  # GiB
  flops: float  # bf16, a second
  hbm_bytes: float  # a second
  link_bytes: float  # a second, over all links of the chip together


CHIPS = {
  'v4': Chip(32, 275e12, 1.228e12, 300e9),
  'v5e': Chip(16, 197e12, 0.819e12, 200e9),
  'v5p': Chip(95, 459e12, 2.765e12, 600e9),
  'v6e': Chip(32, 918e12, 1.640e12, 448e9),
  'tpu7x': Chip(192, 2307e12, 7.380e12, 1200e9),
}


@dataclasses.dataclass(frozen=True)
class Program:
  """One jitted function of the experiment, and what else lies beside it."""

  name: str
  tokens: int  # that one call is of
  function: Any
  args: tuple[Any, ...]
  mesh_shape: dict[str, int]
  beside: float = 0.0  # bytes a chip that the function does not touch
  kernel_load: float = 1.0  # see `costs.count`


@dataclasses.dataclass(frozen=True)
class Planned:
  """What one program needs of a chip. Bytes, FLOPs and seconds a call."""

  name: str
  fits: bool
  memory: float | None  # bytes; None where the compiler gave no figure
  shortfall: float
  arguments: float
  temporaries: float
  beside: float
  flops: float
  wire: dict[str, float]  # collective over axes -> bytes sent
  bounds: dict[str, float]  # 'compute', 'network', 'memory' -> seconds
  binds: str
  tokens: int
  compile_s: float
  notes: tuple[str, ...] = ()


# --- The topology -------------------------------------------------------------


def chip_of(topology: str) -> Chip:
  """The chip that a topology's name begins with.

  Raises:
    ValueError: no such generation is known.
  """
  kind = topology.partition(':')[0]
  if kind not in CHIPS:
    raise ValueError(
      f'--topology={topology!r}: there is no {kind!r}; write a generation and'
      f' its shape, as v5p:8x8x16; known: {", ".join(CHIPS)}'
    )
  return CHIPS[kind]


def devices_of(topology: str) -> list[Any]:
  """The devices of a topology, by libtpu.

  Raises:
    ValueError: libtpu is not installed, or does not know the topology.
  """
  chip_of(topology)
  try:
    import libtpu  # noqa: F401
  except ImportError as error:
    raise ValueError(
      "composer plan compiles with libtpu; pip install -e '.[tpu]'"
    ) from error
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=topology)
  except Exception as error:
    raise ValueError(
      f'--topology={topology!r} is unknown to libtpu: {_first_line(error)}'
    ) from error
  return list(found.devices)


def _first_line(error: BaseException) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# --- The programs of an experiment --------------------------------------------


def programs(
  experiment: config_lib.Experiment, devices: list[Any]
) -> Iterator[Program]:
  """What the experiment runs on the pod, at abstract arguments.

  Raises:
    ValueError: a mesh that does not divide the devices, the batch or the
      experts; says which, and the sizes that do.
  """
  parallel = experiment.parallel
  shape = mesh_lib.mesh_shape(len(devices), parallel)
  mesh = mesh_lib.make_mesh(_arranged(devices, shape), parallel)
  if experiment.midtrain.steps:
    yield _midtraining(experiment, mesh)
  if experiment.rl.steps:
    yield from _reinforcement(experiment, mesh)
    yield _decoding(experiment, devices)


def _arranged(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
  """Devices so that neighbours on a mesh axis are neighbours in the torus."""
  from jax.experimental import mesh_utils

  try:
    return mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
  except (NotImplementedError, ValueError, AssertionError):
    return np.asarray(devices).reshape(shape)  # no better order is known


def _abstract(tree: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


def _per_chip(tree: Any) -> float:
  """Bytes of a tree of sharded abstract arrays on one device."""
  return sum(
    float(np.prod(x.sharding.shard_shape(x.shape), dtype=float))
    * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _state(init: Callable[..., Any], experiment: Any, mesh: Any) -> Any:
  """The abstract train state, sharded as training shards it."""
  spec = transformer.spec(experiment.model)
  rules = mesh_lib.RULES[experiment.parallel.rules]
  state = jax.eval_shape(init, params_lib.abstract(spec))
  by_name = mesh_lib.shardings(spec, rules, mesh)
  return _abstract(state, mesh_lib.like_params(state, spec, by_name, mesh))


def _load(experiment: config_lib.Experiment) -> float:
  return 1.0 / experiment.parallel.slack if experiment.parallel.slack else 1.0


def _midtraining(experiment: config_lib.Experiment, mesh: Any) -> Program:
  stage, model = experiment.midtrain, experiment.model
  rows, length = stage.batch_size, stage.sequence_length
  layout = mesh_lib.train_layout(experiment.numerics, mesh, experiment.parallel)
  if layout:
    mesh_lib.check_experts(layout, model.experts)
  mesh_lib.check_batch(mesh, 'midtrain.batch_size', rows, length)
  step = midtrain.make_train_step(model, experiment.numerics, stage, layout)
  state = _state(
    lambda p: midtrain.init_state(p, stage, jax.random.key(0)),
    experiment,
    mesh,
  )
  over = NamedSharding(mesh, PartitionSpec(mesh_lib.ROWS))
  kinds = {
    'tokens': jnp.int32,
    'segment_ids': jnp.int32,
    'positions': jnp.int32,
    'loss_mask': jnp.bool_,
  }
  batch = {
    name: jax.ShapeDtypeStruct((rows, length), kind, sharding=over)
    for name, kind in kinds.items()
  }
  return Program(
    'mid-training step',
    rows * length,
    step,
    (state, batch),
    dict(mesh.shape),
    kernel_load=_load(experiment),
  )


def _reinforcement(
  experiment: config_lib.Experiment, mesh: Any
) -> Iterator[Program]:
  rl, model = experiment.rl, experiment.model
  rows, length = rl.micro_batch, rl.sequence_length
  step = trainer.make_step(
    model, experiment.numerics, rl, mesh, experiment.parallel
  )
  if step.layout:
    mesh_lib.check_experts(step.layout, model.experts)
  mesh_lib.check_batch(mesh, 'rl.micro_batch', rows, length)
  state = _state(
    lambda p: trainer.init_state(p, rl, 0, jax.random.key(0)), experiment, mesh
  )
  over = NamedSharding(mesh, PartitionSpec(mesh_lib.ROWS))
  padding = pack.empty_batch(
    (1, 1),
    transformer.moe_layers(model),
    model.experts_per_token,
    rl.max_kept,
  )
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (rows, length, *x.shape[2:]), x.dtype, sharding=over
    ),
    padding,
  )
  # Moments, and the sum of the gradients so far, wait while one is computed.
  beside = _per_chip(state.opt_state) + _per_chip(state.params)
  yield Program(
    'RL gradient of a micro-batch',
    rows * length,
    step.gradient,
    (state.params, batch),
    dict(mesh.shape),
    beside,
    _load(experiment),
  )
  yield Program(
    'RL update', 0, step.update, (state, state.params), dict(mesh.shape)
  )


def _decoding(experiment: config_lib.Experiment, devices: list[Any]) -> Program:
  """The engine's step on the mesh of one replica: its rows, pages and experts."""
  model, numerics = experiment.model, experiment.numerics
  engine, parallel = experiment.engine, experiment.parallel
  held = parallel.rollout_expert
  mesh = mesh_lib.make_mesh(
    _arranged(devices[:held], (1, held, 1)), parallel, expert=held
  )
  layout = mesh_lib.layout(mesh, parallel, 'rollout') if held > 1 else None
  if layout:
    mesh_lib.check_experts(layout, model.experts)
  drafting = engine.draft == drafts.ON_DEVICE
  if drafting and layout:
    raise ValueError(
      f'engine.draft={engine.draft!r} with parallel.rollout_expert={held}: the'
      ' layer that drafts runs where a chip holds the experts whole; set'
      ' parallel.rollout_expert=1, or draft by ngram'
    )
  spec = transformer.spec(model)
  parts = mesh_lib.shardings(spec, mesh_lib.ROLLOUT_RULES, mesh)
  published = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.published),
    spec,
    is_leaf=params_lib.is_spec,
  )
  params = _abstract(published, parts)
  rows = NamedSharding(mesh, PartitionSpec('expert'))
  cache = jax.eval_shape(
    lambda: speculate.init_cache(
      model, numerics, engine.pages * held, engine.draft
    )
  )
  cache = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), cache
  )

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # not this device's
    size = programs_lib.step_sizes(numerics, engine)[-1]
    maker = batches.Maker(model, numerics, engine)
    batch = maker.blank(size, maker.tables.shape[1], False, False)
  last = np.zeros(engine.sequences + 1, np.int32)
  # Of every chip, what the engine would send to one.
  last, batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (held * x.shape[0], *x.shape[1:]), x.dtype, sharding=rows
    ),
    (last, batch),
  )

  def local(params, cache, last, batch):
    if drafting:
      first = model, numerics, engine.draft_tokens
      return speculate.mixed.__wrapped__(*first, params, cache, last, *batch)
    return programs_lib.mixed.__wrapped__(
      model, numerics, params, cache, last, *batch, layout=layout
    )

  if layout:
    over = PartitionSpec('expert')
    local = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(jax.tree.map(lambda s: s.spec, parts), over, over, over),
      out_specs=(PartitionSpec(None, 'expert'), over, over),
      check_vma=False,
    )
  return Program(
    f'decode step, {held} chips a replica',
    held * size,
    jax.jit(local, donate_argnums=(1, 2)),
    (params, cache, last, batch),
    dict(mesh.shape),
    kernel_load=_load(experiment),
  )


# --- Compiling, and what follows from it ---------------------------------------


def plan_one(program: Program, chip: Chip) -> Planned:
  """Traces, counts, lowers and compiles one program."""
  started = time.monotonic()
  traced = program.function.trace(*program.args)
  counted = costs.count(traced.jaxpr, program.mesh_shape, program.kernel_load)
  notes = tuple(f'not counted: {what}' for what in sorted(counted.unknown))
  arguments = _per_chip(program.args)
  try:
    compiled = traced.lower(lowering_platforms=('tpu',)).compile()
  except jax.errors.JaxRuntimeError as error:
    need = _memory_of_error(str(error), arguments)
    if need is None:
      raise
    memory, temporaries = need, need - arguments
  else:
    sizes = compiled.memory_analysis()
    temporaries = sizes.temp_size_in_bytes
    memory = (
      sizes.argument_size_in_bytes
      + sizes.output_size_in_bytes
      - sizes.alias_size_in_bytes
      + temporaries
      + sizes.generated_code_size_in_bytes
    )
  total = memory + program.beside
  wire = {
    f'{name} over {" x ".join(axes)}': size
    for (name, axes), size in sorted(counted.wire.items())
  }
  bounds = {
    'compute': counted.flops / chip.flops,
    'network': sum(wire.values()) / chip.link_bytes,
    # Everything that goes in is read at least once.
    'memory': arguments / chip.hbm_bytes,
  }
  return Planned(
    name=program.name,
    fits=total <= chip.hbm * GIB,
    memory=total,
    shortfall=max(total - chip.hbm * GIB, 0.0),
    arguments=arguments,
    temporaries=temporaries,
    beside=program.beside,
    flops=counted.flops,
    wire=wire,
    bounds=bounds,
    binds=max(bounds, key=bounds.get),
    tokens=program.tokens,
    compile_s=time.monotonic() - started,
    notes=notes,
  )


def _memory_of_error(text: str, arguments: float) -> float | None:
  """Bytes that a program would need, of the compiler's refusal."""
  number = r'([0-9.]+)([KMGT])'
  for pattern, beside in (
    (rf'[Uu]sed {number} of [0-9.]+[KMGT] hbm', 0.0),
    (rf'required for HLO temporaries \({number}\)', arguments),
  ):
    found = re.search(pattern, text)
    if found:
      power = 'KMGT'.index(found[2]) + 1
      return float(found[1]) * 1024**power + beside
  return None


def advice(name: str, experiment: config_lib.Experiment) -> str:
  """What to change where a program does not fit."""
  parallel = experiment.parallel
  if name.startswith('decode'):
    return (
      f'raise parallel.rollout_expert={parallel.rollout_expert}, or lower'
      f' engine.pages={experiment.engine.pages} or engine.rows='
      f'{experiment.engine.rows}'
    )
  part = 'midtrain' if name.startswith('mid') else 'rl'
  return (
    f'raise parallel.context={parallel.context} or parallel.expert='
    f'{parallel.expert}, lower {part}.sequence_length, set parallel.chunk='
    f'{parallel.chunk} to a smaller number of tokens, or take a larger'
    ' topology'
  )


def plan(
  experiment: config_lib.Experiment,
  topology: str,
  report: Callable[[str], None] = lambda line: None,
) -> list[Planned]:
  """Plans every program of an experiment on a topology.

  Raises:
    ValueError: see `devices_of` and `programs`.
  """
  chip, devices = chip_of(topology), devices_of(topology)
  found = []
  for program in programs(experiment, devices):
    report(f'compiling: {program.name}')
    found.append(plan_one(program, chip))
  if not found:
    raise ValueError(
      'midtrain.steps and rl.steps are both 0; there is nothing to plan'
    )
  return found


# --- Telling -------------------------------------------------------------------


def table(
  experiment: config_lib.Experiment, topology: str, found: list[Planned]
) -> str:
  """The plan as text."""
  chip = chip_of(topology)
  lines = []
  for p in found:
    lines.append(f'{p.name}')
    verdict = 'fits' if p.fits else f'SHORT BY {p.shortfall / GIB:.1f} GiB'
    beside = f', beside it {p.beside / GIB:.1f}' if p.beside else ''
    lines.append(
      f'  memory a chip   {p.memory / GIB:.1f} of {chip.hbm:.0f} GiB: {verdict}'
      f' (arguments {p.arguments / GIB:.1f}, temporaries'
      f' {p.temporaries / GIB:.1f}{beside})'
    )
    lines.append(f'  FLOPs a chip    {p.flops:.3e}')
    lines.extend(_wire_lines(p.wire))
    bounds = ', '.join(f'{k} {_seconds(v)}' for k, v in p.bounds.items())
    lines.append(f'  no faster than  {bounds}: {p.binds} binds')
    if p.tokens:
      rate = p.tokens / max(max(p.bounds.values()), 1e-12)
      lines.append(
        f'  tokens          {p.tokens:,} a call, at most {rate:,.0f} a second'
      )
    lines.extend(f'  {note}' for note in p.notes)
    if not p.fits:
      lines.append(f'  to change       {advice(p.name, experiment)}')
    lines.append(f'  compiled in     {p.compile_s:.0f} s')
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  lines.append(f'peak memory of this process {peak:.1f} GiB')
  return '\n'.join(lines)


def _wire_lines(wire: dict[str, float]) -> list[str]:
  """Collectives from the largest on; those under a hundredth in one line."""
  large = {k: v for k, v in wire.items() if v >= 0.01 * sum(wire.values())}
  ordered = sorted(large, key=large.get, reverse=True)
  lines = [f'  {name:48} {wire[name] / 1e9:9.3f} GB' for name in ordered]
  if len(large) < len(wire):
    rest = sum(wire.values()) - sum(large.values())
    name = f'{len(wire) - len(large)} others'
    lines.append(f'  {name:48} {rest / 1e9:9.3f} GB')
  return lines


def _seconds(value: float) -> str:
  return f'{value:.2f} s' if value >= 0.1 else f'{1e3 * value:.2f} ms'


def to_json(topology: str, found: list[Planned]) -> dict[str, Any]:
  """The plan as plain values: bytes, FLOPs and seconds a chip and call."""
  return {
    'topology': topology,
    'chip': dataclasses.asdict(chip_of(topology)),
    'programs': [dataclasses.asdict(p) for p in found],
  }
