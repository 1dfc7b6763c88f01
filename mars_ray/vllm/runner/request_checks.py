"""Refuse wrong `vllm_xargs` when a request arrives, with status 400 over HTTP."""

from importlib import import_module
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams

from mars_ray.errors import RequestError
from mars_ray.vllm.request_lookahead import decode_params
from mars_ray.vllm.versions import hooks_of

LogitsProcessor: Any = import_module(hooks_of(vllm.__version__).processors).LogitsProcessor


class MarsRequestChecks(LogitsProcessor):
    """A processor that changes no logits: vLLM calls its `validate_params` for every request.

    Where processors need model runner V1, V2 creates none of them.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` for wrong lookahead parameters."""
        try:
            decode_params(sampling_params.extra_args)
        except RequestError as error:
            raise ValueError(f"vllm_xargs: {error}") from error

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:  # noqa: ARG002
        """Return that the logits stay as they are."""
        return False

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG002
        """Return the logits."""
        return logits
