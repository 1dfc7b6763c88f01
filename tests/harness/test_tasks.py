"""Whole evaluations by the harness: its tasks, its metrics, its clients."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from mars_ray.harness import MODEL_NAME, register
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.model.resolve import resolve_model
from tests.harness.harness_samples import (
    CHOICES,
    CHOOSE,
    GENERATE,
    READ,
    SPEECH,
    MakeModel,
    examples,
    generations,
    judged_slowly,
    write_tasks,
)
from tests.serve.endpoint_samples import Served, config_of, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> TaskManager:
    return write_tasks(folder)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Served]:
    with served(config_of(mode="exact")) as running:
        yield running


def evaluated(tasks: TaskManager, names: list[str], model: str, arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=names,
        task_manager=tasks,
        apply_chat_template=names == [GENERATE],
        bootstrap_iters=0,
    )
    return found


def said(results: dict[str, Any]) -> list[str]:
    return [sample["resps"][0][0] for sample in results["samples"][GENERATE]]


def chat_prompts(oracle: Checkpoint) -> list[list[int]]:
    template = oracle.tokenizer.apply_chat_template
    chats = [[{"role": "user", "content": each.prompt}] for each in examples()]
    return [template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def test_a_generated_task_is_scored_on_the_texts_of_the_reference_decoder(
    tasks: TaskManager, oracle: Checkpoint
) -> None:
    register()
    results = evaluated(tasks, [GENERATE], MODEL_NAME, "model=bundled,mode=threshold,threshold=0.6,max_gen_toks=64")
    options = DecodeOptions(threshold=0.6, block=16, max_tokens=64, stop_ids=oracle.stop_ids)
    decoded = decode(oracle.network, chat_prompts(oracle), options, mask_id=oracle.mask_id)
    texts = [oracle.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in decoded]
    assert said(results) == texts
    right = sum(text == each.response for text, each in zip(texts, examples(), strict=True))
    assert 0 < right < len(texts)
    assert results["results"][GENERATE]["exact_match,none"] == pytest.approx(right / len(texts))
    tokens_per_forward = sum(len(each.tokens) for each in decoded) / sum(each.forwards for each in decoded)
    config = results["config"]
    assert (config["mode"], config["threshold"], config["block"]) == ("threshold", 0.6, 16)
    assert config["tokens_per_forward"] == pytest.approx(tokens_per_forward)


def test_choices_and_perplexity_are_those_of_a_softmax_at_each_token(tasks: TaskManager, oracle: Checkpoint) -> None:
    register()
    results = evaluated(tasks, [CHOOSE, READ], MODEL_NAME, "model=bundled")["results"]
    encode = oracle.tokenizer.encode
    logprobs, words, right = 0.0, 0, 0
    for number, each in enumerate(examples()):
        likely = []
        for choice in CHOICES:
            context, whole = encode(each.prompt), encode(each.prompt + choice)
            likely.append(judged_slowly(oracle.network, context, whole[len(context) :], oracle.mask_id).logprob)
        right += max(range(len(CHOICES)), key=likely.__getitem__) == number % len(CHOICES)
        start = [oracle.tokenizer.eos_token_id]
        logprobs += judged_slowly(oracle.network, start, encode(each.response), oracle.mask_id).logprob
        words += len(each.response.split())
    assert results[CHOOSE]["acc,none"] == pytest.approx(right / len(examples()))
    assert results[READ]["word_perplexity,none"] == pytest.approx(math.exp(-logprobs / words), rel=1e-4)


def test_a_second_registration_changes_nothing() -> None:
    register()
    from lm_eval.api.registry import get_model

    first = get_model(MODEL_NAME)
    register()
    assert get_model(MODEL_NAME) is first
    assert get_model("local-completions"), "the harness's own are there too"


@pytest.mark.parametrize(
    ("client", "path", "more"),
    [
        ("local-chat-completions", "chat/completions", "num_concurrent=4"),
        ("local-completions", "completions", f"tokenizer={resolve_model('bundled')},tokenizer_backend=huggingface"),
    ],
)
def test_the_clients_of_the_harness_get_the_same_texts_from_our_endpoint(
    tasks: TaskManager, endpoint: Served, make_model: MakeModel, client: str, path: str, more: str
) -> None:
    results = evaluated(tasks, [GENERATE], client, f"model=bundled,base_url={endpoint.url}/v1/{path},{more}")
    model = make_model(mode="ar")
    chats = [model.apply_chat_template([{"role": "user", "content": each.prompt}]) for each in examples()]
    assert said(results) == model.generate_until(generations(chats, **SPEECH))


def test_the_harness_judges_texts_through_our_endpoint_as_our_model_does(tasks: TaskManager, endpoint: Served) -> None:
    register()
    ours = evaluated(tasks, [CHOOSE, READ], MODEL_NAME, "model=bundled")["results"]
    arguments = f"model=bundled,base_url={endpoint.url}/v1/completions,tokenizer={resolve_model('bundled')}"
    theirs = evaluated(tasks, [CHOOSE, READ], "local-completions", f"{arguments},tokenizer_backend=huggingface")[
        "results"
    ]
    assert theirs[CHOOSE]["acc,none"] == ours[CHOOSE]["acc,none"]
    assert theirs[READ]["word_perplexity,none"] == pytest.approx(ours[READ]["word_perplexity,none"], rel=1e-3)


@pytest.mark.slow
def test_the_command_line_of_the_harness_knows_the_model(tasks: TaskManager, folder: Path) -> None:
    command = [sys.executable, "-m", "mars_ray.harness", "run", "--model", MODEL_NAME, "--tasks", GENERATE]
    command += ["--include_path", str(folder), "--apply_chat_template", "--limit", "3", "--model_args"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run([*command, "model=bundled,mode=exact"], capture_output=True, text=True, env=offline)
    assert done.returncode == 0, done.stderr
    assert "tokens per forward" in done.stderr
    assert f"|{GENERATE}|" in done.stdout
    refused = subprocess.run([*command, "model=bundled,mod=exact"], capture_output=True, text=True, env=offline)
    assert refused.returncode == 2
    assert "mars-ray: model_args: 'mod' is unknown" in refused.stderr
    assert "Traceback" not in refused.stderr
