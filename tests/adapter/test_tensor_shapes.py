"""Whatever an adapter's file holds, it is loaded as it fits its base or refused by name; no size is taken on trust."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mars_ray.adapter.card import CONFIG_FILE
from mars_ray.adapter.folder import WEIGHTS_FILE, load_adapter, save_adapter, start_from
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape, new_adapter
from mars_ray.engine.execution.torch_runner import TorchRunner
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.decoder import FusedDecoder
from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.errors import AdapterError
from tests.factories.cards import adapter_card

SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 512, 1000])
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.complex64, torch.float8_e5m2]
KERNEL_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = KERNEL_SIZES | {"num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels once, before hypothesis measures how long an example takes."""
    with suppress(KernelError):
        kernel_library()


@pytest.fixture(scope="module")
def folders(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of an adapter, and that of its base."""
    folder = tmp_path_factory.mktemp("adapter")
    base.save_pretrained(folder / "base")
    lora = new_adapter(base, rank=3, alpha=6.0, masks=2, names=["q_proj", "k_proj", "o_proj", "down_proj"])
    card = adapter_card(folder / "base", base_model="tiny", block=3)
    save_adapter(lora, card, folder / "adapter", dtype=torch.float32)
    return folder / "adapter", folder / "base"


def changed(
    folder: Path, tensors: dict[str, Tensor] | None = None, config: Mapping[str, object] = MappingProxyType({})
) -> Path:
    """A copy of the adapter in `folder` with other tensors or another configuration."""
    copy = folder.with_name("changed")
    copy.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    if tensors is not None:
        save_file(tensors, copy / WEIGHTS_FILE)
    (copy / CONFIG_FILE).write_text(json.dumps(json.loads((folder / CONFIG_FILE).read_text()) | dict(config)))
    return copy


def put_to(base: PreTrainedModel, lora: GatedLoRA, kernels: bool) -> None:
    """Put an adapter to a network as the engine does; nothing is decoded."""
    if kernels:
        try:
            kernel_library()
        except KernelError as reason:
            pytest.skip(f"no kernels here: {reason}")
        FusedDecoder(base, mask_id=0, quantize=None, consume=False).pack(lora)
    else:
        cache = SlotKVCache(base.config, base.dtype, base.device)
        TorchRunner(base, cache, mask_id=0).pack(lora)


@pytest.mark.parametrize("kernels", [True, False])
@given(data=st.data())
def test_a_tensor_of_another_shape_is_refused_by_name(
    base: PreTrainedModel, folders: tuple[Path, Path], kernels: bool, data: st.DataObject
) -> None:
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    name = data.draw(st.sampled_from(sorted(tensors)))
    own = list(tensors[name].shape)
    shape = data.draw(st.lists(SIZES, max_size=3).filter(lambda sizes: sizes != own))
    if name == "mask_embedding":  # any number of them fits, because further masks share the last one
        assume(not (len(shape) == 2 and shape[0] and shape[1] == own[1]))
    tensors[name] = torch.zeros(shape)
    part = "sampler|mask_embedding" if name.startswith(("sampler", "mask")) else name.split(".")[-3]
    with pytest.raises(AdapterError, match=part):
        put_to(base, load_adapter(changed(folders[0], tensors), folders[1]).lora, kernels)


@pytest.mark.parametrize("kernels", [True, False])
@given(
    rank=st.integers(1, 40),
    masks=st.integers(1, 9),
    hidden=st.sampled_from([1, 32, 63, 64, 65, 256]),
    linears=st.dictionaries(
        st.sampled_from([
            "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj",
            "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn", "model.norm", "lm_head.x", "",
        ]),
        st.tuples(*2 * [st.sampled_from([1, 32, 64, 96, 128, 1_000])]),
        min_size=1,
    ),
)  # fmt: skip
def test_an_adapter_that_is_whole_meets_only_a_network_it_fits(
    base: PreTrainedModel,
    kernels: bool,
    rank: int,
    masks: int,
    hidden: int,
    linears: dict[str, tuple[int, int]],
) -> None:
    fits = hidden == 64 and all(
        name.startswith("model.layers.0.")
        and sizes == {"q_proj": (64, 64), "o_proj": (64, 64), "down_proj": (96, 64)}.get(name.split(".")[-1])
        for name, sizes in linears.items()
    )
    lora = GatedLoRA(LoraShape(rank=rank, alpha=1.0, masks=masks, linears=linears), hidden)
    if fits:
        put_to(base, lora, kernels)
        return
    with pytest.raises(AdapterError, match=r"needs \(|linear layer"):
        put_to(base, lora, kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_another_dtype_is_refused(folders: tuple[Path, Path], dtype: torch.dtype) -> None:
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    tensors["sampler.write.weight"] = torch.zeros(64, 512).to(dtype)
    with pytest.raises(AdapterError, match=rf"sampler.write.weight has the dtype {dtype}"):
        load_adapter(changed(folders[0], tensors), folders[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e6])
def test_values_that_overflow_a_product_are_refused(folders: tuple[Path, Path], value: float) -> None:
    for name in load_file(folders[0] / WEIGHTS_FILE):
        tensors = load_file(folders[0] / WEIGHTS_FILE)
        tensors[name].view(-1)[-1] = value
        with pytest.raises(AdapterError, match=f"{name} holds values"):
            load_adapter(changed(folders[0], tensors), folders[1])


@pytest.mark.parametrize(
    "scale", [torch.ones(64), torch.ones(1, 64), torch.ones(512, 1), torch.ones(64, 1) * torch.inf], ids=str
)
def test_scales_that_are_not_one_for_each_row_or_column_are_refused(folders: tuple[Path, Path], scale: Tensor) -> None:
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    tensors |= {
        "sampler.write.weight": torch.ones(64, 512, dtype=torch.int8),
        "sampler.write.weight_scale": scale,
    }
    with pytest.raises(AdapterError, match=r"sampler\.write\.weight"):
        load_adapter(changed(folders[0], tensors), folders[1])


def test_a_vector_in_8_bits_is_not_spread_over_the_memory(folders: tuple[Path, Path]) -> None:
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    count = 2_000_000
    tensors |= {"mask_embedding": torch.ones(count, dtype=torch.int8), "mask_embedding_scale": torch.ones(count, 1)}
    with pytest.raises(AdapterError, match="mask_embedding has the shape"):
        load_adapter(changed(folders[0], tensors), folders[1])


def test_a_tensor_that_is_none_of_an_adapter_s_is_refused(folders: tuple[Path, Path]) -> None:
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    for name in ("model.x.lora_A.weight", "mask_embedding_scale", "base_model.model.x.lora_B.weight"):
        with pytest.raises(AdapterError, match=f"{name} does not belong to an adapter"):
            load_adapter(changed(folders[0], tensors | {name: torch.ones(3, 3)}), folders[1])


@pytest.mark.parametrize("rank", [0, -3, 2**70, 2**40, 3.0, True, "3", None], ids=str)
def test_a_rank_that_cannot_be_is_refused(folders: tuple[Path, Path], rank: object) -> None:
    with pytest.raises(AdapterError, match="is not a complete adapter"):
        load_adapter(changed(folders[0], config={"r": rank}), folders[1])


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), 1e38, "6", None, True], ids=str)
def test_an_alpha_that_cannot_be_is_refused(folders: tuple[Path, Path], alpha: object) -> None:
    with pytest.raises(AdapterError, match="lora_alpha is"):
        load_adapter(changed(folders[0], config={"lora_alpha": alpha}), folders[1])


def test_training_begins_with_no_adapter_of_another_hidden_size(folders: tuple[Path, Path]) -> None:
    lora = load_adapter(*folders).lora
    other = GatedLoRA(lora.shape, 128)
    with pytest.raises(AdapterError, match="hidden size 64, here it is 128"):
        start_from(other, folders[0])


def test_training_begins_with_the_first_masks_of_an_adapter_that_has_more(folders: tuple[Path, Path]) -> None:
    lora = load_adapter(*folders).lora
    masks = lora.shape.masks - 1
    shorter = GatedLoRA(replace(lora.shape, masks=masks), lora.mask_embedding_KH.shape[1])
    start_from(shorter, folders[0])
    assert torch.equal(shorter.mask_embedding_KH, lora.mask_embedding_KH[:masks])


def test_training_begins_with_no_adapter_that_has_fewer_masks(folders: tuple[Path, Path]) -> None:
    lora = load_adapter(*folders).lora
    longer = GatedLoRA(replace(lora.shape, masks=lora.shape.masks + 1), lora.mask_embedding_KH.shape[1])
    masks = lora.shape.masks
    with pytest.raises(AdapterError, match=f"it has {masks} masks, and a block of {masks + 2} needs {masks + 1}"):
        start_from(longer, folders[0])
