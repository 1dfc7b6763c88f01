"""Fixtures of a tiny run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mars_ray.training.config import TrainConfig, parse_config
from tests.training.train_samples import RECORDS, TEMPLATE, MakeConfig


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights to train from."""
    folder = tmp_path_factory.mktemp("model") / "start"
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        (text for record in RECORDS for text in record.values()),
        vocab_size=270,
        new_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|end|>", "<|endoftext|>", TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def records_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture
def make_config(start_model: Path, records_file: Path, tmp_path: Path) -> MakeConfig:
    """A factory of configs; keyword arguments replace whole sections or values."""

    def make(name: str = "run", **changes: Any) -> TrainConfig:
        fields: dict[str, Any] = {
            "model": str(start_model),
            "output": str(tmp_path / name),
            "data": {"train": str(records_file), "heldout": str(records_file), "length": 64},
            "objective": {"kind": "mars", "block": 4},
            "optimizer": {"learning_rate": 1e-2, "epochs": 2, "batch_rows": 4},
            "checkpoint_every": 5,
            "measure_every": 4,
            "seed": 3,
        }
        return parse_config(fields | changes, "the test")

    return make
