"""Make prompts of one length, so that no engine pads."""

from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import read_prompts
from mars_ray.errors import ConfigError
from mars_ray.load.plan import bundled_prompts
from mars_ray.model.checkpoint import Checkpoint

PROMPT_TOKENS = 128


def prompts_of_one_length(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """Return `count` prompts of 128 tokens, each the last tokens of a growing text of bundled prompts."""
    encoder = ChatEncoder(checkpoint.tokenizer)
    tokens: list[int] = []
    prompts: list[list[int]] = []
    for messages in read_prompts(bundled_prompts()):
        if len(prompts) == count:
            break
        tokens += encoder.prompt(messages)
        if len(tokens) >= PROMPT_TOKENS:
            prompts.append(tokens[-PROMPT_TOKENS:])
    if not 1 <= count <= len(prompts):
        raise ConfigError(f"{count} requests are asked for; there are 1..{len(prompts)}.")
    return prompts
