"""What a request may ask for, and that it says what is wrong otherwise."""

import math
import pickle
from typing import Any

import pytest

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import (
    LOSSLESS,
    STOP_STRINGS_MAX,
    Acceptance,
    DecodeParams,
    Request,
    SamplingParams,
)
from mars_ray.errors import RequestError
from mars_ray.method.metric import Metric

NAN, INF = math.nan, math.inf

WRONG_WHOLE_NUMBERS = {
    "max_tokens": (0, -1, True, 1.0, "9", None, NAN, INF, [1]),
    "min_tokens": (-1, 257, True, 0.0, "0", None, NAN, INF),
    "top_k": (-1, True, 5.0, "5", None, NAN, INF),
    "seed": (-1, 2**63, True, 1.0, "1", NAN),
    "n": (0, -1, 65, True, 1.0, "1", None),
    "logprobs": (-1, 21, True, 1.0, "1", NAN),
}
WRONG_NUMBERS = {
    "temperature": (-0.1, 100.1, True, NAN, INF, -INF, "1", None, [1.0]),
    "top_p": (0, 0.0, -0.1, 1.1, True, NAN, INF, "1", None),
    "min_p": (-0.1, 1.1, True, NAN, INF, "0", None),
    "presence_penalty": (-2.1, 2.1, True, NAN, INF, -INF, "0", None),
    "frequency_penalty": (-2.1, 2.1, True, NAN, INF, -INF, "0", None),
    "repetition_penalty": (0, 0.0, -1, 100.1, True, NAN, INF, "1", None),
}
WRONG = [
    (name, value) for table in (WRONG_WHOLE_NUMBERS, WRONG_NUMBERS) for name, many in table.items() for value in many
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_number_out_of_range_or_of_another_type_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert name in str(refused.value)
    assert repr(value) in str(refused.value)


WRONG_FORMS: dict[str, list[object]] = {
    "stop": [5, b"word", ("word", 1), (b"word",), None, ("",), ("x" * 257,), ("x",) * (STOP_STRINGS_MAX + 1), {"word"}],
    "stop_token_ids": [{"4"}, [4.5], ("4",), 4, None, frozenset({-1}), frozenset({True}), frozenset({"4"})],
    "logit_bias": [
        *({-1: 1.0}, {True: 1.0}, {"4": 1.0}, {4: 101}, {4: -101}, {4: NAN}, {4: INF}, {4: True}, {4: "1"}, {4: None}),
        *([(4, 1.0)], ((4, 1.0),), 4, None, "4"),
    ],
    "ignore_eos": ["no", 1, None],
    "skip_special_tokens": ["no", 1, None],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, many in WRONG_FORMS.items() for wrong in many])
def test_a_parameter_of_another_form_or_out_of_range_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"),
        ("mode", None),
        ("metric", "certainty"),
        ("metric", 1),
        *(("threshold", value) for value in (-0.1, 1.1, True, NAN, INF, "0.9", [0.9])),
        *(("block", value) for value in (0, -1, 65, True, 4.0, "4", NAN)),
    ],
)
def test_decoding_out_of_range_is_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(RequestError) as refused:
        DecodeParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(refused.value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("value", [-0.1, NAN, INF, True, "1", pytest.param(10**400, id="huge")])
def test_an_entropy_threshold_is_a_finite_number_of_nats(value: object) -> None:
    with pytest.raises(RequestError, match="threshold"):
        DecodeParams(metric=Metric.ENTROPY, threshold=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", [Metric.ENTROPY, Metric.MARGIN])
def test_a_metric_other_than_the_probability_needs_a_threshold_of_its_own(metric: Metric) -> None:
    with pytest.raises(RequestError, match=metric.value):
        DecodeParams(metric=metric)


def test_a_mode_or_metric_may_be_given_by_its_name() -> None:
    assert DecodeParams(mode="ar").mode is Mode.AR  # type: ignore[arg-type]
    assert DecodeParams(metric="entropy", threshold=0.0).metric is Metric.ENTROPY  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="choose one of"):
        DecodeParams(mode="fast")  # type: ignore[arg-type]


def test_the_edges_of_every_range_are_inside() -> None:
    SamplingParams(max_tokens=1, min_tokens=1, temperature=100, top_p=1, top_k=10**9, min_p=1, seed=2**63 - 1, n=64)
    SamplingParams(min_tokens=0, temperature=0, top_p=1e-9, top_k=0, min_p=0, seed=0, n=1, logprobs=0)
    SamplingParams(logprobs=20, presence_penalty=-2, frequency_penalty=2, repetition_penalty=100)
    SamplingParams(stop=("x" * 256,) * 16, stop_token_ids=frozenset({0}), logit_bias={0: -100, 1: 100})
    DecodeParams(threshold=0, block=1)
    DecodeParams(threshold=1, block=64)
    DecodeParams(metric=Metric.ENTROPY, threshold=1e6)


def test_the_defaults_are_a_greedy_request_that_follows_the_engine() -> None:
    request = Request(id="a", prompt=(1, 2))
    assert request.sampling == SamplingParams()
    assert request.sampling.temperature == 0
    assert request.decode.acceptance(0.42) == Acceptance(0.42, Metric.PROBABILITY)


def test_a_request_survives_pickling() -> None:
    sampling = SamplingParams(stop=("\n",), stop_token_ids=frozenset({4}), logit_bias={7: 1.5}, seed=3, logprobs=2)
    request = Request(id="a", prompt=(1, 2), sampling=sampling, decode=DecodeParams(mode=Mode.EXACT, block=4))
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("decode", "acceptance"),
    [
        (DecodeParams(), Acceptance(0.9, Metric.PROBABILITY)),
        (DecodeParams(threshold=0.5), Acceptance(0.5, Metric.PROBABILITY)),
        (DecodeParams(threshold=1), LOSSLESS),
        (DecodeParams(mode=Mode.AR), None),
        (DecodeParams(mode=Mode.AR, threshold=0.5), None),
        (DecodeParams(mode=Mode.EXACT), LOSSLESS),
        (DecodeParams(mode=Mode.EXACT, threshold=0.3), LOSSLESS),
        (DecodeParams(mode=Mode.EXACT, threshold=1), LOSSLESS),
        (DecodeParams(metric=Metric.ENTROPY, threshold=0), LOSSLESS),
        (DecodeParams(metric=Metric.ENTROPY, threshold=2.5), Acceptance(2.5, Metric.ENTROPY)),
        (DecodeParams(metric=Metric.MARGIN, threshold=0.4), Acceptance(0.4, Metric.MARGIN)),
        (DecodeParams(metric=Metric.MARGIN, threshold=1), LOSSLESS),
    ],
)
def test_a_threshold_that_nothing_passes_has_drafts_verified(
    decode: DecodeParams, acceptance: Acceptance | None
) -> None:
    assert decode.acceptance(0.9) == acceptance


@pytest.mark.parametrize("decode", [DecodeParams(), DecodeParams(mode=Mode.EXACT)])
def test_an_engine_threshold_of_one_is_lossless(decode: DecodeParams) -> None:
    assert decode.acceptance(1.0) == LOSSLESS
    assert LOSSLESS.threshold == 1


def test_a_floor_follows_the_engine_above_it_and_holds_below() -> None:
    decode = DecodeParams(floor=0.9)
    assert [needs and needs.threshold for needs in map(decode.acceptance, (0.95, 0.9, 0.5))] == [0.95, 0.9, 0.9]
    with pytest.raises(RequestError, match="give one of them"):
        DecodeParams(floor=0.9, threshold=0.8)
