"""Run a decoder on a CPU through the compiled kernels."""

import ctypes
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.sampler_head import SamplerHead
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow
from mars_ray.engine.execution.step_threads import StepThreads, lost_cores
from mars_ray.engine.kernels.adapter import FusedLoRA
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.decoder import INT, POINTER, FusedDecoder
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.options import Quantize


@dataclass(frozen=True, slots=True, eq=False)
class FusedAdapter:
    """An adapter packed for the kernels."""

    lora: FusedLoRA
    sampler: "FusedMaskSampler"

    @property
    def nbytes(self) -> int:
        """Memory of the adapter in bytes, without the embeddings of the network."""
        return self.lora.nbytes + self.sampler.nbytes


class CPURunner:
    """Runs packed copies of the network's weights. Raises `KernelError` if the kernels do not support the network."""

    def __init__(
        self,
        network: PreTrainedModel,
        cache: SlotKVCache,
        *,
        mask_id: int,
        quantize: Quantize | None,
        consume: bool,
        folder: Path | None = None,
    ) -> None:
        self._decoder = FusedDecoder(network, mask_id=mask_id, quantize=quantize, consume=consume, folder=folder)
        self._embedding_VH = network.get_input_embeddings().weight.detach()
        self._unembedding: weakref.ref[Tensor] | None = None
        """Output embedding while adapters hold it. Without adapters it may exist only in packed form."""
        self._adapters: list[FusedLoRA] = []
        self._cache = cache
        self._threads = StepThreads(torch.get_num_threads())

    def pack(self, lora: GatedLoRA) -> FusedAdapter:
        """Return an adapter in the form that `use` takes. One thread at a time may call it, next to a forward.

        Raises `AdapterError` if the adapter does not fit the network.
        """
        packed = self._decoder.pack(lora)
        unembedding_VH = self._unembedding() if self._unembedding else None
        if unembedding_VH is None:
            unembedding_VH = self._decoder.unembedding().contiguous()
            self._unembedding = weakref.ref(unembedding_VH)
        return FusedAdapter(packed, FusedMaskSampler(lora.sampler, self._embedding_VH, unembedding_VH))

    def use(self, adapters: Sequence[FusedAdapter]) -> None:
        """Decode masks with these adapters from the next forward on; batches refer to them by their index."""
        self._adapters = [adapter.lora for adapter in adapters]

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward, which writes the keys and values of all its positions to the cache."""
        began_s, lost_before = time.perf_counter(), lost_cores()
        output = self._decoder.forward(self._cache.layers, batch, self._adapters, threads=self._threads.count)
        self._threads.took(len(batch.id_N), time.perf_counter() - began_s, lost_cores() - lost_before)
        return ForwardOutput(*output)

    def close(self) -> None:
        """Do nothing, because adapters are never attached to the network."""


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
        self._correct = getattr(kernel_library().library, f"correct_{str(dtype).removeprefix('torch.')}")
        matrices = (head.read_hidden.weight, head.read_token.weight, head.write.weight)
        hidden, token, write = (matrix.detach().to(dtype).contiguous() for matrix in matrices)
        bias = head.read_hidden.bias.detach().float().contiguous()
        self.nbytes = sum(tensor.nbytes for tensor in (hidden, bias, token, write))
        """Memory of the head in bytes."""
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
        token_M = torch.tensor([output.tokens[pick] for pick in picks], dtype=torch.int64)
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
