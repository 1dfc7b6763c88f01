"""The sampler head of an adapter as a call into compiled kernels: what `mask_sampler` does through torch."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from mars_ray.adapter.sampler_head import SamplerHead
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.decoder import INT, POINTER


class _Head(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("hidden", "width", "vocabulary")),
        *((name, POINTER) for name in ("read_hidden", "bias", "read_token", "write", "embedding", "unembedding")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("count", INT),
        *((name, POINTER) for name in ("before", "first", "length", "result", "states", "logits")),
        ("stride", INT),
        *((name, POINTER) for name in ("tokens", "confidences")),
    )


class FusedMaskSampler:
    """Corrects masks by `head`, in a network with these input and output embeddings, both [V, H], on a CPU."""

    def __init__(self, head: SamplerHead, embedding_VH: Tensor, unembedding_VH: Tensor) -> None:
        dtype = embedding_VH.dtype
        self._correct = getattr(kernel_library(), f"correct_{str(dtype).removeprefix('torch.')}")
        matrices = (head.read_hidden.weight, head.read_token.weight, head.write.weight)
        hidden, token, write = (each.detach().to(dtype).contiguous() for each in matrices)
        bias = head.read_hidden.bias.detach().float().contiguous()
        given = (hidden, bias, token, write, embedding_VH.contiguous(), unembedding_VH.contiguous())
        vocabulary, size = embedding_VH.shape
        self._head = _Head(size, len(bias), vocabulary, *(each.data_ptr() for each in given))
        self._kept = given
        """What owns the memory that the structure points into."""

    @torch.inference_mode()
    def correct(self, output: ForwardOutput, rows: Sequence[MaskRow]) -> None:
        """Correct tokens, confidences and logits of `output` at the masks of `rows`."""
        assert output.hidden_MH is not None
        picks = [pick for row in rows for pick in row.masks]
        result = 0
        places = []
        for row in rows:
            places.append((output.tokens[row.behind], row.masks.start, len(row.masks), result))
            result += len(row.masks)
        before_R, first_R, length_R, result_R = torch.tensor(places).T.contiguous()
        token_M = torch.empty(len(picks), dtype=torch.int64)
        confidence_M = torch.tensor([output.confidences[pick] for pick in picks])
        told = _Rows(
            len(rows),
            *(each.data_ptr() for each in (before_R, first_R, length_R, result_R, output.hidden_MH, output.logits_MV)),
            output.logits_MV.stride(0),
            token_M.data_ptr(),
            confidence_M.data_ptr(),
        )
        self._correct(ctypes.byref(self._head), ctypes.byref(told), INT(min(len(rows), torch.get_num_threads())))
        for pick, token, confidence in zip(picks, token_M.tolist(), confidence_M.tolist(), strict=True):
            output.tokens[pick], output.confidences[pick] = token, confidence
