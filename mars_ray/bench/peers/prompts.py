"""Prompts of one length for engines that are compared: whoever pads, pads nothing."""

import json
from importlib.resources import files

from mars_ray.data.chat import ChatEncoder
from mars_ray.errors import ConfigError
from mars_ray.model.checkpoint import Checkpoint

PROMPT_TOKENS = 128


def prompts_of_one_length(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """Return `count` prompts of 128 tokens: the bundled ones as chats, one behind the other, cut into pieces."""
    encoder = ChatEncoder(checkpoint.tokenizer)
    tokens: list[int] = []
    for line in (files("mars_ray") / "assets" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        if len(tokens) >= count * PROMPT_TOKENS:
            break
        tokens += encoder.prompt([{"role": "user", "content": json.loads(line)["prompt"]}])
    if not 1 <= count <= len(tokens) // PROMPT_TOKENS:
        raise ConfigError(f"{count} requests are asked for; with --peers there are 1..{len(tokens) // PROMPT_TOKENS}.")
    return [tokens[start : start + PROMPT_TOKENS] for start in range(0, count * PROMPT_TOKENS, PROMPT_TOKENS)]
