"""The peers give the answers greedy decoding gives, and count only those."""

from collections.abc import Callable

import pytest
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from benchmarks.decode.script import autoregressive_outputs
from benchmarks.decode.transformers_peers import PeerRun, Unavailable, generate_continuous, generate_static
from benchmarks.decode.workload import Workload
from mars_ray.model.checkpoint import Checkpoint

continuous_batching = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="the benchmark needs transformers 5.20"
)


@pytest.mark.parametrize("peer", [generate_static, pytest.param(generate_continuous, marks=continuous_batching)])
def test_they_answer_as_the_reference_does(
    peer: Callable[..., PeerRun | Unavailable], bundled: Checkpoint, workload: Workload
) -> None:
    run = peer(bundled.network, workload.prompts, workload.lengths, 4, stop_ids=bundled.stop_ids)
    assert isinstance(run, PeerRun)
    assert run.outputs == autoregressive_outputs(bundled, workload.prompts, 128)
    assert (run.tokens, run.seconds > 0) == (workload.tokens, True)


def test_each_answer_of_a_static_batch_has_its_own_length(network: PreTrainedModel) -> None:
    prompts, lengths = [[1, 2, 3], [4], [5, 6]], [3, 7, 2]
    run = generate_static(network, prompts, lengths, 2, stop_ids=frozenset())
    assert [len(output) for output in run.outputs] == lengths


@continuous_batching
def test_continuous_batching_gives_the_answers_of_static_batches(network: PreTrainedModel) -> None:
    prompts, lengths = [[1, 2, 3], [4], [5, 6]], [3, 7, 2]
    run = generate_continuous(network, prompts, lengths, 2, stop_ids=frozenset())
    assert isinstance(run, PeerRun)
    assert run.outputs == generate_static(network, prompts, lengths, 2, stop_ids=frozenset()).outputs


@continuous_batching
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continuous_batching_leaves_the_network_as_it_was(network: PreTrainedModel, attention: str) -> None:
    network.set_attn_implementation(attention)
    try:
        run = generate_continuous(network, [[1, 2]], [2], 1, stop_ids=frozenset())
        assert isinstance(run, PeerRun)
        assert network.config._attn_implementation == attention
    finally:
        network.set_attn_implementation("sdpa")


@continuous_batching
def test_where_continuous_batching_does_not_run_the_reason_is_returned(
    network: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **settings: object) -> None:
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(network, "init_continuous_batching", broken)
    run = generate_continuous(network, [[1, 2]], [2], 1, stop_ids=frozenset())
    assert run == Unavailable("continuous batching of transformers: MemoryError: no room for the cache")


@continuous_batching
def test_an_error_in_the_thread_of_continuous_batching_is_the_reason(network: PreTrainedModel) -> None:
    run = generate_continuous(network, [[1, 2], [10**6]], [2, 2], 2, stop_ids=frozenset())
    assert isinstance(run, Unavailable)
    assert "index out of range" in run.reason
