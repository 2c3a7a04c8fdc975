"""Every operation at real shapes: right, then how fast, ours and theirs.

For each named shape fresh random data is drawn on the device, ours is checked
against float32 of the highest precision, and then ours, XLA's and, where they
can be imported, others' are timed on that data in one process. Times are
medians, in order of the table, with the launches that a call needs; of a call of
less than 0.2 ms, theirs too, the kernels' own on the device.

On a machine without an accelerator the shapes are cut down, and only the plain
implementations run: that shows that the benchmark works, and no speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_shapes
from pallas_kernels import bench_time
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import norm
from pallas_kernels import token_logprob
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.delta import shapes as delta_shapes
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.matmul import shapes as matmul_shapes
from pallas_kernels.norm import shapes as norm_shapes
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.quantize import shapes as quantize_shapes
from pallas_kernels.route import shapes as route_shapes
from pallas_kernels.token_logprob import shapes as logprob_shapes

TOLERANCE = 5e-3  # relative, of the norm; bfloat16 rounds to 2^-9


@dataclasses.dataclass(frozen=True)
class Row:
  """One measurement.

  Attributes:
    operation: with its pass, e.g. 'grouped_matmul dx'.
    shape: name.
    who: 'ours', 'xla', 'torch', 'jax mosaic', 'tokamax', 'tuned'.
    seconds: median of a call; None where it failed.
    flops: of a call, or None.
    bytes: that a call has to move at least, or None.
    error: relative error of ours.
    differing: elements of ours that differ at another number of rows, order and
      tiling.
    memory: bytes of temporaries, where that is the point.
    note: why there is no time.
  """

  operation: str
  shape: str
  who: str
  seconds: float | None = None
  flops: int | None = None
  bytes: int | None = None
  error: float | None = None
  differing: int | None = None
  memory: int | None = None
  note: str = ''


# --- Measuring ---------------------------------------------------------------


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
  """Of a call; of its kernels alone where it is short and they can be seen."""
  took = bench_time.seconds(call, wait)
  if dispatch.platform() == 'gpu' and took < bench_time.SHORT:
    return bench_time.device_seconds(call, wait) or took
  return took


def _timed(row: Row, function: Callable[..., Any], *arguments: Any) -> Row:
  """The row with its time, or with the reason why there is none."""
  try:
    ready = jax.jit(function)
    took = seconds(lambda: ready(*arguments), jax.block_until_ready)
    return dataclasses.replace(row, seconds=took)
  except Exception as error:  # one shape must not end the benchmark
    note = f'{type(error).__name__}: {" ".join(str(error).split())[:120]}'
    return dataclasses.replace(row, note=note)


def _memory(function: Callable[..., Any], *arguments: Any) -> int | None:
  try:
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes
  except Exception:  # not every backend says
    return None


def relative(got: jax.Array, want: jax.Array) -> float:
  got, want = got.astype(jnp.float32), want.astype(jnp.float32)
  return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def exact(x: jax.Array, w: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32), w.astype(jnp.float32)
  return jnp.dot(*wide, precision='highest')


def ceilings() -> dict[str, float]:
  """What the device does at most: copy, bytes/s; bf16 matmul, FLOP/s."""
  large = dispatch.platform() != 'cpu'
  size = 2**30 if large else 2**24
  n = 8192 if large else 512
  words = jnp.arange(size, dtype=jnp.uint16)
  x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
  copy = jax.jit(lambda words: words ^ jnp.uint16(1))
  product = jax.jit(lambda x: x @ x)
  return {
    'copy_bytes_per_s': 4
    * size
    / seconds(lambda: copy(words), jax.block_until_ready),
    'matmul_flops_per_s': 2
    * n**3
    / seconds(lambda: product(x), jax.block_until_ready),
  }


def _torch() -> Any | None:
  """PyTorch where it is there and sees the GPU, else None."""
  if dispatch.platform() != 'gpu' or importlib.util.find_spec('torch') is None:
    return None
  torch = importlib.import_module('torch')
  return torch if torch.cuda.is_available() else None


def _torch_timed(row: Row, torch: Any, call: Callable[[], Any]) -> Row:
  try:
    took = seconds(call, lambda _: torch.cuda.synchronize())
    return dataclasses.replace(row, seconds=took)
  except Exception as error:  # as above
    return dataclasses.replace(
      row, note=f'{type(error).__name__}: {error}'[:120]
    )


# --- Operations --------------------------------------------------------------


def _grouped(shape: grouped_shapes.Shape) -> Iterator[Row]:
  from pallas_kernels import bench_others  # which measures with this module

  sizes = shape.sizes()
  keys = jax.random.split(jax.random.key(1), 3)
  draw = lambda key, size: jax.random.normal(key, size, jnp.bfloat16)  # noqa: E731
  x, dy = (
    draw(keys[0], (shape.rows, shape.k)),
    draw(keys[2], (shape.rows, shape.n)),
  )
  w = draw(keys[1], (shape.groups, shape.k, shape.n)) * jnp.bfloat16(0.02)
  group_sizes = jnp.asarray(sizes)
  active = int((sizes > 0).sum()) * shape.k * shape.n * 2
  size = dict(flops=shape.flops, bytes=active)
  ends = np.cumsum(sizes)
  some = int(np.argmax(sizes))
  rows = slice(int(ends[some] - sizes[some]), int(ends[some]))

  run = jax.jit(grouped_matmul.grouped_matmul)
  y = run(x, w, group_sizes)
  first = Row('grouped_matmul', shape.name, 'ours', **size)
  first = dataclasses.replace(
    first,
    error=relative(y[rows], exact(x[rows], w[some])),
    differing=_differing(x, w, sizes, y),
  )
  yield _timed(first, grouped_matmul.grouped_matmul, x, w, group_sizes)
  theirs = Row('grouped_matmul', shape.name, 'xla', **size)
  if (
    shape.rows * shape.groups * shape.k < 5e9 and shape.groups <= 64
  ):  # it expands x for each group
    yield _timed(theirs, jax.lax.ragged_dot, x, w, group_sizes)
  yield from _stock(
    dataclasses.replace(theirs, who='jax mosaic'), x, w, group_sizes
  )
  yield from bench_others.grouped(
    dataclasses.replace(theirs, who='tokamax'), x, w, group_sizes
  )
  training = shape in grouped_shapes.TRAINING
  if training:
    yield from _grouped_gradients(
      shape, x, w, dy, group_sizes, some, rows, size
    )
  torch = _torch()
  if torch is not None:
    xt, wt, dyt = (torch.from_dlpack(array) for array in (x, w, dy))
    offsets = torch.tensor(ends, dtype=torch.int32, device='cuda')
    calls = {'grouped_matmul': lambda: torch._grouped_mm(xt, wt, offs=offsets)}
    if training:
      calls['grouped_matmul dx'] = lambda: torch._grouped_mm(
        dyt, wt.transpose(1, 2), offs=offsets
      )
      calls['grouped_matmul dw'] = lambda: torch._grouped_mm(
        xt.t(), dyt, offs=offsets
      )
    for operation, call in calls.items():
      yield _torch_timed(
        Row(operation, shape.name, 'torch', **size), torch, call
      )


def _grouped_gradients(shape, x, w, dy, group_sizes, some, rows, size):
  def dx(dy, w, group_sizes):
    return grouped_matmul.grouped_matmul(dy, w, group_sizes, transpose=True)

  found = jax.jit(dx)(dy, w, group_sizes)
  row = Row('grouped_matmul dx', shape.name, 'ours', **size)
  error = relative(found[rows], exact(dy[rows], w[some].T))
  yield _timed(dataclasses.replace(row, error=error), dx, dy, w, group_sizes)
  found = jax.jit(grouped_matmul.weight_gradient)(x, dy, group_sizes)
  row = Row('grouped_matmul dw', shape.name, 'ours', **size)
  error = relative(found[some], exact(x[rows].T, dy[rows]))
  yield _timed(
    dataclasses.replace(row, error=error),
    grouped_matmul.weight_gradient,
    x,
    dy,
    group_sizes,
  )


def _differing(x, w, sizes, y) -> int | None:
  """Elements with other bits: some rows, in another order, with other tiles."""
  if dispatch.platform() != 'gpu':
    return None
  from pallas_kernels.grouped_matmul import gpu

  rng = np.random.default_rng(2)
  owner = np.repeat(np.arange(len(sizes)), sizes)
  differ = 0
  for rows, tiles in (
    (1, gpu.Tiles()),
    (8, gpu.Tiles(consumers=1, columns=64, depth=128)),
    (len(owner) // 3 + 1, gpu.Tiles(rows=128, columns=128, stages=3, slots=1)),
    (len(owner), gpu.Tiles(stages=3, panel=3)),
  ):
    kept = rng.permutation(len(owner))[:rows]
    kept = kept[np.argsort(owner[kept], kind='stable')]
    counts = np.bincount(owner[kept], minlength=len(sizes)).astype(np.int32)
    other = grouped_matmul.grouped_matmul(
      x[kept], w, jnp.asarray(counts), tiles=tiles
    )
    differ += int(jnp.sum(other != y[kept]))
  return differ


def _stock(row: Row, x, w, group_sizes) -> Iterator[Row]:
  """The kernel that comes with jax, at the best of a few tilings."""
  if dispatch.platform() != 'gpu' or w.shape[0] > 64:  # unrolls over groups
    return
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

  found = []
  for block in (64, 128):

    def run(x, w, group_sizes, block=block):
      return ragged_dot_mgpu.ragged_dot(
        x,
        w,
        group_sizes=group_sizes,
        block_m=block,
        block_n=128,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=8,
      )

    found.append(_timed(row, run, x, w, group_sizes))
  timed = [one for one in found if one.seconds is not None]
  yield min(timed, key=lambda one: one.seconds) if timed else found[0]


def _matmul(shape: matmul_shapes.Shape) -> Iterator[Row]:
  keys = jax.random.split(jax.random.key(1), 2)
  x = jax.random.normal(keys[0], (shape.rows, shape.k), jnp.bfloat16)
  w = jax.random.normal(keys[1], (shape.k, shape.n), jnp.bfloat16)
  size = dict(flops=shape.flops, bytes=2 * shape.k * shape.n)
  y = jax.jit(matmul.matmul)(x, w)
  some = slice(0, min(512, shape.rows))
  row = Row('matmul', shape.name, 'ours', **size)
  row = dataclasses.replace(
    row,
    error=relative(y[some], exact(x[some], w)),
    differing=int(jnp.sum(matmul.matmul(x[some][:7], w) != y[:7])),
  )
  yield _timed(row, matmul.matmul, x, w)
  theirs = Row('matmul', shape.name, 'xla', **size)
  yield _timed(theirs, lambda x, w: x @ w, x, w)
  torch = _torch()
  if torch is not None:
    xt, wt = torch.from_dlpack(x), torch.from_dlpack(w)
    theirs = dataclasses.replace(theirs, who='torch')
    yield _torch_timed(theirs, torch, lambda: xt @ wt)


def _naive_logprob(hidden, unembed, tokens, temperatures):
  """What a trainer writes first: it holds the logits."""
  z = jnp.dot(hidden, unembed, preferred_element_type=jnp.float32)
  log_p = jax.nn.log_softmax(z / temperatures[:, None])
  chosen = jnp.take_along_axis(log_p, tokens[:, None], 1)[:, 0]
  return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


def _token_logprob(shape: logprob_shapes.Shape) -> Iterator[Row]:
  t, d, v = shape.tokens, shape.depth, shape.vocabulary
  keys = jax.random.split(jax.random.key(1), 4)
  hidden = jax.random.normal(keys[0], (t, d), jnp.bfloat16)
  unembed = jax.random.normal(keys[1], (d, v), jnp.bfloat16)
  unembed = unembed * jnp.bfloat16(2 / d**0.5)
  tokens = jax.random.randint(keys[2], (t,), 0, v)
  temperatures = jax.random.uniform(keys[3], (t,), minval=0.5, maxval=1.5)
  ours, theirs = token_logprob.token_logprob, _naive_logprob
  arguments = hidden, unembed, tokens, temperatures
  size = dict(flops=shape.flops, bytes=2 * d * v)
  found = jnp.stack(jax.jit(ours)(*arguments))
  some = slice(0, min(t, 64))
  z = exact(hidden[some], unembed) / temperatures[some, None]
  want = jax.nn.log_softmax(z)
  chosen = jnp.take_along_axis(want, tokens[some, None], 1)[:, 0]
  few = jnp.stack(
    ours(
      *(array[:7] if array is not unembed else unembed for array in arguments)
    )
  )
  row = Row(
    'token_logprob',
    shape.name,
    'ours',
    error=relative(found[0, some], chosen),
    differing=int(jnp.sum(few != found[:, :7])),
    memory=_memory(ours, *arguments),
    **size,
  )
  yield _timed(row, ours, *arguments)
  row = Row(
    'token_logprob',
    shape.name,
    'xla',
    memory=_memory(theirs, *arguments),
    **size,
  )
  yield _timed(row, theirs, *arguments)
  if shape not in logprob_shapes.TRAINING:
    return
  size = dict(flops=3 * shape.flops)
  for who, function in (('ours', ours), ('xla', theirs)):

    def both(hidden, unembed, function=function):
      logprob, entropy = function(hidden, unembed, tokens, temperatures)
      return jnp.sum(logprob) + 0.1 * jnp.sum(entropy)

    grad = jax.grad(both, (0, 1))
    row = Row('token_logprob + gradient', shape.name, who, **size)
    row = dataclasses.replace(row, memory=_memory(grad, hidden, unembed))
    yield _timed(row, grad, hidden, unembed)


def _norm(shape: norm_shapes.Shape) -> Iterator[Row]:
  x = jax.random.normal(
    jax.random.key(1), (shape.rows, shape.depth), jnp.bfloat16
  )
  scale = jnp.ones((shape.depth,), jnp.bfloat16)
  size = dict(bytes=4 * shape.rows * shape.depth)
  y = jax.jit(norm.rms_norm)(x, scale)
  want = norm.reference.rms_norm(x.astype(jnp.float32), scale, 1e-6)
  row = Row(
    'norm',
    shape.name,
    'ours',
    error=relative(y, want),
    differing=int(jnp.sum(norm.rms_norm(x[:7], scale) != y[:7])),
    **size,
  )
  yield _timed(row, norm.rms_norm, x, scale)

  def theirs(x, scale):
    return norm.reference.rms_norm(x, scale, 1e-6)

  yield _timed(Row('norm', shape.name, 'xla', **size), theirs, x, scale)


def _attention(shape: attention_shapes.Shape) -> Iterator[Row]:
  from pallas_kernels import bench_attention  # which measures with this module

  yield from bench_attention.packed(shape)


def _paged_attention(shape: paged_shapes.Shape) -> Iterator[Row]:
  from pallas_kernels import bench_attention

  yield from bench_attention.paged(shape)


def _words(name: str) -> Callable[[Any], Iterator[Row]]:
  return _of('bench_words', name)


def _of(module: str, name: str) -> Callable[[Any], Iterator[Row]]:
  """Rows of a module that measures with this one."""

  def rows(shape: Any) -> Iterator[Row]:
    found = importlib.import_module(f'pallas_kernels.{module}')
    yield from getattr(found, name)(shape)

  return rows


CASES = {
  'grouped_matmul': (
    _grouped,
    grouped_shapes.TRAINING + grouped_shapes.DECODING,
  ),
  'matmul': (_matmul, matmul_shapes.TRAINING + matmul_shapes.DECODING),
  'token_logprob': (
    _token_logprob,
    logprob_shapes.TRAINING + logprob_shapes.DECODING,
  ),
  'norm': (_norm, norm_shapes.TRAINING),
  'route': (_words('routing'), route_shapes.TRAINING + route_shapes.DECODING),
  'delta': (_words('changes'), delta_shapes.TRAINING),
  'quantize': (_words('rounding'), quantize_shapes.TRAINING),
  'packed weights': (
    _words('packed_weights'),
    grouped_shapes.DECODING[:3],
  ),
  'attention': (_attention, attention_shapes.TRAINING),
  'paged_attention': (
    _paged_attention,
    paged_shapes.DECODING + paged_shapes.PREFILLING,
  ),
  'moe layer': (_of('bench_moe', 'layer'), bench_shapes.LAYERS),
  'invariance': (_of('bench_invariance', 'rows'), bench_shapes.INVARIANCE),
}


def small(shape: Any) -> Any:
  """The shape cut down to what a CPU does in a moment."""
  most = dict(rows=64, tokens=64, k=128, n=128, depth=128, vocabulary=512)
  most |= dict(groups=4, active=2, words=4096)
  if isinstance(shape, attention_shapes.Shape | paged_shapes.Shape):
    most = dict(rows=2, tokens=64, heads=4, groups=2, key=64, width=64)
    most |= dict(block=16, sequences=2, queries=4, shared=True)
  values = {
    name: min(value, most.get(name, value))
    for name, value in dataclasses.asdict(shape).items()
    if isinstance(value, int)
  }
  return dataclasses.replace(shape, **values)


# --- The report --------------------------------------------------------------


def run(
  operations: list[str] | None = None, json_path: pathlib.Path | None = None
) -> int:
  """Measures, prints a table, and writes the same as JSON; 1 if ours is wrong.

  Args:
    operations: names of CASES; None: all.
    json_path: file to write to.
  """
  # Else jax takes three quarters of the memory, and PyTorch finds none.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  for name in operations or ():
    if name not in CASES:
      raise ValueError(f'no operation {name!r}; there are {", ".join(CASES)}')
  device = jax.devices()[0]
  limits = ceilings()
  about = {
    'device': device.device_kind,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'date': datetime.date.today().isoformat(),
    **limits,
  }
  print(
    f'{device.device_kind}, jax {jax.__version__}: copies'
    f' {limits["copy_bytes_per_s"] / 1e12:.3f} TB/s, multiplies'
    f' {limits["matmul_flops_per_s"] / 1e12:.1f} TFLOP/s',
    flush=True,
  )
  print(
    _line(
      'operation',
      'shape',
      'who',
      'ms',
      'TFLOP/s',
      'TB/s',
      'share',
      'ours/it',
      'notes',
    )
  )
  rows: list[Row] = []
  for name in operations or CASES:
    function, cases = CASES[name]
    for shape in cases:
      if dispatch.platform() == 'cpu':
        shape = small(shape)
      found: list[Row] = []
      for row in function(shape):  # as it comes: what was measured stays
        found.append(row)
        print(describe(row, found, limits), flush=True)
        if json_path is not None:
          result = {
            **about,
            'rows': [dataclasses.asdict(r) for r in rows + found],
          }
          json_path.write_text(json.dumps(result, indent=1), encoding='utf-8')
      rows += found
  wrong = [
    row for row in rows if row.error is not None and not row.error < TOLERANCE
  ]
  for row in wrong:
    print(f'wrong: {row.operation} at {row.shape}, relative error {row.error}')
  return 1 if wrong else 0


def _line(*cells: str) -> str:
  widths = (27, 18, 11, 9, 8, 7, 6, 8)
  text = ''.join(
    f'{cell:<{width}}' if i < 3 else f'{cell:>{width}}'
    for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
  )
  return f'{text}  {cells[-1]}'.rstrip()


def describe(row: Row, all_rows: list[Row], limits: dict[str, float]) -> str:
  """A line of the table: rates, share of the nearer ceiling, ratio to ours."""
  notes = [row.note] if row.note else []
  if row.error is not None:
    notes.append(f'error {row.error:.1e}')
  if row.differing is not None:
    notes.append(f'{row.differing} differing')
  if row.memory is not None:
    notes.append(f'{row.memory / 2**20:.0f} MiB')
  cells = ['', '', '', '', '']
  if row.seconds:
    flops = (row.flops or 0) / row.seconds
    moved = (row.bytes or 0) / row.seconds
    share = max(
      flops / limits['matmul_flops_per_s'], moved / limits['copy_bytes_per_s']
    )
    ours = [
      one.seconds
      for one in all_rows
      if one.who == 'ours' and one.operation == row.operation and one.seconds
    ]
    cells = [
      f'{row.seconds * 1e3:.3f}',
      f'{flops / 1e12:.1f}' if row.flops else '',
      f'{moved / 1e12:.2f}' if row.bytes else '',
      f'{share:.2f}',
      f'{row.seconds / ours[0]:.2f}' if ours and row.who != 'ours' else '',
    ]
  return _line(row.operation, row.shape, row.who, *cells, ', '.join(notes))
