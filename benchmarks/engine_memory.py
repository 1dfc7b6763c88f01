"""Measure the memory of an engine and of its tokenizer process over rounds of unusual requests.

    python -m benchmarks.engine_memory --json benchmarks/results/DATE-engine-memory.json

Every round has the same kinds of requests, but no two equal ones: answers as long as the model allows, answers with a
schema, several answers with stop strings and log-probabilities, and cancelled requests. The engine's caches are full
after the first rounds; memory that grows later is a leak. Memory is the private memory of a process (RssAnon in /proc)
at the end of a round.
"""

import argparse
import asyncio
import json
import random
import re
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import machine
from mars_ray.model.resolve import resolve_model
from mars_ray.serve.http.tokenizer_process import TokenizerProcess

TOGETHER = 32
ENGINE, TOKENIZER = "mars-ray-engine", "mars_ray.serve.http.tokenizer_worker"
"""Requests in flight."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request and its share of a round."""

    name: str
    share: float
    cancelled: bool = False


KINDS = (Kind("long", 0.04), Kind("schema", 0.4), Kind("several", 0.16), Kind("cancelled", 0.4, cancelled=True))


def sampling_of(kind: str, dice: random.Random) -> SamplingParams:
    """Return the sampling parameters of a kind of request; random parts make them unique."""
    match kind:
        case "long":
            return SamplingParams(max_tokens=2048, ignore_eos=True, temperature=0.0)
        case "schema":
            schema = json.dumps({"type": "object", "properties": _properties(dice), "additionalProperties": False})
            return SamplingParams(max_tokens=64, grammar=GrammarSpec(kind="json_schema", text=schema))
        case "several":
            stop = tuple(f"{dice.randrange(10**9)}" for _ in range(4))
            return SamplingParams(max_tokens=32, n=2, stop=stop, logprobs=20, presence_penalty=1.0, ignore_eos=True)
    return SamplingParams(max_tokens=512, ignore_eos=True)


def _properties(dice: random.Random) -> dict[str, Any]:
    """Return uniquely named fields, some with a pattern, a choice or a list."""
    types: list[Any] = [
        {"type": "string", "pattern": f"^[a-z]{{1,{dice.randrange(3, 40)}}}$"},
        {"type": "integer"},
        {"enum": [f"v{dice.randrange(10**6)}" for _ in range(20)]},
        {"type": "array", "items": {"type": "number"}, "maxItems": dice.randrange(2, 20)},
    ]
    return {f"field_{dice.randrange(10**9)}": dice.choice(types) for _ in range(dice.randrange(2, 24))}


async def one_round(engine: AsyncEngine, tokenizer: TokenizerProcess, number: int, requests: int) -> None:
    """Send the requests of a round and wait for all answers."""
    dice = random.Random(number)
    slots = asyncio.Semaphore(TOGETHER)

    async def send(kind: Kind, index: int) -> None:
        async with slots:
            text = " ".join(f"{dice.randrange(10**6)}" for _ in range(dice.randrange(1, 60)))
            [prompt] = await tokenizer.encode([text])
            request = Request(
                id=f"{number}-{kind.name}-{index}",
                prompt=tuple(prompt[:1500]),
                sampling=sampling_of(kind.name, dice),
                decode=DecodeParams(),
            )
            async with aclosing(engine.generate(request)) as chunks:
                chunks_left = dice.randrange(1, 6)
                async for _ in chunks:
                    chunks_left -= kind.cancelled
                    if not chunks_left:
                        break

    kinds = [kind for kind in KINDS for _ in range(round(requests * kind.share))]
    dice.shuffle(kinds)
    await asyncio.gather(*(send(kind, index) for index, kind in enumerate(kinds)))


def own_mib(process: psutil.Process) -> float:
    """Return the private memory of a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert match is not None
    return round(int(match[1]) / 1024, 1)


async def measure(rounds: int, requests: int) -> list[dict[str, float]]:
    """Return the memory before the first round and after each round."""
    folder = resolve_model("bundled")
    spec = EngineSpec(folder=folder, dtype="float32", threads=2, options=EngineOptions())
    engine, _ = await AsyncEngine.start(spec)
    tokenizer = TokenizerProcess(folder)
    await tokenizer.start()
    children = {
        "engine" if child.name() == ENGINE else "tokenizer": child
        for child in psutil.Process().children(recursive=True)
        if child.name() == ENGINE or TOKENIZER in child.cmdline()
    }
    memory = []
    try:
        for number in range(rounds + 1):
            began_s = time.monotonic()
            if number:
                await one_round(engine, tokenizer, number, requests)
            memory.append({name: own_mib(child) for name, child in children.items()})
            memory[-1]["seconds"] = round(time.monotonic() - began_s, 1)
            Console(stderr=True).print(number, memory[-1])
    finally:
        await engine.close()
        await tokenizer.close()
    return memory


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory = asyncio.run(measure(options.rounds, options.requests))
    if options.json:
        report = {"machine": machine(), "rounds": options.rounds, "requests": options.requests, "mib": memory}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
