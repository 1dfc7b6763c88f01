"""Decode from Python: `LLM` in this process, `AsyncLLM` behind asyncio."""
