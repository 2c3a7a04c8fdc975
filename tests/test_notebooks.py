"""The notebooks run from start to end, import what they show, and hold nothing.

A notebook defines no library code: small functions for its own plots and prose
are all right, classes are not. It is committed without outputs.
"""

import ast
import os
from pathlib import Path
import re

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted(
  (Path(__file__).resolve().parent.parent / 'notebooks').glob('*.ipynb')
)
SECONDS = 300  # of a cell, on a busy machine; a notebook aims at 40 in all
FUNCTION_LINES = 40


def code(path):
  """Sources of the code cells."""
  notebook = nbformat.read(path, as_version=4)
  return [cell.source for cell in notebook.cells if cell.cell_type == 'code']


def parse(source):
  """Notebook cells may await at top level."""
  flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
  return compile(source, 'cell', 'exec', flags)


def named(path):
  return path.stem


def test_there_are_notebooks():
  assert {path.stem for path in NOTEBOOKS} >= {'one_rl_step', 'reading_a_run'}


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_committed_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  assert notebook.metadata.kernelspec.name == 'python3'
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_imports_and_defines_no_library_code(path):
  imported = set()
  for source in code(path):
    for node in ast.walk(parse(source)):
      assert not isinstance(node, ast.ClassDef), f'class {node.name}'
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        assert node.end_lineno - node.lineno < FUNCTION_LINES, node.name
      if isinstance(node, ast.ImportFrom):
        imported.add(node.module.split('.')[0])
  assert 'composer' in imported
  paths = re.findall(
    r'(?<![\w.])/(?:home|tmp|root|work)\b', '\n'.join(code(path))
  )
  assert not paths, 'a path of one machine'


@pytest.mark.slow
@pytest.mark.filterwarnings(
  'ignore::DeprecationWarning'
)  # of the kernel's client
@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_runs(path):
  notebook = nbformat.read(path, as_version=4)
  # One device, as on a laptop, and not the eight of the tests; no run of ours.
  left_out = ('XLA_FLAGS', 'JAX_NUMPY_RANK_PROMOTION', 'COMPOSER_RUN')
  environment = {k: v for k, v in os.environ.items() if k not in left_out}
  client = nbclient.NotebookClient(
    notebook,
    timeout=SECONDS,
    kernel_name='python3',
    resources={'metadata': {'path': str(path.parent)}},
  )
  client.execute(env=environment)
  printed = [
    output.get('text', '')
    for cell in notebook.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
  ]
  assert any(printed)
