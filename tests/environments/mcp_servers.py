"""Two MCP servers, as processes.

python mcp_servers.py              with the `mcp` package; has a memory
python mcp_servers.py plain        the standard library alone
python mcp_servers.py broken       says something else, and ends
"""

import json
import os
import sys
import time


def packaged():
  from mcp.server import MCPServer
  from mcp.types import ToolAnnotations

  server = MCPServer('notes')
  notes = []

  @server.tool(description='Keep a note; says how many there are.')
  def keep(text: str) -> str:
    notes.append(text)
    return f'{len(notes)} notes'

  reads = ToolAnnotations(read_only_hint=True)

  @server.tool(description='All notes, as one text.', annotations=reads)
  def all_notes(limit: int = 10) -> str:
    return ' '.join(notes[:limit])

  @server.tool(description='Fails.')
  def fail() -> str:
    raise RuntimeError('no such note')

  @server.tool(description='Takes its time.')
  def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return 'awake'

  @server.tool(description='Ends the server.')
  def die() -> str:
    os._exit(3)

  @server.tool(description='What the server can see of its environment.')
  def look() -> str:
    return ' '.join(sorted(os.environ))

  server.run('stdio')


def plain():
  """What the protocol asks of a server with two tools, by hand."""
  schema = {
    'type': 'object',
    'properties': {'path': {'type': 'string'}},
    'required': ['path'],
  }
  for line in sys.stdin:
    message = json.loads(line)
    if 'id' not in message:
      continue
    method, params = message['method'], message.get('params', {})
    answer = {}
    if method == 'initialize':
      answer['result'] = {
        'protocolVersion': params['protocolVersion'],
        'capabilities': {'tools': {}},
        'serverInfo': {'name': 'plain', 'version': '1'},
      }
    elif method == 'tools/list':
      names = ('size', 'gone')
      answer['result'] = {
        'tools': [
          {'name': x, 'description': f'{x} of a file', 'inputSchema': schema}
          for x in names
        ]
      }
    elif method == 'tools/call' and params['name'] == 'gone':
      sys.exit('that was too much')
    elif method == 'tools/call':
      try:
        text, bad = str(os.path.getsize(params['arguments']['path'])), False
      except OSError as error:
        text, bad = error.strerror, True
      content = [{'type': 'text', 'text': text}]
      answer['result'] = {'content': content, 'isError': bad}
    else:
      answer['error'] = {'code': -32601, 'message': f'no method {method}'}
    note = {'jsonrpc': '2.0', 'method': 'notifications/message', 'params': {}}
    for said in (note, {'jsonrpc': '2.0', 'id': message['id'], **answer}):
      print(json.dumps(said), flush=True)


if __name__ == '__main__':
  if sys.argv[1:] == ['plain']:
    plain()
  elif sys.argv[1:] == ['broken']:
    sys.exit('no licence')
  else:
    packaged()
