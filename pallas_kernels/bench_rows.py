"""What the rows of the benchmark are made with: programs, checks, times.

The rows of a shape come from a generator in two moves. First it compiles what is
ours, from shapes alone, and yields None: nothing has run on the device yet, so
that many may do this side by side. What follows has the device to itself: data
are drawn, ours is checked against float32, and rows come as they are measured.
What is not ours compiles then, because XLA times its own choices while it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_time
from pallas_kernels import dispatch

TOLERANCE = 5e-3  # relative, of the norm; bfloat16 rounds to 2^-9
THREADS = 4  # that compile while the next program is lowered
SEED = jax.ShapeDtypeStruct((), jnp.uint32)
_SEED = contextvars.ContextVar('seed of the data', default=1)
# What nobody times is compiled without timing it, which would use the device.
UNTIMED = {'xla_gpu_autotune_level': 0}
WORDS = 120  # characters of an error
UNCHECKED = 'not checked, '  # begins the note of a row whose check failed


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
    note: why there is no time, or what the others do not say.
    took: seconds that the row took to measure.
    case: entry of the benchmark's cases and number of the shape, as 'norm 0'.
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
  took: float | None = None
  case: str = ''


# --- Programs ----------------------------------------------------------------


def ahead(
  programs: dict[str, tuple[Any, ...]], untimed: Collection[str] = ()
) -> dict[str, Callable[..., Any]]:
  """Compiles programs, some at once, and runs none.

  Lowering is Python and takes turns; XLA and ptxas work beside it.

  Args:
    programs: by name (function, shapes of its arguments).
    untimed: names of those whose speed is of no interest.

  Returns:
    By name what runs it. Where one could not be compiled, this raises why.
  """
  found: dict[str, Any] = {}
  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    for name, (function, *arguments) in programs.items():
      plain = name in untimed and dispatch.platform() == 'gpu'
      jitted = function if hasattr(function, 'lower') else jax.jit(function)
      try:
        found[name] = pool.submit(
          jitted.lower(*arguments).compile, UNTIMED if plain else None
        )
      except Exception as error:  # it is raised where it is asked for
        found[name] = error
  return {name: _ready(one) for name, one in found.items()}


def _ready(one: Any) -> Callable[..., Any]:
  error = one if isinstance(one, Exception) else one.exception()
  if error is None:
    return one.result()

  def fails(*arguments):
    raise error

  return fails


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
  """Inside, `draw` draws from this seed, 0 to 2^32 - 1."""
  before = _SEED.set(seed)
  try:
    yield
  finally:
    _SEED.reset(before)


def draw(ready: Callable[..., Any]) -> Any:
  """Data of a program that draws them, from the seed of `seeded`."""
  return ready(np.uint32(_SEED.get()))


def normal(key: jax.Array, *size: int) -> jax.Array:
  return jax.random.normal(key, size, jnp.bfloat16)


def normal_at(seed: Any, place: int, *size: int) -> jax.Array:
  """Of arguments that are drawn apart the one of this number."""
  return normal(jax.random.fold_in(jax.random.key(seed), place), *size)


def keys(seed: Any, count: int) -> jax.Array:
  return jax.random.split(jax.random.key(seed), count)


def memory(ready: Any) -> int | None:
  """Bytes of temporaries of a compiled program, where the backend says."""
  try:
    return ready.memory_analysis().temp_size_in_bytes
  except Exception:  # not every backend says
    return None


# --- Checks ------------------------------------------------------------------


def relative(got: jax.Array, want: jax.Array) -> jax.Array:
  got, want = got.astype(jnp.float32), want.astype(jnp.float32)
  return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def exact(x: jax.Array, w: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32), w.astype(jnp.float32)
  return jnp.dot(*wide, precision='highest')


def differing(got: Any, want: Any) -> jax.Array:
  """Elements with other bits, of all arrays."""

  def bits(array):
    if jnp.issubdtype(array.dtype, jnp.integer):
      return array
    size = jnp.dtype(array.dtype).itemsize
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{8 * size}'))

  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return sum(jnp.sum(bits(a) != bits(b)) for a, b in pairs)


# --- Times -------------------------------------------------------------------


def seconds(
  call: Callable[[], Any], wait: Callable[[Any], Any], kernels: bool = False
) -> float:
  """Of a call; of its kernels alone where it is short and they can be seen.

  Args:
    call: what is timed.
    wait: for its result.
    kernels: their time whatever the call takes, where they can be seen.
  """
  if dispatch.platform() != 'gpu':
    return bench_time.seconds(call, wait)
  if kernels:
    alone = bench_time.device_seconds(call, wait)
    return alone or bench_time.seconds(call, wait)
  took = bench_time.seconds(call, wait)
  if took < bench_time.SHORT:
    return bench_time.device_seconds(call, wait) or took
  return took


def timed(
  row: Row, function: Any, *arguments: Any, kernels: bool = False
) -> Row:
  """The row with its time, or with the reason why there is none.

  Args:
    row: without a time.
    function: compiled, or to be compiled now.
    *arguments: of it.
    kernels: see `seconds`.
  """
  try:
    ready = function
    if not isinstance(function, jax.stages.Compiled):
      # What could not be compiled raises again, inside of what jit traces.
      ready = jax.jit(function)
    took = seconds(lambda: ready(*arguments), jax.block_until_ready, kernels)
    return dataclasses.replace(row, seconds=took)
  except Exception as error:  # one row must not end the benchmark
    return dataclasses.replace(row, note=reason(error))


def reason(error: BaseException) -> str:
  words = ' '.join(str(error).split())
  return f'{type(error).__name__}: {words[:WORDS]}'


def checked(row: Row, **checks: Callable[[], Any]) -> Row:
  """The row with its `error` and `differing`, or with why they are missing.

  What differs is of no interest on a CPU: there ours is XLA's.
  """
  if dispatch.platform() == 'cpu':
    checks.pop('differing', None)
  for name, check in checks.items():
    try:
      value = check()
    except Exception as error:  # it is said, and the time is wanted as well
      note = f'{UNCHECKED}{name}: {reason(error)}'
      row = dataclasses.replace(row, note=note)
      continue
    value = float(value) if name == 'error' else int(value)
    row = dataclasses.replace(row, **{name: value})
  return row


# --- PyTorch -----------------------------------------------------------------


def torch() -> Any | None:
  """PyTorch where it is there and sees the GPU, else None."""
  if dispatch.platform() != 'gpu' or importlib.util.find_spec('torch') is None:
    return None
  library = importlib.import_module('torch')
  return library if library.cuda.is_available() else None


def torch_timed(
  row: Row, library: Any, call: Callable[[], Any], kernels: bool = False
) -> Row:
  try:
    took = seconds(call, lambda _: library.cuda.synchronize(), kernels)
    return dataclasses.replace(row, seconds=took)
  except Exception as error:  # as above
    return dataclasses.replace(row, note=reason(error))
  finally:  # what it keeps, the next row could need
    library.cuda.empty_cache()


# --- Ceilings ----------------------------------------------------------------


def ceilings() -> dict[str, float]:
  """What the device does at most: copy, bytes/s; bf16 matmul, FLOP/s.

  No one way of copying is the fastest on every device, so some are tried.
  """
  large = dispatch.platform() != 'cpu'
  size = 2**32 if large else 2**26  # bytes
  n = 8192 if large else 512
  products = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
  product = functools.partial(jax.jit(lambda x: x @ x), products)
  took = seconds(product, jax.block_until_ready)
  copies = []
  for dtype in (jnp.uint16, jnp.float32):
    words = jnp.ones(size // 2 // jnp.dtype(dtype).itemsize, dtype)
    for copy in (jax.jit(lambda words: words + words.dtype.type(1)), jnp.copy):
      call = functools.partial(copy, words)
      copies.append(seconds(call, jax.block_until_ready))
  return {
    'copy_bytes_per_s': size / min(copies),
    'matmul_flops_per_s': 2 * n**3 / took,
  }


Rows = Iterator[Row | None]
