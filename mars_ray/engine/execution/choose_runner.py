"""Choose the runner for a network: the compiled CPU kernels if they support the network, otherwise torch."""

from pathlib import Path

from transformers import PreTrainedModel

from mars_ray.engine.execution.cpu_runner import CPURunner
from mars_ray.engine.execution.model_runner import ModelRunner
from mars_ray.engine.execution.torch_runner import TorchRunner
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.options import EngineOptions
from mars_ray.errors import ModelError


def choose_runner(
    network: PreTrainedModel,
    cache: SlotKVCache,
    mask_id: int,
    options: EngineOptions,
    *,
    consume: bool,
    folder: Path | None,
) -> tuple[ModelRunner, str]:
    """Return the runner, and a description of it with the reason for the choice.

    With `consume`, the network's own weights may be freed once they are packed. `folder` is the one that the network
    was loaded from unchanged, if there is one. Raises `ModelError` if the options ask
    for quantized weights, which need the kernels, and the kernels do not support the network or the machine.
    """
    try:
        runner = CPURunner(network, cache, mask_id=mask_id, quantize=options.quantize, consume=consume, folder=folder)
    except KernelError as error:
        if options.quantize:
            raise ModelError(f"quantize {options.quantize} needs kernels that do not run here: {error}") from None
        through_torch = TorchRunner(network, cache, mask_id=mask_id, compiled=options.compiled)
        return through_torch, f"torch, because {error}" if network.device.type == "cpu" else "torch"
    library = kernel_library()
    quantized = f", {options.quantize}" if options.quantize else ""
    return runner, f"CPU kernels {library.family.name}{quantized} ({library.origin})"
