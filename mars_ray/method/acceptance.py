"""Decide by confidence how many of the tokens proposed in one forward to accept.

Letters: R rows, W window (the autoregressive token and the masks after it), V vocabulary.

Source: arXiv 2604.07023, section 3.3 and its comparison of metrics.
"""

import torch
from torch import Tensor

from mars_ray.method.metric import Metric


def confidence(logits: Tensor, metric: Metric) -> Tensor:
    """Return the confidence of each distribution in `logits` [..., V] as float32 [...]."""
    log_p: Tensor = logits.float().log_softmax(dim=-1)
    match metric:
        case Metric.PROBABILITY:
            return log_p.amax(dim=-1).exp()
        case Metric.ENTROPY:
            # `entr` gives 0 for a probability of 0 (a banned token has a logit of -inf), where p * log p would be NaN.
            entropy: Tensor = torch.special.entr(log_p.exp())
            return entropy.sum(dim=-1)
        case Metric.MARGIN:
            best_two = log_p.topk(2, dim=-1).values.exp()
            return best_two[..., 0] - best_two[..., 1]


def accepted_lengths(confidence_RW: Tensor, threshold_R: Tensor, metric: Metric) -> Tensor:
    """Return the number of tokens to accept in each row, from 1 to W, as int64 [R].

    Column 0 is the autoregressive token, which is always accepted. The tokens at masks are accepted up to, but without,
    the first that does not pass. At a threshold that accepts nothing, no token at a mask passes, whatever its
    confidence.
    """
    drafted_RW, threshold_R1 = confidence_RW[:, 1:], threshold_R[:, None]
    if metric is Metric.ENTROPY:
        passes_RW = (drafted_RW <= threshold_R1) & (threshold_R1 > 0)
    else:
        passes_RW = (drafted_RW >= threshold_R1) & (threshold_R1 < 1)
    return 1 + passes_RW.long().cumprod(dim=1).sum(dim=1)
