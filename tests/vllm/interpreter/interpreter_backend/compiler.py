"""The compiler that Triton's interpreter does without."""

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        raise NotImplementedError

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        raise NotImplementedError
