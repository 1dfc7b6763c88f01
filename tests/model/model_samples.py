"""The architectures of small real models, and what tests ask of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

ARCHITECTURES = ("qwen2", "qwen3", "llama", "phi3", "gemma2", "gemma3_text")
MakeFolder = Callable[..., Path]
PROMPT = "two plus two is four, and Two plus Three is 5!"


def logits_of(network: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=torch.arange(3, 19)[None]).logits


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
