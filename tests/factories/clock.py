"""A clock that tests set."""


class Clock:
    """Returns `now_s`, which tests change."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
