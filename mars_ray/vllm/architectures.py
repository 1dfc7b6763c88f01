"""Names of the networks that look ahead in vLLM. Under its own name, a checkpoint is served by stock vLLM."""

ARCHITECTURE_OF = {
    "llama": "MarsLlamaForCausalLM",
    "qwen2": "MarsQwen2ForCausalLM",
    "qwen3": "MarsQwen3ForCausalLM",
}
"""Names for `--hf-overrides`, keyed by the `model_type` of config.json."""
