"""Run a decoder step on a CPU, in one call into compiled kernels.

The output at a position depends, bit for bit, only on its own tokens: not on the rest of the batch, its place in the
batch or the number of threads. So a drafted and verified token has the same logits as a token decoded alone.

Libraries such as oneDNN would need one call for each of some 120 products of a step, and do not round inputs to 8 bits
in groups, where an outlier spoils 64 numbers instead of a row.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.kernels.adapter import FusedLoRA, pack_adapter
from mars_ray.engine.kernels.architectures import Activation, architecture_of, odd_sizes
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kernels.kept_weights import LayerPacker
from mars_ray.engine.kernels.packed import GROUP, Format, Matrix, PackedLinear, unpack
from mars_ray.engine.kv.attention import Layers
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.model.rotary_length import constant_rotary_length

PER_POSITION = tuple(field.name for field in fields(ForwardBatch) if field.name.endswith("_N"))
"""Fields that describe the packed positions."""
GATE_UP = 2
"""Number of the gate and up projection among the groups of linear layers."""
FIRST_ROTATIONS = 512
"""Positions whose rotary embeddings are computed at the start."""
POINTER = ctypes.c_void_p
INT = ctypes.c_int64
FLOAT = ctypes.c_float


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", POINTER),
        ("qkv", Matrix),
        ("query_norm", POINTER),
        ("key_norm", POINTER),
        ("output", Matrix),
        ("output_norm", POINTER),
        ("mlp_norm", POINTER),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("down_norm", POINTER),
        ("window", INT),
        ("rotary", INT),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, INT) for name in ("vocabulary", "mask_id", "rotary_dim", "activation", "norm_rounding")),
        *((name, FLOAT) for name in ("norm_epsilon", "scaling", "attention_cap", "logit_cap", "embedding_scale")),
        *((name, POINTER) for name in ("embedding", "final_norm")),
        ("head", Matrix),
        ("layers", POINTER),
    )


class _Group(ctypes.Structure):
    _fields_ = (("adapter", POINTER), ("first", INT), ("count", INT))


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("positions", "picks", "threads", "num_groups")),
        *((name, POINTER) for name in ("groups", "offsets")),
        *((name, POINTER) for name in ("ids", "slots", "places", "columns", "prefixes", "behind", "cosines", "sines")),
        ("rotated", INT),
        *((name, POINTER) for name in ("picked", "keys", "values")),
        *((name, INT) for name in ("slot_stride", "head_stride")),
        *((name, POINTER) for name in ("hidden", "logits", "tokens", "confidences")),
    )


class FusedDecoder:
    """Runs a decoder of one of the `ARCHITECTURES` with packed weights.

    With `consume`, the weights of each layer of `network` are freed once they are packed, so that memory never holds
    the model twice. `folder` is the one that the network was loaded from unchanged; rounded weights of a large model
    are kept in the cache for it. Raises `KernelError` with the reason if the kernels do not support the model, its
    sizes or the machine.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        *,
        mask_id: int,
        quantize: str | None,
        consume: bool,
        folder: Path | None = None,
    ) -> None:
        self._architecture = architecture_of(network)
        library = kernel_library()
        name = str(network.dtype).removeprefix("torch.")
        self._call = getattr(library.library, f"forward_{name}")
        self._layout = library.layout
        plain = Format.of(network.dtype)
        self._kind = Format[quantize.upper()] if quantize else plain
        odd = odd_sizes(network, GROUP)
        if quantize and odd:
            raise KernelError(f"sizes must be multiples of {GROUP}, not {odd[0]}.")
        self._dtype = network.dtype
        self._consume = consume
        self._body: Any = network.model
        self._kept: list[Any] = []
        """Objects that own the memory that the structures point into."""
        self._layer_packer = LayerPacker(
            self._layout, folder if quantize else None, f"{quantize} {name} {mask_id} {self._architecture.linears}"
        )
        self._model = self._describe(network, mask_id)
        self._layer_packer.keep()
        # An adapter only proposes tokens, so it may have 8 bits. Beside float32 weights it stays as trained.
        self._adapter_kind = plain if odd or self._kind is Format.FLOAT32 else Format.INT8
        self._network = network
        self._rotations_max = constant_rotary_length(network.config.get_text_config())
        """Positions beyond which some networks rotate all positions otherwise. Sequences end before."""
        positions = torch.arange(min(FIRST_ROTATIONS, self._rotations_max))
        self._rotations = self._architecture.rotations(self._body, positions)
        """Cosines and sines of the first positions, which grow with the longest sequence."""
        self._layers: Layers | None = None
        """The cache whose addresses `_keys` and `_values` hold. A cache with new tensors is a new list."""

    def pack(self, lora: GatedLoRA) -> FusedLoRA:
        """Return an adapter in the form that `forward` takes. Any thread may call it, next to a forward.

        The adapter must not be attached to the network. Raises `AdapterError` if its sizes do not match.
        """
        lora.check_fits(self._network)
        linears = self._architecture.linears
        return pack_adapter(lora, self._body.layers, linears, self._adapter_kind, self._dtype, self._layout)

    def unembedding(self) -> Tensor:
        """Return the output embedding [V, H], unpacked if the network no longer has it.

        Unpacking is exact, except that 8-bit weights stay rounded.
        """
        head: Any = self._network.get_output_embeddings()
        if not head.weight.is_meta:
            return cast(Tensor, head.weight.detach())
        return unpack(self._head, self._layout)[: head.out_features].to(self._dtype)

    def forward(
        self, layers: Layers, batch: ForwardBatch, adapters: Sequence[FusedLoRA] = (), *, threads: int = 1
    ) -> tuple[list[int], list[float], Tensor, Tensor]:
        """Return tokens, confidences, logits and last hidden states at the M picked positions.

        The token is the most likely one, and its confidence is its probability. Logits are float32 [M, V]; hidden
        states are [M, H] in the dtype of the network. Keys and values of all N positions are written to `layers`. Masks
        are embedded and adapted by `adapters`, to which the batch refers by index.
        """
        self._point_into(layers)
        picks = len(batch.pick_M)
        keys = layers[0][0]
        groups: list[_Group] = []
        if adapters:
            batch = _by_adapter(batch)
            groups = _groups(adapters, batch.adapter_N, batch.offset_N)
        packed_groups = (_Group * len(groups))(*groups)
        self._rotate_up_to(int(batch.position_N.max()))
        logits_MV = torch.empty(picks, self._model.head.columns)
        hidden_MH = torch.empty(picks, self._model.hidden, dtype=self._dtype)
        token_M = torch.empty(picks, dtype=torch.int64)
        confidence_M = torch.empty(picks)
        inputs = (batch.id_N, batch.slot_N, batch.position_N, batch.target_N, batch.prefix_N, batch.behind_N)
        structure = _Batch(
            len(batch.id_N),
            picks,
            threads,
            len(groups),
            ctypes.addressof(packed_groups),
            batch.offset_N.data_ptr(),
            *(tensor.data_ptr() for tensor in (*inputs, *self._rotations)),
            self._rotations[0].shape[1],
            batch.pick_M.data_ptr(),
            ctypes.addressof(self._keys),
            ctypes.addressof(self._values),
            keys.stride(0),
            keys.stride(1),
            *(tensor.data_ptr() for tensor in (hidden_MH, logits_MV, token_M, confidence_M)),
        )
        self._call(ctypes.byref(self._model), ctypes.byref(structure))
        return token_M.tolist(), confidence_M.tolist(), logits_MV[:, : self._model.vocabulary], hidden_MH

    def _rotate_up_to(self, position: int) -> None:
        if position >= self._rotations[0].shape[1]:
            length = max(position + 1, min(2 * position, self._rotations_max))
            self._rotations = self._architecture.rotations(self._body, torch.arange(length))

    def _point_into(self, layers: Layers) -> None:
        if layers is not self._layers:
            kind = POINTER * len(layers)
            self._keys, self._values = (kind(*(pair[side].data_ptr() for pair in layers)) for side in (0, 1))
            self._layers = layers

    def _describe(self, network: PreTrainedModel, mask_id: int) -> _Model:
        config = network.config
        body = self._body
        architecture = self._architecture
        head: Any = network.get_output_embeddings()
        attention = body.layers[0].self_attn
        attention_cap, logit_cap = architecture.caps_of(config)
        scale = getattr(body.embed_tokens, "embed_scale", None)
        layers = (_Layer * len(body.layers))(*(self._layer(layer) for layer in body.layers))
        self._kept.append(layers)
        # The output head keeps 8 bits, as in other engines: 4 bits would cost more quality than they gain in speed.
        self._head = self._pack([head], Format.INT8 if self._kind is Format.INT4 else self._kind)
        return _Model(
            num_layers=len(layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            intermediate=config.intermediate_size,
            vocabulary=head.out_features,
            mask_id=mask_id,
            rotary_dim=architecture.rotary_dim(body),
            activation=Activation[architecture.activation_of(config)],
            norm_rounding=architecture.rounding,
            norm_epsilon=config.rms_norm_eps,
            scaling=attention.scaling,
            attention_cap=attention_cap,
            logit_cap=logit_cap,
            embedding_scale=1.0 if scale is None else float(scale.to(body.embed_tokens.weight.dtype)),
            embedding=self._address(body.embed_tokens.weight.detach().contiguous()),
            final_norm=self._norm(body.norm),
            head=self._head.matrix,
            layers=ctypes.addressof(layers),
        )

    def _layer(self, layer: Any) -> _Layer:
        architecture = self._architecture
        attention = layer.self_attn
        qkv, output, gate_up, down = (
            self._pack([layer.get_submodule(name) for name in names], self._kind, alternating=number == GATE_UP).matrix
            for number, names in enumerate(architecture.linears)
        )
        norms = {
            "attention_norm": layer.input_layernorm,
            "query_norm": getattr(attention, "q_norm", None),
            "key_norm": getattr(attention, "k_norm", None),
            "output_norm": architecture.output_norm and getattr(layer, architecture.output_norm),
            "mlp_norm": getattr(layer, architecture.mlp_norm),
            "down_norm": architecture.down_norm and getattr(layer, architecture.down_norm),
        }
        return _Layer(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            window=architecture.window_of(attention),
            rotary=architecture.rotary_of(attention),
            **{name: self._norm(norm) for name, norm in norms.items()},
        )

    def _pack(self, layers: list[nn.Linear], kind: Format, *, alternating: bool = False) -> PackedLinear:
        packed = self._layer_packer.pack(layers, kind, alternating=alternating)
        self._kept.append(packed)
        for layer in layers:
            if self._consume and layer.weight is not self._body.embed_tokens.weight:
                layer.to("meta")
        return packed

    def _norm(self, norm: Any) -> int | None:
        return None if norm is None else self._address(self._architecture.norm_weight(norm))

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _by_adapter(batch: ForwardBatch) -> ForwardBatch:
    """Sort the positions by adapter, positions without an adapter first."""
    order_N = batch.adapter_N.argsort(stable=True)
    sorted_fields = {name: getattr(batch, name)[order_N] for name in PER_POSITION}
    return replace(batch, pick_M=order_N.argsort()[batch.pick_M], **sorted_fields)


def _groups(adapters: Sequence[FusedLoRA], adapter_N: Tensor, offset_N: Tensor) -> list[_Group]:
    """Return the range of masks of each adapter, and clamp `offset_N` in place to the adapter's mask embeddings.

    Positions must be sorted by adapter.
    """
    groups = []
    first, *counts = (adapter_N + 1).bincount().tolist()
    for adapter, count in zip(adapters, counts, strict=False):
        if count:
            groups.append(_Group(ctypes.addressof(adapter.structure), first, count))
            offset_N[first : first + count].clamp_(max=adapter.masks - 1)
            first += count
    return groups
