"""Lets engine processes of tests run vLLM's model runner V2 under Triton's interpreter. Python runs this file at start.

Tests put this folder on the PYTHONPATH of the processes that they start.
"""

import sys

if "mars_ray.engine.process.worker" in sys.orig_argv:
    from types import SimpleNamespace

    from triton.backends import backends

    class InterpreterDriver:
        """Makes vLLM find an active Triton driver; the interpreter needs none."""

        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = SimpleNamespace(compiler=None, driver=InterpreterDriver)  # type: ignore[assignment]
