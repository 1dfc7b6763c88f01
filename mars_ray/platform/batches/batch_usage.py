"""Token usage of a batch, from the lines of its output file.

In:    the content of the output file in chunks.
Out:   the same chunks; OpenAI's usage object.
Never: counts a row twice: a row has one line in the output file, however often it ran.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from openai.types.batch_usage import BatchUsage, InputTokensDetails, OutputTokensDetails


class UsageSum:
    """Sums the usage of the rows whose lines pass. Holds one line at a time."""

    def __init__(self) -> None:
        self._input = self._cached = self._output = self._reasoning = 0

    def read(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks, and add the usage of each line once it is complete."""
        line = bytearray()
        for chunk in chunks:
            first, *others = chunk.split(b"\n")
            line += first
            for other in others:
                self._add(line)
                line = bytearray(other)
            yield chunk
        self._add(line)

    def usage(self) -> BatchUsage:
        """Return the sums so far."""
        return BatchUsage(
            input_tokens=self._input,
            input_tokens_details=InputTokensDetails(cached_tokens=self._cached),
            output_tokens=self._output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning),
            total_tokens=self._input + self._output,
        )

    def _add(self, line: bytearray) -> None:
        if not line.strip():
            return
        usage = json.loads(line)["response"]["body"].get("usage") or {}
        # The Responses API has names of its own for the same counts.
        self._input += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self._output += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self._cached += _detail(usage, ("prompt_tokens_details", "input_tokens_details"), "cached_tokens")
        self._reasoning += _detail(usage, ("completion_tokens_details", "output_tokens_details"), "reasoning_tokens")


def _detail(usage: dict[str, Any], groups: tuple[str, str], name: str) -> int:
    return sum((usage.get(group) or {}).get(name) or 0 for group in groups)
