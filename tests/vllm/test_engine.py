"""The plug-in inside vLLM's model runner V2, on the bundled model, against stock vLLM and the plain rule."""

import json
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("vllm") is None:  # importing it now would come before `interpreted` sets its environment
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

# First: Triton reads TRITON_INTERPRET when torch or transformers import it.
from tests.vllm.interpreted import ASSETS, BUNDLED, LLM, SamplingParams, engine, tokens_of  # noqa: E402, I001

from transformers import AutoTokenizer  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

from mars_ray.method import reference  # noqa: E402
from mars_ray.method.reference import DecodeOptions  # noqa: E402
from mars_ray.model.card import read_card  # noqa: E402
from mars_ray.model.checkpoint import load_checkpoint  # noqa: E402
from tests.vllm.causal_reference import CausalAnswer, choices_of, decode_causally  # noqa: E402

MAX_TOKENS = 64
BLOCK_SIZE = 32  # the CPU backend takes multiples of 32
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "top_k": 40, "seed": 7, "presence_penalty": 0.5, "n": 2}


@cache
def prompts() -> list[str]:
    """Two prompts of each task family."""
    rows = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    return [row["prompt"] for row in rows if row["id"].endswith(("-00", "-01"))]


def decode(llm: LLM, texts: list[str], extra: list[dict[str, Any]] | None = None, **sampling: Any) -> list[Any]:
    """Outputs of vLLM; `extra` gives each request its `vllm_xargs`."""
    params = [SamplingParams(**(GREEDY | sampling), extra_args=each) for each in extra or [{}] * len(texts)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return llm.chat(chats, params, use_tqdm=False)


@pytest.fixture(scope="module")
def stock() -> list[Any]:
    """Stock vLLM's greedy outputs, one token a step."""
    return decode(stock_engine(), prompts(), logprobs=2)


@pytest.fixture(scope="module")
def stock_drawn() -> list[Any]:
    return decode(stock_engine(), prompts()[::4], **DRAWN)


@cache
def stock_engine() -> LLM:
    return engine()


@pytest.fixture(scope="module", params=[False, True], ids=["waiting", "async"])
def mars(request: pytest.FixtureRequest) -> LLM:
    llm = engine({}, async_scheduling=request.param, enable_prefix_caching=False)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling is request.param
    return llm


@cache
def plain(threshold: float) -> list[CausalAnswer]:
    """The plain rule on transformers' network."""
    card = read_card(BUNDLED)
    assert card is not None and card.block is not None
    choices = choices_of(BUNDLED, card.mask_token_id)
    ids_of_prompts, stop_ids = prompt_ids()
    return [
        decode_causally(
            choices,
            ids,
            threshold=threshold,
            masks=card.block - 1,
            mask_id=card.mask_token_id,
            max_tokens=MAX_TOKENS,
            stop_ids=stop_ids,
        )
        for ids in ids_of_prompts
    ]


@cache
def referenced() -> list[list[int]]:
    """Tokens of our reference decoder, which verifies every token at threshold 1."""
    checkpoint = load_checkpoint(BUNDLED)
    ids, stop_ids = prompt_ids()
    options = DecodeOptions(threshold=1.0, max_tokens=MAX_TOKENS, stop_ids=stop_ids)
    return [answer.tokens for answer in reference.decode(checkpoint.network, ids, options, mask_id=checkpoint.mask_id)]


def prompt_ids() -> tuple[list[list[int]], frozenset[int]]:
    """Ids of the prompts as chats, and the ids that end an answer."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    chats = [[{"role": "user", "content": text}] for text in prompts()]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    return ids, frozenset({tokenizer.eos_token_id})


def test_exact_mode_returns_the_tokens_of_stock_vllm_and_of_our_reference_decoder(mars, stock):
    outputs = decode(mars, prompts(), [{"mode": "exact"}] * len(prompts()))
    assert tokens_of(outputs) == tokens_of(stock) == referenced()


@pytest.mark.parametrize("threshold", [0.95, 0.6])
def test_a_threshold_returns_the_tokens_of_the_plain_rule(mars, threshold):
    outputs = decode(mars, prompts(), [{"threshold": threshold}] * len(prompts()))
    assert tokens_of(outputs) == [answer.tokens for answer in plain(threshold)]


def test_requests_of_all_modes_share_a_batch(mars, stock):
    modes: list[dict[str, Any]] = [{"mode": "exact"}, {"threshold": 0.6}, {"mode": "ar"}, {"threshold": 0.95}]
    outputs = tokens_of(decode(mars, prompts(), [modes[index % 4] for index in range(len(prompts()))]))
    one_by_one = tokens_of(stock)
    low, high = ([answer.tokens for answer in plain(value)] for value in (0.6, 0.95))
    expected = [one_by_one, low, one_by_one, high]
    assert outputs == [expected[index % 4][index] for index in range(len(prompts()))]


def test_the_threshold_changes_while_the_engine_runs(mars, stock):
    mars.collective_rpc("set_mars_threshold", args=(0.6,))
    lowered = tokens_of(decode(mars, prompts()))
    mars.collective_rpc("set_mars_threshold", args=(1.0,))
    assert lowered == [answer.tokens for answer in plain(0.6)]
    assert tokens_of(decode(mars, prompts())) == tokens_of(stock)


def test_exact_mode_draws_what_stock_vllm_draws_with_the_same_seed(mars, stock_drawn):
    ours = decode(mars, prompts()[::4], [{"mode": "exact"}] * len(prompts()[::4]), **DRAWN)
    drawn = [[list(answer.token_ids) for answer in output.outputs] for output in ours]
    assert drawn == [[list(answer.token_ids) for answer in output.outputs] for output in stock_drawn]


def test_logprobs_are_those_of_the_rows_that_chose_the_tokens(mars, stock):
    for ours, theirs in zip(
        decode(mars, prompts(), [{"mode": "exact"}] * len(prompts()), logprobs=2), stock, strict=True
    ):
        for mine, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert mine.keys() == other.keys()
            # Stock vLLM gives the mask token a probability, and we give it to the others.
            more = [mine[token].logprob - other[token].logprob for token in mine]
            assert more == pytest.approx([more[0]] * len(more), abs=1e-3)
            assert -1e-3 < more[0] < 1e-2


def test_wrong_parameters_of_a_request_are_refused_by_name(mars):
    with pytest.raises(VLLMValidationError, match=r"vllm_xargs: threshold is 1\.5"):
        decode(mars, prompts()[:1], [{"threshold": 1.5}])


def test_counts_say_how_many_tokens_a_step_yields(mars):
    before = mars.collective_rpc("mars_record")[0]["lookahead"]
    decode(mars, prompts(), [{"threshold": 0.6}] * len(prompts()))
    after = mars.collective_rpc("mars_record")[0]["lookahead"]
    gained = {name: after[name] - before[name] for name in ("forwards", "tokens", "drafts", "right", "accepted")}
    assert gained["tokens"] > 2 * gained["forwards"]
    assert 0 < gained["right"] <= gained["drafts"]
    assert gained["tokens"] == gained["forwards"] + gained["right"] + gained["accepted"]


def test_chunked_prompts_and_preemptions_change_no_token(stock, monkeypatch):
    llm = engine(
        {},
        max_model_len=192,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=32,
        num_gpu_blocks_override=7,
        block_size=BLOCK_SIZE,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *arguments: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *arguments, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    assert tokens_of(decode(llm, prompts(), [{"mode": "exact"}] * len(prompts()))) == tokens_of(stock)
    assert preempted
