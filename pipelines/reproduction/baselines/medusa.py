"""Medusa-1: heads on a frozen autoregressive network that guess the tokens after its next token.

The network itself is not changed, and the tokens equal those of autoregressive decoding, up to rounding.

Letters: K heads, D hidden size, V vocabulary, M picked positions.

Source: arXiv 2401.10774. Head k in 0..K-1 predicts the token k + 2 ahead (the network itself predicts 1 ahead), with a
residual block and an output embedding of its own. Unlike in the paper, which verifies a tree, the guesses are a chain
of the first choice of each head.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError, DivergedError, ModelError
from mars_ray.method.streams import IGNORE, PackedRows, clean_stream
from mars_ray.method.visibility import dense_mask
from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.reader import Reader
from pipelines.reproduction.baselines.verify import verify_greedily

DECAY = 0.8
"""The loss of head k has the weight DECAY ** (k + 1)."""


class MedusaHeads(nn.Module):
    """K heads. New heads predict the same as the network, whose output embedding [V, D] they start from."""

    def __init__(self, heads: int, output_VD: Tensor) -> None:
        super().__init__()
        if heads < 1:
            raise ConfigError(f"heads is {heads}; it must be at least 1.")
        D = output_VD.shape[1]
        self.weight_KDD = nn.Parameter(output_VD.new_zeros(heads, D, D))
        self.bias_KD = nn.Parameter(output_VD.new_zeros(heads, D))
        self.output_KVD = nn.Parameter(output_VD.detach().expand(heads, -1, -1).clone())

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Return the logits [K, M, V] of all heads."""
        hidden_MD = hidden_MD.to(self.weight_KDD.dtype)
        inner_KMD = hidden_MD @ self.weight_KDD.mT + self.bias_KD[:, None]
        return (hidden_MD + F.silu(inner_KMD)) @ self.output_KVD.mT

    def loss(self, hidden_MD: Tensor, label_KM: Tensor) -> Tensor:
        """Return the mean of the heads' weighted cross-entropies, each of which is a mean over labels."""
        logits_KMV = self(hidden_MD).float()
        loss_KM = F.cross_entropy(logits_KMV.transpose(1, 2), label_KM, ignore_index=IGNORE, reduction="none")
        mean_K = loss_KM.sum(dim=1) / (label_KM != IGNORE).sum(dim=1).clamp(min=1)
        weight_K = DECAY ** torch.arange(1, len(mean_K) + 1, device=mean_K.device)
        return (weight_K * mean_K).mean()

    def save(self, path: Path) -> None:
        """Write the heads to a safetensors file."""
        save_file({name: weight.detach().contiguous() for name, weight in self.named_parameters()}, path)

    @classmethod
    def load(cls, path: Path, network: PreTrainedModel) -> "MedusaHeads":
        """Read heads for networks with the sizes of `network`, on the CPU. Raises `ModelError` for any other file."""
        try:
            weights = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a complete safetensors file: {error}. Train the heads again.") from error
        output_VD = network.get_output_embeddings().weight
        V, D = output_VD.shape
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        K = shapes.get("bias_KD", (0,))[0]
        if K < 1 or shapes != {"weight_KDD": (K, D, D), "bias_KD": (K, D), "output_KVD": (K, V, D)}:
            raise ModelError(f"{path} holds {shapes}, not heads for a network of hidden size {D}. Train new heads.")
        heads = cls(K, output_VD.cpu())
        heads.load_state_dict(weights)
        return heads


def head_labels(rows: PackedRows, heads: int) -> Tensor:
    """Return the labels of all heads, int64 [K, R, T]: the token k + 2 ahead, otherwise `IGNORE`.

    A token is a label only if it and all tokens between belong to the same response, so no head looks past the end.
    """
    label_KRT = torch.full((heads, *rows.tokens_RT.shape), IGNORE)
    inside_RT = torch.ones_like(rows.response_RT)
    for ahead in range(1, heads + 2):
        follows_RT = torch.zeros_like(inside_RT)
        follows_RT[:, :-ahead] = rows.response_RT[:, ahead:] & (
            rows.example_RT[:, ahead:] == rows.example_RT[:, :-ahead]
        )
        inside_RT = inside_RT & follows_RT
        if ahead > 1:
            label_KRT[ahead - 2][inside_RT] = rows.tokens_RT.roll(-ahead, dims=1)[inside_RT]
    return label_KRT


def train_heads(
    network: PreTrainedModel, heads: MedusaHeads, rows: Iterable[PackedRows], *, steps: int, learning_rate: float
) -> list[float]:
    """Train `heads` on the device of the network, with one step on each of the first `steps` batches in `rows`.

    Uses AdamW with a cosine decay of the learning rate to 0. Returns the loss before each step. Raises `DivergedError`
    if a loss is not finite. The network must use SDPA attention.
    """
    optimizer = torch.optim.AdamW(heads.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[float] = []
    for batch in islice(rows, steps):
        label_KRT = head_labels(batch, len(heads.bias_KD))
        where_RT = (label_KRT != IGNORE).any(dim=0)
        label_KM = label_KRT[:, where_RT].to(network.device)
        hidden_MD = hidden_at(network, batch, where_RT)
        loss = heads.loss(hidden_MD, label_KM)
        if not torch.isfinite(loss):
            raise DivergedError(
                f"the loss of the heads is {float(loss.detach())}. Lower the learning rate {learning_rate}."
            )
        # Restrict to the parameters of the heads, because the output embedding must not accumulate gradients.
        torch.autograd.backward(loss, inputs=list(heads.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def hidden_at(network: PreTrainedModel, rows: PackedRows, where_RT: Tensor) -> Tensor:
    """Return the inputs of the output embedding where `where_RT` is True, [M, D]."""
    streams = clean_stream(rows).to(network.device)
    picked: list[Tensor] = []

    def pick(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        picked.append(args[0][where_RT.to(args[0].device)])
        # The logits are not needed, so compute only one position.
        return (args[0][:1, :1],)

    hook = network.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        network(
            input_ids=streams.tokens_RS,
            position_ids=streams.position_RS,
            attention_mask=dense_mask(streams),
            use_cache=False,
        )
    finally:
        hook.remove()
    return picked[0]


@torch.inference_mode()
def decode_medusa(
    network: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    mask_id: int,
) -> list[BaselineOutput]:
    """Decode each prompt; prompts must not be empty. A forward verifies the last guesses and yields 1..K + 1 tokens."""
    outputs = []
    for prompt in prompts:
        output = BaselineOutput(max_tokens, stop_ids)
        reader = Reader(network, mask_id)
        guesses: list[int] = []
        while not output.is_finished:
            prefix = [*prompt, *output.tokens]
            guessed = guesses[: output.left - 1]
            reading = reader.read([*prefix, *guessed], last=len(guessed) + 1)
            accepted = verify_greedily(guessed, reading.logits_MV.argmax(dim=-1).tolist())
            output.extend(accepted)
            reader.crop(len(prefix) + len(accepted) - 1)
            # The heads look ahead from the position that predicted the last token.
            logits_KV = heads(reading.hidden_MD[len(accepted) - 1, None])[:, 0]
            logits_KV[:, mask_id] = -torch.inf
            guesses = logits_KV.argmax(dim=-1).tolist()
        output.forwards = reader.forwards
        outputs.append(output)
    return outputs
