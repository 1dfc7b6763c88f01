import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from mars_ray.data.tasks import FAMILIES, Family, TaskExample, examples, mixture, split_of

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def draw_card(rng: random.Random) -> TaskExample:
    card = str(rng.randrange(52))
    return TaskExample(family="card", prompt=f"card {card}", response=card, answer=card)


CARDS = replace(FAMILIES["sum_direct"], name="card", make=draw_card)
CARDS_HELD_OUT = {f"card {number}" for number in range(52) if split_of(f"card {number}") == "heldout"}


def test_one_prompt_in_eight_is_held_out() -> None:
    splits = Counter(split_of(f"prompt {number}") for number in range(8000))
    assert splits["heldout"] == pytest.approx(1000, abs=100)


@EACH
def test_no_prompt_is_in_both_splits_and_held_out_prompts_come_once(family: Family) -> None:
    train = {each.prompt for each in islice(examples(family, "train", 0), 700)}
    heldout = [each.prompt for each in islice(examples(family, "heldout", 0), 300)]
    assert train.isdisjoint(heldout)
    assert len(set(heldout)) == 300
    assert {split_of(prompt) for prompt in train} == {"train"}


@EACH
def test_a_seed_decides_the_stream(family: Family) -> None:
    first, again, other = (list(islice(examples(family, "train", seed), 20)) for seed in (3, 3, 4))
    assert first == again != other


def test_another_process_draws_the_same_mixture() -> None:
    code = (
        "from itertools import islice; from mars_ray.data.tasks import mixture;"
        "print([each.prompt for each in islice(mixture('heldout', 7), 40)])"
    )
    # A hash seed of its own changes every `hash()` of a text, and with it the order of sets.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "12345"}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str([each.prompt for each in islice(mixture("heldout", 7), 40)])


def test_a_mixture_follows_the_weights() -> None:
    drawn = Counter(each.family for each in islice(mixture("train", 1), 14_000))
    total = sum(family.weight for family in FAMILIES.values())
    for name, family in FAMILIES.items():
        # A share of a seventh is 2,000 draws, with a standard deviation of 41.
        assert drawn[name] == pytest.approx(14_000 * family.weight / total, abs=160)


def test_a_held_out_mixture_repeats_no_prompt() -> None:
    prompts = [each.prompt for each in islice(mixture("heldout", 1), 1000)]
    assert len(set(prompts)) == 1000


def test_a_held_out_stream_ends_when_its_prompts_are_used_up() -> None:
    prompts = [each.prompt for each in examples(CARDS, "heldout", 0)]
    assert CARDS_HELD_OUT and sorted(prompts) == sorted(CARDS_HELD_OUT)


def test_a_training_stream_repeats_its_prompts_and_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # Far fewer than the prompts passed over in all, far more than ever come in a row.
    monkeypatch.setattr("mars_ray.data.tasks.split.FRUITLESS_DRAWS_MAX", 60)
    assert len(list(islice(examples(CARDS, "train", 0), 2000))) == 2000


def test_a_mixture_ends_with_its_first_used_up_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_ray.data.tasks.split.FAMILIES", {"card": CARDS})
    assert len(list(islice(mixture("heldout", 0), 52))) == len(CARDS_HELD_OUT)
