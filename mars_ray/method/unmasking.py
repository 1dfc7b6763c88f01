"""What stands in the noisy stream in place of some of its masks: tokens of the data, or guesses of the network itself.

The functions return token ids for `mars_streams`, `IGNORE` where a mask stays; labels do not change.

Beyond the paper, which masks every response token. Tokens of the data are left as masked language models do; guesses
are what a decoder meets that keeps what it could not accept yet (Jacobi forcing, arXiv 2512.14681).
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.method.loss import training_logits
from mars_ray.method.streams import IGNORE, PackedRows, mars_streams, masks_before


def unmask_with_data(rows: PackedRows, mask_share: float, draw_RT: Tensor) -> Tensor:
    """Leave each token of the data with the probability 1 - `mask_share`: int64 [R, T], `IGNORE` where a mask stays.

    `draw_RT` holds draws from [0, 1).
    """
    return rows.tokens_RT.masked_fill(draw_RT < mask_share, IGNORE)


@torch.no_grad()
def unmask_with_guesses(
    network: PreTrainedModel, rows: PackedRows, *, block: int, mask_id: int, phase_RT: Tensor, draw_RT: Tensor
) -> Tensor:
    """Put the network's guesses at the first tokens of each block: int64 [R, T], `IGNORE` where a mask stays.

    The draw from [0, 1) at its first mask says how many, from none to all but one. Takes a forward of its own.
    """
    streams = mars_streams(rows, block=block, mask_id=mask_id, phase_RT=phase_RT)
    where_RS = torch.ones_like(streams.noisy_RS)
    logits_MV = training_logits(network, streams.to(network.device), where_RS.to(network.device))
    logits_MV[:, mask_id] = -torch.inf
    guess_RS = logits_MV.argmax(dim=-1).cpu().view_as(streams.tokens_RS)
    R, T = rows.tokens_RT.shape
    # What stands at a mask says the token behind it; what the first token of a block is, only the clean stream says.
    clean_RT, noisy_RN = guess_RS[:, -T:], guess_RS[:, :-T]
    next_RT = clean_RT.clone()
    real_RN = streams.example_RS[:, :-T] >= 0
    position_RN = streams.twin_RS[:, :-T] - noisy_RN.shape[1]
    row_RN = torch.arange(R)[:, None].expand_as(position_RN)
    next_RT[row_RN[real_RN], position_RN[real_RN]] = noisy_RN[real_RN]
    block_RT = (rows.position_RT + phase_RT) // block
    before_RT = masks_before(rows, block_RT)
    guess_RT = torch.full_like(rows.tokens_RT, IGNORE)
    guess_RT[:, 1:] = torch.where(before_RT[:, 1:] > 0, next_RT[:, :-1], clean_RT[:, :-1])
    first_RT = (torch.arange(T) - before_RT.long()).clamp(min=0)
    count_RT = (draw_RT * block).long().gather(1, first_RT)
    return torch.where(before_RT < count_RT, guess_RT, IGNORE)
