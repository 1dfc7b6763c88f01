"""Compiled steps say what eager ones say, come from the disk the second time, and are never needed."""

import threading
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest
import torch

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution import compiled
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from tests.factories.engine import MakeEngine, Output, bundled_checkpoint, engine_of, request, run


def outputs_of(engine: Engine, prompts: list[tuple[int, ...]]) -> dict[str, Output]:
    modes = [DecodeParams(mode=mode, threshold=0.9, block=8) for mode in Mode]
    requests = [request(n, p, modes[n % 3], max_tokens=40) for n, p in enumerate(prompts)]
    alone = run(engine, requests[:3][-1:])
    return alone | run(engine, [*requests[:2], *requests[3:]])


@pytest.mark.slow
def test_compiled_steps_say_what_eager_ones_say_and_come_from_the_disk_the_second_time(
    make_torch_engine: MakeEngine, prompts: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = {name: each.tokens for name, each in outputs_of(make_torch_engine(), prompts[::8]).items()}
    first = make_torch_engine(compiled=True, max_num_seqs=7)
    first.wait_until_compiled()
    assert len(first._runner._compiled._ready) == 4  # type: ignore[attr-defined]
    assert {name: each.tokens for name, each in outputs_of(first, prompts[::8]).items()} == expected
    on_disk = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")}
    second = make_torch_engine(compiled=True, max_num_seqs=3)
    second.wait_until_compiled()
    assert second._runner._compiled._child is None  # type: ignore[attr-defined]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")} == on_disk
    assert {name: each.tokens for name, each in outputs_of(second, prompts[::8]).items()} == expected
    lost = next(iter(on_disk))
    lost.unlink()
    third = make_torch_engine(compiled=True)
    third.wait_until_compiled()
    assert len(third._runner._compiled._ready) == 4  # type: ignore[attr-defined]
    assert lost.exists()


@pytest.mark.slow
def test_without_a_compiler_steps_stay_eager_with_one_warning(
    make_torch_engine: MakeEngine,
    prompts: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    engine = make_torch_engine(compiled=True)
    engine.wait_until_compiled()
    assert [record.message.split(":")[0] for record in caplog.records] == ["steps stay uncompiled"]
    assert run(engine, [request(0, prompts[0], max_tokens=8)])["0"].finished.reason in ("stop", "length")


def test_closing_an_engine_ends_what_compiles_for_it(
    make_torch_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = set(threading.enumerate())
    make_torch_engine(compiled=True).close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("mode", "loaded"), [(0o600, 4), (0o666, 0)], ids=["ours alone", "others may write"])
def test_a_step_that_others_could_have_written_is_not_loaded(
    make_torch_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, loaded: int
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = make_torch_engine(compiled=True)
    engine.close()
    folder = engine._runner._compiled._folder  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    for variant in compiled.VARIANTS:
        planted = folder / compiled._name(*variant)
        planted.touch()
        planted.chmod(mode)
    found: list[str] = []

    def load(file: IO[bytes], **_: Any) -> Any:
        found.append(file.name)
        return Mock()

    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    make_torch_engine(compiled=True).close()
    assert len(found) == loaded


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cuda_the_engine_says_what_generate_says(prompts: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    plain, other = (bundled_checkpoint(dtype=dtype, device="cuda") for _ in range(2))
    engine = engine_of(other)
    chosen = prompts[::8]
    said = run(engine, [request(n, p, DecodeParams(mode=Mode.EXACT), max_tokens=32) for n, p in enumerate(chosen)])
    same = 0
    for number, prompt in enumerate(chosen):
        given = torch.tensor([prompt], device="cuda")
        ids = plain.network.generate(given, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(given))
        same += said[str(number)].tokens == ids[0, len(prompt) :].tolist()
    # bfloat16 has 8 bits of mantissa: two kernels may order a near tie differently, in at most one prompt of twenty.
    assert same >= len(chosen) * (1.0 if dtype is torch.float32 else 0.95)
