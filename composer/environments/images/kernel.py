"""A kernel's ELF file out of a compressed one: what Firecracker boots.

The boot protocol (Linux, Documentation/arch/x86/boot.rst) says where the
compressed payload is; its first bytes say how. LZ4 is not in the standard
library: its legacy frames and its blocks are decoded here, after their
descriptions (lz4_Frame_format.md, lz4_Block_format.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import lzma
import struct
import zlib

ELF = b'\x7fELF'
LZ4_LEGACY = b'\x02\x21\x4c\x18'
MAGIC, PAYLOAD = 0x202, 0x248  # offsets in the header
SECTOR = 512
MINIMUM = 4  # bytes of a match
LONG = 15  # of a token's four bits: more follow


def uncompressed(kernel: bytes) -> bytes:
  """The ELF file of a bzImage, or the very bytes if they are one already.

  Raises:
    ValueError: neither, or an unknown compression; says which.
  """
  if kernel.startswith(ELF):
    return kernel
  if kernel[MAGIC : MAGIC + 4] != b'HdrS':
    raise ValueError('this is no Linux kernel')
  sectors = kernel[0x1F1] or 4
  offset, size = struct.unpack_from('<II', kernel, PAYLOAD)
  start = (sectors + 1) * SECTOR + offset
  payload = kernel[start : start + size]
  for magic, decode in DECODERS.items():
    if payload.startswith(magic):
      elf = decode(payload)
      if not elf.startswith(ELF):
        raise ValueError('what the kernel holds is no ELF file')
      return elf
  raise ValueError(
    f'the kernel is compressed in an unknown way (it begins {payload[:4].hex()})'
  )


def _gzip(payload: bytes) -> bytes:
  return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(payload)


def _xz(payload: bytes) -> bytes:
  return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload)


def _lz4(payload: bytes) -> bytes:
  """Blocks of a legacy frame, until the size of the whole that ends it."""
  out, at = bytearray(), len(LZ4_LEGACY)
  while at + 4 <= len(payload):
    [size] = struct.unpack_from('<I', payload, at)
    at += 4
    if at + size > len(payload):
      break
    out += lz4_block(payload[at : at + size])
    at += size
  return bytes(out)


def lz4_block(source: bytes) -> bytes:
  """Sequences of literals and of copies from what has come out already."""
  out, at = bytearray(), 0
  while True:
    token = source[at]
    count, at = _length(source, at + 1, token >> 4)
    out += source[at : at + count]
    at += count
    if at >= len(source):  # the last sequence has no copy
      return bytes(out)
    back = source[at] | source[at + 1] << 8
    if not 0 < back <= len(out):
      raise ValueError(f'a copy of {back} bytes back, of {len(out)}')
    count, at = _length(source, at + 2, token & LONG)
    count += MINIMUM
    start = len(out) - back
    piece = bytes(out[start : start + count])
    # A copy may read what it writes: then it repeats.
    out += (piece * (count // len(piece) + 1))[:count]


def _length(source: bytes, at: int, count: int) -> tuple[int, int]:
  """A length whose four bits may be continued, and where it ends."""
  if count == LONG:
    while True:
      more = source[at]
      count += more
      at += 1
      if more != 255:
        break
  return count, at


DECODERS: Mapping[bytes, Callable[[bytes], bytes]] = {
  LZ4_LEGACY: _lz4,
  b'\x1f\x8b': _gzip,
  b'\xfd7zXZ': _xz,
}
