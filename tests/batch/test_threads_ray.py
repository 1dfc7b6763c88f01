"""The CPUs that the engine of a job has, on a cluster of two."""

import os
import pickle

import pytest
import ray

from mars_ray.batch.ray.decoder_pool import choose_places, pool_settings, start_decoders
from mars_ray.batch.rows.plain_format import PlainFormatSettings
from mars_ray.batch.rows.row_tables import to_row_table
from mars_ray.batch.run import engine_plan
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.engine.request import DecodeParams, SamplingParams
from tests.factories.engine import engine_processes
from tests.factories.jobs import engines_of

FORMAT = PlainFormatSettings(sampling=SamplingParams(), decode=DecodeParams())

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.slow
def test_a_job_that_says_nothing_of_cpus_decodes_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_plan, "suitable_threads", lambda parameters: 3)  # as for 135 million parameters
    engines = engines_of(WorkerOptions())
    [place] = choose_places(engines, rows=1000)
    settings = pool_settings(engines, (place,))
    [decoder] = start_decoders(settings, "threads")
    try:
        nothing = decoder.answer.remote(to_row_table([], []), pickle.dumps((FORMAT, engines.model)))
        assert ray.get(nothing).num_rows == 0  # the engine is up
        pid = ray.get(decoder.__ray_call__.remote(lambda _: os.getpid()))
        [(_, spec)] = settings.places
        assert (place.cpus, spec.threads, len(engine_processes(pid))) == (2.0, 2, 1)
    finally:
        ray.kill(decoder)
