"""Our waiting queue in front of vLLM, whose place a made-up core takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from mars_ray.engine.core.limits import EngineLimits
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.profile import Profile
from mars_ray.errors import QueueFullError, ReplicaLostError, RequestError
from mars_ray.model.folder import open_model
from mars_ray.vllm.engine.core import CoreLoad, CoreOutput
from mars_ray.vllm.engine.engine import VllmEngine
from mars_ray.vllm.engine.load import LoadedTokens
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.forward_log import LoggedForward

SEQS = 2
CLASSES = (ServiceClass(name="standard"), ServiceClass(name="urgent", priority=1))
TOKEN = 40


@dataclass
class CountingCore:
    """Answers each sequence with two tokens a step."""

    limits: EngineLimits = field(
        default_factory=lambda: EngineLimits(
            max_model_len=64, vocab_size=512, max_num_seqs=SEQS, max_kv_tokens=128, max_waiting_seqs=8,
            max_request_tokens=64,
        )
    )  # fmt: skip
    block: int = 4
    sequences: dict[str, Sequence] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """Requests whose sequences were aborted."""
    thresholds: list[Mapping[str, float]] = field(default_factory=list)
    broken: bool = False

    def check(self, sequence: Sequence) -> None:
        if sequence.request.sampling.top_k == 13:
            raise RequestError("vLLM refuses the request: 13.")

    def add(self, key: str, sequence: Sequence) -> None:
        assert len(self.sequences) < SEQS
        if sequence.request.prompt[0] == 13:
            raise ValueError("13")
        self.sequences[key] = sequence
        self.started.append(sequence.request.id)

    def abort(self, key: str) -> None:
        if sequence := self.sequences.pop(key, None):  # vLLM ignores keys that it does not know
            self.aborted.append(sequence.request.id)

    def step(self) -> list[CoreOutput]:
        if self.broken:
            raise RuntimeError("out of memory")
        outputs = []
        for key, sequence in list(self.sequences.items()):
            left = sequence.max_tokens - sequence.num_output_tokens
            ended = left <= 2
            outputs.append(
                CoreOutput(
                    key=key,
                    tokens=(TOKEN,) * min(2, left),
                    logprobs=(),
                    cached_tokens=1,
                    finish_reason="length" if ended else None,
                )
            )
            if ended:
                del self.sequences[key]
        return outputs

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        self.thresholds.append(by_class)

    def record(self) -> Mapping[str, Any]:
        return {"step_times": {}}

    def forwards(self) -> list[LoggedForward]:
        return []

    def load(self) -> CoreLoad:
        return CoreLoad(kv_cache_usage=0.5, preemptions=3)

    def close(self) -> None: ...


@pytest.fixture
def core() -> CountingCore:
    return CountingCore()


@pytest.fixture
def engine(core: CountingCore) -> VllmEngine:
    tokens = LoadedTokens(open_model("bundled").load_tokenizer(), mask_id=511, stop_ids=frozenset({4}))
    options = EngineOptions(classes=CLASSES, max_waiting_seqs=8)
    return VllmEngine(core, tokens, options, records=Records(Profile(core.block), tokens.stop_ids))


def request(name: str, service_class: str = "standard", first: int = 7, **sampling: Any) -> Request:
    given = SamplingParams(**({"max_tokens": 4} | sampling))
    return Request(id=name, prompt=(first, 8), service_class=service_class, sampling=given)


def test_vllm_gets_as_many_sequences_as_it_runs_and_urgent_ones_first(engine: VllmEngine, core: CountingCore) -> None:
    for name, service_class in (("a", "standard"), ("b", "standard"), ("c", "standard"), ("d", "urgent")):
        engine.add(request(name, service_class))
    assert (engine.running, engine.waiting) == (0, 4)
    engine.step()
    assert (core.started, engine.running, engine.waiting) == (["d", "a"], 2, 2)
    ended = [chunk.request_id for chunks in run_steps(engine) for chunk in chunks if chunk.finished]
    assert sorted(ended) == ["a", "b", "c", "d"]
    assert core.aborted == [] and not engine.busy


def test_the_youngest_sequence_of_lower_priority_leaves_its_place_and_goes_on_later(
    engine: VllmEngine, core: CountingCore
) -> None:
    for name in "abc":
        engine.add(request(name, max_tokens=6))
    chunks = engine.step()
    engine.add(request("urgent", "urgent", max_tokens=2))
    chunks += engine.step()
    assert (core.started, core.aborted, engine.waiting) == (["a", "b", "urgent"], ["b"], 2)
    chunks += [chunk for step in run_steps(engine) for chunk in step]
    assert core.started == ["a", "b", "urgent", "b", "c"]
    tokens = {name: sum(len(each.tokens) for each in chunks if each.request_id == name) for name in "abc"}
    assert tokens == {"a": 6, "b": 6, "c": 6}
    assert engine.state().preemptions == 4  # three of them are the core's
    assert not engine.busy


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_sequence_that_would_go_on_differently_keeps_its_place(
    engine: VllmEngine, core: CountingCore, penalty: str
) -> None:
    sampling: dict[str, Any] = {penalty: 1.0}
    for name in "ab":
        engine.add(request(name, max_tokens=6, **sampling))
    engine.step()
    engine.add(request("urgent", "urgent"))
    engine.step()
    assert (core.started, core.aborted, engine.waiting) == (["a", "b"], [], 1)


def test_a_preempted_request_can_be_cancelled(engine: VllmEngine, core: CountingCore) -> None:
    for name in "ab":
        engine.add(request(name, max_tokens=6))
    engine.step()
    engine.add(request("urgent", "urgent"))
    engine.step()
    engine.cancel("b")
    ended = [chunk for step in run_steps(engine) for chunk in step if chunk.request_id == "b"]
    assert [(chunk.finished.reason, chunk.finished.tokens) for chunk in ended if chunk.finished] == [("cancelled", 2)]
    assert core.aborted == ["b"]


def test_an_answer_ends_at_a_stop_string_and_vllm_is_told(engine: VllmEngine, core: CountingCore) -> None:
    text = open_model("bundled").load_tokenizer().decode([TOKEN])
    engine.add(request("a", max_tokens=9, stop=(text * 3,)))
    chunks = [chunk for step in run_steps(engine) for chunk in step]
    assert [len(chunk.tokens) for chunk in chunks] == [2, 1]
    assert chunks[-1].finished is not None and chunks[-1].finished.reason == "stop"
    assert core.aborted == ["a"]


def test_cancelled_requests_leave_vllm_and_the_queue(engine: VllmEngine, core: CountingCore) -> None:
    for name in "abc":
        engine.add(request(name, max_tokens=9))
    engine.step()
    engine.cancel("a")
    engine.cancel("c")
    last = {chunk.request_id: chunk.finished for chunk in engine.step() if chunk.finished}
    assert {name: finished.tokens for name, finished in last.items() if finished} == {"a": 2, "c": 0}
    assert core.aborted == ["a"]
    assert (engine.running, engine.waiting) == (1, 0)


def test_what_vllm_refuses_ends_alone(engine: VllmEngine) -> None:
    with pytest.raises(RequestError, match="13"):
        engine.add(request("at once", top_k=13))
    with pytest.raises(RequestError, match="prompt_logprobs is 1; the engine vllm scores no prompts"):
        engine.add(request("scored", prompt_logprobs=1))
    engine.add(request("later", first=13))
    engine.add(request("good"))
    ended = {c.request_id: c.finished for step in run_steps(engine) for c in step if c.finished}
    assert {name: finished.reason for name, finished in ended.items() if finished} == {
        "later": "error",
        "good": "length",
    }


def test_a_full_class_refuses_and_the_other_class_does_not(engine: VllmEngine) -> None:
    engine.add(request("many", n=4))
    with pytest.raises(QueueFullError):
        engine.add(request("more"))
    engine.add(request("urgent", "urgent"))
    with pytest.raises(RequestError, match="already here"):
        engine.add(request("many"))
    assert engine.state().classes[0].arrived == 5


def test_only_changed_thresholds_go_to_vllm(engine: VllmEngine, core: CountingCore) -> None:
    engine.set_thresholds({"standard": 1.0})
    engine.set_thresholds({"urgent": 0.8})
    assert core.thresholds == [{"urgent": 0.8}]
    assert [state.threshold for state in engine.state().classes] == [1.0, 0.8]


def test_a_failure_of_vllm_ends_the_engine(engine: VllmEngine, core: CountingCore) -> None:
    engine.add(request("a"))
    core.broken = True
    with pytest.raises(ReplicaLostError, match="vLLM failed: RuntimeError: out of memory"):
        engine.step()
