"""The exchange: one key-value store that publisher and readers meet in.

Opening it, reading and writing single keys with limits, and HEAD. What a
version consists of is `versions`, who reads and what is deleted `upkeep`.

    HEAD                                     JSON, moved by compare-and-swap
    weights/<form>/<version>-<fence>/base/…  zarr3 arrays, one a parameter
    weights/<form>/<version>-<fence>/<host>/<n>   delta blobs (`delta`)
    weights/<form>/<version>-<fence>/<host>/done  what a host wrote, if several
    weights/<form>/<version>-<fence>/kind    base or delta, if several hosts
    weights/<form>/<version>-<fence>/manifest     parent, digests; written last
    weights/<form>/incarnations/<name>       fence of a start of several hosts
    clusters/<cluster>/<process>             heartbeat: time, form, version
    readers/<cluster>/<process>              what a subscriber holds and needs

HEAD is {"format": 3, "check": digest of the rest, "forms": {<form>: {"claimed",
"version", "fence", "manifest"}}}: `claimed` is the newest publisher's
incarnation, the other three name the newest version and the digest of its
manifest. A version exists when HEAD names it, or names a successor of it. A
manifest names the manifest before it with its digest, so that everything
readable hangs on HEAD by digests. All keys under weights/ are create-only.

Waits are limited (`WAIT_S`); what runs out raises TimeoutError with the key. A
full disk is OSError with errno ENOSPC, whatever the driver says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import difflib
import errno
import functools
import json
import os
import pathlib
import time
from typing import Any
import urllib.parse
import uuid

import tensorstore as ts
import xxhash

FORMAT = 3
WAIT_S = 60.0
OPEN_S = 15.0  # for a first answer where no credentials are to be seen
PROBES = 3
SCHEMES = ('memory', 'file', 'gs', 's3')
# What TensorStore answers as the generation of a key that is not there.
ABSENT = b'\x02'


class BrokenWeights(ValueError):
  """What the exchange holds is missing, damaged or does not fit together."""


class PublisherFenced(RuntimeError):
  """A newer publisher has taken over; this one must not publish any more."""


def before_write(key: str) -> None:
  """Called before every write; the seam at which tests inject faults."""
  del key


# --- Opening, reading, writing -----------------------------------------------


def open_exchange(
  url: str, *, writable: bool = True, sync: bool = False
) -> ts.KvStore:
  """Opens `memory://`, `file:///absolute/path`, `gs://…` or `s3://…`.

  Args:
    url: the exchange. A bare `memory://` is a new, private store;
      `memory://NAME` is the same store for the whole process.
    writable: proves by a few writes under `.probe/` that the store may be
      written and refuses stale compare-and-swaps.
    sync: flush files to the disk on every write. Off: data survives the death
      of every process, and may be lost with the machine's power.

  s3:// reads the usual variables: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION
  and, for other servers than Amazon's, AWS_ENDPOINT_URL.

  Raises:
    ValueError: unknown scheme, a path that is not absolute, missing
      credentials, or a store without compare-and-swap.
    OSError: not writable, or no space left.
  """
  scheme, separator, rest = url.partition('://')
  if not separator or scheme not in SCHEMES:
    near = difflib.get_close_matches(scheme, SCHEMES, 1)
    hint = f'; did you mean {near[0]}://?' if separator and near else ''
    raise ValueError(
      f'exchange {url!r} has no known scheme{hint} (known:'
      f' {", ".join(s + "://" for s in SCHEMES)}; a local path is written'
      ' file:///absolute/path)'
    )
  spec: str | dict[str, Any] = url if url.endswith('/') else url + '/'
  context = ts.Context({'file_io_sync': sync, **_retries()})
  if scheme == 'file':
    path = urllib.parse.unquote(rest)
    if not path.startswith('/'):
      raise ValueError(
        f'exchange {url!r} must hold an absolute path, as in'
        f' file:///absolute/path (three slashes)'
      )
    spec = {'driver': 'file', 'path': path.rstrip('/') + '/'}
  elif scheme == 'memory':
    spec = {'driver': 'memory', 'path': rest.rstrip('/') + '/' if rest else ''}
    context = _shared_memory() if rest else ts.Context()
  elif scheme == 's3':
    spec = _s3(url, rest)
  kv = await_result(ts.KvStore.open(spec, context=context), url, 'opening')
  with _credentials(url, scheme) as seen:
    if not seen:  # only a machine's own role can answer; soon, or never
      read(kv, 'HEAD', wait_s=OPEN_S)
    if writable:
      _prove_compare_and_swap(kv, url)
  return kv


@functools.cache
def _shared_memory() -> ts.Context:
  return ts.Context()


def _retries() -> dict[str, Any]:
  """Of single requests; what outlasts them is for the caller to repeat."""
  limits = {'max_retries': 8, 'initial_delay': '50ms', 'max_delay': '4s'}
  return {'s3_request_retries': limits, 'gcs_request_retries': limits}


def _s3(url: str, rest: str) -> dict[str, Any]:
  bucket, _, path = rest.partition('/')
  if not bucket:
    raise ValueError(
      f'exchange {url!r} names no bucket; write s3://BUCKET/PATH'
    )
  spec = {
    'driver': 's3',
    'bucket': bucket,
    'path': urllib.parse.unquote(path).rstrip('/') + '/' if path else '',
  }
  region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION')
  if region:
    spec['aws_region'] = region
  endpoint = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get(
    'AWS_ENDPOINT_URL'
  )
  if endpoint:
    spec |= {'endpoint': endpoint, 'aws_region': region or 'us-east-1'}
  return spec


# Where credentials of a scheme come from: variables, files, and what to set.
_CREDENTIALS = {
  's3': (
    (
      'AWS_ACCESS_KEY_ID',
      'AWS_PROFILE',
      'AWS_WEB_IDENTITY_TOKEN_FILE',
      'AWS_CONTAINER_CREDENTIALS_RELATIVE_URI',
      'AWS_CONTAINER_CREDENTIALS_FULL_URI',
    ),
    ('~/.aws/credentials', '~/.aws/config'),
    'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE',
  ),
  'gs': (
    ('GOOGLE_APPLICATION_CREDENTIALS', 'CLOUDSDK_CONFIG'),
    ('~/.config/gcloud/application_default_credentials.json',),
    'GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth'
    ' application-default login',
  ),
}


@contextlib.contextmanager
def _credentials(url: str, scheme: str) -> Iterator[bool]:
  """Whether any are to be seen; what fails without them says what to set."""
  names, files, remedy = _CREDENTIALS.get(scheme, ((), (), ''))
  paths = [pathlib.Path(file).expanduser() for file in files]
  seen = not names or any(os.environ.get(name) for name in names)
  seen = seen or any(path.is_file() for path in paths)
  try:
    yield seen
  except (OSError, ValueError) as error:
    if seen:
      raise
    raise ValueError(
      f'no credentials for exchange {url!r}: none of {", ".join(names)} is set,'
      f' there is no {" or ".join(files)}, and this machine has no role of its'
      f' own; set {remedy} ({error})'
    ) from error


def _prove_compare_and_swap(kv: ts.KvStore, url: str) -> None:
  """Repeated, for an answer that was lost looks like a refusal."""
  for attempt in range(PROBES):
    key = f'.probe/{uuid.uuid4().hex}'
    first = write(kv, key, b'1', if_equal=ABSENT)
    again = write(kv, key, b'2', if_equal=ABSENT)
    second = write(kv, key, b'3', if_equal=first or b'none')
    stale = write(kv, key, b'4', if_equal=first or b'none')
    held, _ = read(kv, key)
    write(kv, key, None)
    if first and second and not again and not stale and held == b'3':
      return
    if again or stale or attempt + 1 == PROBES:
      break
  raise ValueError(
    f'exchange {url!r} does not refuse a stale compare-and-swap, so two'
    ' publishers could overwrite each other; use a store with conditional'
    ' writes (GCS, AWS S3, a local file system)'
  )


def read(
  kv: ts.KvStore, key: str, *, wait_s: float = WAIT_S
) -> tuple[bytes | None, bytes]:
  """(value, generation); the value is None where there is no such key."""
  result = await_result(kv.read(key), key, 'reading', wait_s)
  value = result.value if result.state == 'value' else None
  return value, result.stamp.generation


def write(
  kv: ts.KvStore,
  key: str,
  value: bytes | None,
  *,
  if_equal: bytes | None = None,
  wait_s: float = WAIT_S,
) -> bytes:
  """Writes (None deletes); its generation, b'' where `if_equal` is stale."""
  before_write(key)
  future = kv.write(key, value, if_equal=if_equal)
  return await_result(future, key, 'writing', wait_s).generation


def create(kv: ts.KvStore, objects: Mapping[str, bytes]) -> None:
  """Writes keys that must not exist yet, several at a time.

  The same bytes again are no error; others are ValueError, for what lies under
  weights/ is immutable.
  """
  futures = []
  for key, value in objects.items():
    before_write(key)
    futures.append(kv.write(key, value, if_equal=ABSENT))
  for (key, value), future in zip(objects.items(), futures, strict=True):
    generation = await_result(future, key, 'writing').generation
    if not generation and read(kv, key)[0] != value:
      raise ValueError(
        f'{key} exists already with other content; it is immutable'
      )


def keys(kv: ts.KvStore, prefix: str, *, wait_s: float = WAIT_S) -> list[str]:
  """All keys under `prefix`, which ends in '/', sorted."""
  span = ts.KvStore.KeyRange(prefix, prefix[:-1] + '0')
  found = await_result(kv.list(span), prefix, 'listing', wait_s)
  return sorted(key.decode() for key in found)


def wait_for(kv: ts.KvStore, key: str, *, wait_s: float, why: str) -> bytes:
  """Polls until the key exists; TimeoutError says what was waited for."""
  end, pause = time.monotonic() + wait_s, 0.005
  while (value := read(kv, key)[0]) is None:
    if time.monotonic() > end:
      raise TimeoutError(f'{key} did not appear within {wait_s:g} s ({why})')
    time.sleep(pause)
    pause = min(0.2, pause * 1.5)
  return value


def await_result(
  future: ts.Future, key: str, doing: str, wait_s: float = WAIT_S
) -> Any:
  """The future's result, with the driver's errors made plain."""
  try:
    return future.result(timeout=wait_s)
  except TimeoutError as error:
    raise TimeoutError(
      f'{doing} {key} of the exchange took longer than {wait_s:g} s'
    ) from error
  except ValueError as error:
    raise _plain(error, key, doing) from error


# What goes by itself: throttling, servers that fail, connections that break.
_PASSING = ('UNAVAILABLE', 'ABORTED', 'DEADLINE_EXCEEDED')


def _plain(error: ValueError, key: str, doing: str) -> Exception:
  text = str(error)
  if "os_error_code='28'" in text or 'No space left' in text:
    return OSError(
      errno.ENOSPC, f'no space left on the exchange while {doing}', key
    )
  if text.startswith(('PERMISSION_DENIED', 'UNAUTHENTICATED')):
    return PermissionError(
      errno.EACCES, f'{doing} the exchange was refused: {text}', key
    )
  if text.startswith(_PASSING):
    return OSError(errno.EAGAIN, f'{doing} the exchange failed: {text}', key)
  return ValueError(f'{doing} {key} of the exchange failed: {text}')


_BEGUN = '.__lock'  # the file driver's name for a key while it is written


def remove_below(kv: ts.KvStore, prefix: str) -> None:
  """Deletes all keys under `prefix`, which ends in '/', and empty folders.

  A file system keeps the folders of keys that were deleted, and what a write
  that was killed had begun; nobody may be writing below the prefix any more.
  """
  before_write(prefix)
  span = ts.KvStore.KeyRange(prefix, prefix[:-1] + '0')
  await_result(kv.delete_range(span), prefix, 'deleting')
  root = folder(kv)
  if root is None:
    return
  for begun in (root / prefix).rglob(f'*{_BEGUN}'):
    begun.unlink(missing_ok=True)
  remove_empty(root / prefix)


def folders(kv: ts.KvStore, prefix: str) -> list[str]:
  """Folders right below `prefix` of a file store, those without keys too.

  A writer that was killed leaves such: it had made them for its first key.
  """
  root = folder(kv)
  if root is None or not (root / prefix).is_dir():
    return []
  return [path.name for path in (root / prefix).iterdir() if path.is_dir()]


def folder(kv: ts.KvStore) -> pathlib.Path | None:
  """Where a store lies on a file system of this machine; None elsewhere."""
  spec = kv.spec().to_json()
  return pathlib.Path(spec['path']) if spec['driver'] == 'file' else None


def remove_empty(top: pathlib.Path) -> None:
  """Removes a folder and those in it, as far as there is nothing in them."""
  for path, _, _ in os.walk(top, topdown=False):
    try:
      os.rmdir(path)
    except OSError:
      pass  # not empty, or gone already


# --- HEAD --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ref:
  """Names one version: its number, its publisher, its manifest's digest."""

  version: int
  fence: int
  manifest: str


@dataclasses.dataclass(frozen=True)
class Head:
  """One form's entry: the newest incarnation and the newest version."""

  claimed: int
  ref: Ref | None


def read_head(kv: ts.KvStore, form: str) -> Head:
  """HEAD of a form; (0, None) where nothing was ever published."""
  return _entry(_parse_heads(read(kv, 'HEAD')[0]), form)


def claim_fence(kv: ts.KvStore, form: str) -> int:
  """Takes the next incarnation of the form's publisher; fences all before."""
  return _update_head(
    kv, form, lambda head: dataclasses.replace(head, claimed=head.claimed + 1)
  ).claimed


def move_head(kv: ts.KvStore, form: str, ref: Ref) -> None:
  """Makes `ref` the newest version; PublisherFenced if another took over."""

  def change(head: Head) -> Head:
    check_fence(head, form, ref.fence)
    if head.ref is not None and head.ref != ref:
      if ref.version <= head.ref.version:
        raise ValueError(
          f'version {ref.version} of {form} is not newer than HEAD'
          f' ({head.ref.version}); versions are never used twice'
        )
    return Head(head.claimed, ref)

  _update_head(kv, form, change)


def check_fence(head: Head, form: str, fence: int) -> None:
  """Raises PublisherFenced where a newer incarnation has claimed the form."""
  if head.claimed != fence:
    raise PublisherFenced(
      f'publisher {fence} of {form} was replaced by publisher {head.claimed};'
      ' only the newest may publish, end this process'
    )


def _update_head(
  kv: ts.KvStore, form: str, change: Callable[[Head], Head]
) -> Head:
  """Compare-and-swap of one form's entry until it holds `change(entry)`."""
  end = time.monotonic() + WAIT_S
  while True:
    value, generation = read(kv, 'HEAD')
    heads = _parse_heads(value)
    old = _entry(heads, form)
    # Also how a swap is recognised that landed although its answer was lost.
    if (new := change(old)) == old:
      return new
    entry: dict[str, Any] = {'claimed': new.claimed}
    if new.ref is not None:
      entry |= dataclasses.asdict(new.ref)
    forms = heads | {form: entry}
    text = to_json({'format': FORMAT, 'forms': forms, 'check': _check(forms)})
    if write(kv, 'HEAD', text, if_equal=generation):
      return new
    if time.monotonic() > end:
      raise TimeoutError(
        f'HEAD of the exchange kept changing for {WAIT_S:g} s; how many'
        ' publishers are there?'
      )


def _parse_heads(value: bytes | None) -> dict[str, Any]:
  if value is None:
    return {}
  fields = parse_json(value, 'HEAD')
  forms = fields.get('forms')
  if not isinstance(forms, dict) or fields.get('check') != _check(forms):
    raise BrokenWeights(
      'HEAD of the exchange is damaged: it is not what its digest says'
    )
  return forms


def _check(forms: Mapping[str, Any]) -> str:
  """HEAD is what everything else hangs on, and nothing holds its digest."""
  return xxhash.xxh3_64_hexdigest(to_json(forms))


def _entry(heads: Mapping[str, Any], form: str) -> Head:
  entry = heads.get(form)
  if entry is None:
    return Head(0, None)
  if 'version' not in entry:
    return Head(entry['claimed'], None)
  return Head(
    entry['claimed'],
    Ref(entry['version'], entry['fence'], entry['manifest']),
  )


def to_json(fields: Mapping[str, Any]) -> bytes:
  return json.dumps(fields, separators=(',', ':'), sort_keys=True).encode()


def parse_json(value: bytes, key: str) -> dict[str, Any]:
  """A JSON object of the exchange; ValueError where damaged or too new."""
  try:
    fields = json.loads(value)
  except ValueError as error:
    raise BrokenWeights(
      f'{key} of the exchange is not JSON: {error}'
    ) from error
  if not isinstance(fields, dict):
    raise BrokenWeights(f'{key} of the exchange is not a JSON object')
  found = fields.get('format', FORMAT)
  if found != FORMAT:
    newer = isinstance(found, int) and found > FORMAT
    remedy = 'update it' if newer else 'begin another exchange'
    raise ValueError(
      f'{key} has format {found}, this program reads {FORMAT}; {remedy}'
    )
  return fields
