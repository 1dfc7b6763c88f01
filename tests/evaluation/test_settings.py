"""The ways of decoding that are compared."""

import pytest

from mars_ray.engine.mode import Mode
from mars_ray.errors import ConfigError, ModelError
from mars_ray.evaluation.settings import block_of, settings_of
from mars_ray.model.card import Card, read_card
from mars_ray.model.resolve import resolve_model


def card() -> Card:
    found = read_card(resolve_model("bundled"))
    assert found is not None
    return found


def test_autoregressive_decoding_is_always_first() -> None:
    names = [each.name for each in settings_of(["threshold", "exact"], [0.6, 1.0, 0.6, 0.99])]
    assert names == ["ar", "exact", "threshold 1", "threshold 0.99", "threshold 0.6"]
    assert [each.name for each in settings_of([], [])] == ["ar"]


def test_thresholds_that_differ_have_names_that_differ() -> None:
    assert len({each.name for each in settings_of(["threshold"], [0.9999999, 1.0])}) == 3


def test_by_the_clock_the_engine_chooses_how_far_to_look_ahead() -> None:
    for setting in settings_of(["ar", "exact", "threshold"], [0.9]):
        assert (setting.decode.mode, setting.decode.block) == (setting.mode, None)
        assert setting.decode.threshold is not None


@pytest.mark.parametrize(
    ("modes", "thresholds", "message"),
    [
        (["thrshold"], [0.9], "unknown mode 'thrshold'.*Did you mean 'threshold'"),
        (["threshold"], [1.5], "threshold is 1.5"),
        (["threshold"], [float("nan")], "threshold is nan"),
        (["threshold"], [], "at least one threshold"),
    ],
)
def test_what_is_no_setting_is_named(modes: list[str], thresholds: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(modes, thresholds)


def test_the_block_is_that_of_the_card_whether_it_is_calibrated_or_not() -> None:
    settings = settings_of(["threshold"], [0.9])
    assert block_of(card(), "m", settings) == 16
    assert block_of(card().model_copy(update={"calibration": ()}), "m", settings) == 16


def test_a_block_may_be_smaller_than_that_of_the_card_but_not_larger() -> None:
    settings = settings_of(["threshold"], [0.9])
    assert block_of(card(), "m", settings, 4) == 4
    with pytest.raises(ConfigError, match="block is 17; m was trained with 16"):
        block_of(card(), "m", settings, 17)


def test_a_model_that_was_not_trained_to_look_ahead_is_evaluated_without_thresholds() -> None:
    plain = card().model_copy(update={"method": "ar", "block": None})
    for found, why in ((plain, "names no block"), (None, "has no mars.json")):
        with pytest.raises(ModelError, match=f"m was not trained to look ahead .*{why}.*--modes ar,exact"):
            block_of(found, "m", settings_of(["threshold"], [0.9]))
        assert block_of(found, "m", settings_of([Mode.AR, Mode.EXACT], [])) == 1
        with pytest.raises(ConfigError, match="block is 4; m does not look ahead"):
            block_of(found, "m", settings_of([Mode.EXACT], []), 4)
