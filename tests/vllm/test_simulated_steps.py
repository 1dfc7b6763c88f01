"""The layout and the outcome of steps, driven as vLLM's runner drives them, by a made-up causal network."""

import random
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.vllm.forward_log import ForwardLog
from mars_ray.vllm.step_rule import draft_positions
from tests.vllm.causal_reference import decode_causally
from tests.vllm.step_reference import StepPredictions, add_to_log, fed_ids, lay_out, take

VOCABULARY = 5
MASK = VOCABULARY


@dataclass(frozen=True)
class MadeUpNetwork:
    """Predicts by chance, the same after the same ids. After masks it guesses the tokens that it would choose."""

    seed: int
    skill: float
    """Probability that a guess at a mask is right."""

    def choices(self, ids: list[int], count: int) -> list[tuple[int, float]]:
        return [self._choice(ids[: len(ids) - count + 1 + row]) for row in range(count)]

    def ratio(self, ids: list[int], token: int) -> float:
        return 1.0 if token == self._choice(ids)[0] else random.Random(f"{self.seed} {ids} {token}").random()

    def _choice(self, ids: list[int]) -> tuple[int, float]:
        known = [*ids]
        masks = 0
        while known and known[-1] == MASK:
            known.pop()
            masks += 1
        assert MASK not in known, "a mask stays in the cache"
        for _ in range(masks + 1):
            chance = random.Random(f"{self.seed} {known}")
            known.append(chance.randrange(VOCABULARY))
        chance = random.Random(f"{self.seed} {ids}")
        guess = known[-1] if not masks or chance.random() < self.skill else chance.randrange(VOCABULARY)
        return guess, chance.random()


@dataclass
class PagedRequest:
    """A request as vLLM's worker sees it: tokens, and ids whose keys are in the cache."""

    prompt: list[int]
    masks: int
    threshold: float
    block: int
    tokens: list[int] = field(default_factory=list)
    cache: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    forwards: int = 0


def step(
    network: MadeUpNetwork,
    requests: list[PagedRequest],
    chunk: int,
    log: ForwardLog | None = None,
    *,
    lenient: bool = False,
) -> None:
    """One step of all requests: those that read their prompt get `chunk` positions, the others their full width."""
    masks = log.confidence_SK.shape[1] if log else max(request.block for request in requests) - 1
    reads = [len(request.cache) < len(request.prompt) for request in requests]
    positions = [
        min(chunk, len(request.prompt) - len(request.cache)) if reading else 1 + draft_positions(request.block)
        for request, reading in zip(requests, reads, strict=True)
    ]
    rows = [1 if reading else count for reading, count in zip(reads, positions, strict=True)]
    unfed = [len(request.prompt) + len(request.tokens) - len(request.cache) for request in requests]
    layout = lay_out(
        positions_R=torch.tensor(positions),
        rows_R=torch.tensor(rows),
        unfed_R=torch.tensor(unfed),
        drafts_R=torch.tensor([len(request.drafts) for request in requests]),
        masks_R=torch.tensor([request.masks for request in requests]),
    )
    width = max(rows)
    drafts_RK = torch.tensor([[*request.drafts, *[0] * masks][:masks] for request in requests])
    known_RQ = torch.zeros(len(requests), width, dtype=torch.long)
    for row, request in enumerate(requests):
        known = [*request.prompt, *request.tokens][len(request.cache) + positions[row] - rows[row] :][:width]
        known_RQ[row, : len(known)] = torch.tensor(known)
    ids_RQ = fed_ids(layout, known_RQ, drafts_RK, torch.full((masks,), MASK))
    fed, read = [], []
    ratio_RQ = torch.zeros(len(requests), width)
    for row, request in enumerate(requests):
        ids = ids_RQ[row, : rows[row]].tolist()
        if reads[row]:
            ids = request.prompt[len(request.cache) :][: positions[row]]
        fed.append(ids)
        answer = network.choices([*request.cache, *ids], rows[row])
        for column in range(rows[row] - 1):
            if ids[column + 1] != MASK:
                before = [*request.cache, *ids[: column + 1]]
                ratio_RQ[row, column] = network.ratio(before, ids[column + 1])
        read.append([*answer, *[(0, 0.0)] * (width - len(answer))])
    predictions = StepPredictions(
        torch.tensor([[token for token, _ in line] for line in read]),
        torch.tensor([[confidence for _, confidence in line] for line in read]),
        torch.ones(len(requests), width, dtype=torch.bool),
        ratio_RQ,
    )
    threshold_R = torch.tensor([request.threshold for request in requests])
    outcome = take(layout, predictions, drafts_RK, threshold_R, lenient=lenient)
    if log:
        slot_R = torch.arange(len(requests))
        add_to_log(log, slot_R, layout, ids_RQ, threshold_R, predictions, outcome, lenient=lenient)
    for row, request in enumerate(requests):
        sampled, rejected = int(outcome.num_sampled_R[row]), int(outcome.num_rejected_R[row])
        request.cache += fed[row][: positions[row] - rejected]
        request.tokens += outcome.token_RQ[row, :sampled].tolist()
        request.drafts = outcome.drafts_RK[row, : int(outcome.num_drafts_R[row])].tolist()
        request.forwards += sampled > 0


networks = st.builds(MadeUpNetwork, st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
prompts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=4)
blocks = st.integers(2, 6)
chunks = st.integers(1, 9)


def decode(
    network: MadeUpNetwork, requests: list[PagedRequest], chunk: int, max_tokens: int = 24, *, lenient: bool = False
) -> None:
    while any(len(request.tokens) < max_tokens for request in requests):
        step(network, requests, chunk, lenient=lenient)
        for request in requests:
            everything = [*request.prompt, *request.tokens]
            assert request.cache == everything[: len(request.cache)], "void keys count as computed"
            known = len(everything) - len(request.cache)
            assert len(request.cache) < len(request.prompt) or known <= request.block


@given(networks, prompts, blocks, chunks, st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.booleans())
@settings(deadline=None)
def test_a_batch_decodes_the_tokens_of_the_plain_rule_in_as_many_steps(
    network, prompts, block, chunk, threshold, lenient
):
    requests = [PagedRequest(prompt, block - 1, threshold, block) for prompt in prompts]
    decode(network, requests, chunk, lenient=lenient)
    for request in requests:
        ratio = network.ratio if lenient else None
        rule = {"threshold": threshold, "masks": block - 1, "mask_id": MASK, "ratio": ratio}
        plain = decode_causally(network.choices, request.prompt, **rule, max_tokens=len(request.tokens))
        assert (request.tokens, request.forwards) == (plain.tokens, plain.forwards)


@given(networks, prompts, blocks, chunks)
@settings(deadline=None)
def test_at_threshold_1_the_tokens_are_those_of_decoding_one_at_a_time(network, prompts, block, chunk):
    requests = [PagedRequest(prompt, block - 1, 1.0, block) for prompt in prompts]
    decode(network, requests, chunk)
    for request in requests:
        tokens = request.prompt.copy()
        while len(tokens) < len(request.prompt) + len(request.tokens):
            tokens.append(network.choices(tokens, 1)[0][0])
        assert request.tokens == tokens[len(request.prompt) :]


@given(networks, prompts, st.integers(0, 10**6))
@settings(deadline=None)
def test_requests_with_blocks_and_thresholds_of_their_own_do_not_mix(network, prompts, seed):
    chance = random.Random(seed)
    requests = []
    for prompt in prompts:
        block = chance.randint(2, 6)
        requests.append(PagedRequest(prompt, chance.randrange(block), chance.choice([0.2, 0.6, 1.0]), block))
    alone = [PagedRequest(each.prompt, each.masks, each.threshold, each.block) for each in requests]
    decode(network, requests, 3)
    for one in alone:
        decode(network, [one], 3)
    shortest = [min(len(a.tokens), len(b.tokens)) for a, b in zip(requests, alone, strict=True)]
    assert [each.tokens[:n] for each, n in zip(requests, shortest, strict=True)] == [
        each.tokens[:n] for each, n in zip(alone, shortest, strict=True)
    ]


def test_nothing_is_accepted_after_a_token_that_is_not_the_most_likely_one():
    layout = lay_out(
        positions_R=torch.tensor([5, 5]),
        rows_R=torch.tensor([5, 5]),
        unfed_R=torch.tensor([1, 1]),
        drafts_R=torch.tensor([0, 0]),
        masks_R=torch.tensor([2, 2]),
    )
    is_argmax_RQ = torch.tensor([[True, False, True, True, True], [False, True, True, True, True]])
    predictions = StepPredictions(torch.arange(10).view(2, 5), torch.ones(2, 5), is_argmax_RQ, torch.zeros(2, 5))
    outcome = take(layout, predictions, torch.zeros(2, 2, dtype=torch.long), torch.tensor([0.5, 0.5]))
    assert outcome.num_sampled_R.tolist() == [1, 1]
    assert outcome.num_drafts_R.tolist() == [1, 0]  # a drawn token at a mask is verified
    assert outcome.drafts_RK[0, 0] == 1
