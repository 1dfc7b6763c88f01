"""The forwards of an engine: a batch in, the logits of its picks out, with masks corrected by their adapters.

The compiled CPU kernels run the network if they support it, otherwise torch does.
"""

import math

from mars_ray.engine.core.adapters import Adapters, AdaptersByName
from mars_ray.engine.execution.cpu_runner import CPURunner
from mars_ray.engine.execution.input_packer import InputPacker
from mars_ray.engine.execution.model_runner import ForwardOutput, ModelRunner, Picks
from mars_ray.engine.execution.torch_runner import TorchRunner
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.errors import ModelError
from mars_ray.model.checkpoint import Checkpoint


class Forwards:
    """Runs the network of `checkpoint` over a KV cache; see `Engine` for `consume` and the errors."""

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, adapters: AdaptersByName, *, consume: bool
    ) -> None:
        network = checkpoint.network
        self.cache = SlotKVCache(network.config, network.dtype, network.device)
        self.runner, self.kernels = self._choose_runner(checkpoint, options, consume)
        self.adapters = Adapters(self.runner, checkpoint, adapters)
        self.packer = InputPacker(checkpoint.mask_id, network.device, self.adapters.number)

    def run(self, batch: list[ScheduledSequence], *, audit: bool) -> tuple[list[Picks], ForwardOutput, int]:
        """Run one forward over `batch`. Return the picks of each sequence, the output, and the cached tokens read.

        With `audit`, the logits at all tokens of decoding sequences are read.
        """
        inputs, picks = self.packer.pack(batch, audit=audit)
        output = self.runner.run(inputs)
        self.adapters.correct_masks(batch, picks, output)
        # Products of a broken adapter may overflow. A guess that is no number is no guess.
        output.confidences[:] = [sure if math.isfinite(sure) else 0.0 for sure in output.confidences]
        return picks, output, inputs.kv_tokens

    def _choose_runner(self, checkpoint: Checkpoint, options: EngineOptions, consume: bool) -> tuple[ModelRunner, str]:
        """Return the runner, and a description of it with the reason for the choice.

        Raises `ModelError` if the options ask for quantized weights, which need the kernels, and the kernels do not
        support the network or the machine.
        """
        network, mask_id, quantize = checkpoint.network, checkpoint.mask_id, options.quantize
        folder = checkpoint.folder if consume else None  # only then the network has the weights of its folder
        try:
            runner = CPURunner(network, self.cache, mask_id=mask_id, quantize=quantize, consume=consume, folder=folder)
        except KernelError as error:
            if quantize:
                raise ModelError(f"quantize {quantize} needs kernels that do not run here: {error}") from None
            through_torch = TorchRunner(network, self.cache, mask_id=mask_id)
            return through_torch, f"torch, because {error}" if network.device.type == "cpu" else "torch"
        library = kernel_library()
        quantized = f", {quantize}" if quantize else ""
        return runner, f"CPU kernels {library.family.name}{quantized} ({library.origin})"
