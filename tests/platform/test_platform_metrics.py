"""Metrics of what surrounds the core."""

from pathlib import Path

from mars_ray.platform.batches.batch_store import STALE_S, BatchFigures, BatchStore
from mars_ray.platform.batches.file_store import FileStore
from mars_ray.platform.batches.protocol import StorageLimits
from mars_ray.platform.batches.storage_paths import BatchFolders
from mars_ray.platform.gateway import PlatformMetrics
from mars_ray.serve.http.gateway_metrics import merge_metrics
from tests.serve.test_metrics import samples, total


def test_figures_of_batches_are_those_of_the_endpoint_and_vanish_with_their_runner(tmp_path: Path) -> None:
    folders = BatchFolders(tmp_path)
    batches = BatchStore(folders, FileStore(folders, StorageLimits()), StorageLimits())
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
