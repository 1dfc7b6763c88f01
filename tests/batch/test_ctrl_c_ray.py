"""A job stopped by Ctrl-C keeps the rows that were finished, and the same call answers the rest."""

import json
import signal
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mars_ray.batch.output.ledger import LEDGER, rows_done
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import InterruptedRunError
from tests.factories.jobs import generate_options

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster", "sigint")]
SHORT, LONG = 4, 8
"""Rows of one token, and rows that take hundreds of steps each."""
SECONDS = 240


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_that_were_finished(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    sampling = {"ignore_eos": True}
    rows = [{"id": str(number), "prompt": "Say it.", "max_tokens": 1} for number in range(SHORT)]
    rows += [
        {"id": str(number), "prompt": "Say it.", "max_tokens": 400, "sampling": sampling}
        for number in range(SHORT, SHORT + LONG)
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    options = generate_options(source, output, sampling=SamplingParams(seed=1))
    ended = threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def press_ctrl_c() -> None:
        while not rows_done(output / LEDGER) and not ended.wait(0.02):
            pass
        if not ended.is_set():
            signal.pthread_kill(main_thread, signal.SIGINT)

    pressing = threading.Thread(target=press_ctrl_c, daemon=True)
    pressing.start()
    try:
        with pytest.raises(
            InterruptedRunError, match=r"Stopped after \d+ of 12 rows.*Run the same command to continue\."
        ):
            generate_files(options)
    finally:
        ended.set()
        pressing.join(SECONDS)
    kept = pq.read_table(output / "rows").to_pylist()
    assert 1 <= len(kept) == rows_done(output / LEDGER) < SHORT + LONG

    report = generate_files(options)
    assert (report.status, report.rows, report.runs) == ("complete", SHORT + LONG, 2)
    answered = pq.read_table(output / "rows").to_pylist()
    assert sorted(int(row["id"]) for row in answered) == list(range(SHORT + LONG))
    assert [row for row in answered if row["id"] in {row["id"] for row in kept}] == kept
