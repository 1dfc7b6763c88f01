"""Let vLLM find an active Triton driver on a CPU. Python runs this at its start where this folder is on its path."""

from types import SimpleNamespace

from triton.backends import backends


class InterpreterDriver:
    """Says that it is active; the interpreter needs no driver."""

    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = SimpleNamespace(compiler=None, driver=InterpreterDriver)  # type: ignore[assignment]
