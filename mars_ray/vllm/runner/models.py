"""Stock networks of vLLM with our model state."""

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from mars_ray.vllm.runner.model_state import MarsModelState


class MarsLlamaForCausalLM(LlamaForCausalLM):
    """Llama with lookahead."""

    @staticmethod
    def get_model_state_cls() -> type[MarsModelState]:
        """Return the class that lays out the steps."""
        return MarsModelState


class MarsQwen2ForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with lookahead."""

    @staticmethod
    def get_model_state_cls() -> type[MarsModelState]:
        """Return the class that lays out the steps."""
        return MarsModelState


class MarsQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with lookahead."""

    @staticmethod
    def get_model_state_cls() -> type[MarsModelState]:
        """Return the class that lays out the steps."""
        return MarsModelState
