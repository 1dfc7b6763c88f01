"""The sampler head of an adapter: corrects the logits of a mask, given the token chosen before it.

All masks of a block are decoded in one forward. A mask therefore does not know the token at the mask before it, and two
tokens that are each likely may not fit together. Once the token before a mask is known, the head corrects the logits of
the most likely candidates, which takes little time compared with a forward.

Source: arXiv 2507.11851, whose sampler computes the logits of the whole vocabulary.

Letters: M masks, C candidates, H hidden size, W width of the head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from mars_ray.errors import AdapterError

CANDIDATES = 32
"""Number of most likely tokens per mask that get corrected logits."""
CHUNK = 64
WIDTH = 512


def check_shape(name: str, tensor: Tensor, needed: tuple[int, ...]) -> None:
    """Raise `AdapterError` unless `tensor` has the shape `needed`; `name` names the tensor in the message."""
    if tuple(tensor.shape) != needed:
        raise AdapterError(
            f"The adapter does not fit the model: its tensor {name} has the shape {tuple(tensor.shape)}; the model "
            f"needs {needed}. Give an adapter that was trained on this model."
        )


class SamplerHead(nn.Module):
    """Two layers over a mask's last hidden state and the token before it. An untrained head changes no logits."""

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__()
        self.read_hidden = nn.Linear(hidden, width)
        self.read_token = nn.Linear(hidden, width, bias=False)
        self.write = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.write.weight)

    def check_fits(self, hidden: int) -> None:
        """Raise `AdapterError` unless the head fits a network with this hidden size."""
        width = self.read_hidden.out_features
        check_shape("sampler.read_hidden.weight", self.read_hidden.weight, (width, hidden))
        check_shape("sampler.read_hidden.bias", self.read_hidden.bias, (width,))
        check_shape("sampler.read_token.weight", self.read_token.weight, (width, hidden))
        check_shape("sampler.write.weight", self.write.weight, (hidden, width))

    def read(self, hidden_MH: Tensor) -> Tensor:
        """Return the part of the head's inner layer that depends only on the masks, as [M, W]."""
        read_MW: Tensor = self.read_hidden(rms_norm(hidden_MH, hidden_MH.shape[-1:]))
        return read_MW

    def correction(self, read_MW: Tensor, before_MH: Tensor, candidate_MCH: Tensor) -> Tensor:
        """Return the corrections to add to the candidates' logits, as [M, C].

        `before_MH` holds the input embeddings of the tokens before the masks, and `candidate_MCH` the output embeddings
        of the candidates.
        """
        read_MW = silu(read_MW + self.read_token(rms_norm(before_MH, before_MH.shape[-1:])))
        correction_MC: Tensor = (candidate_MCH @ self.write(read_MW)[:, :, None])[:, :, 0]
        return correction_MC


def likeliest(logits_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `CANDIDATES` largest logits of each mask in descending order, and their tokens, both [M, C].

    A top-k over the whole vocabulary would take longer than the head. The vocabulary is split into chunks; the largest
    logits are in the chunks with the largest maxima.
    """
    M, V = logits_MV.shape
    if V <= CANDIDATES * CHUNK:
        return torch.topk(logits_MV, min(CANDIDATES, V), dim=-1)
    padded_MV = nn.functional.pad(logits_MV, (0, -V % CHUNK), value=-torch.inf)
    chunked_MNP = padded_MV.view(M, -1, CHUNK)
    chunk_MC = chunked_MNP.amax(dim=-1).topk(CANDIDATES, dim=-1).indices
    within_MQ = chunked_MNP.gather(1, chunk_MC[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    logit_MC, index_MC = within_MQ.topk(CANDIDATES, dim=-1)
    return logit_MC, chunk_MC.gather(1, index_MC // CHUNK) * CHUNK + index_MC % CHUNK


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely tokens of M masks, and their logits with and without the head."""

    token_MC: Tensor
    logit_MC: Tensor
    """Logits without the head, float32."""
    corrected_MC: Tensor

    @property
    def token_M(self) -> Tensor:
        """Most likely token of each mask after correction."""
        return self.token_MC.gather(1, self.corrected_MC.argmax(dim=-1, keepdim=True))[:, 0]

    def log_total(self, log_total_M: Tensor) -> Tensor:
        """Return the log-sum-exp of each mask's corrected logits over the whole vocabulary, as [M]; `log_total_M` holds
        the uncorrected values."""
        others_M = (1 - (self.logit_MC - log_total_M[:, None]).exp().sum(dim=-1)).clamp(min=1e-6)
        return torch.logaddexp(log_total_M + others_M.log(), self.corrected_MC.logsumexp(dim=-1))
