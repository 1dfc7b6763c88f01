"""Decode from Python: `LLM` in this process, `AsyncLLM` in a separate process for asyncio."""
