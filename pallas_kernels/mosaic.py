"""What every Mosaic GPU kernel here shares: entry, tiles in memory, lowering.

Mosaic GPU is the Pallas backend for Hopper. It is experimental and moves from
release to release; the few places where jax 0.10 and 0.11 differ are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import inspect
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

# Bytes of shared memory that a block can have on Hopper.
SHARED_BYTES = 227 * 1024
# Streaming multiprocessors where no device can be asked (H100 and H200 SXM).
CORES = 132


def available() -> str | None:
  """None where a Hopper GPU is the default device, else why not."""
  device = jax.devices()[0]
  if device.platform != 'gpu':
    return f'the default device is {device.platform}, not a GPU'
  capability = getattr(device, 'compute_capability', '?')
  if capability != '9.0':
    return f'compute capability {capability}; the kernels are for Hopper (9.0)'
  return None


def cores() -> int:
  """Streaming multiprocessors of the device that is lowered for."""
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return abstract.num_cores
  return getattr(jax.devices()[0], 'core_count', None) or CORES


def interprets() -> bool:
  """Whether kernels run on CPU: since jax 0.11.

  jax 0.10 has an interpreter too, but not one that runs these kernels.
  """
  return hasattr(plgpu, 'InterpretGPUParams')


def interpreter() -> Any:
  """Parameters that make a kernel run on CPU, or ValueError."""
  if not interprets():
    raise ValueError(
      f'jax {jax.__version__} cannot interpret Mosaic GPU kernels; use 0.11 or'
      ' newer, or another implementation'
    )
  return plgpu.InterpretGPUParams(detect_races=False)


def launch(
  body: Callable[..., None],
  *,
  out: Any,
  scratch: Sequence[Any],
  grid: int,
  warpgroups: int,
  interpret: bool = False,
  approximate: bool = False,
) -> Callable[..., Any]:
  """A kernel over a flat grid ('sm') of blocks of `warpgroups` ('wg').

  `approximate` lets exp2 and the like be the processor's own instructions.
  """
  return plgpu.kernel(
    body,
    out_type=out,
    scratch_types=tuple(scratch),
    grid=(grid,),
    grid_names=('sm',),
    num_threads=warpgroups,
    thread_name='wg',
    interpret=interpreter() if interpret else None,
    compiler_params=plgpu.CompilerParams(  # the default since jax 0.11
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
      approx_math=approximate,
    ),
  )


def tiled(shape: Sequence[int], dtype: Any) -> Any:
  """Shared memory in the swizzled layout that copy engine and wgmma read."""
  bits = jnp.dtype(dtype).itemsize * 8
  swizzle = plgpu.find_swizzle(shape[-1] * bits)
  columns = swizzle * 8 // bits
  return plgpu.SMEM(
    tuple(shape),
    dtype,
    transforms=(
      plgpu.TilingTransform((8, columns)),
      plgpu.SwizzleTransform(swizzle),
    ),
  )


def linear(shape: Sequence[int], dtype: Any) -> Any:
  """Shared memory in row-major order, of which any rows can be copied."""
  return plgpu.SMEM(tuple(shape), dtype)


def plain(ref: Any, interpret: bool = False) -> None:
  """Linear shared memory stays as it is, row after row, wherever it is used.

  Else Mosaic may choose a swizzle for it. The copy engine takes that from the
  address; a store of registers through `ref.at[rows]` takes it from the first of
  these rows, and where that is any row, writes elsewhere than is read.
  """
  if not interpret:
    keep = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda *_: None)
    keep(ref)


def store_rows(source: Any, rows: Any, low: Any, count: Any, most: int) -> None:
  """Copies rows low to low + count of shared memory; `count` is traced.

  The copy engine moves boxes of fixed size, so there is one box for each power
  of two; each bit of `count` moves one.

  Args:
    source: linear shared memory [at least `most`, n].
    rows: `rows(done, size)` is the reference to write to.
    low: the first row.
    count: rows to write, 0 to `most`.
    most: a power of two.
  """
  size, done = most, 0
  while size:

    def copy(done=done, size=size):
      plgpu.copy_smem_to_gmem(
        source.at[pl.ds(low + done, size)], rows(done, size), commit_group=False
      )

    pl.when((count & size) != 0)(copy)
    done = done + (count & size)
    size //= 2
  plgpu.commit_smem_to_gmem_group()


def load(ref: Any, layout: Any) -> Any:
  """Reads from memory into registers of this layout."""
  index = inspect.signature(plgpu.load).parameters['idx']
  needed = () if index.default is not index.empty else ((),)  # jax 0.10
  return plgpu.load(ref, *needed, layout=layout, optimized=False)


def cdiv(a: Any, b: int) -> Any:
  """Rounded up, of traced non-negative int32."""
  return lax.div(a + jnp.int32(b - 1), jnp.int32(b))


def lower(function: Callable[..., Any], *arguments: Any) -> str:
  """Lowers for an H100 on a machine without one; the module as text.

  Shows that a kernel can be built as far as its code for the device, which is
  where the compiler of CUDA takes over.
  """
  device = jax.sharding.AbstractDevice('NVIDIA H100 80GB HBM3', CORES, 'cuda')
  mesh = jax.sharding.AbstractMesh((1,), ('x',), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    exported = jax.export.export(jax.jit(function), platforms=['cuda'])
    return exported(*arguments).mlir_module()


def shared_bytes(*buffers: tuple[Sequence[int], Any]) -> int:
  """Shared memory of buffers, each aligned to 1024 bytes."""
  total = 0
  for shape, dtype in buffers:
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    total += -(-size // 1024) * 1024
  return total


def check_shared(tiles: Any, used: int) -> None:
  """ValueError where a block would not fit into shared memory."""
  if used + 1024 > SHARED_BYTES:  # 1024 for the barriers
    raise ValueError(
      f'{tiles} needs {used} bytes of shared memory, and a block has'
      f' {SHARED_BYTES - 1024}; use fewer stages or smaller tiles'
    )


partial = functools.partial
