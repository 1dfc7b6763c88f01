"""Compare routers on conversations of several turns, with real engines behind a real endpoint.

    python -m benchmarks.routing --model smollm2 --prompts val.jsonl.gz --json benchmarks/results/DATE-routing.json

Conversations begin at random times with one of a few long system prompts, the first of which is the most frequent. A
user answers some seconds after an answer has ended. Each router gets the same conversations in each round, on an
endpoint of its own; nothing else may run meanwhile. Measured are the share of prompt tokens that an engine had in its
cache, and the time to the first token, by the client.

`ours` is the router of the package. `load` takes the less loaded of two replicas, which is Serve's default. `start` and
`session` are ours with one of its two keys alone. `hash` and `prefix` are Ray's `ConsistentHashRouter` and
`PrefixCacheAffinityRouter`; the former gets our key as the id of the session. Ray's `KVAwareRouter` needs events of
vLLM's cache and NVIDIA Dynamo, so it cannot run here.
"""

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from benchmarks.served import URL, endpoint
from mars_ray.data.prompt_file import read_prompts
from mars_ray.engine.request import Request
from mars_ray.load.plan import Texts, bundled_prompts
from mars_ray.program import run_program
from mars_ray.serve.ray.app import PrefixRouter

ROUTERS: dict[str, dict[str, Any]] = {
    "ours": {"request_router_class": "mars_ray.serve.ray.app:PrefixRouter"},
    "load": {"request_router_class": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"},
    "start": {"request_router_class": "benchmarks.routing:StartRouter"},
    "session": {"request_router_class": "benchmarks.routing:TurnsRouter"},
    "hash": {"request_router_class": "benchmarks.routing:SessionRouter"},
    "prefix": {
        "request_router_class": "benchmarks.routing:TextRouter",
        "request_router_kwargs": {"imbalanced_threshold": 5},
    },
}
SYSTEM_PROMPTS = 6


class StartRouter(PrefixRouter):
    """Prefers the replica of the first tokens of the prompt alone."""

    def keys_of(self, request: Request) -> list[str]:
        """Return the key of the request."""
        return super().keys_of(request)[:1]


class TurnsRouter(PrefixRouter):
    """Prefers the replica of the session alone."""

    def keys_of(self, request: Request) -> list[str]:
        """Return the key of the request."""
        return super().keys_of(request)[1:]


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Ray's router by session, which takes our key of the request as its id."""

    def _routing_key(self, pending_request: PendingRequest | None) -> str | None:
        request = _request(pending_request)
        key: str | None = request.session if request else super()._routing_key(pending_request)
        return key


class TextRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router by text, which takes each token for one character."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        request = _request(pending_request)
        return "".join(chr(0x10000 + token) for token in request.prompt) if request else "-"


def _request(pending_request: PendingRequest | None) -> Request | None:
    first = next(iter(pending_request.args), None) if pending_request else None
    return first if isinstance(first, Request) else None


@dataclass(frozen=True, slots=True)
class Turn:
    """What the client saw of a turn."""

    number: int
    """Number of the turn in its conversation, from 0."""
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A planned conversation."""

    start_s: float
    system: str
    questions: tuple[str, ...]
    pauses_s: tuple[float, ...]
    """Seconds between an answer and the next question."""


def main() -> None:
    """Run all routers in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--prompts", type=Path, default=bundled_prompts())
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.5, help="new conversations per second")
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between an answer and the next question")
    parser.add_argument("--system-words", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--router", action="append", choices=ROUTERS, help="repeatable; all without it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)  # Ray's libraries log each request of the clients
    turns: dict[str, list[list[Turn]]] = {name: [] for name in arguments.router or ROUTERS}
    for number in range(arguments.rounds):
        planned = plan(arguments, number)
        for name, rounds in turns.items():
            with routed(arguments, ROUTERS[name]):
                rounds.append(asyncio.run(talk(planned, arguments.max_tokens)))
            show(turns)
    report = {
        "routers": {name: figures(rounds) for name, rounds in turns.items()},
        "turns": {name: [[asdict(turn) for turn in seen] for seen in rounds] for name, rounds in turns.items()},
    }
    write_report(arguments.json, report)


def plan(arguments: argparse.Namespace, seed: int) -> list[Conversation]:
    """Return the conversations of a round."""
    drawn = random.Random(seed)
    texts = Texts(read_prompts(arguments.prompts), drawn)
    systems = [texts.of(arguments.system_words) for _ in range(SYSTEM_PROMPTS)]
    start_s = 0.0
    planned = []
    for _ in range(arguments.conversations):
        start_s += drawn.expovariate(arguments.rate)
        [system] = drawn.choices(systems, [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)])
        questions = tuple(texts.of(drawn.randint(10, 60)) for _ in range(arguments.turns))
        pauses_s = tuple(drawn.expovariate(1 / arguments.pause) for _ in questions)
        planned.append(Conversation(start_s, system, questions, pauses_s))
    return planned


def routed(arguments: argparse.Namespace, router: dict[str, Any]) -> AbstractContextManager[None]:
    """Return an endpoint with engines of one thread behind this router."""
    args = {
        "model": arguments.model,
        "threshold": 1.0,
        "control": {"policy": "fixed"},
        "engine": {"threads": 1, "quantize": arguments.quantize, "max_num_seqs": 8},
        "limits": {"requests": 512, "requests_per_key": 512},
    }
    engine = {"num_replicas": arguments.replicas, "request_router_config": router}
    return endpoint(args, engine | {"ray_actor_options": {"num_cpus": 0.1}})


async def talk(planned: Sequence[Conversation], max_tokens: int) -> list[Turn]:
    """Hold all conversations; return their turns."""
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", timeout=300, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        held = await asyncio.gather(*(hold(client, model, conversation, max_tokens) for conversation in planned))
    return [turn for turns in held for turn in turns]


async def hold(client: openai.AsyncOpenAI, model: str, conversation: Conversation, max_tokens: int) -> list[Turn]:
    """Hold one conversation."""
    await asyncio.sleep(conversation.start_s)
    messages: list[Any] = [{"role": "system", "content": conversation.system}]
    turns = []
    for number, (question, pause_s) in enumerate(zip(conversation.questions, conversation.pauses_s, strict=True)):
        messages.append({"role": "user", "content": question})
        sent_s = time.perf_counter()
        ttft_s = None
        text = ""
        usage = None
        async for event in await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if event.choices and event.choices[0].delta.content:
                ttft_s = ttft_s or time.perf_counter() - sent_s
                text += event.choices[0].delta.content
            usage = event.usage or usage
        assert usage
        details = usage.prompt_tokens_details
        cached = (details and details.cached_tokens) or 0
        turns.append(Turn(number, ttft_s or time.perf_counter() - sent_s, usage.prompt_tokens, cached))
        messages.append({"role": "assistant", "content": text or "-"})
        await asyncio.sleep(pause_s)
    return turns


def figures(rounds: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """Return what all rounds say about a router: medians over rounds, and the figures of each."""
    each = [
        {
            "cached": sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
            "ttft_p50_s": float(np.percentile([turn.ttft_s for turn in turns], 50)),
            "ttft_p95_s": float(np.percentile([turn.ttft_s for turn in turns], 95)),
        }
        for turns in rounds
    ]
    return {"rounds": each} | {name: statistics.median(one[name] for one in each) for name in each[0]}


def show(turns: dict[str, list[list[Turn]]]) -> None:
    """Print a table of the routers."""
    table = Table("router", "prompt tokens cached", "TTFT p50, ms", "TTFT p95, ms", "rounds", "p95 of each round")
    for name, rounds in turns.items():
        if rounds:
            of = figures(rounds)
            table.add_row(
                name,
                f"{100 * of['cached']:.1f} %",
                f"{1000 * of['ttft_p50_s']:.0f}",
                f"{1000 * of['ttft_p95_s']:.0f}",
                str(len(rounds)),
                " ".join(f"{1000 * one['ttft_p95_s']:.0f}" for one in of["rounds"]),
            )
    Console().print(table)


if __name__ == "__main__":
    run_program("benchmarks.routing", main)
