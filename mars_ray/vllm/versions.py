"""Versions of vLLM that the plug-in was tried with, and the hooks that differ between them.

Everything else that the plug-in overrides, calls or reads is the same in all versions. `tests/vllm/test_hooks.py` lists
it, and reads it in the files of each version.
"""

from typing import NamedTuple

from mars_ray.errors import ConfigError


class Hooks(NamedTuple):
    """The hooks of one version that differ from those of another."""

    processors: str
    """Module of the base class of logits processors, whose `validate_params` vLLM calls for each request."""
    processors_need_v1: bool
    """Whether vLLM chooses model runner V1 for a model with logits processors."""


HOOKS = {
    "0.29": Hooks(processors="vllm.v1.sample.logits_processor.interface", processors_need_v1=True),
    "0.30": Hooks(processors="vllm.v1.sample.logits_processor.interface", processors_need_v1=True),
    "0.31": Hooks(processors="vllm.v1.worker.gpu.sample.logits_processor.interface", processors_need_v1=False),
    "0.32": Hooks(processors="vllm.v1.worker.gpu.sample.logits_processor.interface", processors_need_v1=False),
    "0.33": Hooks(processors="vllm.v1.worker.gpu.sample.logits_processor.interface", processors_need_v1=False),
}
"""Hooks by minor version, from the oldest to the newest."""


def check_version(version: str) -> None:
    """Raise `ConfigError` for a version of vLLM that the plug-in was not tried with."""
    if minor(version) not in HOOKS:
        raise ConfigError(
            f"vLLM is {version}; the plug-in was tried with {', '.join(HOOKS)}. Install one of these, or try this one: "
            '--additional-config \'{"mars": {"any_version": true}}\' of vllm serve.'
        )


def hooks_of(version: str) -> Hooks:
    """Return the hooks of a version of vLLM; those of the newest version for an unknown one."""
    return HOOKS.get(minor(version)) or [*HOOKS.values()][-1]


def minor(version: str) -> str:
    """Return the first two numbers of a version, such as 0.32."""
    return ".".join(version.split(".")[:2])
