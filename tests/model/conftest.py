from pathlib import Path
from typing import Any

import pytest

from mars_ray.model.card import Card, FamilyPoint
from tests.factories.cards import calibration_point, model_card
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import tiny_tokenizer
from tests.model.model_samples import MakeFolder


@pytest.fixture
def make_model_folder(tmp_path: Path) -> MakeFolder:
    """A factory: a folder as transformers saves it, without a mask token unless asked for."""

    def make(
        architecture: str = "qwen2", *, rows: int = 320, tied: bool = True, mask: bool = False, **save: Any
    ) -> Path:
        folder = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        tiny_network(architecture, vocab_size=rows, tie_word_embeddings=tied).save_pretrained(folder, **save)
        tokenizer = tiny_tokenizer()
        if mask:
            tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def mars_card() -> Card:
    family = FamilyPoint(examples=20, tokens_per_forward=1.5, accuracy=0.75)
    return model_card(calibration=(calibration_point(by_family={"copy": family}),))
