"""A .gguf file of a stranger, in a folder of his: no code runs, and little memory and time are taken."""

import json
import os
import pty
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

from mars_ray.errors import ModelError
from mars_ray.model.resolve import resolve_model
from mars_ray.model.sources import gguf as conversion
from tests.model.gguf_samples import convert_in_fork, tiny_llama, write_gguf

RESOLVE = "import sys; from mars_ray.model.resolve import resolve_model; print(resolve_model(sys.argv[1]))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Resolved:
    """The end of a program that resolved a file in a folder with code, and the file that the code writes."""

    done: "subprocess.CompletedProcess[str]"
    ran: Path


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    """A terminal on standard input says yes to every question; standard error is a pipe."""
    tmp_path = tmp_path_factory.mktemp("stranger")
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    write_gguf(tiny_llama(), folder / "tiny.gguf", "F32")
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Evil:\n    ...\n"
    for name in ("evil.py", "torch.py", "transformers.py", "mars_ray.py"):
        (folder / name).write_text(code)
    maps = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    auto_map = {"auto_map": maps | {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps(auto_map | {"tokenizer_class": "Evil"}))
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 100)
    # The user stands in the folder of the model, as one does who has just downloaded it.
    done = subprocess.run(
        [sys.executable, "-P", "-c", RESOLVE, "tiny.gguf"],
        stdin=theirs, capture_output=True, text=True, cwd=folder, check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    return Resolved(done, ran)


def test_a_folder_that_brings_code_runs_none_though_a_terminal_says_yes_to_every_question(resolved: Resolved) -> None:
    assert resolved.done.returncode == 0, resolved.done.stderr
    assert (Path(resolved.done.stdout.strip()) / "model.safetensors").is_file()
    assert not resolved.ran.exists()


def test_without_a_terminal_for_output_a_conversion_is_one_plain_line(resolved: Resolved) -> None:
    assert re.fullmatch(r"unpack tiny\.gguf, MB: (\d+)/\1 .* s\n", resolved.done.stderr)


def bomb_of_49_bytes(file: Path) -> None:
    """Announces an array of 2^40 numbers under a key of one letter, and ends there."""
    key = struct.pack("<Q", 1) + b"x"
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8, 2**40)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
    assert file.stat().st_size == 49


REFUSE = """
import resource, sys
from mars_ray.errors import ModelError
from mars_ray.model.resolve import resolve_model
from mars_ray.model.sources import gguf
gguf.MEMORY_BYTES, gguf.SECONDS = 200 << 20, 10  # whichever limit comes first
try:
    resolve_model(sys.argv[1])
except ModelError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_file_that_announces_more_than_it_holds_is_refused_within_its_memory(tmp_path: Path) -> None:
    bomb_of_49_bytes(tmp_path / "bomb.gguf")
    # In a process of its own: the most that any child took is known of all children of a process together.
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, str(tmp_path / "bomb.gguf")], capture_output=True, text=True, check=True
    )
    said, kilobytes = done.stdout.splitlines()
    assert "bomb.gguf cannot be converted: " in said
    assert int(kilobytes) < 2 << 20, "Python with torch and transformers takes under a gigabyte of it"


def test_a_file_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SECONDS", 0)
    bomb_of_49_bytes(tmp_path / "bomb.gguf")
    with pytest.raises(ModelError, match=r"bomb\.gguf cannot be converted: it took more than 0 s"):
        resolve_model(str(tmp_path / "bomb.gguf"))
    models = tmp_path / "cache" / "mars-ray" / "models"
    assert not models.exists() or list(models.iterdir()) == []


@pytest.mark.parametrize("name", ["block_count", "embedding_length", "vocab_size", "attention.head_count"])
def test_sizes_that_no_memory_holds_are_refused_by_name(tmp_path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "huge.gguf", "llama")
    writer.add_uint32(f"llama.{name}", 2**31)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert re.search(r"out of bounds: \w+ is 2147483648", convert_in_fork(tmp_path / "huge.gguf", tmp_path / "huge"))
    assert not (tmp_path / "huge").exists()
