"""Ways of decoding that the measurements compare, and their modelled speed."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from mars_ray.engine.kv.cache import kv_shape
from mars_ray.errors import ConfigError
from mars_ray.machines.step_model import EFFICIENCIES, GPUS, Network, StepModel

CALLERS = (1, 8, 32, 128)
SMALL_CALLERS = (1, 4)
MASKS = (3, 7)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen2 networks that are measured with random weights."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way of decoding: one token at a time, exact, or a threshold, with up to `masks` masks per step."""

    name: str
    masks: int
    threshold: float | None = None
    """None for exact decoding and for one token at a time."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of a request, by the names that our engine and the plug-in for vLLM share."""
        if not self.masks:
            return {"mode": "ar"}
        block = {"block": self.masks + 1}
        return block | ({"mode": "exact"} if self.threshold is None else {"threshold": self.threshold})


AR = Setting("ar", 0)


def lookahead_settings(masks: int) -> list[Setting]:
    """Return exact decoding and two thresholds with this number of masks."""
    values = (None, 0.95, 0.9)
    return [Setting(f"{'exact' if value is None else value} K {masks}", masks, value) for value in values]


def step_model(gpu: str, config: PretrainedConfig, parameters: int) -> StepModel:
    """Return the model of step times that `mars-ray plan` uses, for this network. Raises `ConfigError` for a GPU that
    has no entry."""
    if gpu not in GPUS:
        raise ConfigError(f"gpu {gpu!r} is unknown; choose one of {', '.join(GPUS)}.")
    layers, key_heads, head_size = kv_shape(config)
    network = Network(
        billion_parameters=parameters / 1e9,
        layers=layers,
        key_heads=key_heads,
        head_size=head_size,
        max_model_len=config.get_text_config().max_position_embeddings,
    )
    name = f"{gpu}/{parameters / 1e6:.0f}M"
    return StepModel(name=name, gpu=GPUS[gpu], network=network, efficiency=EFFICIENCIES["vllm-0.32"])


def gpu_of(device_name: str) -> str:
    """Return the entry of `GPUS` for a CUDA device name. Raises `ConfigError` if no entry fits."""
    lower = device_name.lower().replace("a100", "a100-40g" if "40gb" in device_name.lower() else "a100-80g")
    # The longest name first, because "l4" is also in "l40s".
    for gpu in sorted(GPUS, key=len, reverse=True):
        if gpu in lower:
            return gpu
    raise ConfigError(f"the GPU is {device_name!r}; name its entry with --gpu, one of {', '.join(GPUS)}.")
