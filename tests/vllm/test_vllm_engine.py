"""vLLM behind the interface of our engine, in this process, compared with our own engine."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
if find_spec("vllm") is None:  # importing it now would come before `interpreted` sets its environment
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

# First: Triton reads TRITON_INTERPRET when torch or transformers import it.
import tests.vllm.interpreted  # noqa: E402, F401, I001

import torch  # noqa: E402
import vllm.v1.worker.gpu.structured_outputs as bitmasks  # noqa: E402

from mars_ray import LLM, SamplingParams  # noqa: E402
from mars_ray.engine.chunk import Chunk  # noqa: E402
from mars_ray.engine.core.offline import run_steps  # noqa: E402
from mars_ray.engine.grammar.spec import GrammarSpec  # noqa: E402
from mars_ray.engine.mode import Mode  # noqa: E402
from mars_ray.engine.request import DecodeParams, Request  # noqa: E402
from mars_ray.engine.service_class import ServiceClass  # noqa: E402
from mars_ray.errors import ConfigError, ReplicaLostError, RequestError  # noqa: E402
from mars_ray.llm.requests import as_conversation, encode_conversations  # noqa: E402
from mars_ray.load.plan import bundled_prompts  # noqa: E402
from mars_ray.data.prompt_file import read_prompts  # noqa: E402
from mars_ray.method.metric import Metric  # noqa: E402
from mars_ray.openai_api.answer_grammar import answer_grammar  # noqa: E402
from mars_ray.chat.call_format import CALL_FORMATS, AnswerFormat  # noqa: E402
from mars_ray.chat.tools import FunctionDefinition  # noqa: E402
from mars_ray.openai_api.tools import OfferedTools  # noqa: E402

PROMPTS = read_prompts(bundled_prompts())[::10]
"""24 prompts, at least one of each task family."""
SAMPLING = SamplingParams(max_tokens=48)
CLASSES = (ServiceClass(name="standard"), ServiceClass(name="first", priority=1))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "city": {"enum": ["Paris", "Dallas", "Rome"]}},
    "required": ["name", "city"],
    "additionalProperties": False,
}
ARGUMENTS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512, "async_scheduling": True}
"""Scheduling is asynchronous, as on a GPU; engines in processes of their own wait for each step on a CPU."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"max_num_seqs": 8, "classes": CLASSES, "vllm_args": ARGUMENTS}
    with LLM("bundled", dtype="float32", engine="vllm", **options) as llm:
        config = llm.engine._core._engine.vllm_config  # type: ignore[attr-defined]
        assert config.scheduler_config.async_scheduling
        yield llm


@cache
def ours() -> LLM:
    return LLM("bundled", dtype="float32", engine="mars")


def request(name: str, prompt: Any, *, service_class: str = "standard", decode: DecodeParams | None = None) -> Request:
    [tokens], _ = encode_conversations(ours().tokenizer, [as_conversation(prompt)])
    decode = decode or DecodeParams()
    return Request(id=name, prompt=tokens, service_class=service_class, sampling=SAMPLING, decode=decode)


def answers(llm: LLM, prompts: Sequence[Any] = PROMPTS, **asked: Any) -> list[tuple[Any, ...]]:
    outputs = llm.chat(prompts, asked.pop("sampling", SAMPLING), **asked)
    return [(a.text, a.token_ids, a.finish_reason) for output in outputs for a in output.outputs]


def test_exact_answers_are_those_of_our_engine(llm: LLM) -> None:
    assert answers(llm, mode="exact") == answers(ours(), mode="exact")


def test_one_token_at_a_time_gives_the_same(llm: LLM) -> None:
    ar, theirs = (engine.chat(PROMPTS[:6], SAMPLING, mode="ar") for engine in (llm, ours()))
    assert [output.token_ids for output in ar] == [output.token_ids for output in theirs]
    assert all(output.tokens_per_forward == 1 for output in ar)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=24, stop=("a", '": ')),
        SamplingParams(max_tokens=9, min_tokens=4),
        SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={345: 4.0, 300: -100.0}),
        SamplingParams(max_tokens=16, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    ],
    ids=["stop strings", "lengths", "bias", "penalties"],
)
def test_parameters_of_greedy_requests_mean_the_same(llm: LLM, sampling: SamplingParams) -> None:
    some = PROMPTS[::3]
    assert answers(llm, some, sampling=sampling, mode="exact") == answers(ours(), some, sampling=sampling, mode="exact")


def test_logprobs_are_those_of_our_engine(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=16, logprobs=3)
    for mine, theirs in zip(
        llm.chat(PROMPTS[:4], sampling, mode="exact"), ours().chat(PROMPTS[:4], sampling, mode="exact"), strict=True
    ):
        for one, other in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert one.chosen == pytest.approx(other.chosen, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert (one.start, len(one.top)) == (other.start, 3)


class TorchBitmaskKernel:
    """Does what vLLM's kernel for grammars does, which does not run under Triton's interpreter."""

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self.run

    @staticmethod
    def run(
        logits: torch.Tensor,
        _logits_stride: int,
        indices: torch.Tensor,
        first_rows: torch.Tensor,
        bitmask: torch.Tensor,
        _bitmask_stride: int,
        vocabulary: int,
        MASK_STRIDE: int,
        BLOCK_SIZE: int,
    ) -> None:
        for packed, index in zip(bitmask, indices.tolist(), strict=True):
            request, row = divmod(index, MASK_STRIDE)
            if row < first_rows[request + 1] - first_rows[request]:
                allowed = ((packed[:, None] >> torch.arange(32)) & 1).flatten()[:vocabulary]
                logits[first_rows[request] + row, allowed == 0] = -torch.inf


FUNCTION = FunctionDefinition(name="set_light", parameters=SCHEMA)
TOOLS = OfferedTools(functions=(FUNCTION,), callable=(FUNCTION,), required=True, parallel=False, legacy=False)
MODEL_WITH_TOOLS = AnswerFormat(calls=CALL_FORMATS["hermes"], template_takes_tools=True, markers={})


@pytest.mark.parametrize(
    "grammar",
    [
        GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA)),
        GrammarSpec(kind="json_object"),
        GrammarSpec(kind="regex", text=r"[A-Z][a-z]+ [a-z]{3,9}!"),
        GrammarSpec(kind="lark", text=answer_grammar(MODEL_WITH_TOOLS, TOOLS, None, None)),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_grammars_give_the_text_of_our_engine(llm: LLM, grammar: GrammarSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitmasks, "_apply_grammar_bitmask_kernel", TorchBitmaskKernel())
    sampling = SamplingParams(max_tokens=72, grammar=grammar)
    mine, theirs = (engine.chat(PROMPTS[:3], sampling) for engine in (llm, ours()))
    assert [output.text for output in mine] == [output.text for output in theirs]
    assert [output.finish_reason for output in mine] == [output.finish_reason for output in theirs]


def test_seeds_draw_the_same_again_and_n_answers_differ(llm: LLM) -> None:
    drawn = SamplingParams(max_tokens=12, temperature=1.5, seed=11, n=2)
    first, again = (answers(llm, PROMPTS[:4], sampling=drawn, mode=mode) for mode in ("exact", "ar"))
    assert first == again
    assert any(one != other for one, other in zip(first[::2], first[1::2], strict=True))


def test_a_class_follows_its_own_threshold_from_the_next_step_on(llm: LLM) -> None:
    engine = llm.engine
    engine.set_thresholds({"first": 0.6})
    try:
        requests = [
            request(f"{name} {n}", PROMPTS[n], service_class=name) for n in range(6) for name in ("standard", "first")
        ]
        chunks = [chunk for step in run_steps(engine, requests) for chunk in step]
    finally:
        engine.set_thresholds({"first": 1.0})
    assert {chunk.threshold for chunk in chunks if chunk.request_id.startswith("standard")} == {1.0}
    assert {chunk.threshold for chunk in chunks if chunk.request_id.startswith("first")} == {0.6}
    exact = [tokens for _, tokens, _ in answers(ours(), mode="exact")[:6]]
    assert [tokens_of(chunks, f"standard {n}") for n in range(6)] == exact
    forwards = [
        sum(len(chunk.tokens) > 0 for chunk in chunks if chunk.request_id.startswith(name))
        for name in ("standard", "first")
    ]
    assert forwards[1] < forwards[0]


def tokens_of(chunks: list[Chunk], name: str) -> tuple[int, ...]:
    return tuple(token for chunk in chunks if chunk.request_id == name for token in chunk.tokens)


def test_sequences_that_left_their_places_to_others_end_with_the_tokens_of_an_undisturbed_run(llm: LLM) -> None:
    exact = DecodeParams(mode=Mode.EXACT)
    before = llm.engine.state().preemptions
    for number, prompt in enumerate(PROMPTS[:8]):
        llm.engine.add(request(str(number), prompt, decode=exact))
    chunks = [chunk for _ in range(3) for chunk in llm.engine.step()]
    for number, prompt in enumerate(PROMPTS[8:10], start=8):
        llm.engine.add(request(str(number), prompt, service_class="first", decode=exact))
    chunks += [chunk for step in run_steps(llm.engine) for chunk in step]
    assert llm.engine.state().preemptions >= before + 2
    told = {
        str(number): [token for chunk in chunks if chunk.request_id == str(number) for token in chunk.tokens]
        for number in range(10)
    }
    undisturbed = ours().chat(PROMPTS[:10], SAMPLING, mode="exact")
    assert told == {str(number): list(output.token_ids) for number, output in enumerate(undisturbed)}


def test_the_profile_predicts_the_tokens_per_forward_at_each_threshold(llm: LLM) -> None:
    llm.chat(PROMPTS, SAMPLING)
    points = {point.threshold: point for point in llm.engine.state().profile}
    for threshold in (1.0, 0.6):
        outputs = llm.chat(PROMPTS, SAMPLING, threshold=threshold)
        # The forward of the prompt has no masks and yields one token, so the profile leaves it out.
        tokens = sum(len(output.token_ids) - 1 for output in outputs)
        forwards = sum(output.outputs[0].forwards - 1 for output in outputs)
        assert points[threshold].tokens_per_forward == pytest.approx(tokens / forwards, rel=0.05)
    audited = {point.threshold: point for point in llm.engine.state().profile}[0.6]
    assert audited.audited > 50
    assert audited.agreement is not None and 0.7 < audited.agreement <= 1


def test_the_state_counts_what_runs_and_waits(llm: LLM) -> None:
    engine = llm.engine
    before = engine.state()
    for n in range(12):
        engine.add(request(f"counted {n}", PROMPTS[n]))
    assert engine.step() == [] or engine.running
    during = engine.state()
    engine.cancel("counted 11")
    cancelled = engine.step()
    assert [chunk.finished.reason for chunk in cancelled if chunk.request_id == "counted 11" and chunk.finished] == [
        "cancelled"
    ]
    ended, first_tokens = list[Chunk](), list[float | None]()
    for step in run_steps(engine):
        ended += [chunk for chunk in step if chunk.finished]
        first_tokens.append(engine.state().ttft_p95_s)  # of the last seconds, in which a slow machine takes one step
    after = engine.state()
    assert (during.running, during.waiting, during.max_num_seqs) == (8, 4, 8)
    assert 0 < during.kv_cache_usage < 1
    [standard, _] = after.classes
    assert standard.arrived - before.classes[0].arrived == 12
    assert standard.ended - before.classes[0].ended == 11
    assert standard.tokens - before.classes[0].tokens == sum(chunk.finished.tokens for chunk in ended if chunk.finished)
    assert after.running == after.waiting == after.tokens_running == 0
    assert after.steps > before.steps
    assert after.step_time is not None and after.step_time.fixed_s + after.step_time.position_s > 0
    assert any(latency is not None for latency in first_tokens) and after.tpot_p95_s is not None


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (DecodeParams(threshold=0.5, metric=Metric.MARGIN), "metric is margin"),
        (DecodeParams(mode=Mode.EXACT, adapter="none"), "adapter is 'none'"),
    ],
)
def test_what_vllm_lacks_is_refused_when_the_request_arrives(llm: LLM, decode: DecodeParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.engine.add(request("refused", PROMPTS[0], decode=decode))
    assert not llm.engine.busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_such": 1}, "vllm_args has 'no_such'"),
        ({"max_num_seqs": 4}, "vllm_args may not set max_num_seqs"),
        ({"enforce_eager": True, "pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"enforce_eager": True, "max_num_batched_tokens": 64}, "max_num_batched_tokens"),
        ({"max_model_len": -7}, "vLLM refuses the settings"),
    ],
)
def test_wrong_arguments_of_vllm_are_refused_before_weights_load(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("bundled", dtype="float32", engine="vllm", max_num_seqs=8, vllm_args=arguments)


def test_a_failure_of_vllm_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this file."""
    llm.engine.add(request("last", PROMPTS[0]))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    core = llm.engine._core._engine.engine_core.engine_core  # type: ignore[attr-defined]
    monkeypatch.setattr(core.model_executor, "execute_model", fail)
    with pytest.raises(ReplicaLostError, match="vLLM failed: RuntimeError: CUDA error"):
        llm.engine.step()
