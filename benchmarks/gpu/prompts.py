"""Prompts of the measurements with a trained model, as token ids."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import read_prompts

PROMPTS = Path(__file__).parents[2] / "mars_ray/assets/prompts.jsonl"


def prompts_of(tokenizer: PreTrainedTokenizerBase, count: int, file: Path = PROMPTS) -> list[tuple[int, ...]]:
    """Return `count` prompts spread over a file, which has families one after the other; they repeat if there are
    fewer."""
    encoder = ChatEncoder(tokenizer)
    conversations = read_prompts(file)
    every = max(1, len(conversations) // count)
    return [tuple(encoder.prompt(messages)) for messages in (conversations[::every] * count)[:count]]
