"""How many of the tokens proposed in one forward are accepted, by their confidence.

Letters: R rows, W window (the autoregressive token and the masks behind it), V vocabulary.

Source: arXiv 2604.07023, section 3.3 and its comparison of metrics.
"""

import torch
from torch import Tensor

from mars_ray.method.metric import Metric


def confidence(logits: Tensor, metric: Metric) -> Tensor:
    """Reduce logits [..., V] to one confidence each, float32 [...]."""
    log_p: Tensor = logits.float().log_softmax(dim=-1)
    match metric:
        case Metric.PROBABILITY:
            return log_p.amax(dim=-1).exp()
        case Metric.ENTROPY:
            # 0 * log 0 is 0 for an entropy and NaN for a float: banned tokens have a logit of -inf.
            entropy: Tensor = torch.special.entr(log_p.exp())
            return entropy.sum(dim=-1)
        case Metric.MARGIN:
            best_two = log_p.topk(2, dim=-1).values.exp()
            return best_two[..., 0] - best_two[..., 1]


def accepted_lengths(confidence_RW: Tensor, threshold_R: Tensor, metric: Metric) -> Tensor:
    """Return the tokens to accept per row, int64 [R], in 1..W.

    Column 0 is the autoregressive token: always accepted. A threshold that accepts nothing leaves only that one,
    however confident the masks are; the first mask that does not pass ends the row.
    """
    drafted_RW, threshold_R1 = confidence_RW[:, 1:], threshold_R[:, None]
    if metric is Metric.ENTROPY:
        passes_RW = (drafted_RW <= threshold_R1) & (threshold_R1 > 0)
    else:
        passes_RW = (drafted_RW >= threshold_R1) & (threshold_R1 < 1)
    return 1 + passes_RW.long().cumprod(dim=1).sum(dim=1)
