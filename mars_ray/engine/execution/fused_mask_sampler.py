"""Correct the logits of masks with compiled kernels, on a CPU; `mask_sampler` does the same through torch."""

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
    """Corrects masks with the sampler head `head` and the input and output embeddings of the network, each [V, H]."""

    def __init__(self, head: SamplerHead, embedding_VH: Tensor, unembedding_VH: Tensor) -> None:
        dtype = embedding_VH.dtype
        self._correct = getattr(kernel_library(), f"correct_{str(dtype).removeprefix('torch.')}")
        matrices = (head.read_hidden.weight, head.read_token.weight, head.write.weight)
        hidden, token, write = (matrix.detach().to(dtype).contiguous() for matrix in matrices)
        bias = head.read_hidden.bias.detach().float().contiguous()
        self._tensors = (hidden, bias, token, write, embedding_VH.contiguous(), unembedding_VH.contiguous())
        """Tensors that own the memory that the structure points into."""
        vocabulary, size = embedding_VH.shape
        self._head = _Head(size, len(bias), vocabulary, *(tensor.data_ptr() for tensor in self._tensors))

    @torch.inference_mode()
    def correct(self, output: ForwardOutput, rows: Sequence[MaskRow]) -> None:
        """Correct the tokens, confidences and logits of `output` at the masks of `rows`, in place."""
        assert output.hidden_MH is not None
        picks = [pick for row in rows for pick in row.masks]
        result = 0
        lines = []
        for row in rows:
            lines.append((output.tokens[row.behind], row.masks.start, len(row.masks), result))
            result += len(row.masks)
        before_R, first_R, length_R, result_R = torch.tensor(lines).T.contiguous()
        token_M = torch.empty(len(picks), dtype=torch.int64)
        confidence_M = torch.tensor([output.confidences[pick] for pick in picks])
        inputs = (before_R, first_R, length_R, result_R, output.hidden_MH, output.logits_MV)
        structure = _Rows(
            len(rows),
            *(tensor.data_ptr() for tensor in inputs),
            output.logits_MV.stride(0),
            token_M.data_ptr(),
            confidence_M.data_ptr(),
        )
        self._correct(ctypes.byref(self._head), ctypes.byref(structure), INT(min(len(rows), torch.get_num_threads())))
        for pick, token, confidence in zip(picks, token_M.tolist(), confidence_M.tolist(), strict=True):
            output.tokens[pick] = token
            output.confidences[pick] = confidence
