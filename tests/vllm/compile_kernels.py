"""Compile the kernels of the plug-in for NVIDIA GPUs, on a machine without one and without Triton's interpreter."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mars_ray.vllm.runner.kernels.confidence import TOKENS_AT_ONCE, _find_most_likely
from mars_ray.vllm.runner.kernels.layout import _lay_out
from mars_ray.vllm.runner.kernels.outcome import _take
from mars_ray.vllm.step_rule import LEAST_LIKELY

INT64 = {"slot_R", "sampled_N", "token_RQ", "sum_SC", "passed_SGK"}
FLOAT32 = {
    "own_threshold_S",
    "floor_S",
    "temperature_S",
    "class_threshold_C",
    "threshold_R",
    "temperature_R",
    "confidence_N",
    "ratio_N",
    "grid_G",
    "log_FC",
    "confidence_SK",
}
NUMBERS = {"token_stride", "mask_id", "last_total", "logits_stride", "vocab_size", "log_start"}
"""Arguments by type; all others are addresses of int32."""
CAPABILITIES = (80, 90)


def kind(name: str) -> str:
    if name in NUMBERS:
        return "i32"
    return "*i64" if name in INT64 else "*fp32" if name in FLOAT32 else "*i32"


def compile_kernel(kernel: Any, warps: int, logits: str = "*bf16", **constants: Any) -> None:
    types = {
        name: "constexpr" if name in constants else logits if name == "logits_NV" else kind(name)
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    for capability in CAPABILITIES:
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def main() -> None:
    for masks in (1, 7, 63):
        width = 1 + 2 * masks
        blocks = {"K": masks, "Q_BLOCK": triton.next_power_of_2(width)}
        for is_exact in (False, True):
            compile_kernel(_lay_out, 1, **blocks, MASK_STEP=int(is_exact), IS_EXACT=is_exact)
        sizes = {"Q": width, "G": 13, "F": 1024, "K_BLOCK": triton.next_power_of_2(masks), "G_BLOCK": 16}
        for lenient in (False, True):
            compile_kernel(_take, 1, **blocks, **sizes, LEAST_LIKELY=LEAST_LIKELY, LENIENT=lenient)
    for logits in ("*bf16", "*fp16", "*fp32"):
        compile_kernel(_find_most_likely, 16, logits, V_BLOCK=TOKENS_AT_ONCE)


if __name__ == "__main__":
    main()
