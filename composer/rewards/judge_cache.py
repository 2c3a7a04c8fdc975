"""Verdicts that are known: in memory, and in a directory where there is one."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import pathlib
import tempfile

MOST = 4096  # answers kept in memory


class Cache:
  """Owner of the answers of a judge, by the hash of what it was asked.

  Processes may share the directory: an answer is written whole or not at all,
  and whichever of two equal questions is answered last is kept.
  """

  def __init__(self, folder: str = ''):
    self._folder = pathlib.Path(folder) if folder else None
    self._known: collections.OrderedDict[str, str] = collections.OrderedDict()

  async def get(self, key: str) -> str | None:
    """An answer, or None. One that cannot be read counts as not there."""
    if key not in self._known and self._folder is not None:
      text = await asyncio.to_thread(self._read, key)
      if text is not None:
        self._keep(key, text)
    return self._known.get(key)

  async def put(self, key: str, text: str) -> None:
    self._keep(key, text)
    if self._folder is not None:
      await asyncio.to_thread(self._write, key, text)

  def _keep(self, key: str, text: str) -> None:
    self._known[key] = text
    self._known.move_to_end(key)
    while len(self._known) > MOST:
      self._known.popitem(last=False)

  def _path(self, key: str) -> pathlib.Path:
    assert self._folder is not None
    return self._folder / key[:2] / f'{key}.json'

  def _read(self, key: str) -> str | None:
    try:
      text = json.loads(self._path(key).read_text(encoding='utf-8'))['answer']
    except (OSError, ValueError, KeyError, TypeError):
      return None
    return text if isinstance(text, str) else None

  def _write(self, key: str, text: str) -> None:
    path = self._path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, suffix='.part')
    try:
      with os.fdopen(descriptor, 'w', encoding='utf-8') as file:
        json.dump({'answer': text}, file)
      os.replace(part, path)
    except BaseException:
      os.unlink(part)
      raise
