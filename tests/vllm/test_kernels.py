"""The kernels of the plug-in, under Triton's interpreter, against the rule in plain torch."""

from copy import deepcopy
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

import tests.vllm.interpreted  # noqa: E402, F401, I001

import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from mars_ray.vllm.forward_log import ForwardLog  # noqa: E402
from mars_ray.vllm.lookahead_counters import LookaheadCounters  # noqa: E402
from mars_ray.vllm.runner.kernels.confidence import TOKENS_AT_ONCE, find_most_likely  # noqa: E402
from mars_ray.vllm.runner.kernels.layout import (  # noqa: E402
    NextDrafts,
    KnownTokens,
    LayoutRule,
    WantedLookahead,
    StepBatch,
    StepLayout,
    lay_out,
)
from mars_ray.vllm.runner.kernels.outcome import take  # noqa: E402
from tests.vllm import step_reference as reference  # noqa: E402

SLOTS = 6
CONTEXT = 400
CHUNK = 5
VOCABULARY = 11
GRID = (1.0, 0.8, 0.5)


class Sequences:
    """Sequences in vLLM's buffers, whose steps are computed by the kernels and by the reference."""

    def __init__(self, masks: int, rule: LayoutRule, seed: int, *, lenient: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.masks, self.rule, self.lenient = masks, rule, lenient
        self.prompt_S = self.integers(1, 3 * CHUNK, SLOTS)
        self.known = KnownTokens(
            torch.zeros(SLOTS, dtype=torch.int32), self.prompt_S.clone(), self.integers(0, VOCABULARY, SLOTS, CONTEXT)
        )
        classes = torch.tensor([0.9, 0.3])
        temperature_S = torch.where(self.chance(SLOTS) < 0.5, 1.0, 0.1 + 2 * self.chance(SLOTS))
        own_S = torch.where(self.chance(SLOTS) < 0.3, -1.0, self.chance(SLOTS).round(decimals=1))
        self.wanted = WantedLookahead(
            self.integers(0, masks + 1, SLOTS),
            own_S,
            self.chance(SLOTS),
            temperature_S,
            self.integers(0, 2, SLOTS),
            classes,
        )
        self.drafts = NextDrafts(
            torch.zeros(SLOTS, masks, dtype=torch.int32),
            torch.zeros(SLOTS, dtype=torch.int32),
        )
        self.counters = LookaheadCounters(masks, SLOTS, GRID, torch.device("cpu"))
        self.log = ForwardLog(masks, SLOTS, torch.device("cpu"))
        self.expected_counters, self.expected_log = deepcopy((self.counters, self.log))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def step(self, requests: int, skill: float, dtype: torch.dtype) -> None:
        """One step of some sequences, in which drafts and tokens accepted at masks are right with some probability."""
        slot_R = torch.randperm(SLOTS, generator=self.generator)[:requests]
        computed_R, total_R = self.known.computed_S[slot_R], self.known.total_S[slot_R]
        reads_R = computed_R < self.prompt_S[slot_R]
        unfed_R = total_R - computed_R
        positions_R = torch.where(reads_R, unfed_R.clamp(max=CHUNK), 1 + 2 * self.wanted.masks_S[slot_R])
        rows_R = torch.where(reads_R, 1, positions_R)
        batch = StepBatch(slot_R, starts(positions_R, padding=2), starts(rows_R), torch.full((1000,), 77).int())
        width = int(rows_R.max())
        rows = int(rows_R.sum())
        logits_NV = (3 * torch.randn(rows, VOCABULARY, generator=self.generator)).to(dtype)
        logits_NV[:, -1] = -torch.inf
        argmax_N = logits_NV.max(dim=-1).indices
        sampled_N = torch.where(self.chance(rows) < 0.9, argmax_N, self.integers(0, VOCABULARY, rows).long())
        self.make_right(skill, batch, positions_R, sampled_N)

        expected = reference.lay_out(
            positions_R=positions_R.long(),
            rows_R=rows_R.long(),
            unfed_R=unfed_R.long(),
            drafts_R=self.drafts.count_S[slot_R].long(),
            masks_R=self.wanted.masks_S[slot_R].long(),
        )
        threshold_R = reference.thresholds(
            own_R=self.wanted.threshold_S[slot_R],
            class_R=self.wanted.class_threshold_C[self.wanted.class_S[slot_R].long()],
            floor_R=self.wanted.floor_S[slot_R],
            total_R=total_R,
            last_total=self.rule.last_total,
            is_exact=self.rule.is_exact,
        )
        fed_drafts_RK = self.drafts.token_SK[slot_R].long()
        place_RQ = (computed_R + positions_R - rows_R)[:, None] + torch.arange(width)
        known_RQ = self.known.token_SP[slot_R[:, None], place_RQ].long()
        mask_id_K = self.rule.mask_id + self.rule.mask_step * torch.arange(self.masks)
        fed_RQ = reference.fed_ids(expected, known_RQ, fed_drafts_RK, mask_id_K)

        layout = lay_out(batch, self.known, self.drafts, self.wanted, self.rule)
        for name in ("known_R", "drafts_R", "masks_R"):
            assert torch.equal(getattr(layout, name), getattr(expected, name).int()), name
        assert torch.equal(layout.threshold_R, threshold_R)
        is_row_RQ = torch.arange(width) < rows_R[:, None]
        ids = torch.full((1000,), 77)
        is_fed_RQ = is_row_RQ & (rows_R > 1)[:, None]
        place_of_row_RQ = (batch.query_start_R[1 : requests + 1] - rows_R)[:, None] + torch.arange(width)
        ids[place_of_row_RQ[is_fed_RQ]] = fed_RQ[is_fed_RQ]
        assert torch.equal(batch.input_ids_P, ids.int())

        likely = find_most_likely(logits_NV, batch, layout, 1 + 2 * self.masks)
        read_R = expected.known_R + expected.drafts_R + expected.masks_R
        is_judged_RQ = (torch.arange(width) < read_R[:, None]) & (read_R > 1)[:, None] & expected.samples_R[:, None]
        is_judged_N = is_judged_RQ[is_row_RQ]
        confidence_N = logits_NV.float().softmax(dim=-1).max(dim=-1).values
        assert torch.equal(likely.token_N[is_judged_N].long(), argmax_N[is_judged_N])
        torch.testing.assert_close(likely.confidence_N[is_judged_N], confidence_N[is_judged_N])

        temperature_N = self.wanted.temperature_S[slot_R][is_row_RQ.nonzero()[:, 0]]
        next_N = fed_RQ.roll(-1, dims=1)[is_row_RQ].clamp(max=VOCABULARY - 1)
        drawn_NV = (logits_NV.float() / temperature_N[:, None]).softmax(dim=-1)
        ratio_N = drawn_NV.gather(1, next_N[:, None])[:, 0] / drawn_NV.max(dim=-1).values
        column_1Q = torch.arange(width)[None] - expected.known_R[:, None] + 1
        is_before_draft_RQ = (column_1Q >= 0) & (column_1Q < expected.drafts_R[:, None])
        is_compared_N = is_judged_N & is_before_draft_RQ[is_row_RQ]
        torch.testing.assert_close(likely.ratio_N[is_compared_N], ratio_N[is_compared_N])

        confidence_N = torch.where(is_judged_N, likely.confidence_N, confidence_N)  # equal to the last bit
        predictions = reference.StepPredictions(
            by_request(is_row_RQ, sampled_N),
            by_request(is_row_RQ, confidence_N),
            by_request(is_row_RQ, sampled_N == argmax_N),
            by_request(is_row_RQ, torch.where(is_compared_N, likely.ratio_N, ratio_N)),
        )
        wanted = reference.take(expected, predictions, fed_drafts_RK, threshold_R, lenient=self.lenient)
        reference.count(self.expected_counters, slot_R, expected, wanted)
        reference.add_to_log(
            self.expected_log, slot_R, expected, fed_RQ, threshold_R, predictions, wanted, lenient=self.lenient
        )

        outcome = take(batch, layout, sampled_N, likely, self.drafts, self.counters, self.log, lenient=self.lenient)
        assert torch.equal(outcome.num_sampled_R, wanted.num_sampled_R.int())
        assert torch.equal(outcome.num_rejected_R, wanted.num_rejected_R.int())
        kept_RQ = torch.arange(width) < wanted.num_sampled_R[:, None]
        assert torch.equal(outcome.token_RQ[:, :width][kept_RQ], wanted.token_RQ[kept_RQ])
        assert torch.equal(self.drafts.count_S[slot_R], wanted.num_drafts_R.int())
        is_draft_RK = torch.arange(self.masks) < wanted.num_drafts_R[:, None]
        assert torch.equal(self.drafts.token_SK[slot_R][is_draft_RK], wanted.drafts_RK[is_draft_RK].int())

        self.known.computed_S[slot_R] += positions_R - outcome.num_rejected_R
        self.known.total_S[slot_R] += outcome.num_sampled_R
        for request, slot in enumerate(slot_R.tolist()):
            count, end = int(outcome.num_sampled_R[request]), int(self.known.total_S[slot])
            self.known.token_SP[slot, end - count : end] = outcome.token_RQ[request, :count].int()

    def make_right(self, skill: float, batch: StepBatch, positions_R: Tensor, sampled_N: Tensor) -> None:
        """Make some of the known tokens and drafts those that the rows before them choose."""
        for request, slot in enumerate(batch.slot_R.tolist()):
            row, end = batch.row_start_R[request : request + 2].tolist()
            first = int(self.known.computed_S[slot] + positions_R[request]) - (end - row)
            known = int(self.known.total_S[slot]) - first
            for column in range(row, end - 1):
                index = column - row + 1
                draft = index - known
                if self.chance(1) >= skill or known > end - row:
                    continue
                if draft < 0:
                    self.known.token_SP[slot, first + index] = sampled_N[column]
                elif draft < self.masks:
                    self.drafts.token_SK[slot, draft] = sampled_N[column]


def starts(count_R: Tensor, padding: int = 0) -> Tensor:
    """Return the starts of neighbouring ranges; vLLM pads those of positions."""
    ends = count_R.cumsum(dim=0).int()
    return torch.cat([torch.zeros(1).int(), ends, ends[-1:].repeat(padding)])


def by_request(is_row_RQ: Tensor, value_N: Tensor) -> Tensor:
    value_RQ = value_N.new_zeros(is_row_RQ.shape)
    value_RQ[is_row_RQ] = value_N
    return value_RQ


rules = st.builds(
    LayoutRule,
    mask_id=st.just(VOCABULARY),
    mask_step=st.sampled_from([0, 1]),
    is_exact=st.booleans(),
    last_total=st.sampled_from([8, CONTEXT]),
)


@given(
    st.one_of(st.integers(1, 5), st.just(63)),
    rules,
    st.booleans(),
    st.integers(0, 10**6),
    st.sampled_from([0.5, 0.95]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None, max_examples=20)
def test_steps_are_those_of_the_rule(masks, rule, lenient, seed, skill, dtype):
    sequences = Sequences(masks, rule, seed, lenient=lenient)
    for _ in range(5):
        sequences.step(int(sequences.integers(1, SLOTS + 1, 1)), skill, dtype)
    assert sequences.counters.record() == sequences.expected_counters.record()
    assert sequences.log.drain() == sequences.expected_log.drain()


@given(st.integers(1, 3 * TOKENS_AT_ONCE), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=30)
def test_the_most_likely_token_of_any_vocabulary_is_the_first_of_equally_likely_ones(size, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits_NV = torch.randint(-40, 41, (3, size), generator=generator).to(dtype)
    none_R, one_R, two_R = (torch.tensor([count]).int() for count in range(3))
    start_R = torch.tensor([0, 3]).int()
    batch = StepBatch(none_R.long(), start_R, start_R, torch.zeros(3).int())
    layout = StepLayout(
        known_R=one_R, drafts_R=none_R, masks_R=two_R, threshold_R=torch.ones(1), temperature_R=torch.ones(1)
    )
    likely = find_most_likely(logits_NV, batch, layout, width=3)
    highest_N = logits_NV.max(dim=-1, keepdim=True).values
    assert likely.token_N.tolist() == [line.index(True) for line in (logits_NV == highest_N).tolist()]
    confidence_N = logits_NV.float().softmax(dim=-1).max(dim=-1).values
    torch.testing.assert_close(likely.confidence_N, confidence_N)
