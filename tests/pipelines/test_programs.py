"""The programs in pipelines/, run as a user runs them: on a real Ray, with the bundled model, small."""

import gzip
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mars_ray.adapter.folder import load_adapter, save_adapter
from mars_ray.adapter.gated_lora import GatedLoRA, new_adapter
from mars_ray.adapter.loss import AdapterLoss
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.data.packed import PackedData, PackedWriter
from mars_ray.data.packing import Packer
from mars_ray.data.records import parse_record
from mars_ray.data.tasks import FAMILIES, is_right_answer, mixture
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES
from mars_ray.evaluation.calibration import THRESHOLDS
from mars_ray.evaluation.task_files import read_references
from mars_ray.method import tiles
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.folder import open_model
from mars_ray.model.resolve import resolve_model
from pipelines import race_picture, ship_adapter
from tests.data.data_samples import example
from tests.demo.race_samples import RACE
from tests.factories.cards import adapter_card
from tests.factories.token_rows import pack_report

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"pipelines.{program}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def done(program: str, *arguments: object) -> str:
    ended = run(program, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def conversations(path: Path) -> list[tuple[str, str]]:
    """Return question and answer of each record, which must be what training reads."""
    records = [parse_record(line) for line in path.read_bytes().splitlines()]
    assert all([each["role"] for each in record.messages] == ["user", "assistant"] for record in records)
    return [(record.messages[0]["content"], record.messages[1]["content"]) for record in records]


@pytest.mark.slow
@pytest.mark.ray
def test_documents_become_instructions_of_the_schema(tmp_path: Path) -> None:
    ask = "Extract name, age and city as JSON: "
    people = zip(FIRST_NAMES, range(20, 50), CITIES, strict=False)
    sentences = [f"{name}, {age}, lives in {city}." for name, age, city in people]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"body": body}) + "\n" for body in [*sentences, None]))
    # The model was trained to write ages as numbers.
    kinds = {name: {"type": "string"} for name in ("name", "age", "city")}
    schema = {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    said = done(
        "documents_to_instructions",
        *("--output", tmp_path / "out", "--input", tmp_path / "in.jsonl"),
        *("--schema", tmp_path / "schema.json", "--template", ask + "{{ body }}"),
    )
    assert "30 of 31 documents are instructions, 1 errors" in said
    found = conversations(tmp_path / "out" / "instructions.jsonl")
    assert sorted(question for question, _ in found) == sorted(ask + sentence for sentence in sentences)
    assert {type(json.loads(answer)["age"]) for _, answer in found} == {str}


@pytest.mark.slow
@pytest.mark.ray
def test_an_answer_that_was_cut_off_is_no_instruction(tmp_path: Path) -> None:
    whole, cut = {"text": "Adam, 34, lives in Paris."}, {"text": "Mia, 41, lives in Oslo.", "max_tokens": 5}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps(cut)}\n")
    said = done("documents_to_instructions", "--output", tmp_path / "out", "--input", tmp_path / "in.jsonl")
    assert "1 of 2 documents are instructions, 1 dropped as not JSON, 0 errors" in said
    [(question, answer)] = conversations(tmp_path / "out" / "instructions.jsonl")
    assert question == "Extract name, age and city as JSON: Adam, 34, lives in Paris."
    assert json.loads(answer) == {"name": "Adam", "age": 34, "city": "Paris"}


@pytest.mark.slow
@pytest.mark.ray
def test_of_several_answers_a_right_one_is_kept(tmp_path: Path) -> None:
    # So hot that many answers are wrong.
    done("best_of_n", "--output", tmp_path, "--prompts", 48, "--n", 3, "--temperature", 1.8)
    asked = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    right = {row["prompt"]: (row["family"], row["answer"]) for row in asked}
    found = conversations(tmp_path / "kept.jsonl")
    assert 0 < len(found) < len(asked)
    assert all(is_right_answer(*right[question], answer) for question, answer in found)
    shares: dict[str, dict[str, int]] = json.loads((tmp_path / "kept.json").read_text())
    assert sum(share["kept"] for share in shares.values()) == len(found)
    assert sum(share["prompts"] for share in shares.values()) == len(asked)
    assert all(share["answers"] == 3 * share["prompts"] for share in shares.values())
    assert all(share["kept"] <= share["right"] <= 3 * share["kept"] for share in shares.values())


@pytest.mark.slow
@pytest.mark.ray
def test_a_model_learns_from_itself_and_from_references_and_a_finished_seed_is_not_done_again(tmp_path: Path) -> None:
    budget = ("--prompts", 64, "--epochs", 1, "--per-family", 1, "--seeds", 3)
    command = ("--output", tmp_path / "run", "--json", tmp_path / "found.json", *budget)
    assert "self - before" in done("self_distill", *command)
    folder = tmp_path / "run" / "seed-3"
    own, gold = (conversations(folder / f"{teacher}.jsonl") for teacher in ("self", "gold"))
    assert [question for question, _ in own] == [question for question, _ in gold]
    assert own != gold
    [seed] = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert seed["learnt_from"] == len(own)
    assert min(seed["steps"].values()) >= 1
    figures: list[dict[str, Any]] = [seed["models"][name] for name in ("before", "self", "gold")]
    assert all(each["examples"] == len(FAMILIES) and each["tokens_per_forward"] > 2 for each in figures)
    weights = [folder / f"trained-{teacher}" / "model" / "model.safetensors" for teacher in ("self", "gold")]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    written = [path.stat().st_mtime_ns for path in weights]
    result = (folder / "result.json").read_bytes()
    assert "self - before" in done("self_distill", *command)
    assert (folder / "result.json").read_bytes() == result
    assert [path.stat().st_mtime_ns for path in weights] == written
    other = run("self_distill", *command, "--epochs", 2)
    assert other.returncode == 2
    assert "epochs was 1.0, now it is 2.0" in other.stderr


def test_structure_tasks_ask_for_what_their_references_judge(tmp_path: Path) -> None:
    tldr = [(f"Do thing {n} with `tool-{n}`.", f'`tool-{n} --say "{n}"`') for n in range(40)]
    coffee = [(f"{n} lattes, please.", "Here you are.") for n in range(8)]
    story = [(f"Read the text and answer.\n\nIt was day {n}.\n\nWhich day?", f"Day {n}.") for n in range(4)]
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        for source, pairs in (("tldr", tldr), ("taskmaster4", coffee), ("fairytaleqa", story)):
            for asked, answer in pairs:
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"source": source, "messages": turns}) + "\n")
    (tmp_path / "val.jsonl.gz").write_bytes((tmp_path / "train.jsonl.gz").read_bytes())
    done("structure_tasks", "--instruct", tmp_path, "--output", tmp_path / "out", "--train", 40, "--heldout", 40)
    tasks = read_references(tmp_path / "out" / "heldout.jsonl", "exact")
    assert {each.match for each in tasks} == {"exact", "json"}
    by_prompt = {each.messages[0]["content"]: each for each in tasks}
    assert len(tasks) == len(by_prompt) == 40
    question = next(each for prompt, each in by_prompt.items() if prompt.startswith("Write these questions"))
    [row] = json.loads(question.reference)
    assert question.messages[0]["content"].endswith(f"Q: {row['question']}\nA: {row['answer']}")
    answers = dict(conversations(tmp_path / "out" / "train.jsonl"))
    assert answers == {prompt: each.reference for prompt, each in by_prompt.items()}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["documents_to_instructions", "best_of_n", "self_distill"])
def test_an_error_is_one_line_with_an_exit_code(program: str, tmp_path: Path) -> None:
    ended = run(program, "--output", tmp_path / "out", "--model", tmp_path / "none")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{program}: unknown model")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.ray
def test_a_model_gets_an_adapter_from_its_own_answers_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rows = [{"prompt": each.prompt, "response": each.response} for each in islice(mixture("train", 0), 40)]
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--model", "bundled", "--data", data, "--heldout", data, "--own", 30, "--output", output)
    settings = ("--rank", 4, "--length", 256, "--heldout-prompts", 12)
    assert "The adapter is in" in done("adapt", *asked, *settings)
    bundled = resolve_model("bundled")
    adapter = load_adapter(output / "model", bundled)
    assert adapter.lora.shape.rank == 4
    assert [point.data for point in adapter.card.calibration] == ["questions.jsonl"] * len(THRESHOLDS)
    taught = conversations(output / "own" / "train" / "conversations.jsonl")
    assert {question for question, _ in taught} <= {row["prompt"] for row in rows}
    results = json.loads((output / "evaluation" / "results.json").read_text())
    assert results["overall"]["exact"]["accuracy"] == 1.0
    assert "The adapter is in" in done("adapt", *asked, *settings)
    other = run("adapt", *asked, *settings, "--block", 4)
    assert other.returncode == 2
    assert "block was 8, now it is 4" in other.stderr


def test_a_race_that_nobody_ran_is_drawn_without_anything_that_a_reader_would_load() -> None:
    picture = race_picture.drawn([RACE], "tiny")
    assert "Count&#160;to&#160;three." in picture
    assert "url(" not in picture.replace("url(#", "")


@pytest.mark.slow
def test_a_race_is_drawn_without_anything_that_a_reader_would_load(tmp_path: Path) -> None:
    assert "The picture is in" in done("race_picture", "--model", "bundled", "--output", tmp_path / "race.svg")
    drawn = (tmp_path / "race.svg").read_text()
    assert "How&#160;do&#160;plants&#160;make&#160;their&#160;food?" in drawn
    assert "url(http" not in drawn


def test_the_drafts_of_an_adapter_and_of_its_copy_are_compared_at_the_same_masks(
    start_model: Path, tmp_path: Path
) -> None:
    with PackedWriter(tmp_path, 16) as writer:
        writer.write(Packer(16).add(example(range(5, 21), prompt=4)))
        writer.write(Packer(16).add(example(range(30, 46), prompt=4)))
        writer.close(pack_report(rows=writer.rows, length=16))
    network = load_checkpoint(start_model).network
    one, other = (new_adapter(network, rank=2, alpha=4.0, masks=3, names=["up_proj"]) for _ in range(2))
    arguments = PackedData(tmp_path), 64, 4, [2, 1]
    equal = ship_adapter.measure(open_model(start_model), (one, one), *arguments)
    assert equal.masks > 0
    assert (equal.points, equal.changed) == (0.0, 0.0)
    with torch.no_grad():
        for factors in other.factors.values():
            factors.b.normal_(std=30.0)
    changed = ship_adapter.measure(open_model(start_model), (one, other), *arguments)
    assert (changed.masks, changed.agreement) == (equal.masks, equal.agreement)
    assert changed.changed > 0


def learn(network: PreTrainedModel, lora: GatedLoRA, rows: PackedData) -> None:
    """Train an adapter on all rows at once, until its masks agree with the model."""
    network.set_attn_implementation(tiles.ATTENTION)
    loss = AdapterLoss(network, lora, 1.0)
    streams = mask_streams(rows.rows(range(len(rows))), masks=lora.shape.masks)
    optimizer = torch.optim.AdamW(lora.parameters(), lr=1e-2)
    for _ in range(20):
        loss(streams)[0].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_an_adapter_is_shipped_in_8_bits_where_its_drafts_stay_what_they_were(tmp_path: Path) -> None:
    bundled = resolve_model("bundled")
    network = load_checkpoint(bundled).network
    lora = new_adapter(network, rank=2, alpha=4.0, masks=3, names=["up_proj"])
    with torch.no_grad():
        for pair in lora.factors.values():
            pair.a[0] = 0
    card = adapter_card(bundled, block=4)
    save_adapter(lora, card, tmp_path / "trained")
    rows = [{"prompt": each.prompt, "response": each.response} for each in islice(mixture("heldout", 0), 20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = [sys.executable, "-m", "mars_ray", "prepare", "--length", "256"]
    subprocess.run([*prepared, "--input", tmp_path / "data.jsonl", "--output", tmp_path / "rows"], check=True)
    shipping = (tmp_path / "trained", "--model", "bundled", "--heldout", tmp_path / "rows")
    assert "in 8 bits" in done("ship_adapter", *shipping, "--to", tmp_path / "shipped")
    assert load_adapter(tmp_path / "shipped", bundled).card == card
    learn(network, lora, PackedData(tmp_path / "rows"))
    with torch.no_grad():
        for pair in lora.factors.values():
            pair.b[:, 0] = 3e4  # has no effect, because a[0] is 0, but is so large that 8 bits round the others to 0
    save_adapter(lora, card, tmp_path / "trained", replace=True)
    refused = run("ship_adapter", *shipping, "--to", tmp_path / "other")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "loses too much in 8 bits" in refused.stderr
    assert not (tmp_path / "other").exists()
