"""A client of an MCP server inside a machine; its text is sent there.

    python -c TEXT '{"argv": [...], "call": {"name": ..., "arguments": ...}}'

Starts the server, shakes hands, makes the call (or, without one, lists the
tools) and writes one JSON object: {"tools": [...]}, {"text": ..., "is_error":
...}, {"error": what the server refused}, or {"failed": what went wrong with it}.
It needs nothing but the standard library.
"""

import json
import os
import subprocess
import sys

PROTOCOL = '2025-06-18'
MOST = 12_000  # of an answer as JSON, so that it fits a machine's output


class Gone(Exception):
  """The server ended, or spoke something else."""


def main(request):
  try:
    server = subprocess.Popen(
      request['argv'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      encoding='utf-8',
    )
  except OSError as error:
    return {'failed': f'{request["argv"][0]}: {error.strerror}'}
  try:
    return talk(server, request['call'])
  except (Gone, OSError) as error:
    server.kill()
    said = server.stderr.read()[-400:].strip()
    return {'failed': f'{error}{": " * bool(said)}{said}'}
  finally:
    server.kill()


def talk(server, call):
  hello = {
    'protocolVersion': PROTOCOL,
    'capabilities': {},
    'clientInfo': {'name': 'composer', 'version': '1'},
  }
  refused = ask(server, 1, 'initialize', hello).get('error')
  if refused:
    raise Gone(f'no handshake: {refused.get("message")}')
  send(server, {'method': 'notifications/initialized'})
  if not call:
    return {'tools': tools(server)}
  answer = ask(server, 2, 'tools/call', call)
  if 'error' in answer:
    return {'error': fitted(str(answer['error'].get('message')))}
  result = answer['result']
  pieces = [
    part['text'] if part.get('type') == 'text' else f'({part.get("type")})'
    for part in result.get('content', [])
  ]
  text = '\n'.join(pieces) or 'ok'
  return {'text': fitted(text), 'is_error': bool(result.get('isError'))}


def fitted(text):
  """`text`, its end left out if it is too long once JSON has spelled it."""
  kept = text
  while len(json.dumps(kept)) > MOST:
    kept = kept[: len(kept) * 3 // 4]
  gone = len(text) - len(kept)
  return f'{kept}\n[{gone} characters left out]' if gone else text


def tools(server):
  found, cursor = [], None
  for number in range(2, 66):
    parameters = {'cursor': cursor} if cursor else {}
    answer = ask(server, number, 'tools/list', parameters)
    if 'error' in answer:
      raise Gone(f'no list of tools: {answer["error"].get("message")}')
    for tool in answer['result']['tools']:
      found.append(
        {
          'name': tool['name'],
          'description': tool.get('description') or '',
          'schema': tool['inputSchema'],
          'reads': (tool.get('annotations') or {}).get('readOnlyHint') is True,
        }
      )
    cursor = answer['result'].get('nextCursor')
    if not cursor:
      break
  return found


def send(server, message):
  server.stdin.write(json.dumps({'jsonrpc': '2.0', **message}) + '\n')
  server.stdin.flush()


def ask(server, number, method, parameters):
  """The answer of that number; whatever else is said meanwhile is let be."""
  send(server, {'id': number, 'method': method, 'params': parameters})
  for line in server.stdout:
    try:
      message = json.loads(line)
    except ValueError:
      raise Gone(f'it speaks no JSON: {line[:80]!r}') from None
    if isinstance(message, dict) and message.get('id') == number:
      if 'method' not in message:
        return message
  raise Gone(f'it ended before it answered {method}')


if __name__ == '__main__':
  sys.path[:] = [x for x in sys.path if x not in ('', '.', os.getcwd())]
  json.dump(main(json.loads(sys.argv[1])), sys.stdout)
