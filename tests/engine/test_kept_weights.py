"""Rounded weights that a start keeps for the next one: the same answers, never damaged or foreign weights."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.core.load import load_engine
from mars_ray.engine.kernels import kept_weights, packed
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.kept_weights import read_kept
from mars_ray.engine.kernels.packed import Format, pack_weight
from mars_ray.engine.options import EngineOptions, Quantize
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.model.folder import check_folder
from mars_ray.model.sources.cache import cache_folder
from tests.factories.engine import run
from tests.factories.networks import network_of_rows
from tests.factories.tokenizers import tiny_tokenizer

FORMATS: list[Quantize] = ["int8", "int4"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that keeps small models, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 0)
    return cache_folder()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose sizes the kernels can quantise, with biases and an untied output."""
    save(tmp_path / "model", seed=0)
    return tmp_path / "model"


def save(folder: Path, seed: int) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 320, "head_dim": 32}
    network_of_rows(seed=seed, **sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def logprobs(folder: Path, quantize: Quantize) -> list[list[float]]:
    """Log probabilities of the tokens of an answer, which differ if any weight does."""
    engine, _ = load_engine(check_folder(folder), EngineOptions(quantize=quantize))
    sampling = SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True)
    [answer] = run(engine, [Request(id="a", prompt=(5, 6, 7, 8), sampling=sampling)]).values()
    engine.close()
    return [[logprob for _, logprob in position.top] for position in answer.logprobs]


def kept(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.glob("*.packed/*")) if not path.is_symlink()]


@pytest.mark.parametrize("quantize", FORMATS)
def test_kept_weights_answer_bit_for_bit_like_new_ones(folder: Path, cache: Path, quantize: Quantize) -> None:
    fresh = logprobs(folder, quantize)
    [file] = kept(cache)
    inode = file.stat().st_ino
    assert logprobs(folder, quantize) == fresh
    assert [path.stat().st_ino for path in kept(cache)] == [inode]


def test_kept_weights_are_private_and_mapped(folder: Path, cache: Path) -> None:
    logprobs(folder, "int8")
    [file] = kept(cache)
    assert file.parent.stat().st_mode & 0o077 == 0
    engine, _ = load_engine(check_folder(folder), EngineOptions(quantize="int8"))
    assert str(file) in Path("/proc/self/maps").read_text()
    engine.close()


def test_each_format_has_a_file_of_its_own(folder: Path, cache: Path) -> None:
    assert logprobs(folder, "int8") != logprobs(folder, "int4")
    assert len(kept(cache)) == 2
    assert logprobs(folder, "int8") != logprobs(folder, "int4")


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_changed_model_gets_new_weights_and_the_old_ones_are_removed(
    folder: Path, cache: Path, tmp_path: Path, keep_times: bool
) -> None:
    before = logprobs(folder, "int8")
    old = kept(cache)
    save(tmp_path / "other", seed=1)
    weights, times = folder / "model.safetensors", (folder / "model.safetensors").stat()
    shutil.copy(tmp_path / "other" / "model.safetensors", weights)
    if keep_times:
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = logprobs(folder, "int8")
    assert after != before
    assert after == logprobs(tmp_path / "other", "int8")
    assert set(old) & set(kept(cache)) == set()
    assert len(kept(cache)) == 2


def test_weights_of_a_removed_model_are_removed_when_others_are_kept(folder: Path, cache: Path, tmp_path: Path) -> None:
    logprobs(folder, "int8")
    save(tmp_path / "other", seed=1)
    shutil.rmtree(folder)
    logprobs(tmp_path / "other", "int8")
    assert [path.name.partition("-")[0] for path in cache.glob("*.packed")] == ["other"]


@given(position=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
def test_a_damaged_byte_anywhere_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, position: float, flipped: int
) -> None:
    file = tmp_path_factory.mktemp("kept") / "weights"
    weight = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    kept_weights.write_kept(file, [pack_weight(weight, torch.ones(64), Format.INT8, kernel_library().layout)])
    assert read_kept(file) is not None
    content = bytearray(file.read_bytes())
    content[int(position * len(content))] ^= flipped
    file.write_bytes(content)
    assert read_kept(file) is None
    assert not file.exists()


@pytest.mark.parametrize("size", [0, 1, 30, 1000, 100_000])
def test_a_file_cut_short_is_written_again(folder: Path, cache: Path, size: int) -> None:
    fresh = logprobs(folder, "int8")
    [file] = kept(cache)
    whole = file.read_bytes()
    os.truncate(file, size)
    assert logprobs(folder, "int8") == fresh
    assert file.read_bytes() == whole


def test_a_file_that_others_can_write_is_not_used(folder: Path, cache: Path) -> None:
    logprobs(folder, "int8")
    [file] = kept(cache)
    file.chmod(0o666)
    assert read_kept(file) is None


def test_a_cache_that_cannot_be_written_leaves_a_start_as_it_is(folder: Path, cache: Path, tmp_path: Path) -> None:
    fresh = logprobs(folder, "int8")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert logprobs(folder, "int8") == fresh


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_a_start_as_it_is_and_no_file(folder: Path, cache: Path) -> None:
    with largest_file(20_000):
        fresh = logprobs(folder, "int8")
    assert kept(cache) == []
    assert logprobs(folder, "int8") == fresh
    assert len(kept(cache)) == 1


KILLED = """
import resource, signal, sys
from pathlib import Path
from tests.engine.test_kept_weights import kept_weights, logprobs
kept_weights.LEAST_BYTES = 0
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends this process at the first byte beyond the limit
kept_weights.os.posix_fallocate = lambda *_: None  # which would end it before the first byte
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
logprobs(Path(sys.argv[1]), "int8")
"""


def test_a_process_killed_while_it_writes_leaves_nothing_that_a_later_start_uses(folder: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert done.returncode < 0
    assert [path.name.endswith(".partial") for path in kept(cache)] == [True]
    fresh = logprobs(folder, "int8")
    assert [path.name.endswith(".partial") for path in kept(cache)] == [False]
    assert logprobs(folder, "int8") == fresh


def test_a_small_model_is_not_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 64 << 20)
    logprobs(folder, "int8")
    assert kept(cache) == []


@given(blocks=st.integers(1, 5), groups=st.integers(1, 3), tile=st.integers(1, 20_000), seed=st.integers(0, 9))
@pytest.mark.parametrize("kind", [Format.INT8, Format.INT4])
def test_weights_packed_in_tiles_are_those_packed_at_once(
    kind: Format, blocks: int, groups: int, tile: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = kernel_library().layout
    weight = torch.randn(blocks * layout.columns, groups * 64, generator=torch.Generator().manual_seed(seed))
    monkeypatch.setattr(packed, "TILE", weight.numel())
    at_once = pack_weight(weight, None, kind, layout).tensors[0]
    monkeypatch.setattr(packed, "TILE", tile)
    in_tiles = pack_weight(weight, None, kind, layout).tensors[0]
    assert at_once is not None and in_tiles is not None
    assert torch.equal(at_once, in_tiles)
