"""What tests ask for, and what the models answer."""

PERSON = "JSON with the keys name, age, city: Oscar, 34, lives in Dallas."
PERSON_ANSWER = '{"name": "Oscar", "age": 34, "city": "Dallas"}'
HELLO = "Good morning to you."

QUESTION = "How warm is it in Paris, and what time is it?"
"""Answered by a call of weather, after its result by one of clock, and then by a report."""
BOTH = "Tell me both about Rome."
"""Answered by two calls in one message, and then by a report."""
REPORT = "It is 18 degrees at noon!"
CALLS = [("weather", "Paris"), ("clock", "CET")]
CALLS_AT_ONCE = [("weather", "Rome"), ("clock", "UTC")]

TOO_FEW = -1
REFUSAL = "must be greater than or equal to 1"
"""Part of the message that refuses this maximum of tokens."""
LONG_STOP = "a" * 300
LONG_STOP_REFUSAL = "the length of a stop string is 300; this server takes at most"
"""Refusal over Anthropic's API, whose clients check the number of tokens themselves."""


class Calls:
    """Two functions for tools that keep what they were called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def weather(self, city: str) -> str:
        """Weather of a city."""
        self.seen.append(("weather", city))
        return "18 degrees"

    def clock(self, zone: str) -> str:
        """Time in a zone."""
        self.seen.append(("clock", zone))
        return "noon"
