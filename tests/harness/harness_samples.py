"""Small tasks of lm-evaluation-harness, written as files, the requests it makes of such, and a slow judge of texts."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from mars_ray.data.tasks import TaskExample
from mars_ray.evaluation.calibration import heldout_examples
from mars_ray.harness.likelihood import Likelihood
from mars_ray.harness.model import HarnessModel

MakeModel = Callable[..., HarnessModel]

GENERATE, CHOOSE, READ = "small_generate", "small_choose", "small_read"
CHOICES = (" a", " the", " Warsaw", " 16 nights")
SPEECH = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 64}


def examples() -> list[TaskExample]:
    """One of each family."""
    return heldout_examples(1, seed=3)


def write_tasks(folder: Path) -> TaskManager:
    """A task of each kind over the same examples; nothing of it comes from elsewhere."""
    lines = [
        {"question": each.prompt, "answer": each.response, "choices": CHOICES, "right": number % len(CHOICES)}
        for number, each in enumerate(examples())
    ]
    (folder / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "examples.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    _write(
        folder,
        GENERATE,
        whole | {"output_type": "generate_until", "doc_to_target": "{{answer}}", "generation_kwargs": SPEECH},
        "exact_match",
    )
    choose = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}"}
    _write(folder, CHOOSE, whole | choose | {"target_delimiter": ""}, "acc")
    _write(
        folder,
        READ,
        whole | {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{answer}}"},
        "word_perplexity",
    )
    return TaskManager(include_path=str(folder), include_defaults=False)


def _write(folder: Path, name: str, fields: Mapping[str, Any], metric: str) -> None:
    better = metric != "word_perplexity"
    aggregation = "mean" if better else "weighted_perplexity"
    metrics = [{"metric": metric, "aggregation": aggregation, "higher_is_better": better}]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **fields, "metric_list": metrics}))


def generations(contexts: Sequence[str], **arguments: Any) -> list[Instance]:
    return [
        Instance("generate_until", {}, (context, dict(arguments)), number) for number, context in enumerate(contexts)
    ]


def pairs(*texts: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, text, number) for number, text in enumerate(texts)]


def documents(*texts: str) -> list[Instance]:
    return [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)]


def judged_slowly(network: PreTrainedModel, context: list[int], continuation: list[int], mask_id: int) -> Likelihood:
    """One token at a time, each after a forward over all before it."""
    logprob, greedy = 0.0, True
    for number, token in enumerate(continuation):
        with torch.no_grad():
            logits_V = network(input_ids=torch.tensor([[*context, *continuation[:number]]])).logits[0, -1].double()
        logits_V[mask_id] = -torch.inf
        logprob += float(logits_V.softmax(dim=0)[token].log())
        greedy &= int(logits_V.argmax()) == token
    return Likelihood(logprob=logprob, greedy=greedy)
