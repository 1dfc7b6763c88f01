"""Stock networks of vLLM with our model state."""

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from mars_ray.vllm.runner.model_state import MarsModelState


class _Lookahead:
    """Mixin that adds lookahead to a network."""

    @staticmethod
    def get_model_state_cls() -> type[MarsModelState]:
        """Return the class that lays out the steps."""
        return MarsModelState


class MarsLlamaForCausalLM(_Lookahead, LlamaForCausalLM):
    """Llama with lookahead."""


class MarsQwen2ForCausalLM(_Lookahead, Qwen2ForCausalLM):
    """Qwen2 with lookahead."""


class MarsQwen3ForCausalLM(_Lookahead, Qwen3ForCausalLM):
    """Qwen3 with lookahead."""
