"""The rule of a step: which positions a request gets, and which tokens it keeps.

vLLM's scheduler gives every request of a step the same kind of row: one token and some draft positions. It believes
that only the newest token lacks keys in the KV cache. Tokens accepted at masks lack keys as well, because their
positions were fed masks, so the next step feeds them again. These are the known tokens. A step therefore feeds

    [ 1 + (tokens accepted at masks) known tokens | drafts to verify | masks | padding ]

With 2 K draft positions, the known tokens and the drafts, at most 1 + K together, leave room for K masks.

Tokens are kept by the rule of `method/reference`. Predictions at masks are accepted while their confidence passes the
threshold; the first that falls short and those after it become drafts, which the next step verifies. One thing differs:
vLLM's attention is causal, so masks follow the last draft only, and a wrong draft voids the masks of its step.

Predictions at masks assume the most likely token at the rows before them. Nothing is accepted or drafted after a token
that a draw, a penalty or a bias changed; at a mask such a token is a draft. A threshold of 1 accepts nothing.

With an adapter the threshold applies to drafts instead (see `Acceptance`): nothing is accepted at masks, and a draft is
kept if the network finds it at least that many times as likely as its most likely token.

The kernels in `runner/kernels` compute this, and `tests/vllm/step_reference.py` does so in plain torch.
"""

from mars_ray.method.drafts import FIXED_PRICE

LEAST_LIKELY = FIXED_PRICE.of_draft(0)
"""Minimum probability that a draft is right along with all drafts before it, as in the reference decoder."""


def draft_positions(block: int) -> int:
    """Return the number of draft positions that a request with this block needs per step."""
    return 2 * (block - 1)
