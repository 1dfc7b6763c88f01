"""Refuse wrong `vllm_xargs` when a request arrives, with status 400 over HTTP."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from mars_ray.errors import RequestError
from mars_ray.vllm.request_lookahead import decode_params


class MarsRequestChecks(LogitsProcessor):
    """A processor that changes no logits: vLLM calls its `validate_params` for every request."""

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

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:  # noqa: ARG002
        """Return the logits."""
        return logits
