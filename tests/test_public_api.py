"""What `mars_ray` exports is the promise: it is listed here, and importing it is cheap."""

import subprocess
import sys

import mars_ray

PUBLIC = {
    *("LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Mode"),
    *("Engine", "AsyncEngine", "EngineOptions", "Request", "DecodeParams", "Chunk"),
    *("generate_files", "GenerateOptions", "WorkerOptions", "train", "TrainConfig"),
    *("evaluate", "EvaluateOptions", "calibrate", "CalibrateOptions"),
    *("MarsRayError", "InputError", "RunError"),
}


def test_the_public_names_are_these() -> None:
    assert set(mars_ray.__all__) == PUBLIC


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    assert [name for name in mars_ray.__all__ if not getattr(mars_ray, name).__doc__] == []


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    program = "import sys, mars_ray; print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(mars_ray, "LLMs")
