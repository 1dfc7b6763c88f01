"""Cards of models and of adapters; keyword arguments replace fields."""

from pathlib import Path
from typing import Any

from mars_ray.adapter.card import AdapterCard
from mars_ray.model.card import CalibrationPoint, Card
from mars_ray.model.digest import vocabulary_digest, weights_digest


def calibration_point(**fields: Any) -> CalibrationPoint:
    usual: dict[str, Any] = {
        "threshold": 0.9,
        "tokens_per_forward": 1.6,
        "tokens_per_forward_std": 0.1,
        "agreement": 0.97,
        "agreement_std": 0.01,
        "accuracy": 0.7,
        "accuracy_std": None,
        "examples": 40,
        "tokens": 800,
        "seeds": 2,
        "data": "tasks",
        "by_family": {},
    }
    return CalibrationPoint(**(usual | fields))


def model_card(**fields: Any) -> Card:
    usual: dict[str, Any] = {
        "method": "mars",
        "block": 4,
        "objective": {"phase": "absolute", "ar_weight": 1.0},
        "mask_token": "<|mask|>",
        "mask_token_id": 300,
        "data": "tasks",
        "examples": 1000,
        "tokens": 64000,
        "steps": 200,
        "seed": 3,
        "versions": {"torch": "2.13"},
        "losses": {"mask": 1.25, "ar": 0.5},
    }
    return Card(**(usual | fields))


def adapter_card(base: Path | None = None, **fields: Any) -> AdapterCard:
    """The card of an adapter that was trained on the model in `base`."""
    usual: dict[str, Any] = {
        "block": 2,
        "objective": {},
        "base_model": "bundled",
        "data": "d.jsonl",
        "examples": 1,
        "tokens": 2,
        "steps": 3,
        "seed": 0,
        "versions": {},
        "losses": {},
    }
    digests = {
        "base_digest": weights_digest(base) if base else "",
        "base_vocabulary": vocabulary_digest(base) if base else "",
    }
    return AdapterCard(**(digests | usual | fields))
