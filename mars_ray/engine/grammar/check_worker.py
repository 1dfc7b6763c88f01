"""The child process of `process/grammar_checker`, which measures the cost of grammars.

In:    the tokenizer, then {"id", "kind", "text"} a line on standard input.
Out:   {"ready": true}, then for each grammar, in any order, {"id", "bytes"}, {"id", "error"} or {"id", "killed"}.
Never: loads torch or transformers; takes more processor time or memory for a grammar than the limits below.

Each grammar is compiled in its own child, which the kernel kills at the limits below, so that grammars do not wait for
one another and the tokenizer is loaded once. A second child waits for the first and reports the result.
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
"""Limit of processor time for a grammar. A thousand optional properties take 0.1 s."""
MEMORY_BYTES = 64 << 20
"""Limit of memory for a grammar. A thousand optional properties take 9 MB."""
WALL_SECONDS = 60
"""Limit of elapsed time for a check, which a busy machine may reach."""
WALK_TOKENS = 48
"""Number of further token masks computed, because some grammars are slow only after the first one."""
NICE, SLOW_NICE = 5, 15
"""Niceness of a check at first, equal to the engine's, and after `QUICK_SECONDS`. So ordinary grammars need not wait
for the engine, and hostile ones do not slow it down."""
QUICK_SECONDS = 0.2

TOO_SLOW = f"it takes more than {CPU_SECONDS:g} s to compile; simplify it"
TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MiB to compile; simplify it"


def main() -> None:
    """Check the grammars on standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the reporting children
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = GrammarTokenizer(**json.loads(sys.stdin.buffer.readline())).load()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # free memory would hide the memory of a grammar
    _send({"ready": True})
    while line := sys.stdin.buffer.readline():
        if os.fork() == 0:
            _report(json.loads(line), tokenizer)


def _report(task: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """Check a grammar in a child, write the result, and end this process."""
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
    """Return the bytes of a grammar, or the reason for a refusal. The kernel kills this process at the limits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the library's message when memory runs out
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
    """Compile a grammar and follow it for some tokens, the same in every run. Raises `GrammarError`."""
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
    """Return the bytes of this process's address space, and of its resident memory without shared pages."""
    addresses, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return addresses * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _send(answer: dict[str, Any]) -> None:
    # One short write to a pipe is atomic, so answers of several processes do not mix.
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
