from pathlib import Path

import pytest

from mars_ray.errors import ModelError
from mars_ray.model.resolve import is_folder_here, resolve_model


def test_bundled_is_the_packaged_folder_even_beside_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundled").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("bundled").parts[-3:] == ("mars_ray", "assets", "bundled")
    assert resolve_model("./bundled") == Path("bundled")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(str(tmp_path / "runs")) == tmp_path / "runs"
    assert resolve_model("~/runs") == tmp_path / "runs"


def test_a_name_that_is_no_folder_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"unknown model './no-such': give 'bundled', 'smollm2', a folder, a \.gguf file, a URL of either, or",
    ):
        resolve_model("./no-such")
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2'"):
        resolve_model("smolm2")
    with pytest.raises(ModelError, match=r"Did you mean 'bundled'"):
        resolve_model("bundle")


def test_a_folder_with_a_similar_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "arithmetic-ar").mkdir()
    (tmp_path / "arithmetic-at").write_text("a file is no model")
    with pytest.raises(ModelError, match=r"Did you mean '.*/arithmetic-ar'"):
        resolve_model(str(tmp_path / "aritmetic-ar"))


def test_a_path_that_cannot_be_looked_up_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model 'a+\.\.\.a+' cannot be read: File name too long\."):
        resolve_model("a" * 300)
    assert not is_folder_here("a" * 300)
