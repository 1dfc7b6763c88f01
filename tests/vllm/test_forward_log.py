"""The log of forwards against the tokens of the requests, on simulated steps."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.vllm.forward_log import CAPACITY, ForwardLog, LoggedForward
from tests.vllm.test_simulated_steps import MadeUpNetwork, PagedRequest, networks, prompts, step


@given(networks, prompts, st.integers(0, 10**6))
@settings(deadline=None)
def test_the_log_tells_how_each_forward_came_to_its_tokens(
    network: MadeUpNetwork, prompts: list[list[int]], seed: int
) -> None:
    chance = random.Random(seed)
    requests = [PagedRequest(prompt, 3, chance.choice([0.2, 0.6, 1.0]), 4) for prompt in prompts]
    log = ForwardLog(masks=3, slots=len(requests), device=torch.device("cpu"))
    last: dict[int, tuple[LoggedForward, int]] = {}
    for _ in range(12):
        before = [len(request.tokens) for request in requests]
        step(network, requests, 3, log)
        forwards = iter(log.drain())
        for number, request in enumerate(requests):
            gained = request.tokens[before[number] :]
            if not gained:  # the request reads its prompt
                continue
            forward = next(forwards)
            accepted = len(gained) - 1 - forward.right
            assert gained == forward.drafts[: forward.right] + forward.tokens[: 1 + accepted]
            assert abs(forward.threshold - request.threshold) < 1e-6
            previous, previously_accepted = last.get(number, (None, 0))
            predicted = previous.mask_confidences if previous else []
            drafted = previously_accepted + len(forward.drafts)
            assert forward.accepted_confidences == predicted[:previously_accepted]
            assert forward.draft_confidences == predicted[previously_accepted:drafted]
            ids = [*request.prompt, *request.tokens[: before[number]]]
            starts = range(len(ids) - previously_accepted, len(ids))
            assert forward.agreed == [network.choices(ids[:start], 1)[0][0] == ids[start] for start in starts]
            last[number] = forward, accepted
        assert next(forwards, None) is None


def test_a_full_log_keeps_the_latest_forwards() -> None:
    network = MadeUpNetwork(seed=1, skill=1.0)
    log = ForwardLog(masks=3, slots=5, device=torch.device("cpu"))
    for number in range(CAPACITY // 5 + 2):
        requests = [PagedRequest([number], 3, 1.0 - number / 1000, 4) for _ in range(5)]
        step(network, requests, 3, log)
    thresholds = [forward.threshold for forward in log.drain()]
    assert len(thresholds) == CAPACITY
    assert thresholds == sorted(thresholds, reverse=True)
    assert log.drain() == []
