"""Answer prompts with vLLM's offline engine: lines of JSON in, lines of JSON out.

    .venv-vllm/0.32/bin/python -P benchmarks/peers/vllm_server.py FOLDER THREADS ROWS [SPECULATION]

SPECULATION is vLLM's `speculative_config` as JSON.

It runs in vLLM's environment, so it imports nothing of mars-ray. With `-P` the file `vllm.py` beside it does not hide
vLLM. A line `{"prompts": [[1, 2]], "tokens": 64}` is answered with the fields of `TimedAnswers`. The first line out is
`{"load_seconds": ...}`.
"""

import json
import os
import sys
import time
from typing import Any, TextIO

PROMPT_TOKENS = 4096
"""Prompt tokens of one step: all prompts of a batch."""


def main() -> None:
    """Load the model, and answer until the input ends."""
    folder, threads, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to the standard output
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    began_s = time.perf_counter()
    from vllm import LLM

    llm = LLM(
        model=folder,
        dtype="bfloat16",
        max_num_seqs=rows,
        max_num_batched_tokens=PROMPT_TOKENS,
        max_model_len=2048,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config=json.loads(sys.argv[4]) if len(sys.argv) > 4 else None,
    )
    _answer(llm.llm_engine, {"prompts": [[1, 2, 3]], "tokens": 2})
    _write(lines, {"load_seconds": time.perf_counter() - began_s})
    for line in sys.stdin:
        _write(lines, _answer(llm.llm_engine, json.loads(line)))


def _answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    tokens: int = asked["tokens"]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    for number, prompt in enumerate(asked["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    answers: dict[str, list[int]] = {}
    read_s, forwards = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        forwards += 1
        if not read_s and len(answers) == len(asked["prompts"]):
            read_s, forwards = time.perf_counter(), 0
    return {
        "tokens": [answers[str(number)] for number in range(len(asked["prompts"]))],
        "prompt_seconds": read_s - began_s,
        "decode_seconds": time.perf_counter() - read_s,
        "forwards": forwards,
    }


def _write(to: TextIO, value: dict[str, Any]) -> None:
    to.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
