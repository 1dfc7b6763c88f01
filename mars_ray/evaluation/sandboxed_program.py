"""The program in the sandbox: a judge that runs the tests, and a second process for the answer (see `code_check`).

    python -I -c THIS_FILE LIMITS PASSED STARTED

In:    as arguments, resource limits, the exit code for an answer that passes, and the text to print once the sandbox is
       up; on standard input, the result of `program_of`.
Out:   the exit code.
Never: runs the answer in the judge's process. The answer's process returns only plain values, so an answer cannot pass
       by exiting with the right code or by returning objects that compare equal to everything.

Only the standard library is available in the sandbox.
"""

import builtins
import ctypes
import json
import os
import resource
import sys
import types
from typing import IO, Any

JOIN_SESSION_KEYRING = 1
SET_DUMPABLE = 4
KEYCTL = {"x86_64": 250, "aarch64": 219}
"""Number of the keyctl system call on each type of processor."""
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def main() -> None:
    """Judge one answer and exit."""
    limits = json.loads(sys.argv[1])
    passed = int(sys.argv[2])
    started = sys.argv[3]
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    libc = ctypes.CDLL(None)
    # Leave the user's session keyring. Where this call is forbidden, reading keys is forbidden, too.
    libc.syscall(KEYCTL[os.uname().machine], JOIN_SESSION_KEYRING, None)
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # keeps the answer from attaching to the judge as a debugger
    os.write(2, started.encode())
    os.dup2(1, 2)
    calls_out, calls_in = os.pipe()
    values_out, values_in = os.pipe()
    child = os.fork()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if child == 0:
        for pipe in (0, calls_in, values_out):
            os.close(pipe)
        answer_calls(os.fdopen(calls_out), os.fdopen(values_in, "w"))
    for pipe in (calls_out, values_in):
        os.close(pipe)
    judge(json.load(sys.stdin), os.fdopen(calls_in, "w"), os.fdopen(values_out))
    os._exit(passed)


def answer_calls(calls: IO[str], values: IO[str]) -> None:
    """Run the answer's code, and then call its function for each line of `calls`."""
    program = json.loads(calls.readline())
    answer = sys.modules["answer"] = types.ModuleType("answer")
    for piece in program["answer"]:
        exec(compile(piece, "<answer>", "exec"), answer.__dict__)
    for line in calls:
        try:
            args, kwargs = decoded(json.loads(line))
            outcome = {"value": encoded(answer.__dict__[program["entry_point"]](*args, **kwargs))}
        except Exception as error:
            outcome = {"error": type(error).__name__}
        print(json.dumps(outcome), file=values, flush=True)
    os._exit(0)


def judge(program: dict[str, Any], calls: IO[str], values: IO[str]) -> None:
    """Run the tests on the answer. An error in a test ends this process."""

    def send(message: Any) -> None:
        print(json.dumps(message), file=calls, flush=True)

    def candidate(*args: Any, **kwargs: Any) -> Any:
        send(encoded((args, kwargs)))
        outcome = json.loads(values.readline())
        if "error" in outcome:
            kind = getattr(builtins, str(outcome["error"]), None)
            raise kind() if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(outcome["error"])
        return decoded(outcome["value"])

    send({"answer": program["answer"], "entry_point": program["entry_point"]})
    tests = types.ModuleType("tests").__dict__
    exec(compile(program["head"], "<head>", "exec"), tests)
    tests[program["entry_point"]] = candidate
    exec(compile(program["test"], "<test>", "exec"), tests)
    tests["check"](candidate)


def encoded(value: Any) -> Any:
    """Convert a value of built-in types, or of their subclasses, to values that JSON can represent."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *map(encoded, value)]
    if isinstance(value, dict):
        return ["dict", *([encoded(key), encoded(item)] for key, item in value.items())]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    raise TypeError(f"{type(value).__name__} is not a built-in type")


def decoded(value: Any) -> Any:
    """Convert a result of `encoded` back to the original value."""
    if not isinstance(value, list):
        return value
    name, *parts = value
    if name == "dict":
        return {decoded(key): decoded(item) for key, item in parts}
    if name == "bytes":
        return bytes.fromhex(*parts)
    if name == "complex":
        return complex(*parts)
    return SEQUENCES[name](map(decoded, parts))


if __name__ == "__main__":
    main()
