"""Metrics of what surrounds the core."""

import asyncio
import threading
from pathlib import Path

import pytest

from mars_ray.errors import UnavailableError
from mars_ray.platform import gateway
from mars_ray.platform.batches.batch_store import STALE_S, BatchFigures, BatchStore
from mars_ray.platform.batches.file_store import FileStore
from mars_ray.platform.batches.protocol import StorageLimits
from mars_ray.platform.batches.storage_paths import BatchFolders
from mars_ray.platform.gateway import FiguresReader, PlatformMetrics
from mars_ray.serve.http.gateway_metrics import merge_metrics
from tests.factories.clock import Clock
from tests.serve.test_metrics import samples, total


def batches_in(folder: Path) -> BatchStore:
    folders = BatchFolders(folder)
    return BatchStore(folders, FileStore(folders, StorageLimits()), StorageLimits())


def test_figures_of_batches_are_those_of_the_endpoint_and_vanish_with_their_runner(tmp_path: Path) -> None:
    batches = batches_in(tmp_path)
    assert batches.figures(1000.0) is None
    batches.write_figures(
        BatchFigures(
            unix_s=1000.0,
            unfinished={"waiting": 2, "in_progress": 1},
            rows_left=70,
            deadline_unix_s=4600.0,
            ended={"completed": 3},
            rows={"completed": 30, "failed": 1},
            file_bytes=99,
        )
    )
    moments = (("f", 1001.0), ("g", 1001.0), ("f", 1000.0 + STALE_S))
    texts = [PlatformMetrics(model="m", gateway=name).text(None, batches.figures(now_s)) for name, now_s in moments]
    pages = [samples(merge_metrics([text])[0].decode()) for text in texts]
    shown = [{sample: value for sample, value in page.items() if "batch" in sample[0]} for page in pages]
    assert shown[0] == shown[1], "every gateway shows the same samples"
    assert total(shown[0], "mars:batches", status="waiting") == 2
    assert total(shown[0], "mars:batches_ended", status="completed") == 3
    assert total(shown[0], "mars:batch_rows", outcome="failed") == 1
    assert total(shown[0], "mars:batch_rows_left") == 70
    assert total(shown[0], "mars:batch_deadline_timestamp_seconds") == 4600
    assert total(shown[0], "mars:batch_file_bytes") == 99
    assert shown[2] == {}


def test_while_a_read_of_the_figures_hangs_scrapes_show_the_last_ones_until_they_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "FIGURES_S", 0.01)
    batches = batches_in(tmp_path)
    written = BatchFigures(unix_s=1000.0, rows_left=70)
    batches.write_figures(written)
    clock = Clock(1001.0)
    reads = 0
    go_on = threading.Event()

    def hanging(_now_s: float) -> BatchFigures | None:
        nonlocal reads
        reads += 1
        go_on.wait(60)
        raise UnavailableError("the storage does not answer.")

    async def run() -> None:
        reader = FiguresReader(batches, clock)
        while await reader.newest() != written:
            pass
        monkeypatch.setattr(batches, "figures", hanging)
        try:
            assert [await reader.newest() for _ in range(3)] == [written] * 3
            clock.now_s = 1000.0 + STALE_S
            assert await reader.newest() is None
            assert reads <= 1, "the others wait for it"
        finally:
            go_on.set()

    asyncio.run(run())
