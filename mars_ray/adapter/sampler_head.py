"""The sampler head of an adapter: it tells a mask which token was chosen before it.

All masks of a block are decoded in one forward, so none knows what the one before it said; each may say something
likely, and both together something nobody would write. The head corrects the logits of a mask once that token is known:
those of its likeliest candidates alone, for that costs next to nothing beside a forward.

Source: arXiv 2507.11851, whose sampler computes the logits of the whole vocabulary.

Letters: M masks, C candidates, H hidden size, W width of the head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from mars_ray.adapter.sizes import check_sizes

CANDIDATES = 32
"""Tokens of a mask whose logits are corrected: those it finds likeliest."""
CHUNK = 64
WIDTH = 512


class SamplerHead(nn.Module):
    """Two layers over a mask's last hidden state and the token before it. New, it corrects nothing: `write` is zero."""

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__()
        self.read_hidden = nn.Linear(hidden, width)
        self.read_token = nn.Linear(hidden, width, bias=False)
        self.write = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.write.weight)

    def check_fits(self, hidden: int) -> None:
        """Raise `AdapterError` unless this is the head of a network with this hidden size."""
        width = self.read_hidden.out_features
        check_sizes("sampler.read_hidden.weight", self.read_hidden.weight, (width, hidden))
        check_sizes("sampler.read_hidden.bias", self.read_hidden.bias, (width,))
        check_sizes("sampler.read_token.weight", self.read_token.weight, (width, hidden))
        check_sizes("sampler.write.weight", self.write.weight, (hidden, width))

    def read(self, hidden_MH: Tensor) -> Tensor:
        """Return what is known of masks before any token is: [M, W]."""
        read_MW: Tensor = self.read_hidden(rms_norm(hidden_MH, hidden_MH.shape[-1:]))
        return read_MW

    def correction(self, read_MW: Tensor, before_MH: Tensor, candidate_MCH: Tensor) -> Tensor:
        """Return what is added to the logits of candidates, [M, C].

        `before_MH` are the input embeddings of the tokens before the masks, `candidate_MCH` the rows of the output
        embedding that belong to the candidates.
        """
        read_MW = silu(read_MW + self.read_token(rms_norm(before_MH, before_MH.shape[-1:])))
        correction_MC: Tensor = (candidate_MCH @ self.write(read_MW)[:, :, None])[:, :, 0]
        return correction_MC


def likeliest(logits_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `CANDIDATES` largest logits at each mask, in descending order, and their tokens: two [M, C].

    A sort of the whole vocabulary would take longer than the head: the largest are in the chunks with the largest.
    """
    M, V = logits_MV.shape
    if V <= CANDIDATES * CHUNK:
        return torch.topk(logits_MV, min(CANDIDATES, V), dim=-1)
    padded_MV = nn.functional.pad(logits_MV, (0, -V % CHUNK), value=-torch.inf)
    chunked_MNP = padded_MV.view(M, -1, CHUNK)
    chunk_MC = chunked_MNP.amax(dim=-1).topk(CANDIDATES, dim=-1).indices
    within_MQ = chunked_MNP.gather(1, chunk_MC[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    logit_MC, place_MC = within_MQ.topk(CANDIDATES, dim=-1)
    return logit_MC, chunk_MC.gather(1, place_MC // CHUNK) * CHUNK + place_MC % CHUNK


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of M masks, and what the head makes of their logits."""

    token_MC: Tensor
    logit_MC: Tensor
    """Without the head, float32."""
    corrected_MC: Tensor

    @property
    def token_M(self) -> Tensor:
        """The likeliest token of each mask with the head."""
        return self.token_MC.gather(1, self.corrected_MC.argmax(dim=-1, keepdim=True))[:, 0]

    def log_total(self, log_total_M: Tensor) -> Tensor:
        """Return log sum exp of all logits of a mask, [M]; `log_total_M` is that without the head."""
        others_M = (1 - (self.logit_MC - log_total_M[:, None]).exp().sum(dim=-1)).clamp(min=1e-6)
        return torch.logaddexp(log_total_M + others_M.log(), self.corrected_MC.logsumexp(dim=-1))
