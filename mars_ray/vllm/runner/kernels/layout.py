"""Lay out a step and write the ids to feed, in one launch with a program for each request.

Letters: R requests of a step, S slots, P positions of a step or of a sequence, K masks of the full block, Q = 1 + 2 K
rows of the widest request, C service classes. In a kernel such a name is the address of the tensor.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class StepBatch(NamedTuple):
    """The requests of a step in vLLM's buffers."""

    slot_R: Tensor
    """Slot of each request, int64."""
    query_start_R: Tensor
    """First position of each request and, last, the number of positions; int32 [R + 1]."""
    row_start_R: Tensor
    """First row of logits of each request and, last, the number of rows; int32 [R + 1]. The rows of a request are those
    of its last positions: one for a part of a prompt, otherwise all."""
    input_ids_P: Tensor
    """Token ids that the step feeds, int32."""


class KnownTokens(NamedTuple):
    """The sequences in vLLM's buffers."""

    computed_S: Tensor
    """Tokens that have keys in the cache, int32."""
    total_S: Tensor
    """Tokens of the prompt and the answer so far, int32."""
    token_SP: Tensor
    """These tokens, int32."""


class WantedLookahead(NamedTuple):
    """Parameters of the requests."""

    masks_S: Tensor
    """Masks per step that each request wants, int32."""
    threshold_S: Tensor
    """Threshold of each request; a negative one follows the class."""
    floor_S: Tensor
    """Lower bound on the threshold of the class."""
    temperature_S: Tensor
    """Temperature of each request's draws; 1 without draws."""
    class_S: Tensor
    """Service class of each request, int32."""
    class_threshold_C: Tensor


class NextDrafts(NamedTuple):
    """Drafts for the next step."""

    token_SK: Tensor
    """Token ids, int32."""
    count_S: Tensor
    """Number of valid drafts, int32."""


class StepLayout(NamedTuple):
    """Numbers of positions in each request's rows of logits, int32 [R]."""

    known_R: Tensor
    """Known tokens among the rows. More than there are rows if the prompt continues in a later step."""
    drafts_R: Tensor
    """Drafts after the known tokens."""
    masks_R: Tensor
    """Masks after the drafts."""
    threshold_R: Tensor
    """Threshold of each request in this step, float32."""
    temperature_R: Tensor
    """Temperature of each request's draws; 1 without draws. float32."""


class LayoutRule(NamedTuple):
    """Parameters of the engine."""

    mask_id: int
    """Id of a request's first mask."""
    mask_step: int
    """Difference of the ids of two neighbouring masks."""
    is_exact: bool
    """Whether only the network's own choices are kept."""
    last_total: int
    """Tokens of a sequence up to which tokens may be accepted unverified. Near the end of the context, later steps get
    fewer positions, which may not hold several known tokens."""


def lay_out(
    batch: StepBatch, known: KnownTokens, drafts: NextDrafts, wanted: WantedLookahead, rule: LayoutRule
) -> StepLayout:
    """Return the layout of a step, and write its ids into `batch.input_ids_P`."""
    requests, masks = batch.slot_R.shape[0], drafts.token_SK.shape[1]
    known_R, drafts_R, masks_R = (batch.query_start_R.new_empty(requests) for _ in range(3))
    threshold_R, temperature_R = (wanted.threshold_S.new_empty(requests) for _ in range(2))
    layout = StepLayout(known_R, drafts_R, masks_R, threshold_R, temperature_R)
    _lay_out[(requests,)](
        *batch,
        *known,
        known.token_SP.stride(0),
        *drafts,
        *wanted,
        *layout,
        rule.mask_id,
        rule.last_total,
        K=masks,
        Q_BLOCK=triton.next_power_of_2(1 + 2 * masks),
        MASK_STEP=rule.mask_step,
        IS_EXACT=rule.is_exact,
        num_warps=1,
    )
    return layout


@triton.jit
def _lay_out(
    slot_R,
    query_start_R,
    row_start_R,
    input_ids_P,
    computed_S,
    total_S,
    token_SP,
    token_stride,
    draft_SK,
    num_drafts_S,
    wanted_S,
    own_threshold_S,
    floor_S,
    temperature_S,
    class_S,
    class_threshold_C,
    known_R,
    drafts_R,
    masks_R,
    threshold_R,
    temperature_R,
    mask_id,
    last_total,
    K: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    MASK_STEP: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slot_R + request)
    end = tl.load(query_start_R + request + 1)
    positions = end - tl.load(query_start_R + request)
    rows = tl.load(row_start_R + request + 1) - tl.load(row_start_R + request)
    total = tl.load(total_S + slot)
    first = tl.load(computed_S + slot) + positions - rows  # tokens before the first row
    known = total - first
    drafts = tl.minimum(tl.load(num_drafts_S + slot), tl.maximum(rows - known, 0))
    masks = tl.minimum(tl.load(wanted_S + slot), tl.maximum(rows - known - drafts, 0))
    if IS_EXACT:
        threshold = 1.0
    else:
        own = tl.load(own_threshold_S + slot)
        of_class = tl.load(class_threshold_C + tl.load(class_S + slot))
        threshold = tl.where(own < 0, tl.maximum(of_class, tl.load(floor_S + slot)), own)
        threshold = tl.where(total > last_total, 1.0, threshold)
    tl.store(known_R + request, known)
    tl.store(drafts_R + request, drafts)
    tl.store(masks_R + request, masks)
    tl.store(threshold_R + request, threshold)
    tl.store(temperature_R + request, tl.load(temperature_S + slot))

    # A request with one row reads a part of its prompt, or decodes one token that vLLM has put in place.
    column = tl.arange(0, Q_BLOCK)
    is_fed = column < tl.where(rows > 1, rows, 0)
    draft = column - known
    mask = draft - drafts
    is_draft = (draft >= 0) & (mask < 0)
    known_ids = tl.load(token_SP + slot * token_stride + first + column, mask=is_fed & (draft < 0), other=0)
    draft_ids = tl.load(draft_SK + slot * K + draft, mask=is_fed & is_draft, other=0)
    mask_ids = mask_id + tl.minimum(tl.maximum(mask, 0), K - 1) * MASK_STEP  # also after the masks
    ids = tl.where(draft < 0, known_ids, tl.where(is_draft, draft_ids, mask_ids))
    tl.store(input_ids_P + end - rows + column, ids, mask=is_fed)
