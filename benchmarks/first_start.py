"""Measure how long a model takes until it can answer: the first start from a .gguf file, and later starts.

    python -m benchmarks.first_start MODEL.gguf --baseline ../main --repeat 3 --output first_start.json

Each start is a process of its own. Contenders take turns, each with a cache folder of its own: this checkout, the one
of `--baseline`, and llama.cpp's Python package if it is installed. "imports" is the time until the package is imported,
"start" the time from then until the engine can take a request, and "CPU" the processor time of the process and its
children. Files are in the page cache, as after a download.
"""

OURS = """
import json, resource, sys, time
began_s = time.monotonic()
from mars_ray import LLM, SamplingParams
imported_s = time.monotonic()
quantize = sys.argv[2] or None
try:
    llm = LLM(sys.argv[1], quantize=quantize)
except TypeError:  # the baseline takes options together
    from mars_ray import EngineOptions
    llm = LLM(sys.argv[1], options=EngineOptions(quantize=quantize))
started_s = time.monotonic()
llm.chat("Say hi.", SamplingParams(max_tokens=1))
answered_s = time.monotonic()
"""
