"""Which engine serves a model, and why vLLM cannot, before anything is loaded."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mars_ray.engine.choose_engine import check_engine, choose_engine
from mars_ray.engine.options import EngineOptions
from mars_ray.errors import AdapterError, ConfigError, InputError, ModelError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.folder import check_folder, open_model
from mars_ray.vllm.engine import requirements
from mars_ray.vllm.engine.requirements import problems

IS_HERE = find_spec("vllm") is not None


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed_version", lambda: "0.32.0")


def messages(options: EngineOptions, model: str | Path = "bundled", adapters: Any = None) -> list[str]:
    found = open_model(model) if isinstance(model, str) else check_folder(model)
    return [str(problem) for problem in problems(found, options, adapters or {})]


def test_vllm_serves_a_model_with_a_card(with_vllm: None) -> None:
    assert messages(EngineOptions()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "quantize is 'int8', which the engine vllm lacks"),
        ({"max_kv_tokens": 100}, "max_kv_tokens is 100"),
        ({"adapter_memory_gib": 1.5}, "adapter_memory_gib is 1.5"),
        ({"rehearse": "h200/qwen2.5-7b"}, "rehearse is 'h200/qwen2.5-7b'"),
    ],
)
def test_options_of_our_engine_alone_are_named(with_vllm: None, options: dict[str, Any], message: str) -> None:
    [problem] = messages(EngineOptions(**options))
    assert message in problem
    assert "\n" not in problem


def test_adapters_need_our_engine(with_vllm: None, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="adapters need the engine mars"):
        check_engine(open_model("bundled"), EngineOptions(engine="vllm"), {None: tmp_path})


def copied(tmp_path: Path, **changed: tuple[str, str]) -> Path:
    """The bundled model with other lines in its files."""
    for file in open_model("bundled").folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, (old, new) in changed.items():
        file = tmp_path / f"{name}.json"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    return tmp_path


def test_a_model_without_a_card_is_refused(with_vllm: None, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / CARD_FILE).unlink()
    with pytest.raises(ModelError, match="has no card"):
        check_engine(check_folder(folder), EngineOptions(engine="vllm"), {})


def test_a_mask_outside_the_vocabulary_is_refused(with_vllm: None, tmp_path: Path) -> None:
    card = open_model("bundled").card
    assert card is not None
    folder = copied(tmp_path, mars=(f'"mask_token_id": {card.mask_token_id}', '"mask_token_id": 99999'))
    [problem] = messages(EngineOptions(), folder)
    assert "names mask token 99999" in problem


@pytest.mark.parametrize("version", ["0.28.2", "0.34.0"])
def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(requirements, "installed_version", lambda: version)
    [problem] = messages(EngineOptions())
    assert f"vLLM is {version}; the plug-in was tried with 0.29, 0.30" in problem


@pytest.mark.skipif(IS_HERE, reason="vLLM is installed")
def test_without_vllm_it_can_be_named_only_where_it_is() -> None:
    model = open_model("bundled")
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        check_engine(model, EngineOptions(engine="vllm"), {})
    assert choose_engine(model, EngineOptions(), {}, device="cuda") == "mars"


def test_vllm_is_the_default_on_a_gpu_where_it_can_serve(with_vllm: None) -> None:
    model = open_model("bundled")
    assert choose_engine(model, EngineOptions(), {}, device="cuda") == "vllm"
    assert choose_engine(model, EngineOptions(), {}, device="cpu") == "mars"
    assert choose_engine(model, EngineOptions(quantize="int8"), {}, device="cuda") == "mars"
    assert choose_engine(model, EngineOptions(engine="mars"), {}, device="cuda") == "mars"


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"vllm_args": {"max_model_len": 100}}])
def test_options_of_vllm_need_its_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))} needs the engine vllm"):
        check_engine(open_model("bundled"), EngineOptions(**options), {})
