"""The header and the values that we read from a .gguf file are those that the package gguf reads."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GgufConfig

from mars_ray.model.sources.gguf_file import GGUFFile, Unpacker
from tests.model.gguf_samples import convert_in_fork, tiny_llama, write_gguf


def gguf_unpacks(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind for kind in gguf.GGMLQuantizationType if gguf_unpacks(kind)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales are infinite or not a number, too
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(rows=st.integers(1, 200), blocks=st.integers(1, 4), seed=st.integers(0, 99), threads=st.integers(1, 3))
def test_every_kind_is_unpacked_as_gguf_unpacks_it(
    kind: gguf.GGMLQuantizationType, rows: int, blocks: int, seed: int, threads: int
) -> None:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed).integers(0, 256, (rows, blocks * block_bytes), np.uint8)
    plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    data = random.view(plain.get(kind, np.uint8))
    done: list[int] = []
    values = Unpacker(threads, done.append).dequantize(data, kind)
    expected = gguf.quants.dequantize(data, kind)
    assert values.shape == expected.shape
    assert np.array_equal(values, expected, equal_nan=True)
    assert sum(done) == data.nbytes


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_fields_and_tensors_are_those_of_gguf(tmp_path: Path, kind: str) -> None:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", kind)
    ours, theirs = GGUFFile(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    own = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.fields) == list(own)
    for name, field in own.items():
        if field.types[0] is not gguf.GGUFValueType.ARRAY:
            assert ours.fields[name].contents() == field.contents(), name
    vocabulary = "tokenizer.ggml.tokens"
    assert len(ours.fields[vocabulary].data) == len(theirs.fields[vocabulary].data)
    for tensor, expected in zip(ours.tensors, theirs.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type) == (expected.name, expected.tensor_type)
        assert tensor.data.dtype == expected.data.dtype
        assert np.array_equal(tensor.data, expected.data)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q5_0", "Q4_1"])
def test_converted_weights_are_bit_for_bit_those_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", kind)
    assert convert_in_fork(tmp_path / "tiny.gguf", tmp_path / "converted") == ""
    ours = load_file(tmp_path / "converted" / "model.safetensors")
    network = AutoModelForCausalLM.from_pretrained(
        str(tmp_path),
        gguf_file="tiny.gguf",
        dtype={"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16),
        quantization_config=GgufConfig(dequantize=True),
    )
    theirs = network.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype is tensor.dtype
        assert torch.equal(ours[name], tensor), name


@given(position=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_header_ends_in_an_error_or_a_header(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "tiny.gguf"
    file.write_bytes(whole_file(tmp_path_factory))
    content = bytearray(file.read_bytes())
    content[4 + position % 3000] = value
    file.write_bytes(content)
    try:
        GGUFFile(file)
    except Exception as error:
        assert not isinstance(error, MemoryError | RecursionError)


WHOLE: list[bytes] = []


def whole_file(folders: pytest.TempPathFactory) -> bytes:
    if not WHOLE:
        file = folders.mktemp("whole") / "tiny.gguf"
        write_gguf(tiny_llama(), file, "F32")
        WHOLE.append(file.read_bytes())
    return WHOLE[0]
