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
import files  # noqa: E402
import groups  # noqa: E402
import isolate  # noqa: E402
import seccomp  # noqa: E402
import serve  # noqa: E402

sys.path.remove(_HERE)


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
  for name in execute.PRELOAD:
    importlib.import_module(name)
  for path, text in harness.items():
    execute.add_harness(path, text)
  # A program may have a module of any name, ours included.
  for module in (execute, files, groups, isolate, seccomp, serve):
    sys.modules.pop(module.__name__, None)


class Running:
  """What was lent to a machine until it ends."""

  def __init__(self, number: int, pid: int, network: int):
    self.number = number
    self.pid = pid
    self.network = network  # descriptor of its network namespace, or -1

  def ended(self) -> bool:
    """Process 1 of a pid namespace ends after everything else in it."""
    try:
      os.kill(self.pid, 0)
    except ProcessLookupError:
      return isolate.leave_group(self.number)
    return False


def serve_starts(control: socket.socket, config: dict, own: int) -> None:
  """Forks a machine for every descriptor, until end of file.

  A network namespace takes longer to make than all else of a machine together,
  so those of ended machines are used again: empty ones, of which a machine owns
  nothing, and with no process left in them.
  """
  number = 0
  running: list = []
  networks: list = []
  while True:
    data, messages, _, _ = control.recvmsg(64, socket.CMSG_LEN(64))
    if not data:
      return
    packed = b''.join(body for _, _, body in messages)
    for (descriptor,) in struct.iter_unpack('i', packed):
      number += 1
      if not networks:
        running = collect(running, networks)
      network = -1
      try:
        if own >= 0:
          isolate.next_pid_namespace(own)
          network = isolate.take_network(networks)
        pid = os.fork()
        if pid == 0:
          be_machine(control, descriptor, config, own, number)
        running.append(Running(number, pid, network))
      except (OSError, isolate.Missing):
        # The host sees end of file and starts another.
        if network >= 0:
          networks.append(network)
      finally:
        os.close(descriptor)


def collect(running: list, networks: list) -> list:
  """Takes back what ended machines had; the machines that go on."""
  left = []
  for machine in running:
    if not machine.ended():
      left.append(machine)
    elif machine.network >= 0:
      networks.append(machine.network)
  return left


def be_machine(
  control: socket.socket, descriptor: int, config: dict, own: int, number: int
) -> None:
  """Never returns."""
  try:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    sock = socket.socket(fileno=descriptor)
    try:
      if own >= 0:
        os.close(own)
        place = isolate.become_machine(config, number)
      else:
        place = isolate.become_process(config, number)
    except isolate.Missing as error:
      serve.reply_missing(sock, error.facility, error.errno)
      os._exit(1)
    except OSError as error:
      serve.reply_missing(sock, str(error.filename), error.errno or 0)
      os._exit(1)
    serve.serve(sock, config, *place)
  except BaseException:
    pass
  finally:
    os._exit(1)


main()
