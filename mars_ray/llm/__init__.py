"""Decode from Python, with `LLM` in this process or with `AsyncLLM` in a separate process for asyncio."""
