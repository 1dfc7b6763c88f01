"""Subclasses of vLLM's classes. Besides them only `vllm/engine/llm_engine` imports vLLM."""
