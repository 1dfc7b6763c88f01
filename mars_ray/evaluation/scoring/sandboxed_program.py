"""What runs in the sandbox: a judge with the tests, and a process of its own for the answer (see `code_check`).

    python -I -c THIS_FILE LIMITS PASSED STARTED

In:    limits of resources, the exit code of an answer that passes and the word that says the sandbox is up; on standard
       input what `program_of` makes.
Out:   the exit code.
Never: lets the answer into the process that judges. Only plain values come out of it, so that an answer passes neither
       by an exit code nor by objects that are equal to everything.

Only the standard library is here.
"""

import builtins
import ctypes
import json
import os
import resource
import sys
import types
from typing import IO, Any

JOIN_SESSION_KEYRING, SET_DUMPABLE = 1, 4
KEYCTL = {"x86_64": 250, "aarch64": 219}
"""Number of the system call by processor."""
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def main() -> None:
    """Judge an answer."""
    limits, passed, started = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    libc = ctypes.CDLL(None)
    # Keys of whoever evaluates are in the keyring of his session. Where this call is forbidden, reading them is, too.
    libc.syscall(KEYCTL[os.uname().machine], JOIN_SESSION_KEYRING, None)
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # or the answer could attach itself to the judge
    os.write(2, started.encode())
    os.dup2(1, 2)
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    child = os.fork()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if child == 0:
        for each in (0, asks, answered):
            os.close(each)
        answer_calls(os.fdopen(asked), os.fdopen(answers, "w"))
    for each in (asked, answers):
        os.close(each)
    judge(json.load(sys.stdin), os.fdopen(asks, "w"), os.fdopen(answered))
    os._exit(passed)


def answer_calls(asked: IO[str], answers: IO[str]) -> None:
    """Define the answer, and call its function as often as the judge asks."""
    program = json.loads(asked.readline())
    answer = sys.modules["answer"] = types.ModuleType("answer")
    for piece in program["answer"]:
        exec(compile(piece, "<answer>", "exec"), answer.__dict__)
    for line in asked:
        try:
            args, kwargs = decoded(json.loads(line))
            said = {"value": encoded(answer.__dict__[program["entry_point"]](*args, **kwargs))}
        except Exception as error:
            said = {"error": type(error).__name__}
        print(json.dumps(said), file=answers, flush=True)
    os._exit(0)


def judge(program: dict[str, Any], asks: IO[str], answered: IO[str]) -> None:
    """Run the tests on the answer; what they raise ends this process."""

    def ask(what: Any) -> None:
        print(json.dumps(what), file=asks, flush=True)

    def candidate(*args: Any, **kwargs: Any) -> Any:
        ask(encoded((args, kwargs)))
        said = json.loads(answered.readline())
        if "error" in said:
            kind = getattr(builtins, str(said["error"]), None)
            raise kind() if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(said["error"])
        return decoded(said["value"])

    ask({"answer": program["answer"], "entry_point": program["entry_point"]})
    tests = types.ModuleType("tests").__dict__
    exec(compile(program["head"], "<head>", "exec"), tests)
    tests[program["entry_point"]] = candidate
    exec(compile(program["test"], "<test>", "exec"), tests)
    tests["check"](candidate)


def encoded(value: Any) -> Any:
    """Return a value of Python's own types, or of types made from them, as JSON can hold it."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *map(encoded, value)]
    if isinstance(value, dict):
        return ["dict", *([encoded(key), encoded(each)] for key, each in value.items())]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    raise TypeError(f"{type(value).__name__} is no type of Python's own")


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    if not isinstance(value, list):
        return value
    name, *parts = value
    if name == "dict":
        return {decoded(key): decoded(each) for key, each in parts}
    if name == "bytes":
        return bytes.fromhex(*parts)
    if name == "complex":
        return complex(*parts)
    return SEQUENCES[name](map(decoded, parts))


if __name__ == "__main__":
    main()
