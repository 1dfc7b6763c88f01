"""Measure the parts that exist once per cluster or job: their cost per replica, row and request limits the size.

    python -m benchmarks.growth --json benchmarks/results/DATE-growth.json

Every figure is processor time of one process, in microseconds, so other programs on the machine change it little. Rates
of parts that wait for a disk are measured in elapsed seconds instead. Parts are added to an existing file of results
with the same options, machine and commit.

- `controller`: handling a report, including its share of the decision made every second, by number of replicas. Every
  replica reports a different speed.
- `controller_actor`: the same in a Ray actor, including Ray and decoding the report.
- `reader`: reading a row, making its id, and looking it up among the finished rows.
- `driver`: writing a row into ledger, history and shard, from the tables that workers send.
- `gateway`: a request with an answer of 64 tokens, whole and in 16 chunks, in front of an engine that does nothing;
  includes HTTP and the access middleware.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import ray

from benchmarks.report import report_so_far
from mars_ray.batch.output.folder import open_output
from mars_ray.batch.output.ledger import Ledger
from mars_ray.batch.rows.row_ids import RowIdAssigner
from mars_ray.batch.rows.row_tables import RowResult, to_table
from mars_ray.batch.run.job import Job
from mars_ray.batch.run.placement import BLOCK_ROWS
from mars_ray.batch.run.row_store import RowStore
from mars_ray.cli.shared import write_json
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.ray_controller import ControllerActor
from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.data.input_file import InputFile
from mars_ray.engine.chunk import Chunk, Finished
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.program import run_program
from mars_ray.serve.replicas.engine_client import Take
from mars_ray.simulate.machine import read_machine

PROMPT = "Say in one word what the text is about. " + "lorem ipsum dolor sit " * 16
ANSWER = "an answer of some words " * 10


def main() -> None:
    """Measure the selected parts, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    replicas = " ".join(map(str, arguments.replicas))
    command = f"python -m benchmarks.growth --replicas {replicas} --rows {arguments.rows}"
    report = report_so_far(arguments.json, {"command": f"{command} --requests {arguments.requests}"})
    for name in arguments.parts:
        report[name] = PARTS[name](arguments)
        print(name, json.dumps(report[name]), flush=True)
    write_json(arguments.json, report)


def cost_us(work: Callable[[], Any], count: int) -> float:
    """Do the work for `count` items and return this process's processor time per item."""
    began_s = time.process_time()
    work()
    return round((time.process_time() - began_s) / count * 1e6, 1)


# The controller


def reports(replicas: int, seconds: range) -> list[list[ReplicaReport]]:
    """Return, for each second, the reports of slightly different replicas."""
    model = read_machine(None)
    draw = random.Random(0)
    times = [
        StepTime(
            **{
                field.name: getattr(model.step_time, field.name) * draw.uniform(0.95, 1.05)
                for field in fields(StepTime)
            }
        )
        for _ in range(replicas)
    ]
    profiles = [
        tuple(
            replace(point, tokens=tuple(1 + (count - 1) * share for count in point.tokens)) for point in model.profile
        )
        for share in (draw.uniform(0.95, 1.0) for _ in range(replicas))
    ]

    def state(replica: int, second: int) -> EngineState:
        classes = tuple(
            ClassState(
                name=service_class.name,
                threshold=1.0,
                running=draw.randrange(8, 12),
                waiting=0,
                arrived=4 * second,
                prompt_tokens=2000 * second,
                ended=4 * second,
                tokens=800 * second,
            )
            for service_class in ControlPlan().classes
        )
        return EngineState(
            max_num_seqs=model.max_num_seqs,
            classes=classes,
            tokens_running=0,
            kv_cache_usage=0.3,
            kv_tokens=draw.randrange(8000, 12000),
            steps=second,
            preemptions=0,
            threshold_changes=0,
            block=4,
            profile=profiles[replica],
            step_time=times[replica],
            ttft_p95_s=0.1,
            tpot_p95_s=0.01,
        )

    return [
        [
            ReplicaReport(replica=f"r{replica}", number=second, seconds=float(second), state=state(replica, second))
            for replica in range(replicas)
        ]
        for second in seconds
    ]


def controller(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the core in this process."""
    return {str(replicas): one_controller(replicas) for replicas in arguments.replicas}


def one_controller(replicas: int) -> float:
    """Return the processor time per report with `replicas` replicas."""
    now_s = 0.0
    core = Controller(ControlPlan(), clock=lambda: now_s, unix_clock=lambda: now_s)
    *warm, first, second, third = reports(replicas, range(1, 7))

    def take(all_reports: list[list[ReplicaReport]]) -> None:
        nonlocal now_s
        for reports_of_second in all_reports:
            now_s += 1
            for report in reports_of_second:
                core.handle_report(report)

    take(warm)
    return cost_us(lambda: take([first, second, third]), 3 * replicas)


def controller_actor(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the actor with ten reports of each replica, sent as fast as possible."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    try:
        figures = {}
        for replicas in arguments.replicas:
            actor = ray.remote(ControllerActor).options(num_cpus=0).remote(f"growth-{replicas}", ControlPlan(), None)
            ready, *rest = reports(replicas, range(1, 6))
            ray.get([actor.call.remote("handle_report", report) for report in ready])
            process = max(psutil.process_iter(["name"]), key=lambda process: "Controller" in process.name())
            before_s = sum(process.cpu_times()[:2])
            began_s = time.monotonic()
            for reports_of_second in rest:
                ray.get([actor.call.remote("handle_report", report) for report in reports_of_second])
            count = len(rest) * replicas
            figures[str(replicas)] = {
                "us": round((sum(process.cpu_times()[:2]) - before_s) / count * 1e6, 1),
                "reports_a_second": round(count / (time.monotonic() - began_s)),
            }
            ray.kill(actor)
        return figures
    finally:
        ray.shutdown()


# The driver of a job


def reader(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure rows with and without their own ids."""
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite", of=Path(folder), durable=True)
        for name in ("own ids", "made ids"):
            path = Path(folder) / f"{name}.jsonl"
            with path.open("w") as file:
                for number in range(arguments.rows):
                    id_fields = {"id": f"row-{number}"} if name == "own ids" else {"page": number}
                    file.write(json.dumps(id_fields | {"prompt": PROMPT, "source": "web"}) + "\n")
            with RowStore(ledger.path) as store:
                fill = partial(store.fill, [InputFile(path)], id_column="id")
                fill(limit=1024)  # leave out the cost of starting
                figures[name] = cost_us(partial(fill, limit=None), arguments.rows)
        ledger.close()
    with RowIdAssigner("id") as row_ids:
        for number in range(arguments.rows):
            row_ids.assign(b"", {"id": str(number)})
        figures["bytes of a temporary file"] = bytes_of(row_ids._seen, arguments.rows)
    return figures


def driver(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the processor time of the driver for tables of results, and its rate with waits for the disk."""
    tables = [to_table(block) for block in results(arguments.rows)]
    with TemporaryDirectory(dir=".") as folder, open_output(Path(folder) / "out", new=False) as output:
        output.begin("parquet", {"source": ["text"]})
        job = Job(output, total=arguments.rows, workers=256, settings={}, clock=time.monotonic)
        began_s = time.monotonic()
        us = cost_us(lambda: deque(map(job.add, tables), maxlen=0), arguments.rows)
        passed_s = time.monotonic() - began_s
        return {
            "us": us,
            "rows_a_second": round(arguments.rows / passed_s),
            "bytes of the ledger": bytes_of(output.ledger.connection, arguments.rows),
        }


def results(rows: int) -> Iterator[list[RowResult]]:
    """Yield blocks of results of workers."""
    record = {"sample": 0, "prompt": PROMPT, "text": ANSWER, "tokens": 60, "forwards": 12, "tokens_per_forward": 5.0}
    record |= {"threshold": 1.0, "finish_reason": "stop", "source": "web"}
    for begin in range(0, rows, BLOCK_ROWS):
        yield [
            RowResult(
                key=random.randbytes(16),
                records=(json.dumps({"id": f"row-{number}"} | record),),
                tokens=(60,),
                forwards=(12,),
                threshold=1.0,
                worker=f"worker-{begin % 256}",
                age_s=1.0,
            )
            for number in range(begin, min(begin + BLOCK_ROWS, rows))
        ]


def bytes_of(database: sqlite3.Connection, rows: int) -> int:
    """Return the size of a database per row."""
    [(pages,)] = database.execute("PRAGMA page_count")
    [(size,)] = database.execute("PRAGMA page_size")
    return round(int(pages) * int(size) / rows)


# The gateway


class _Idle:
    """An engine client whose engines answer at once."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        """Answer with 64 tokens, in 16 chunks or, for a whole answer, in one."""
        end = Finished("stop", 20, 0, 64, 16, 0.0)
        if whole:
            await take([Chunk(request.id, 0, (5,) * 64, ("word ",) * 64, finished=end, accepted_lengths=(4,) * 16)])
            return
        for number in range(16):
            last = end if number == 15 else None
            await take([Chunk(request.id, 0, (5, 6, 7, 8), ("one ", "two ", "three ", "four "), finished=last)])
            await asyncio.sleep(0)


def serve(sender: Connection) -> None:
    """Run a gateway and send its port."""
    import uvicorn

    from mars_ray.engine.process.async_engine import AsyncEngine
    from mars_ray.model.resolve import resolve_model
    from mars_ray.openai_api.model_info import ModelInfo
    from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
    from mars_ray.serve.http.endpoint import Endpoint
    from mars_ray.serve.http.gateway_app import make_gateway_app
    from mars_ray.serve.http.models import ModelClients, OneModel
    from mars_ray.serve.replicas.engine_client import LocalEngineClient
    from mars_ray.serve.replicas.engine_metrics import EngineMetrics

    async def run() -> None:
        config = parse_config(ServeConfig, {})
        folder = resolve_model("bundled")
        engine, facts = await AsyncEngine.start(config.engine_spec(folder))
        info = ModelInfo(name=config.model_name, created=1, engine=facts)
        client: Any = _Idle(LocalEngineClient(engine, info, EngineMetrics(model="bundled", replica="none")))
        unused: Any = None
        models = OneModel(ModelClients(Endpoint(client, config, folder), unused))
        app = make_gateway_app(models, config, name="growth")
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        sender.send(server.servers[0].sockets[0].getsockname()[1])
        await serving

    asyncio.run(run())


def gateway(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a gateway in its own process, and its tokenizer process."""
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,))
    process.start()
    try:
        url = f"http://127.0.0.1:{receiver.recv()}/v1/chat/completions"
        return {
            name: asyncio.run(measure_requests(url, process.pid or 0, arguments.requests, stream=name == "streamed"))
            for name in ("whole", "streamed")
        }
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.join()


async def measure_requests(url: str, pid: int, count: int, *, stream: bool) -> dict[str, float]:
    """Send requests, 16 at a time; return processor time per request, in the gateway and in its child processes."""
    import aiohttp

    body = {"model": "bundled", "stream": stream, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64}

    async def send(session: aiohttp.ClientSession, many: int) -> None:
        for _ in range(many):
            async with session.post(url, json=body) as answer:
                answer.raise_for_status()
                await answer.read()

    async with aiohttp.ClientSession() as session:
        await send(session, 20)
        before = processor_seconds(pid)
        await asyncio.gather(*(send(session, count // 16) for _ in range(16)))
        after = processor_seconds(pid)
    return {name: round((after[name] - before[name]) / (count // 16 * 16) * 1e6, 1) for name in before}


def processor_seconds(pid: int) -> dict[str, float]:
    """Return the processor time of a gateway, and of its child processes."""
    process = psutil.Process(pid)
    child_times = [child.cpu_times() for child in process.children(recursive=True)]
    return {"us": sum(process.cpu_times()[:2]), "us beside": sum(times.user + times.system for times in child_times)}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    part.__name__: part for part in (controller, controller_actor, reader, driver, gateway)
}

if __name__ == "__main__":
    run_program("benchmarks.growth", main)
