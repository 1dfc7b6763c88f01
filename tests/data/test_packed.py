import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data import packed
from mars_ray.data.packed import PackedData, PackedWriter, read_report
from mars_ray.data.packing import PackedRow, Packer
from mars_ray.errors import DataError, EmptyDataError, OutputError
from mars_ray.method.streams import PADDING
from tests.data.data_samples import example
from tests.factories.token_rows import pack_report


def write(folder: Path, rows: list[PackedRow], length: int) -> Path:
    with PackedWriter(folder, length) as writer:
        writer.write(rows)
        writer.close(pack_report(rows=writer.rows, length=length))
    return folder


def some_rows(count: int, length: int = 6) -> list[PackedRow]:
    packer = Packer(length)
    rows = [row for n in range(count) for row in packer.add(example([n] * (length - 1), prompt=2))]
    return rows + packer.finish()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_what_is_written_is_read_back_with_positions_that_restart(
    lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    packer, tokens = Packer(9), iter(range(1000))
    examples = [example([next(tokens) for _ in range(size)], prompt=size // 2) for size in lengths]
    rows = [row for each in examples for row in packer.add(each)] + packer.finish()
    data = PackedData(write(tmp_path_factory.mktemp("packed"), rows, 9))
    read = data.rows(range(len(data)))
    assert len(data) == len(rows)
    for r, row in enumerate(rows):
        start = 0
        for e, each in enumerate(row.examples):
            place = slice(start, start + len(each.tokens))
            assert read.tokens_RT[r, place].tolist() == each.tokens.tolist()
            assert read.response_RT[r, place].tolist() == each.response.tolist()
            assert read.example_RT[r, place].tolist() == [e] * len(each.tokens)
            assert read.position_RT[r, place].tolist() == list(range(len(each.tokens)))
            start += len(each.tokens)
        assert (read.example_RT[r, start:] == PADDING).all()
        assert not read.response_RT[r, start:].any()


def test_rows_come_in_the_order_asked_for_and_may_be_changed(tmp_path: Path) -> None:
    data = PackedData(write(tmp_path, some_rows(5), 6))
    read = data.rows([3, 0, 3])
    assert read.tokens_RT[:, 0].tolist() == [3, 0, 3]
    assert {getattr(read, name).dtype for name in ("tokens_RT", "example_RT", "position_RT")} == {torch.int64}
    read.tokens_RT[:] = 9
    assert data.rows([3]).tokens_RT[0, 0] == 3


def test_rows_that_fill_several_groups_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS_PER_GROUP", 4)
    data = PackedData(write(tmp_path, some_rows(11), 6))
    assert pq.read_metadata(tmp_path / "rows.parquet").num_row_groups == 3
    assert data.rows(range(11)).tokens_RT[:, 0].tolist() == list(range(11))


def test_a_row_longer_than_16_bit_numbers_holds_an_example_per_token(tmp_path: Path) -> None:
    length = (1 << 15) + 5
    row = PackedRow([example([7]) for _ in range(length)], length)
    read = PackedData(write(tmp_path, [row], length)).rows([0])
    assert read.example_RT.tolist() == [list(range(length))]


def test_a_folder_is_complete_only_with_its_report(tmp_path: Path) -> None:
    writer = PackedWriter(tmp_path, 6)
    writer.write(some_rows(3))
    assert read_report(tmp_path) is None
    with pytest.raises(DataError, match="no packed data"):
        PackedData(tmp_path)
    writer.close(pack_report(rows=3, length=6))
    assert read_report(tmp_path) == pack_report(rows=3, length=6)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["packed.json", "rows.parquet"]


def test_starting_again_takes_the_old_report_away_before_a_row_is_written(tmp_path: Path) -> None:
    write(tmp_path, some_rows(3), 6)
    with pytest.raises(ZeroDivisionError), PackedWriter(tmp_path, 6):
        assert read_report(tmp_path) is None
        raise ZeroDivisionError  # as a kill would
    assert len(PackedData(write(tmp_path, some_rows(2), 6))) == 2


def test_a_folder_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        PackedWriter(tmp_path / "file" / "data", 6)


def test_no_rows_are_an_empty_data_error(tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match="no packed row"):
        PackedData(write(tmp_path, [], 6))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": 3}', '{"more": 1}', "\x00"])
def test_a_report_of_another_kind_is_a_data_error_with_the_remedy(content: str, tmp_path: Path) -> None:
    write(tmp_path, some_rows(1), 6)
    (tmp_path / "packed.json").write_text(content)
    with pytest.raises(DataError, match="prepare again"):
        read_report(tmp_path)


def test_damaged_rows_are_a_data_error_with_the_remedy(tmp_path: Path) -> None:
    rows = write(tmp_path, some_rows(30), 6) / "rows.parquet"
    whole = rows.read_bytes()
    for damaged in (b"", whole[:-9], b"PAR1" + whole, whole[:40] + bytes(40) + whole[80:]):
        rows.write_bytes(damaged)
        with pytest.raises(DataError, match=r"damaged.*prepare again"):
            PackedData(tmp_path)
    rows.unlink()
    with pytest.raises(DataError, match="damaged"):
        PackedData(tmp_path)
    pq.write_table(pa.table({"tokens": [1] * 30}), rows)
    with pytest.raises(DataError, match="damaged"):
        PackedData(tmp_path)


def test_rows_that_the_report_does_not_describe_are_a_data_error(tmp_path: Path) -> None:
    write(tmp_path, some_rows(3), 6)
    fields = json.loads((tmp_path / "packed.json").read_text())
    for change in ({"rows": 4}, {"length": 7}):
        (tmp_path / "packed.json").write_text(json.dumps(fields | change))
        with pytest.raises(DataError, match="damaged"):
            PackedData(tmp_path)
