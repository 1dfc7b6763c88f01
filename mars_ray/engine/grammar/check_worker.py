"""The child process of `process/grammar_checker`, which measures the cost of grammars.

In:    It reads JSON lines from standard input: the tokenizer, then {"id", "kind", "text"} for each grammar.
Out:   It writes {"ready": true}, then for each grammar, in any order, {"id", "bytes"}, {"id", "error"} or
       {"id", "killed"}.
Never: It never loads torch or transformers, and never spends more processor time or memory on a grammar than the limits
       below.

Each grammar is compiled in its own forked child, which the kernel kills at the limits. So grammars do not wait for one
another, and the tokenizer is loaded only once. A second child waits for the first and reports the result.
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
"""Maximum processor time of a grammar. A thousand optional properties take 0.1 s."""
MEMORY_BYTES = 64 << 20
"""Maximum memory of a grammar. A thousand optional properties take 9 MB."""
WALL_SECONDS = 60
"""Maximum elapsed seconds of a check, which a check may reach on a busy machine."""
WALK_TOKENS = 48
"""Number of tokens that a check takes in a grammar, because some grammars are slow only after the first token mask."""
NICE = 5
"""Initial niceness of a check, equal to the engine's, so that ordinary grammars do not wait for the engine."""
SLOW_NICE = 15
"""Niceness of a check after `QUICK_SECONDS`, so that hostile grammars do not slow the engine down."""
QUICK_SECONDS = 0.2

TOO_SLOW = f"it takes more than {CPU_SECONDS:g} s to compile; simplify it"
TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MiB to compile; simplify it"


def main() -> None:
    """Check the grammars that arrive on standard input, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # the kernel reaps the reporting children, because nothing waits for them
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = GrammarTokenizer(**json.loads(sys.stdin.buffer.readline())).load()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # otherwise grammars would reuse freed memory, which `_cost` does not count
    _send({"ready": True})
    while line := sys.stdin.buffer.readline():
        if os.fork() == 0:
            _report(json.loads(line), tokenizer)


def _report(task: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """Check a grammar in a child process, write the result, and end the current process."""
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
    result = os.read(reading, 1 << 16)
    if result:
        _send({"id": task["id"]} | json.loads(result))
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGKILL):
        _send({"id": task["id"], "killed": True})
    else:
        slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        _send({"id": task["id"], "error": str(unusable(spec, TOO_SLOW if slow else TOO_LARGE))})
    os._exit(0)


def _cost(spec: GrammarSpec, tokenizer: LLTokenizer) -> dict[str, int | str]:
    """Return the memory that a grammar takes, or why it is refused. The kernel kills this process at the limits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the message that the library prints when memory runs out
    address_space, before = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + MEMORY_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        _walk(spec, tokenizer)
    except GrammarError as error:
        return {"error": str(error)}
    return {"bytes": max(0, _memory()[1] - before)}


def _walk(spec: GrammarSpec, tokenizer: LLTokenizer) -> None:
    """Compile a grammar and follow it for some tokens, which are the same in every run. Raises `GrammarError`."""
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
    """Return the size of the address space of this process and of its unshared resident memory, in bytes."""
    address_space, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return address_space * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _send(answer: dict[str, Any]) -> None:
    # A short write to a pipe is atomic, so the answers of several processes do not mix.
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
