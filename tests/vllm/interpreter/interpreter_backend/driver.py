"""The driver that Triton's interpreter does without."""

from typing import Any

from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError
