"""Metrics of what surrounds the core."""

from pathlib import Path

from mars_ray.platform.batches.batch_figures import STALE_S, BatchFigures, FiguresFile
from mars_ray.platform.batches.storage_paths import BatchFolders
from mars_ray.platform.metrics import PlatformMetrics
from mars_ray.serve.http.gateway_metrics import merge_metrics
from tests.serve.test_metrics import samples, total


def test_figures_of_batches_are_those_of_the_endpoint_and_vanish_with_their_runner(tmp_path: Path) -> None:
    file = FiguresFile(BatchFolders(tmp_path))
    assert file.read(1000.0) is None
    file.write(
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
    pages = [
        samples(merge_metrics([PlatformMetrics(model="m", gateway=name).text(None, file.read(now_s))])[0].decode())
        for name, now_s in (("f", 1001.0), ("g", 1001.0), ("f", 1000.0 + STALE_S))
    ]
    shown = [{sample: value for sample, value in page.items() if "batch" in sample[0]} for page in pages]
    assert shown[0] == shown[1], "every gateway shows the same samples"
    assert total(shown[0], "mars:batches", status="waiting") == 2
    assert total(shown[0], "mars:batches_ended", status="completed") == 3
    assert total(shown[0], "mars:batch_rows", outcome="failed") == 1
    assert total(shown[0], "mars:batch_rows_left") == 70
    assert total(shown[0], "mars:batch_deadline_timestamp_seconds") == 4600
    assert total(shown[0], "mars:batch_file_bytes") == 99
    assert shown[2] == {}
