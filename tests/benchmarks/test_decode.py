"""The decode benchmark: everyone runs, what is said is what was measured, and wrong arguments end it at once."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.decode import __main__ as program
from benchmarks.decode.comparison import BatchResult, compare_decoders, ratios, report, tokens_per_forward
from benchmarks.decode.contenders import contenders, engine_contender, subject
from benchmarks.decode.shapes import SIZES
from benchmarks.report import ROOT
from benchmarks.whole_numbers import whole_numbers
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError, MarsRayError
from mars_ray.measure import Sample, Spread
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype


def samples(*tokens_per_s: float, per_forward: float = 1.0) -> list[Sample]:
    return [Sample(tokens=100, seconds=100 / rate, forwards=round(100 / per_forward)) for rate in tokens_per_s]


MEASURED = {
    "ar": samples(10, 20, 30),
    "threshold 0.95": samples(40, 40, 90, per_forward=4),
    "exact": samples(20, 20, 20, per_forward=3),
    "generate": samples(5, 20, 10),
    "block cache 8": samples(20, 20, 20, per_forward=4),
    "block cache 16": samples(30, 30, 30, per_forward=4),
}


def test_ratios_are_of_one_round_each_and_the_paper_is_judged_by_its_best_block() -> None:
    compared = {(ratio.one, ratio.other): ratio.times for ratio in ratios(MEASURED)}
    assert compared["ar", "generate"] == Spread(median=2.0, min=1.0, max=3.0)
    assert ("threshold 0.95", "block cache 16") in compared
    assert ("ar", "generate_batch") not in compared


def test_the_report_holds_every_sample() -> None:
    result = BatchResult(
        batch=1,
        dtype=ResolvedDtype("float32", "asked for"),
        samples=MEASURED,
        absent={"no cache": "why"},
        ratios=ratios(MEASURED),
    )
    written = json.loads(json.dumps(report("bundled", [result])))
    assert len(written["batches"][0]["decoders"]["ar"]["samples"]) == 3
    assert written["batches"][0]["absent"] == {"no cache": "why"}
    assert (written["dtype"], written["dtype_reason"]) == ("float32", "asked for")
    assert tokens_per_forward(MEASURED["threshold 0.95"]) == 4


def test_a_shape_replays_to_its_end_in_every_mode(bundled: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": bundled.network.config.vocab_size, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512}
    monkeypatch.setitem(SIZES, "shape:tiny", sizes | heads)
    on = subject("shape:tiny", 3, "float32")
    for decoding in (DecodeParams(mode=Mode.AR), DecodeParams(mode=Mode.EXACT), DecodeParams(threshold=0.5)):
        sample = engine_contender(on, 2, decoding)()
        assert sample.tokens == sum(on.workload.lengths)


def test_a_quick_comparison_measures_less_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> list[BatchResult]:
        assert arguments == ("bundled", [2], 4, 2, "auto")
        return []

    monkeypatch.setattr(program, "compare_decoders", run)
    monkeypatch.setattr(program, "report", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["decode", "--quick", "--batch", "2"])
    program.main()
    assert "quick: 4 requests and 2 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bundled", [0], 4, 1, "float32"), "batch is 0"),
        (("bundled", [1], 0, 1, "float32"), "requests is 0"),
        (("bundled", [1], 4, 0, "float32"), "repeats is 0"),
        (("bundled", [1], 999, 1, "float32"), "requests is 999"),
        (("shape:7b", [1], 4, 1, "bfloat16"), "unknown shape 'shape:7b'"),
        (("no-such-model", [1], 4, 1, "float32"), "no-such-model"),
    ],
)
def test_wrong_arguments_are_said_before_any_measurement(
    arguments: tuple[str, list[int], int, int, DtypeOrAuto], said: str
) -> None:
    with pytest.raises(MarsRayError, match=said):
        compare_decoders(*arguments)


def test_batches_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="1,two"):
        whole_numbers("1,two")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("bundled", "float32"), ("shape:100m", "auto")])
def test_every_contender_gives_the_answers_asked_for(model: str, dtype: DtypeOrAuto) -> None:
    on = subject(model, 4, dtype)
    found, absent = contenders(on, 2)
    done = {name: run() for name, run in found.items()}
    assert set(absent) <= {"no cache", "generate_batch"}
    assert {sample.tokens for sample in done.values()} == {on.workload.tokens}
    assert done["threshold 0.95"].forwards < done["ar"].forwards == on.workload.tokens


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "deep" / "decode.json"
    options = ["--batch", "2", "--requests", "4", "--repeats", "1", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "decode" / "__main__.py"), *options])
    program.main()
    assert "threshold 0.95 : ar" in capsys.readouterr().out
    results = json.loads(written.read_text())
    assert results["batches"][0]["batch"] == 2
    assert results["machine"]["cpu"]
