"""Subclasses of vLLM's classes, and kernels. Besides them only `vllm/engine/llm_engine` imports vLLM."""
