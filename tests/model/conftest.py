from pathlib import Path
from typing import Any

import pytest

from mars_ray.model.card import CalibrationPoint, Card, FamilyPoint
from tests.model.model_samples import MakeFolder, tiny_network, tiny_tokenizer


@pytest.fixture
def make_model_folder(tmp_path: Path) -> MakeFolder:
    """A factory: a folder as transformers saves it, without a mask token unless asked for."""

    def make(
        architecture: str = "qwen2", *, rows: int = 320, tied: bool = True, mask: bool = False, **save: Any
    ) -> Path:
        folder = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        tiny_network(architecture, rows=rows, tied=tied).save_pretrained(folder, **save)
        tokenizer = tiny_tokenizer()
        if mask:
            tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def mars_card() -> Card:
    family = FamilyPoint(examples=20, tokens_per_forward=1.5, accuracy=0.75)
    point = CalibrationPoint(
        threshold=0.9,
        tokens_per_forward=1.6,
        tokens_per_forward_std=0.1,
        agreement=0.97,
        agreement_std=0.01,
        accuracy=0.7,
        accuracy_std=None,
        examples=40,
        tokens=800,
        seeds=2,
        data="tasks",
        by_family={"copy": family},
    )
    return Card(
        method="mars",
        block=4,
        objective={"phase": "absolute", "ar_weight": 1.0},
        mask_token="<|mask|>",
        mask_token_id=300,
        data="tasks",
        examples=1000,
        tokens=64000,
        steps=200,
        seed=3,
        versions={"torch": "2.13"},
        losses={"mask": 1.25, "ar": 0.5},
        calibration=(point,),
    )
