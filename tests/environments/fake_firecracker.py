"""A Firecracker without a machine in it: its interface, and an agent's answers.

Run as a program, as Firecracker is. It takes what `firecracker.yaml` of 1.12
describes and refuses the rest: unknown paths and fields, wrong types, a request
in a state that has no use for it. The "machine" is a dictionary of files; saved
memory is that dictionary. What it was asked goes to the file LOG, a line each.
"""

import json
import os
import re
import socket
import struct
import sys
import threading

LOG = '@LOG@'
VERSION = '@VERSION@'
SHAPES = {
  '/machine-config': (
    {'vcpu_count': int, 'mem_size_mib': int},
    {'smt': bool, 'track_dirty_pages': bool, 'huge_pages': str},
  ),
  '/boot-source': (
    {'kernel_image_path': str},
    {'initrd_path': str, 'boot_args': str},
  ),
  '/drives/': (
    {'drive_id': str, 'is_root_device': bool},
    {
      'path_on_host': str,
      'is_read_only': bool,
      'cache_type': ('Unsafe', 'Writeback'),
      'io_engine': ('Sync', 'Async'),
    },
  ),
  '/entropy': ({}, {'rate_limiter': dict}),
  '/vsock': ({'guest_cid': int, 'uds_path': str}, {'vsock_id': str}),
  '/actions': (
    {'action_type': ('InstanceStart', 'FlushMetrics', 'SendCtrlAltDel')},
    {},
  ),
  '/vm': ({'state': ('Paused', 'Resumed')}, {}),
  '/snapshot/create': (
    {'snapshot_path': str, 'mem_file_path': str},
    {'snapshot_type': ('Full', 'Diff')},
  ),
  '/snapshot/load': (
    {'snapshot_path': str, 'mem_backend': dict},
    {'resume_vm': bool, 'track_dirty_pages': bool},
  ),
}
state = {'is': 'Not started', 'drives': {}, 'vsock': '', 'files': {}}
paused = threading.Event()
connections = []


class Fault(Exception):
  """Answered with 400."""


def check(path, body):
  known = '/drives/' if path.startswith('/drives/') else path
  if known not in SHAPES:
    raise Fault('Invalid request method and/or path: ' + path)
  needed, optional = SHAPES[known]
  for name in needed:
    if name not in body:
      raise Fault(f'missing field `{name}`')
  for name, value in body.items():
    kind = {**needed, **optional}.get(name)
    if kind is None:
      raise Fault(f'unknown field `{name}`')
    if isinstance(kind, tuple):
      if value not in kind:
        raise Fault(f'unknown variant `{value}`')
    elif type(value) is not kind:
      raise Fault(f'invalid type for `{name}`')


def act(method, path, body):
  if method == 'GET' and path == '/':
    about = {'id': 'x', 'vmm_version': VERSION, 'app_name': 'Firecracker'}
    return {'state': state['is'], **about}
  with open(LOG, 'a') as file:
    file.write(json.dumps([method, path, body]) + '\n')
  check(path, body)
  if method != ('PATCH' if path == '/vm' else 'PUT'):
    raise Fault('Invalid request method and/or path')
  running = state['is'] != 'Not started'
  if running != (path in ('/vm', '/snapshot/create')):
    when = 'after' if running else 'before'
    raise Fault(f'The requested operation is not supported {when} starting')
  if path.startswith('/drives/'):
    if path != '/drives/' + body['drive_id']:
      raise Fault('The id from the path does not match the id from the body!')
    open_drive(body)
  elif path == '/boot-source':
    for name in ('kernel_image_path', 'initrd_path'):
      with open(body[name], 'rb') as file:
        if name == 'kernel_image_path' and file.read(4) != b'\x7fELF':
          raise Fault('Cannot load kernel due to invalid ELF magic')
    state['booted'] = True
  elif path == '/vsock':
    if body['guest_cid'] < 3:
      raise Fault('invalid CID')
    listen(body['uds_path'])
  elif path == '/actions':
    if not state.get('booted'):
      raise Fault('Cannot start microvm without kernel configuration.')
    state['is'] = 'Running'
  elif path == '/vm':
    state['is'] = {'Paused': 'Paused', 'Resumed': 'Running'}[body['state']]
  elif path == '/snapshot/create':
    save(body)
  elif path == '/snapshot/load':
    load(body)
  return {}


def open_drive(body):
  flags = os.O_RDONLY if body.get('is_read_only') else os.O_RDWR
  os.close(os.open(body['path_on_host'], flags))
  state['drives'][body['drive_id']] = body


def save(body):
  if state['is'] != 'Paused':
    raise Fault('save/restore unavailable while running')
  for sock in connections:  # what becomes of vsock by a saved state
    sock.close()
  connections.clear()
  with open(body['mem_file_path'], 'w') as file:
    json.dump(state['files'], file)
  with open(body['snapshot_path'], 'w') as file:
    json.dump({x: state[x] for x in ('drives', 'vsock')}, file)


def load(body):
  if state['drives'] or state['vsock']:
    raise Fault(
      'Loading a microVM snapshot not allowed after configuring'
      ' boot-specific resources.'
    )
  if body['mem_backend']['backend_type'] != 'File':
    raise Fault('unknown variant')
  with open(body['mem_backend']['backend_path']) as file:
    state['files'] = json.load(file)
  with open(body['snapshot_path']) as file:
    saved = json.load(file)
  for drive in saved['drives'].values():
    open_drive(drive)
  listen(saved['vsock'])
  state['is'] = 'Running' if body.get('resume_vm') else 'Paused'


# --- vsock, and the agent behind it ------------------------------------------


def listen(path):
  state['vsock'] = path
  server = socket.socket(socket.AF_UNIX)
  server.bind(path)  # in use: OSError, as there
  server.listen(4)

  def serve():
    while True:
      sock, _ = server.accept()
      threading.Thread(target=talk, args=(sock,), daemon=True).start()

  threading.Thread(target=serve, daemon=True).start()


def talk(sock):
  line = b''
  while not line.endswith(b'\n'):
    line += sock.recv(1)
  match = re.fullmatch(rb'CONNECT (\d+)\n', line)
  if not match or int(match[1]) != 1024 or state['is'] != 'Running':
    sock.close()
    return
  connections.append(sock)
  sock.sendall(b'OK 1073741824\n')
  try:
    agent(sock.makefile('rwb'))
  except (OSError, ValueError, struct.error):
    pass


def agent(file):
  """`set NAME VALUE`, `get NAME`, and what readiness takes."""
  if 'ready' not in state['files']:
    file.readline()
    state['files']['ready'] = 'x'
    file.write(b'{"ready": true}\n')
    file.flush()
  while True:
    size, length = struct.unpack('>II', file.read(8))
    request = json.loads(file.read(size))
    for path, count in request.get('write', ()):
      state['files'][path] = file.read(count).decode()
    if 'resume' in request:
      state['files']['resumed'] = request['resume']['entropy']
    reply(file, request)


def reply(file, request):
  out = b''
  message = {'read': []}
  if request.get('facts'):
    message['facts'] = {'kernel': '6.1.0', 'python': '3.11', 'cgroup': 2}
  if request.get('run'):
    if request['run'][0] == 'die':
      os._exit(1)
    texts = {'python': '42\n', 'cat': ''}
    out = texts.get(request['run'][0], '').encode()
    if request['run'][0] == 'cat':
      out = state['files'].get(request['run'][1], 'none').encode()
    message.update(exit=0, seconds=0.1, cpu_seconds=0.1, out=len(out), err=0)
    message.update(truncated=False, timed_out=False)
  text = json.dumps(message).encode()
  file.write(struct.pack('>II', len(text), len(out)) + text + out)
  file.flush()


# --- HTTP --------------------------------------------------------------------


def answer(sock):
  data = b''
  while b'\r\n\r\n' not in data:
    piece = sock.recv(65536)
    if not piece:
      return
    data += piece
  head, body = data.split(b'\r\n\r\n', 1)
  method, path, version = head.split(b'\r\n')[0].decode().split()
  assert version == 'HTTP/1.1'
  length = int(re.search(rb'(?i)content-length: *(\d+)', head)[1])
  while len(body) < length:
    body += sock.recv(65536)
  status, said = '204 ', b''
  try:
    found = act(method, path, json.loads(body) if body else {})
    if found:
      status, said = '200 OK', json.dumps(found).encode()
  except (Fault, OSError) as error:
    status, said = '400 ', json.dumps({'fault_message': str(error)}).encode()
  head = f'HTTP/1.1 {status}\r\nServer: Firecracker API\r\n'
  if said:
    head += f'Content-Length: {len(said)}\r\n'
  sock.sendall(head.encode() + b'\r\n' + said)


def main():
  if sys.argv[1:] == ['--version']:
    print(f'Firecracker v{VERSION}\n')
    return
  assert sys.argv[1::2] == ['--api-sock', '--level'], sys.argv
  server = socket.socket(socket.AF_UNIX)
  server.bind(sys.argv[2])
  server.listen(4)
  while True:
    sock, _ = server.accept()
    with sock:
      answer(sock)


main()
