"""The settings of the plug-in, the requests' lookahead, and refusals at start, all without vLLM."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mars_ray.adapter.card import CONFIG_FILE
from mars_ray.errors import AdapterError, ConfigError, ModelError, RequestError
from mars_ray.model.card import CARD_FILE, write_card
from mars_ray.vllm.request_lookahead import decode_params, lookahead_of
from mars_ray.vllm.settings import VllmSettings
from mars_ray.vllm.start_checks import check_start
from mars_ray.vllm.step_times import StepTimes
from mars_ray.vllm.sure_tokens import SureTokens
from mars_ray.vllm.versions import HOOKS, check_version, hooks_of
from tests.factories.cards import adapter_card

BUNDLED = Path(__file__).parents[2] / "mars_ray/assets/bundled"
CARD = json.loads((BUNDLED / CARD_FILE).read_text())
VOCABULARY = CARD["mask_token_id"] + 1


def complete(given: Any = None, folder: Path = BUNDLED) -> VllmSettings:
    return VllmSettings.complete({} if given is None else given, folder, VOCABULARY)


def folder_with(tmp_path: Path, **changed: Any) -> Path:
    (tmp_path / CARD_FILE).write_text(json.dumps(CARD | changed))
    return tmp_path


def test_the_card_gives_the_block_and_the_mask_token():
    settings = complete()
    assert (settings.block, settings.mask_id, settings.threshold) == (CARD["block"], CARD["mask_token_id"], 1.0)
    assert VllmSettings.read(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": 1.5}, "mars: threshold is 1.5, must be at most 1"),
        ({"treshold": 0.9}, "mars: treshold is not a setting"),
        ({"block": 1}, "mars: block is 1, must be"),
        ({"block": 64}, "block is 64; the model was trained with"),
        ({"mode": "ar"}, "mars: mode is 'ar', must be 'threshold' or 'exact'"),
        ({"adapter": 3}, "mars.adapter is 3"),
        ({"threshold": 0.5, "controller": {"name": "x", "floor": 0.9}}, "floor of class standard is 0.9; .* 0.5"),
        ({"controller": {"name": "x", "settings": {"policy": "deadline"}}}, "policy is 'deadline', which is for jobs"),
        (0.9, "mars is 0.9; it must be an object"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        complete(given)


def test_a_checkpoint_without_a_card_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no card mars\.json"):
        complete(folder=tmp_path)


def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ModelError, match=f"names mask token {VOCABULARY}, and the network has {VOCABULARY} tokens"):
        complete(folder=folder_with(tmp_path, mask_token_id=VOCABULARY))


def test_a_model_without_masks_is_refused(tmp_path):
    with pytest.raises(ModelError, match="method ar and block None"):
        complete(folder=folder_with(tmp_path, method="ar", block=None))


def adapter_for(base: Path, folder: Path) -> str:
    """A folder with the card of an adapter, but without its weights."""
    (folder / CONFIG_FILE).write_text("{}")
    write_card(adapter_card(base, block=4), folder)
    return str(folder)


def test_an_adapter_has_a_block_and_mask_tokens_after_the_vocabulary(tmp_path):
    adapter = adapter_for(BUNDLED, tmp_path)
    settings = complete({"adapter": adapter})
    assert (settings.block, settings.mask_id, settings.mask_step) == (4, VOCABULARY, 1)
    assert settings.adapter == adapter


def test_an_adapter_of_another_model_is_refused(tmp_path):
    with pytest.raises(AdapterError, match="is an adapter for bundled"):
        complete({"adapter": adapter_for(tmp_path, tmp_path)})


def sampling(**changed: Any) -> Any:
    fields = {"extra_args": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    fields |= {
        "bad_words": None,
        "structured_outputs": None,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    fields |= {"min_tokens": 0, "logprobs": None, "logit_bias": None, "allowed_token_ids": None}
    return SimpleNamespace(**(fields | changed))


@pytest.mark.parametrize(
    ("changed", "masks", "threshold"),
    [
        ({}, 7, None),
        ({"extra_args": {"mode": "ar"}}, 0, None),
        ({"extra_args": {"mode": "exact", "threshold": 0.5}}, 7, 1.0),
        ({"extra_args": {"threshold": 0.5, "block": 4}}, 3, 0.5),
        ({"extra_args": {"block": 64, "others": 1}}, 7, None),
        ({"extra_args": {"threshold": 0.5}, "presence_penalty": 0.1}, 7, 1.0),
        ({"extra_args": {"threshold": 0.5}, "bad_words": ["no"]}, 7, 1.0),
        ({"extra_args": {"threshold": 0.5}, "structured_outputs": object()}, 0, 0.5),
    ],
)
def test_a_request_says_how_far_it_looks_ahead(changed, masks, threshold):
    for lenient in (False, True):
        lookahead = lookahead_of(sampling(**changed), block=8, lenient=lenient)
        assert (lookahead.masks, lookahead.threshold) == (masks, threshold)
        assert lookahead.is_refused == ("structured_outputs" in changed)


@pytest.mark.parametrize(
    ("changed", "threshold"),
    [
        ({}, 0.5),
        ({"temperature": 0.7, "top_k": -1}, 0.5),
        ({"temperature": 0.0, "top_k": 20}, 0.5),
        ({"temperature": 0.7, "top_k": 20}, 1.0),
        ({"temperature": 0.7, "top_p": 0.9}, 1.0),
        ({"temperature": 0.7, "min_p": 0.1}, 1.0),
        ({"min_tokens": 3}, 1.0),
        ({"logit_bias": {1: -100.0}}, 1.0),
        ({"allowed_token_ids": [1, 2]}, 1.0),
        ({"logprobs": 0}, 1.0),
        ({"presence_penalty": 0.1}, 1.0),
    ],
)
def test_drafts_are_kept_only_where_no_token_is_excluded(changed, threshold):
    lookahead = lookahead_of(sampling(extra_args={"threshold": 0.5}, **changed), block=8, lenient=True)
    assert lookahead.threshold == threshold
    assert lookahead.temperature == (changed.get("temperature") or 1.0)


@pytest.mark.parametrize(
    "extra",
    [
        {"threshold": 1.5},
        {"threshold": "0.5"},
        {"threshold_floor": -1},
        {"threshold": 0.5, "threshold_floor": 0.5},
        {"mode": "fast"},
        {"mode": ["ar"]},
        {"block": 0},
        {"block": 2.5},
    ],
)
def test_wrong_parameters_of_a_request_are_named(extra):
    with pytest.raises(RequestError, match=r"mode|threshold|floor|block"):
        decode_params(extra)


def config(**changed: Any) -> SimpleNamespace:
    """The parts of a `VllmConfig` that are checked, all of them fine."""
    values = {
        "use_v2_model_runner": True,
        "speculative_config": None,
        "kv_transfer_config": None,
        "backend": None,
        "use_mla": False,
        "window": None,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "enable_batch_sharded_sampling": None,
        "worker_extension_cls": "",
        "policy": "fcfs",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": 0,
        "kv_offloading_size": None,
        "enable_prompt_embeds": False,
        "enable_trace_replay": False,
    } | changed
    everything = SimpleNamespace(**values)
    everything.get_sliding_window = lambda: everything.window
    return SimpleNamespace(
        **values,
        scheduler_config=everything,
        parallel_config=everything,
        model_config=everything,
        attention_config=everything,
        cache_config=everything,
    )


def test_a_plain_configuration_is_accepted():
    check_start(config(), complete())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_v2_model_runner": False}, "vLLM chose model runner V1"),
        ({"speculative_config": object()}, "speculative_config is set"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling is set"),
        ({"worker_extension_cls": "mine"}, "worker_extension_cls is mine"),
        ({"kv_transfer_config": object()}, "kv_transfer_config is set"),
        ({"kv_offloading_size": 4.0}, "kv_offloading_size is 4.0"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is set"),
        ({"enable_trace_replay": True}, "enable_trace_replay is set"),
        ({"use_mla": True}, "MLA"),
        ({"backend": "AttentionBackendEnum.FLASHINFER"}, "FLASHINFER"),
        ({"window": 4096}, "sliding window of 4096 tokens"),
        ({"policy": "priority"}, "policy is priority"),
        ({"max_num_seqs": 999}, "max_num_batched_tokens is 2048; 999 sequences"),
        ({"long_prefill_token_threshold": 4}, "long_prefill_token_threshold is 4"),
    ],
)
def test_what_would_go_wrong_is_refused_by_name_in_one_line(changed, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_start(config(**changed), complete())
    assert "\n" not in str(error.value)


def test_exact_mode_needs_no_care_for_sliding_windows():
    check_start(config(window=4096), complete({"mode": "exact"}))


@pytest.mark.parametrize("version", ["0.28.9", "0.34.0", "1.32.0"])
def test_other_versions_of_vllm_are_refused_in_one_line_with_those_that_were_tried(version):
    with pytest.raises(ConfigError, match=f"vLLM is {version}; .* tried with 0.29, 0.30, .*any_version") as error:
        check_version(version)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.33.1+cpu"])
def test_known_versions_of_vllm_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize(
    ("version", "row"), [("0.29.1", "0.29"), ("0.32.0", "0.32"), ("0.34.0", "0.33"), ("2.0", "0.33")]
)
def test_a_version_has_the_hooks_of_its_row_and_an_unknown_one_those_of_the_newest(version, row):
    assert hooks_of(version) == HOOKS[row]


class Request:
    """A request of vLLM, which can be held weakly."""


def test_tokens_of_the_last_step_are_not_shared_and_those_before_it_are():
    sure, request = SureTokens(), Request()
    assert sure.limit(request, 40) == 40
    sure.step_ended(request, 40)
    assert [sure.limit(request, tokens) for tokens in (39, 40, 47)] == [39, 40, 40]
    assert sure.limit(Request(), 47) == 47


def test_step_times_are_summed_by_size_while_requests_go_on():
    times = StepTimes()
    steps: list[Callable[[], None]] = [
        lambda: times.begin(["a"], 40, 1.0),
        lambda: times.begin(["a", "b"], 9, 3.0),  # the step of 40 positions took 2 s
        lambda: times.begin(["b"], 16, 3.5),
        lambda: times.begin(["c"], 16, 99.0),  # nothing in common: idle in between
        lambda: times.begin(["c"], 16, 100.0),
    ]
    for begin in steps:
        begin()
    sums = {limit: (total.steps, total.positions, total.seconds) for limit, total in times.sums.items()}
    assert sums == {64: (1, 40, 2.0), 16: (2, 25, 1.5)}
