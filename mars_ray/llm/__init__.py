"""Decode from Python: with `LLM` in this process, or from asyncio with `AsyncLLM` in a separate process."""
