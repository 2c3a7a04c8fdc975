"""The zygote: a small warmed interpreter that machines are forked from.

    python -S -P zygote.py CONTROL_FD

Speaks on a Unix stream socket. It reads one line of JSON, its settings, and says
one: {"ready": true} or {"missing": facility, "errno": n} or {"error": text}. From then on every file
descriptor that arrives is one end of a socket pair and becomes a machine:
forked, put into namespaces of its own, serving requests as `serve.py` says. End
of file on the control socket ends the zygote; under the `namespace` driver it is
process 1 of a pid namespace, so that the kernel ends every machine with it.
"""

import _signal as signal  # the wrappers of these two weigh on every fork
import _socket as socket
import gc
import importlib
import json
import os
import struct
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, _HERE)
import execute  # noqa: E402
import isolate  # noqa: E402
import seccomp  # noqa: E402
import serve  # noqa: E402

sys.path.remove(_HERE)

# What most small programs import. Each costs every fork some page tables.
PRELOAD = (
  'collections',
  'functools',
  'itertools',
  'json',
  'math',
  'operator',
  're',
  'select',
  'signal',
  'time',
)


def main() -> None:
  control = socket.socket(fileno=int(sys.argv[1]))
  config = json.loads(hear(control))
  own = -1  # the zygote's pid namespace
  try:
    if config['driver'] == 'namespace':
      own = isolate.enter(config)
    warm(config['harness'])
  except isolate.Missing as error:
    say(control, {'missing': error.facility, 'errno': error.errno})
    return
  except BaseException as error:
    say(control, {'error': repr(error)})
    return
  say(control, {'ready': True})
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps machines
  # The one signal with a handler, so the one that programs could send process 1.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  gc.collect()
  isolate.trim()
  gc.freeze()  # collections in machines do not touch, so copy, these pages
  serve_starts(control, config, own)
  if config['driver'] == 'process':
    isolate.remove_tree(config['scratch'])


def hear(control: socket.socket) -> bytes:
  line = b''
  while not line.endswith(b'\n'):
    piece = control.recv(65536)
    if not piece:
      sys.exit(1)
    line += piece
  return line


def say(control: socket.socket, message: dict) -> None:
  control.sendall(json.dumps(message).encode() + b'\n')


def warm(harness: dict) -> None:
  """Imports what programs need, and the scripts that process 1 may call."""
  for name in PRELOAD:
    importlib.import_module(name)
  for path, text in harness.items():
    execute.add_harness(path, text)
  # A program may have a module of any name, ours included.
  for module in (execute, isolate, seccomp, serve):
    sys.modules.pop(module.__name__, None)


def serve_starts(control: socket.socket, config: dict, own: int) -> None:
  """Forks a machine for every descriptor, until end of file."""
  number = 0
  while True:
    data, messages, _, _ = control.recvmsg(64, socket.CMSG_LEN(64))
    if not data:
      return
    packed = b''.join(body for _, _, body in messages)
    for (descriptor,) in struct.iter_unpack('i', packed):
      number += 1
      try:
        start_machine(control, descriptor, config, own, number)
      except (OSError, isolate.Missing):
        pass  # the host sees end of file and starts another
      finally:
        os.close(descriptor)


def start_machine(
  control: socket.socket, descriptor: int, config: dict, own: int, number: int
) -> None:
  if own >= 0:
    isolate.next_pid_namespace(own)
  if os.fork():
    return
  try:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    sock = socket.socket(fileno=descriptor)
    try:
      if own >= 0:
        os.close(own)
        workspace = isolate.become_machine(config)
      else:
        workspace = isolate.become_process(config, number)
    except isolate.Missing as error:
      serve.reply_missing(sock, error.facility, error.errno)
      os._exit(1)
    serve.serve(sock, config, workspace)
  except BaseException:
    pass
  finally:
    os._exit(1)


main()
