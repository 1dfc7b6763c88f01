import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mars_ray.errors import ModelError, OutputError
from mars_ray.model.card import CARD_FILE, Card, library_versions, read_card, write_card


def changed(card: Card, **changes: Any) -> str:
    return json.dumps(json.loads(card.model_dump_json()) | changes)


def test_a_card_survives_the_file(tmp_path: Path, mars_card: Card) -> None:
    write_card(mars_card, tmp_path)
    assert read_card(tmp_path) == mars_card
    assert [path.name for path in tmp_path.iterdir()] == [CARD_FILE]


def test_a_folder_without_a_card_has_none(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None


def test_a_second_write_replaces_the_first(tmp_path: Path, mars_card: Card) -> None:
    write_card(mars_card, tmp_path)
    write_card(mars_card.model_copy(update={"steps": 9}), tmp_path)
    card = read_card(tmp_path)
    assert card is not None
    assert card.steps == 9


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"surprise": 1}, "surprise is not a setting"),
        ({"method": "jacobi"}, "method is .jacobi., must be"),
        ({"block": 0}, "block is 0, must be"),
        ({"block": None}, 'card: .*"mars" needs a block'),
        ({"calibration": [{"threshold": 0.5}]}, r"calibration.0.tokens_per_forward is missing"),
    ],
)
def test_an_invalid_card_is_refused_with_the_reason(
    tmp_path: Path, mars_card: Card, changes: dict[str, Any], reason: str
) -> None:
    (tmp_path / CARD_FILE).write_text(changed(mars_card, **changes))
    with pytest.raises(ModelError, match=reason):
        read_card(tmp_path)


def test_a_card_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_bytes(b"\xff{")
    with pytest.raises(ModelError, match="not a valid card: Invalid JSON"):
        read_card(tmp_path)


def test_an_autoregressive_card_needs_no_block(tmp_path: Path, mars_card: Card) -> None:
    fields = mars_card.model_dump() | {"method": "ar", "block": None, "objective": {}}
    card = Card.model_validate(fields)
    write_card(card, tmp_path)
    assert read_card(tmp_path) == card


def test_a_number_that_is_not_finite_is_no_result(mars_card: Card) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Card.model_validate(mars_card.model_dump() | {"losses": {"mask": float("nan")}})


def test_a_card_cannot_be_changed(mars_card: Card) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        mars_card.steps = 5  # type: ignore[misc]


def test_a_folder_that_cannot_be_written_to_is_an_output_error(tmp_path: Path, mars_card: Card) -> None:
    with pytest.raises(OutputError, match=CARD_FILE):
        write_card(mars_card, tmp_path / "missing")


def test_a_failed_write_leaves_the_old_card(tmp_path: Path, mars_card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    write_card(mars_card, tmp_path)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError, match="disk full"):
        write_card(mars_card.model_copy(update={"steps": 9}), tmp_path)
    assert read_card(tmp_path) == mars_card
    assert [path.name for path in tmp_path.iterdir()] == [CARD_FILE]


def test_the_versions_that_decide_the_numbers_are_known() -> None:
    versions = library_versions()
    assert set(versions) == {"torch", "transformers", "mars-ray", "python"}
    assert versions["transformers"].startswith("5.")
