"""Run a module of this folder inside vLLM's CPU build, under Triton's interpreter, to try it without a GPU.

TRITON_INTERPRET=1 python -m benchmarks.gpu.on_cpu benchmarks.gpu.run --device cpu --small --json try.jsonl
"""

import runpy
import sys

from tests.vllm import interpreted  # noqa: F401  # changes vLLM, so it comes before everything that imports vLLM

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
