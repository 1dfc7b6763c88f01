"""Make the bundled model from this repository alone: `python -m pipelines.build_bundled_model`.

A step is skipped if its result exists, so the same command resumes a stopped run. The seven steps:

1. write training and held-out examples of the task families;
2. train a tokenizer on them, create a small Qwen2 with random weights, and train it autoregressively (bundled_ar.yaml);
3. fine-tune this model with MARS (bundled_mars.yaml);
4. continue this training twice, on a mixture with tool calls (bundled_tools_1.yaml, bundled_tools_2.yaml);
5. continue it in five parts, from the weights in bfloat16, with more sentences to extract keys from
   (bundled_keys_1.yaml to bundled_keys_5.yaml), and average the weights after the last two parts;
6. calibrate both models on held-out examples, the MARS model in bfloat16 and at every threshold;
7. replace mars_ray/assets/bundled by the MARS model with its card, and write the prompts of the demo next to it.
"""

import json
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from mars_ray.data.tasks import FAMILIES, Split, TaskExample, examples, mixture
from mars_ray.evaluation.calibration import THRESHOLDS, CalibrateOptions, calibrate, heldout_examples
from mars_ray.model.card import Card, read_card
from mars_ray.model.checkpoint import load_checkpoint, save_checkpoint
from mars_ray.program import run_program
from mars_ray.training.config import read_config
from mars_ray.training.ray_trainer import train
from mars_ray.training.run_folder import RunFolder
from pipelines.bundled_card import card_text
from pipelines.made_up_words import MakeWord, spliced, syllables, with_made_up_words
from pipelines.pipeline_files import write

HERE = Path(__file__).parent
WORK = Path("runs/bundled")
ASSETS = HERE.parent / "mars_ray" / "assets"
SEED = 2026
TRAIN_EXAMPLES = 230_000
MADE_UP_SHARE = 0.5
"""Share of the training examples with made-up words, so that the model can copy words outside the families' lexicon."""
TOOL_EXAMPLES = 48_000
"""Number of training examples of each half of step 4."""
TOOL_SHARE = 0.4
"""Share of tool calls in step 4. A lower share would train fewer calls, a higher one forgets the other families."""
HELDOUT_EXAMPLES = 2_000
"""Number of held-out examples measured during training; the card uses different ones."""


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Training examples of one part of step 5."""

    examples: int
    shares: Mapping[str, float]
    """Families with more examples, mixed in one by one: a share is that of a family in the mixture up to it."""


KEY_PARTS = (
    KeyPart(22_000, {"tool_call": 0.4, "json_extract": 0.5}),
    # The families that the parts before made worse get more examples.
    KeyPart(20_000, {"sum_direct": 0.2, "sort_numbers": 0.15, "tool_call": 0.25, "json_extract": 0.4}),
    KeyPart(24_000, {"sum_direct": 0.1, "sort_numbers": 0.1, "tool_call": 0.2, "json_extract": 0.4}),
    KeyPart(16_000, {"tool_call": 0.3, "sort_numbers": 0.08, "sum_direct": 0.3, "json_extract": 0.4}),
    KeyPart(10_000, {"date_rewrite": 0.25, "tool_call": 0.2, "json_extract": 0.3}),
)
DEMO_PER_FAMILY = 20
VOCABULARY = 1024
TOKENIZER_EXAMPLES = 20_000
TOKEN_LIMITS = r" ?\p{Ll}+|\p{Lu}+\p{Ll}*|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pieces of text that no token crosses, finer than Qwen's. A capitalised word has the same tokens after a space as
after a quotation mark, so that it is easy to copy. Every digit is a token, as in Qwen."""

# Each turn adds two tokens. `developer` is the newer name of `system`. A tool takes one line, because the context is
# short: its name, its parameters with types or values, and its description.
CHAT_TEMPLATE = (
    "{% set offered %}{% for tool in tools or [] %}"
    "{% set function = tool['function'] %}{% set parameters = function['parameters'] or {} %}"
    "{{ '\n' + function['name'] + '(' }}"
    "{% for name, schema in (parameters['properties'] or {}).items() %}"
    "{{ ', ' if not loop.first }}{{ name }}{{ '?' if name not in (parameters['required'] or []) }}: "
    "{{ schema['enum'] | join('|') if schema['enum'] else schema['type'] or 'any' }}"
    "{% endfor %}{{ '): ' + (function['description'] or '') }}"
    "{% endfor %}{% endset %}"
    "{% set offered = 'Tools:' + offered if tools else '' %}"
    "{% if tools and messages[0]['role'] not in ['system', 'developer'] %}"
    "{{ '<|system|>' + offered + '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{% set content = message['content'] or '' %}"
    "{% if role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + role) }}{% endif %}"
    "{% if role == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + content + '\n</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + role + '|>' + content }}"
    "{{ '\n\n' + offered if tools and loop.first and role == 'system' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if content or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> None:
    """Run the seven steps."""
    logging.disable_progress_bar()
    ar_model = autoregressive_model()
    # Other made-up words than in the first training, so that more of the tokens occur in names.
    write_examples(WORK / "train_mars.jsonl", islice(training_examples(spliced), TRAIN_EXAMPLES // 2))
    mars = read_config(HERE / "bundled_mars.yaml")
    train(mars)
    models = [RunFolder(mars.output).model_here(), *tool_calling_models()]
    rounded(models[-1], WORK / "bundled_tools")
    models += key_extracting_models()
    in_bfloat16 = averaged(models[-2:], WORK / "bundled_keys")
    calibrated(in_bfloat16, THRESHOLDS)
    publish(in_bfloat16, [trained_card(model) for model in models], before=calibrated(ar_model, (1.0,)))


def autoregressive_model() -> Path:
    """Run the first two steps and return the model."""
    write_examples(WORK / "train.jsonl", islice(training_examples(syllables), TRAIN_EXAMPLES))
    write_examples(WORK / "heldout.jsonl", islice(mixture("heldout", SEED), HELDOUT_EXAMPLES))
    make_start(WORK / "init")
    ar = read_config(HERE / "bundled_ar.yaml")
    train(ar)
    return RunFolder(ar.output).model_here()


def tool_calling_models() -> Iterator[Path]:
    """Run the fourth step and yield the model after each half."""
    heldout = with_more("tool_call", TOOL_SHARE, mixture("heldout", SEED), "heldout", SEED)
    write_examples(WORK / "heldout_tools.jsonl", islice(heldout, HELDOUT_EXAMPLES))
    for half in (1, 2):
        mixed = with_more("tool_call", TOOL_SHARE, training_examples(spliced), "train", SEED)
        some = islice(mixed, (half - 1) * TOOL_EXAMPLES, half * TOOL_EXAMPLES)
        write_examples(WORK / f"train_tools_{half}.jsonl", some)
        tools = read_config(HERE / f"bundled_tools_{half}.yaml")
        train(tools)
        yield RunFolder(tools.output).model_here()


def key_extracting_models() -> Iterator[Path]:
    """Run the fifth step and yield the model after each part."""
    heldout = with_shares(KEY_PARTS[0], mixture("heldout", SEED), "heldout", SEED)
    write_examples(WORK / "heldout_keys.jsonl", islice(heldout, HELDOUT_EXAMPLES))
    for number, part in enumerate(KEY_PARTS, 1):
        # Other seeds than in the steps before, so that most examples are new.
        seed = SEED + 4 * number - 2
        mixed = with_shares(part, training_examples(spliced, seed), "train", seed)
        write_examples(WORK / f"train_keys_{number}.jsonl", islice(mixed, part.examples))
        keys = read_config(HERE / f"bundled_keys_{number}.yaml")
        train(keys)
        yield RunFolder(keys.output).model_here()


def rounded(model: Path, folder: Path) -> Path:
    """Return a folder with the weights of `model` in bfloat16; write it first if needed."""
    if not folder.exists():
        save_checkpoint(load_checkpoint(model), folder, dtype=torch.bfloat16)
    return folder


def averaged(models: Sequence[Path], folder: Path) -> Path:
    """Return `folder` with the mean of the weights of models in bfloat16, which forgets less than the last one."""
    if not folder.exists():
        checkpoints = [load_checkpoint(model, dtype=torch.bfloat16) for model in models]
        parameters = [dict(checkpoint.network.named_parameters()) for checkpoint in checkpoints]
        with torch.no_grad():
            for name, weight in parameters[-1].items():
                weight.copy_(torch.stack([tensors[name].float() for tensors in parameters]).mean(dim=0))
        save_checkpoint(checkpoints[-1], folder, dtype=torch.bfloat16)
    return folder


def training_examples(make_word: MakeWord, seed: int = SEED) -> Iterator[TaskExample]:
    """Yield examples of twelve families, some of them with made-up words instead of names, cities and things."""
    rng = random.Random(seed)
    for example in mixture("train", seed):
        yield with_made_up_words(example, rng, make_word) if rng.random() < MADE_UP_SHARE else example


def with_shares(part: KeyPart, others: Iterator[TaskExample], split: Split, seed: int) -> Iterator[TaskExample]:
    """Yield examples of all families, and more of those with shares."""
    # With other seeds, few of these examples are also among the others.
    for offset, (family, share) in enumerate(part.shares.items()):
        others = with_more(family, share, others, split, seed + offset)
    return others


def with_more(
    family: str, share: float, others: Iterator[TaskExample], split: Split, seed: int
) -> Iterator[TaskExample]:
    """Yield a share of examples of a family, half of them with made-up words in training, between the others."""
    rng = random.Random(f"{family}/{seed}")
    for example in examples(FAMILIES[family], split, seed):
        while rng.random() > share:
            yield next(others)
        made_up = split == "train" and rng.random() < MADE_UP_SHARE
        yield with_made_up_words(example, rng, spliced) if made_up else example


def write_examples(path: Path, examples: Iterable[TaskExample]) -> None:
    """Write examples as JSONL, atomically."""
    if not path.exists():
        write(path, (json.dumps(record(example)) for example in examples))


def record(example: TaskExample) -> dict[str, Any]:
    """Return an example as a record of training data."""
    fields = {name: getattr(example, name) for name in ("family", "prompt", "response", "answer")}
    if not example.tools:
        return fields
    return {"messages": [*example.messages, {"role": "assistant", "content": example.response}]} | fields


def make_start(folder: Path) -> None:
    """Write the tokenizer and a network with random weights."""
    if folder.exists():
        return
    tokenizer = make_tokenizer()
    torch.manual_seed(SEED)
    network = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    network.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(folder)


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Train a byte-level BPE. Some ids stay unused, for the mask token."""
    special = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    untrained = Qwen2Tokenizer()
    # Qwen2Tokenizer puts its own, coarser pieces back when it is loaded. The tokens stay the same, because none of the
    # learned tokens crosses these limits.
    untrained.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_LIMITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = (
        text for row in islice(training_examples(syllables), TOKENIZER_EXAMPLES) for text in (row.prompt, row.response)
    )
    tokenizer: PreTrainedTokenizerBase = untrained.train_new_from_iterator(
        texts, vocab_size=VOCABULARY - len(special) - 4, new_special_tokens=special, show_progress=False
    )
    tokenizer.eos_token = "<|end|>"
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def calibrated(model: Path, thresholds: tuple[float, ...]) -> Card:
    """Return the card of `model`; calibrate the model first if needed."""
    if not trained_card(model).calibration:
        calibrate(model, CalibrateOptions(thresholds=thresholds))
    return trained_card(model)


def trained_card(model: Path) -> Card:
    """Return the card that training has written."""
    card = read_card(model)
    assert card is not None
    return card


def publish(model: Path, mars_cards: Sequence[Card], before: Card) -> None:
    """Write the model, its README and the demo's prompts to the assets. `mars_cards` are the cards after each training
    with MARS, and `before` is the card of the AR model, from which they went on."""
    checkpoint = load_checkpoint(model, dtype=torch.bfloat16)
    target = ASSETS / "bundled"
    shutil.rmtree(target, ignore_errors=True)
    # Write the default of transformers explicitly, because the tasks have exact answers.
    checkpoint.network.generation_config.do_sample = False
    save_checkpoint(checkpoint, target)
    text = card_text(
        trained_card(model),
        mars_cards,
        before,
        parameters=checkpoint.network.num_parameters(),
        file_bytes=(target / "model.safetensors").stat().st_size,
    )
    (target / "README.md").write_text(text)
    lines = (
        json.dumps(demo_row(f"{example.family}-{number % DEMO_PER_FAMILY:02}", example)) + "\n"
        for number, example in enumerate(heldout_examples(DEMO_PER_FAMILY, SEED + 1))
    )
    (ASSETS / "prompts.jsonl").write_text("".join(lines))


def demo_row(id: str, example: TaskExample) -> dict[str, Any]:
    """Return a prompt of the demo."""
    row = {"id": id, "family": example.family, "prompt": example.prompt, "answer": example.answer}
    return row | ({"messages": example.messages} if example.tools else {})


if __name__ == "__main__":
    run_program("build_bundled_model", main)
