"""Calibration, judged by decoding and comparing one example, and one token, at a time."""

import io
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mars_ray import progress
from mars_ray.adapter.card import read_adapter_card
from mars_ray.adapter.folder import save_adapter
from mars_ray.adapter.gated_lora import new_adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import FAMILIES, is_right_answer
from mars_ray.engine.kv.attention import ATTENTION
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ConfigError, InterruptedRunError, ModelError
from mars_ray.evaluation import agreement
from mars_ray.evaluation.agreement import agreed_tokens
from mars_ray.evaluation.calibration import (
    THRESHOLDS,
    CalibrateOptions,
    CalibrationPrompt,
    calibrate,
    calibration_curve,
    family_prompts,
    file_prompts,
    without_rounding,
)
from mars_ray.evaluation.settings import ADAPTER_THRESHOLDS
from mars_ray.method.reference import DecodeOptions, decode, last_logits
from mars_ray.model.card import CARD_FILE, CalibrationPoint, read_card
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine
from tests.factories.cards import adapter_card, calibration_point
from tests.factories.engine import bundled_checkpoint
from tests.factories.token_rows import VOCABULARY
from tests.samples import Cli

Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def engines() -> Checkpoint:
    """The bundled model, whose attention engines replace."""
    return bundled_checkpoint()


@pytest.fixture(scope="module")
def oracle() -> Checkpoint:
    return bundled_checkpoint()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("bundled"), tmp_path / "model"))


def best_next(network: PreTrainedModel, prefix: list[int], mask_id: int) -> int:
    with torch.inference_mode():
        return int(last_logits(network, prefix, 1, mask_id).argmax())


def agreed_slowly(network: PreTrainedModel, prompt: Tokens, answer: Tokens, mask_id: int) -> int:
    return sum(best_next(network, [*prompt, *answer[:place]], mask_id) == token for place, token in enumerate(answer))


def counted(network: PreTrainedModel, answers: list[tuple[Tokens, Tokens]], mask_id: int) -> list[int]:
    with ProgressLine("compare", total=len(answers)) as progress:
        return agreed_tokens(network, answers, mask_id, progress)


def answers_half_right(network: PreTrainedModel, mask_id: int) -> list[tuple[Tokens, Tokens]]:
    """Answers of many lengths; every second token, about, is the most likely one."""
    rng = random.Random(3)
    answers = []
    for _ in range(12):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12)))
        tokens: list[int] = []
        for _ in range(rng.randint(1, 15)):
            best = best_next(network, [*prompt, *tokens], mask_id)
            tokens.append(rng.choice([best, rng.randrange(VOCABULARY)]))
        answers.append((prompt, tuple(tokens)))
    return answers


@pytest.mark.parametrize("positions", [1, 60, 10_000])
def test_tokens_that_agree_are_those_found_one_forward_at_a_time(
    network: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    monkeypatch.setattr(agreement, "POSITIONS_PER_FORWARD", positions)
    answers = answers_half_right(network, mask_id=5)
    slowly = [agreed_slowly(network, *each, mask_id=5) for each in answers]
    assert counted(network, answers, mask_id=5) == slowly
    assert 0 < sum(slowly) < sum(len(answer) for _, answer in answers)


def test_the_mask_token_is_no_choice(network: PreTrainedModel) -> None:
    prompt = (3, 1, 4)
    first = best_next(network, list(prompt), mask_id=5)
    second = best_next(network, list(prompt), mask_id=first)
    assert counted(network, [(prompt, (first,)), (prompt, (second,))], mask_id=first) == [0, 1]


def test_counting_leaves_the_attention_as_it_was(engines: Checkpoint) -> None:
    before = engines.network.config._attn_implementation
    engines.network.set_attn_implementation(ATTENTION)  # as an engine does that runs it through torch
    try:
        counted(engines.network, [((1, 2), (3,))], engines.mask_id)
        assert engines.network.config._attn_implementation == ATTENTION
    finally:
        engines.network.set_attn_implementation(before)


def measured(
    checkpoint: Checkpoint, prompts: list[CalibrationPrompt], thresholds: tuple[float, ...], max_tokens: int = 64
) -> tuple[CalibrationPoint, ...]:
    return calibration_curve(checkpoint, prompts, thresholds, SamplingParams(max_tokens=max_tokens), "examples")


def test_the_figures_are_those_of_the_reference_decoder_one_example_at_a_time(
    engines: Checkpoint, oracle: Checkpoint
) -> None:
    thresholds = (0.95, 0.5)
    short = ("list_format", "date_rewrite", "sort_numbers", "sum_direct", "rephrase")
    prompts = [q for q in family_prompts(1, range(6, 9)) if q.example and q.example.family in short]
    encoder = ChatEncoder(oracle.tokenizer)
    for point in measured(engines, prompts, thresholds):
        options = DecodeOptions(threshold=point.threshold, block=16, stop_ids=oracle.stop_ids, max_tokens=64)
        speeds, agreements, accuracies = [], [], []
        all_tokens = all_forwards = all_agreed = 0
        for sample in range(3):
            tokens = forwards = agreed = right = 0
            of_sample = [each for each in prompts if each.sample == sample]
            for each in of_sample:
                prompt = encoder.prompt(each.messages)
                (answer,) = decode(oracle.network, [prompt], options, mask_id=oracle.mask_id)
                tokens += len(answer.tokens)
                forwards += answer.forwards
                agreed += agreed_slowly(oracle.network, tuple(prompt), tuple(answer.tokens), oracle.mask_id)
                assert each.example is not None
                text = oracle.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                right += is_right_answer(each.example.family, each.example.answer, text)
            speeds.append(tokens / forwards)
            agreements.append(agreed / tokens)
            accuracies.append(right / len(of_sample))
            all_tokens, all_forwards, all_agreed = all_tokens + tokens, all_forwards + forwards, all_agreed + agreed
        assert (point.examples, point.tokens, point.seeds) == (15, all_tokens, 3)
        assert point.tokens_per_forward == pytest.approx(all_tokens / all_forwards)
        assert point.tokens_per_forward_std == pytest.approx(statistics.stdev(speeds))
        assert point.agreement == pytest.approx(all_agreed / all_tokens)
        assert point.agreement_std == pytest.approx(statistics.stdev(agreements))
        assert point.accuracy == pytest.approx(statistics.mean(accuracies))
        assert point.accuracy_std == pytest.approx(statistics.stdev(accuracies))
    assert point.agreement < 1, "nothing was compared that could differ"


def test_at_a_threshold_of_one_all_tokens_are_those_of_one_at_a_time_in_fewer_forwards(engines: Checkpoint) -> None:
    (point,) = measured(engines, family_prompts(2, range(1)), (1.0,))
    assert point.agreement == 1.0
    assert point.tokens_per_forward > 2


def test_rounding_of_the_engine_costs_no_agreement() -> None:
    rounded = [calibration_point(threshold=1.0, agreement=0.98), calibration_point(threshold=0.5, agreement=0.931)]
    assert [point.agreement for point in without_rounding(rounded)] == [1.0, pytest.approx(0.95)]


def test_one_sample_has_no_spread(engines: Checkpoint) -> None:
    (point,) = measured(engines, family_prompts(1, range(1)), (0.9,))
    assert (point.tokens_per_forward_std, point.agreement_std, point.accuracy_std) == (None, None, None)


def test_the_thresholds_are_those_of_the_live_profile_down_to_a_half() -> None:
    assert THRESHOLDS == (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)


def prompts_file(path: Path, count: int) -> Path:
    rows: list[dict[str, Any]] = [{"prompt": f"Sort these numbers: {n}, 7, 5"} for n in range(count - 1)]
    rows.append({"messages": [{"role": "user", "content": "Add 3 and 4."}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_is_dealt_out_to_samples_that_have_no_record_in_common(tmp_path: Path) -> None:
    path = prompts_file(tmp_path / "prompts.jsonl", 8)
    prompts = file_prompts(path, None, 3)
    assert [each.sample for each in prompts] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len({each.messages[0]["content"] for each in prompts}) == 8
    assert [each.sample for each in file_prompts(path, 2, 3)] == [0, 1, 2, 0, 1, 2]


def test_a_file_gives_speed_and_agreement_and_no_accuracy(engines: Checkpoint, tmp_path: Path) -> None:
    prompts = file_prompts(prompts_file(tmp_path / "prompts.jsonl", 5), None, 2)
    (point,) = measured(engines, prompts, (0.9,), max_tokens=16)
    assert (point.accuracy, point.accuracy_std, point.by_family) == (None, None, {})
    assert (point.examples, point.seeds) == (5, 2)
    assert point.tokens_per_forward > 1
    assert 0 < point.agreement <= 1


def test_the_command_writes_the_calibration_and_nothing_else(folder: Path, mars_ray: Cli) -> None:
    before = read_card(folder)
    others = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CARD_FILE}
    arguments = ("--examples", 1, "--seeds", 2, "--max-tokens", 8, "--json")
    code, out, err = mars_ray("calibrate", "--model", folder, *arguments)
    after = read_card(folder)
    assert code == 0, err
    assert before is not None
    assert after is not None
    assert after.model_copy(update={"calibration": before.calibration}) == before
    assert [point.threshold for point in after.calibration] == list(THRESHOLDS)
    assert after.calibration[0].examples == 2 * len(FAMILIES)
    assert after.calibration[0].tokens <= 2 * len(FAMILIES) * 8
    assert (
        json.loads(out.splitlines()[-1])["calibration"] == json.loads((folder / CARD_FILE).read_text())["calibration"]
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CARD_FILE} == others


@pytest.mark.parametrize(
    ("arguments", "rows", "message"),
    [
        (["--seeds", "0"], None, "seeds is 0"),
        (["--examples", "0"], None, "examples is 0"),
        (["--max-tokens", "0"], None, "max_tokens is 0"),
        (["--data", "nowhere.jsonl"], None, "There is no file nowhere.jsonl"),
        ([], "", "holds no prompt"),
        ([], '{"prompt": "a"}\n{"promt": "b"}\n{"prompt": "c"}\n', "record 2: it has neither 'prompt' nor 'messages'"),
        ([], '{"prompt": "a"}\n', "too few prompts for 3 samples"),
        ([], '{"prompt": "a"}\n' * 3 + json.dumps({"prompt": "word " * 3000}), "record 4: the prompt has"),
        (
            [],
            '{"messages": [{"role": "critic", "content": "a"}]}\n' * 3,
            "record 1: messages.0 has the unknown 'role' 'critic'",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_leaves_the_card(
    folder: Path, mars_ray: Cli, arguments: list[str], rows: str | None, message: str
) -> None:
    if rows is not None:
        data = folder.parent / "rows.jsonl"
        data.write_text(rows)
        arguments = ["--data", str(data)]
    refused(folder, mars_ray, arguments, message)


def test_a_model_without_a_card_is_refused(folder: Path, mars_ray: Cli) -> None:
    (folder / CARD_FILE).unlink()
    refused(folder, mars_ray, [], "has no mars.json")


def test_a_model_in_the_cache_of_the_hub_is_refused(folder: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--ann--tiny" / "snapshots" / "0123abc"
    shutil.copytree(folder, cached)
    before = (cached / CARD_FILE).read_bytes()
    with pytest.raises(ModelError, match="ann/tiny@0123abc is in the cache of the hub"):
        calibrate(cached, CalibrateOptions())
    assert (cached / CARD_FILE).read_bytes() == before


def test_a_damaged_card_is_refused(folder: Path, mars_ray: Cli) -> None:
    (folder / CARD_FILE).write_text("{")
    refused(folder, mars_ray, [], "is not a valid card")


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(mars_ray: Cli) -> None:
    # pytest's own folders are closed to the user that root becomes here, for whom nothing is read-only.
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(resolve_model("bundled"), Path(parent) / "model"))
        Path(parent).chmod(0o755)
        folder.chmod(0o555)
        with nobody():
            refused(folder, mars_ray, ["--examples", "1", "--seeds", "1", "--max-tokens", "1"], "Cannot write into")
        folder.chmod(0o755)


def refused(folder: Path, mars_ray: Cli, arguments: list[str], message: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = mars_ray("calibrate", "--model", folder, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith(("Loading weights", "decode: 0/"))]
    assert (code, out) == (2, "")
    assert len(lines) == 1
    assert message in lines[0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@contextmanager
def nobody() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


class CtrlCAt(io.StringIO):
    """Standard error at which a user presses Ctrl-C once they read these words: at a known place."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def write(self, text: str) -> int:
        if self.words in text:
            self.words = "pressed already"
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_leaves_the_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / CARD_FILE).read_bytes()
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", CtrlCAt("decode: "))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(InterruptedRunError, match="is unchanged"):
            calibrate(folder, CalibrateOptions())  # would take minutes
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (folder / CARD_FILE).read_bytes() == before
    assert not list(folder.glob(".*"))


def test_the_calibration_of_an_adapter_goes_into_its_own_card(folder: Path, tmp_path: Path, mars_ray: Cli) -> None:
    network = load_checkpoint(folder).network
    card = adapter_card(folder)
    save_adapter(new_adapter(network, rank=2, alpha=4, masks=2, names=None), card, tmp_path / "adapter")
    before = (folder / CARD_FILE).read_bytes()
    asked = ("--examples", 1, "--seeds", 1, "--max-tokens", 16)
    code, _, err = mars_ray("calibrate", "--model", folder, "--adapter", tmp_path / "adapter", *asked)
    assert code == 0, err
    written = read_adapter_card(tmp_path / "adapter")
    assert [point.threshold for point in written.calibration] == [1.0, *ADAPTER_THRESHOLDS]
    # The model itself looks further ahead.
    assert all(1 < point.tokens_per_forward <= 1 + card.block for point in written.calibration)
    assert written.model_copy(update={"calibration": ()}) == card
    assert (folder / CARD_FILE).read_bytes() == before


@pytest.mark.parametrize("thresholds", [(), (0.9, 0.8)])
def test_a_calibration_without_threshold_1_is_refused(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="add 1, because losses are measured against it"):
        CalibrateOptions(thresholds=thresholds)


def test_a_threshold_out_of_range_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"threshold is 1\.5"):
        CalibrateOptions(thresholds=(1.0, 1.5))
