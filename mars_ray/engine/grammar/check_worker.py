"""The process that finds out what grammars cost, for `process/grammar_checker`.

In:    the tokenizer, then {"id", "kind", "text"} a line on standard input.
Out:   {"ready": true}, then for each grammar, in any order, {"id", "bytes"}, {"id", "error"} or {"id", "killed"}.
Never: loads torch or transformers; takes more processor time or memory for a grammar than the limits below.

Each grammar is compiled in a child of its own, which the kernel kills at its limits, so none waits for another and the
tokenizer is loaded once. A second child waits for the first and says what became of it.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from mars_ray.engine.grammar.library import GrammarTokenizer, compile_grammar, mask_of, unusable
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import GrammarError

CPU_SECONDS = 1.0
"""Processor time of a grammar. A thousand optional properties take 0.1 s."""
MEMORY_BYTES = 64 << 20
"""Memory that a grammar may take. A thousand optional properties take 9 MB."""
WALL_SECONDS = 60
"""Time after which a check on a machine without a free processor is given up."""
WALK_TOKENS = 48
"""Masks computed behind the first one: some grammars are slow only there."""
NICE, SLOW_NICE = 5, 15
"""Niceness of a check, and of one that is not done after `QUICK_SECONDS`: ordinary grammars do not wait for the engine,
which has the first of these, and hostile ones do not hold it up."""
QUICK_SECONDS = 0.2

TOO_SLOW = f"it takes more than {CPU_SECONDS:g} s to compile; simplify it"
TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MiB to compile; simplify it"


def main() -> None:
    """Answer one line after the other until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children that report
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = GrammarTokenizer(**json.loads(sys.stdin.buffer.readline())).load()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is free here would hide what a grammar takes
    _say({"ready": True})
    while line := sys.stdin.buffer.readline():
        if os.fork() == 0:
            _report(json.loads(line), tokenizer)


def _report(task: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """Have a grammar checked by a child, write what became of it, and end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spec = GrammarSpec(kind=task["kind"], text=task["text"])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_cost(spec, tokenizer)).encode())
        except MemoryError:
            os.abort()
        finally:
            os._exit(0)
    os.close(writing)

    def slow_down(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, child, SLOW_NICE)

    signal.signal(signal.SIGALRM, slow_down)
    signal.setitimer(signal.ITIMER_REAL, QUICK_SECONDS)
    _, status = os.waitpid(child, 0)
    said = os.read(reading, 1 << 16)
    if said:
        _say({"id": task["id"]} | json.loads(said))
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGKILL):
        _say({"id": task["id"], "killed": True})
    else:
        slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        _say({"id": task["id"], "error": str(unusable(spec, TOO_SLOW if slow else TOO_LARGE))})
    os._exit(0)


def _cost(spec: GrammarSpec, tokenizer: LLTokenizer) -> dict[str, int | str]:
    """Return what a grammar takes, or why it cannot be used. The kernel kills this process where it takes too much."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's last words where it gets no memory
    addresses, before = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + MEMORY_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        _walk(spec, tokenizer)
    except GrammarError as error:
        return {"error": str(error)}
    return {"bytes": max(0, _memory()[1] - before)}


def _walk(spec: GrammarSpec, tokenizer: LLTokenizer) -> None:
    """Compile a grammar and follow it for some tokens, always the same. Raises `GrammarError`."""
    matcher = compile_grammar(spec, tokenizer)
    for step in range(WALK_TOKENS):
        allowed_V = mask_of(matcher, tokenizer.vocab_size)
        allowed_V[tokenizer.eos_tokens] = False
        ids = allowed_V.nonzero()[0]
        if not len(ids) or not matcher.consume_token(int(ids[step * 7919 % len(ids)])):
            break
    if matcher.is_error():
        raise unusable(spec, matcher.get_error())


def _memory() -> tuple[int, int]:
    """Return the bytes of addresses that this process has, and of memory that no file backs."""
    addresses, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return addresses * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _say(answer: dict[str, Any]) -> None:
    # One write of less than a pipe holds is never mixed with that of another process.
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
