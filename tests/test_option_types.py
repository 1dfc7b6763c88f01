"""Options of the public API: what means the same is taken, and a wrong type is an error that names the option."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from upath import UPath

from mars_ray import (
    CalibrateOptions,
    DecodeParams,
    EngineOptions,
    EvaluateOptions,
    GenerateOptions,
    MarsRayError,
    Mode,
    Request,
    SamplingParams,
    TrainConfig,
    WorkerOptions,
    calibrate,
    evaluate,
    generate_files,
    train,
)
from mars_ray.batch.run.processor_config import ProcessorConfig
from mars_ray.errors import ConfigError, ModelError, RequestError
from mars_ray.evaluation.tasks import TaskOptions
from mars_ray.simulate.options import SimulateOptions
from tests.samples import JUNK

TRAINING = {
    "model": "bundled",
    "output": "out",
    "data": {"train": "a.jsonl", "heldout": "b.jsonl"},
    "objective": {"kind": "mars"},
    "optimizer": {"learning_rate": 1e-3, "epochs": 1},
}
CLASSES: list[tuple[type, dict[str, Any]]] = [
    (GenerateOptions, {"input": "in.jsonl", "output": "out"}),
    (WorkerOptions, {}),
    (EvaluateOptions, {"output": "out", "tasks": "families"}),
    (TaskOptions, {}),
    (CalibrateOptions, {}),
    (EngineOptions, {}),
    (ProcessorConfig, {}),
    (SimulateOptions, {"trace": "poisson", "replicas": 2}),
    (SamplingParams, {}),
    (DecodeParams, {}),
    (Request, {"id": "a", "prompt": (1, 2)}),
    (TrainConfig, TRAINING),
]
"""Classes of options, with the arguments that have no default."""


def made(kind: Callable[..., Any], **options: Any) -> Any:
    """Return options from values that are of other types than the annotations say."""
    return kind(**options)


def options_of(kind: Any) -> list[str]:
    return list(kind.model_fields) if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]


@pytest.mark.parametrize(("kind", "required"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
@given(data=st.data())
def test_any_value_of_any_option_is_taken_or_is_an_error_of_ours(
    kind: type, required: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(options_of(kind)))
    try:
        kind(**required | {name: data.draw(JUNK)})
    except MarsRayError as error:
        assert str(error)


@pytest.mark.parametrize(("kind", "required"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_value_of_no_type_that_any_option_has_is_named(kind: type, required: dict[str, Any]) -> None:
    for name in options_of(kind):
        with pytest.raises((ConfigError, RequestError), match=rf"^{name}(\.0)? is 1j"):
            kind(**required | {name: 1j})


@pytest.mark.parametrize(
    "source", ["/data/x.jsonl", Path("/data/x.jsonl"), ["/data/x.jsonl"], (Path("/data/x.jsonl"),)]
)
def test_one_path_is_one_input(source: Any) -> None:
    assert made(GenerateOptions, input=source, output="out").input == ("/data/x.jsonl",)


@pytest.mark.parametrize("output", ["/data/o", Path("/data/o"), "file:///data/o"])
def test_an_output_may_be_a_text_or_a_path(output: Any) -> None:
    assert made(GenerateOptions, input="x", output=output).output == Path("/data/o")
    assert made(EvaluateOptions, tasks="x", output=output).output == Path("/data/o")


def test_a_url_is_taken_wherever_a_path_is() -> None:
    options = made(
        GenerateOptions, input=UPath("memory://in/x.jsonl"), output="memory://out", model=UPath("memory://model")
    )
    assert (options.input, str(options.output), options.model) == (
        ("memory://in/x.jsonl",),
        "memory://out",
        "memory://model",
    )
    assert str(made(CalibrateOptions, data="memory://data/x.jsonl").data) == "memory://data/x.jsonl"


def test_one_task_mode_and_threshold_are_one_each() -> None:
    options = made(EvaluateOptions, output="out", tasks="families", modes=Mode.EXACT, thresholds=0.9)
    assert (options.tasks, options.modes, options.thresholds) == (("families",), ("exact",), (0.9,))


def test_a_path_never_names_the_packaged_model() -> None:
    assert made(GenerateOptions, input="x", output="y", model=Path("bundled")).model == "./bundled"
    assert TrainConfig(**TRAINING | {"model": Path("bundled")}).model == "./bundled"


def test_numbers_of_numpy_are_numbers() -> None:
    assert type(made(WorkerOptions, count=np.int64(3)).count) is int
    assert type(made(SamplingParams, max_tokens=np.int32(3)).max_tokens) is int
    thresholds = made(CalibrateOptions, thresholds=np.array([0.5, 1.0], dtype=np.float32)).thresholds
    assert thresholds == (0.5, 1.0)
    assert all(type(threshold) is float for threshold in thresholds)


def test_stops_and_modes_are_taken_as_they_are_written() -> None:
    sampling = made(SamplingParams, stop="a", stop_token_ids=[1, np.int64(2)])
    assert (sampling.stop, sampling.stop_token_ids) == (("a",), frozenset({1, 2}))
    assert made(DecodeParams, mode="ar").mode is Mode.AR


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2]), iter([1, 2])])
def test_a_prompt_of_a_request_is_a_tuple_of_ids(prompt: Any) -> None:
    assert Request(id="a", prompt=prompt).prompt == (1, 2)


@pytest.mark.parametrize("value", [None, 5, "options", {}, GenerateOptions])
@pytest.mark.parametrize(
    "function",
    [generate_files, evaluate, train, lambda options: calibrate("bundled", options)],
    ids=["generate_files", "evaluate", "train", "calibrate"],
)
def test_a_function_names_options_of_another_class(function: Callable[[Any], object], value: object) -> None:
    with pytest.raises(ConfigError, match=r"^(options|config) is .*, must be (Generate|Evaluate|Calibrate|Train)"):
        function(value)


def test_a_folder_without_a_model_is_named_by_calibrate() -> None:
    for model in ("nowhere", Path("nowhere"), 5, b"nowhere"):
        with pytest.raises(ModelError, match=r"(unknown model|the model is).*(nowhere|5)"):
            calibrate(model, CalibrateOptions())  # type: ignore[arg-type]
