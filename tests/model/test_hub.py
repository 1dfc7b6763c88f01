import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mars_ray import progress
from mars_ray.cli.main import show_only_downloads
from mars_ray.errors import ModelError
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import (
    BUNDLED,
    HubName,
    hub_name_of,
    model_label,
    parse_hub_name,
    pin,
    resolve_model,
    short_name,
)
from tests.model.hub_server import TOKEN, HubServer, point_at, running_hub
from tests.model.model_samples import MakeFolder, edit_json

FIRST, SECOND = "1" * 40, "2" * 40
NAME = "someone/small-model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub(tmp_path, monkeypatch) as server:
        server.add(NAME, resolve_model(BUNDLED), FIRST)
        yield server


@pytest.fixture
def cache(hub: HubServer, tmp_path: Path) -> Path:
    return tmp_path / "hub"


def refused(name: str) -> str:
    with pytest.raises(ModelError) as error:
        resolve_model(name)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("a/b", HubName("a/b", None)),
        ("Qwen/Qwen2.5-0.5B@v1.0", HubName("Qwen/Qwen2.5-0.5B", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a", None),
        ("a/b/c", None),
        ("../b", None),
        ("/a/b", None),
        ("a/b@", None),
    ],
)
def test_a_name_on_a_hub_has_one_slash_and_perhaps_a_revision(name: str, parsed: HubName | None) -> None:
    assert parse_hub_name(name) == parsed
    assert parsed is None or str(parsed) == name


def test_a_model_is_downloaded_pinned_to_its_commit_and_answers(hub: HubServer) -> None:
    folder = resolve_model(NAME)
    assert folder_digest(folder) == folder_digest(resolve_model(BUNDLED))
    assert hub_name_of(folder) == HubName(NAME, FIRST)
    assert pin(NAME, folder) == model_label(NAME, folder) == f"{NAME}@{FIRST}"
    assert load_checkpoint(folder).card is not None


def test_a_folder_of_the_cache_is_itself_and_is_called_by_its_commit(hub: HubServer) -> None:
    folder = resolve_model(NAME)
    asked = len(hub.requests)
    assert resolve_model(str(folder)) == folder
    assert pin(str(folder), folder) == str(folder)
    assert model_label(str(folder), folder) == f"{NAME}@{FIRST}"
    assert hub.requests[asked:] == []


def test_nothing_but_weights_configuration_and_tokenizer_is_downloaded(
    hub: HubServer, make_model_folder: MakeFolder
) -> None:
    folder = make_model_folder()
    for file in ("pytorch_model.bin", "modeling_own.py", "README.md", "consolidated.safetensors", "model.gguf"):
        (folder / file).write_bytes(b"x")
    hub.add(NAME, folder, FIRST)
    hub.repositories[NAME].commits[FIRST]["onnx/model.safetensors"] = b"x"
    found = {path.name for path in resolve_model(NAME).rglob("*")}
    assert found == {"model.safetensors", "config.json", "generation_config.json", *TOKENIZER_FILES}


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def test_a_branch_moves_and_a_commit_does_not(hub: HubServer, make_model_folder: MakeFolder) -> None:
    hub.add(NAME, make_model_folder(), SECOND)
    assert resolve_model(NAME).name == SECOND
    assert resolve_model(f"{NAME}@main").name == SECOND
    assert resolve_model(f"{NAME}@{FIRST}").name == FIRST


def test_a_commit_that_is_here_needs_no_network(hub: HubServer) -> None:
    folder = resolve_model(NAME)
    asked = len(hub.requests)
    assert resolve_model(f"{NAME}@{FIRST}") == folder
    assert hub.requests[asked:] == []


def test_without_a_network_the_cache_serves(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert resolve_model(NAME) == folder
    assert hub.requests[asked:] == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    point_at("http://127.0.0.1:9", monkeypatch)
    assert resolve_model(NAME) == folder


def test_what_is_not_in_the_cache_is_refused_without_a_network(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = refused("someone/smal-model")
    assert said.startswith(f"someone/smal-model is not in the cache {cache}, and HF_HUB_OFFLINE is set.")
    assert said.endswith(f"Did you mean {NAME!r}?")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    point_at("http://127.0.0.1:9", monkeypatch)
    assert "http://127.0.0.1:9 cannot be reached" in refused("no/such")


def test_a_broken_connection_goes_on_where_it_broke(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 20)  # what the library keeps at least
    hub.break_at = 3 << 20
    folder = resolve_model(NAME)
    assert folder_digest(folder) == folder_digest(resolve_model(BUNDLED))
    assert any(f"bytes={3 << 20}-" in request for request in hub.requests)


def test_a_download_that_was_killed_is_completed_by_the_next_call(hub: HubServer, cache: Path) -> None:
    resolve_model(NAME)
    [weights] = cache.rglob("snapshots/*/model.safetensors")
    weights.resolve().unlink()
    weights.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "holds only a part of" in refused(NAME)
    asked = len(hub.requests)
    assert folder_digest(resolve_model(NAME)) == folder_digest(resolve_model(BUNDLED))
    assert {request.split("/")[-1] for request in hub.requests[asked:] if "/resolve/" in request} == {
        "model.safetensors"
    }


def test_on_the_command_line_without_a_terminal_progress_is_plain_lines_and_few(
    hub: HubServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_only_downloads()
    hub.add("someone/other", resolve_model(BUNDLED), FIRST)
    resolve_model(NAME)
    assert capfd.readouterr() == ("", "")  # none was due
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
    resolve_model("someone/other")
    given = capfd.readouterr()
    assert given.out == ""
    assert re.match(r"download, MB: \d+/\d+ ", given.err)
    assert "\r" not in given.err


def test_a_download_that_was_killed_in_the_middle_of_a_file_is_completed_by_the_next_call(
    hub: HubServer, cache: Path
) -> None:
    hub.hold_at = 3 << 20
    program = f"from mars_ray.model.resolve import resolve_model; resolve_model('{NAME}')"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as child:
        assert hub.held.wait(60)
        child.kill()
    hub.hold_at = None
    hub.released.set()
    assert folder_digest(resolve_model(NAME)) == folder_digest(resolve_model(BUNDLED))


def test_a_gated_model_says_where_to_ask_and_opens_with_a_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME].gated = True
    assert refused(NAME) == (
        f"{NAME} is gated. Ask for access on {hub.url}/{NAME}, then set HF_TOKEN to a token of yours."
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve_model(NAME).name == FIRST


def test_a_token_that_may_not_read_is_named(hub: HubServer) -> None:
    hub.forbidden = True
    assert refused(NAME).startswith(f"{hub.url} refuses {NAME} (403).")


def test_what_the_hub_does_not_have_names_the_nearest(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_model(NAME)
    said = refused("someone/smallmodel")
    assert said.startswith(f"{hub.url} has no model 'someone/smallmodel', or it is private")
    assert said.endswith(f"Did you mean {NAME!r}?")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused("no/such").endswith("HF_TOKEN does not open it.")
    assert refused(f"{NAME}@v9").startswith(f"{NAME} has no revision 'v9' on {hub.url}.")


def test_a_mistyped_folder_is_found_though_the_hub_was_asked(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "arithmetic").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert refused("runs/aritmetic").endswith("Did you mean 'runs/arithmetic'?")


def test_a_folder_comes_before_the_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == Path(NAME)
    assert hub.requests == []


def test_a_model_without_safetensors_is_refused(hub: HubServer, make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.add("someone/pickled", folder, FIRST)
    assert refused("someone/pickled").startswith(f"someone/pickled has no weights in safetensors on {hub.url}.")


def test_a_quantised_model_says_what_to_take_instead(hub: HubServer, make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq"})
    hub.add("someone/small-AWQ", folder, FIRST)
    with pytest.raises(ModelError, match=r"quantised with awq.*\.gguf"):
        load_checkpoint(resolve_model("someone/small-AWQ"))


def test_short_names_are_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["bundled", "smollm2", "a/b@v1", "/some/where/model", "./runs/model/", "x/SmolLM2.Q4_1.gguf"]
    assert [short_name(name) for name in names] == ["bundled", "smollm2", "b", "model", "model", "SmolLM2.Q4_1"]


def test_the_environment_says_which_hub_and_where_its_cache_is(hub: HubServer, tmp_path: Path) -> None:
    program = f"from mars_ray.model.resolve import resolve_model; print(resolve_model('{NAME}'))"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()  # progress goes to standard error
    assert Path(line).is_relative_to(tmp_path / "home")
