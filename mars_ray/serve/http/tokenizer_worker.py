"""The process of `tokenizer_process`, which renders chat templates and tokenises. Each line is one JSON object.

In:    {"texts": [...]}, {"messages": [...], "tools": [...]} or {"tokens": [...]} on standard input.
Out:   {"prompts": [[id, ...], ...]}, for messages with "in_reasoning", {"text": ...} or {"error": ...}; as the first
       line, {"template": ..., "markers": {text: [id, special], ...}, "infill": [text, text, text] or null}.
Never: runs a template outside jinja's sandbox, loads torch, grows by more than `MEMORY_BYTES`, or spends more than
       `CPU_SECONDS` on a line.
"""

import json
import logging
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

CPU_SECONDS = 2.0
"""Maximum processor time to render and tokenise the prompts of a line. Even a thousand messages take milliseconds."""
MEMORY_BYTES = 1 << 30
"""Memory that the process may use in addition to that of the loaded tokenizer. It is limited because a template can
build very long texts."""


def main(folder: Path) -> None:
    """Answer line by line until standard input ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers works without it, which saves 2 s and 180 MB
    from transformers import PreTrainedTokenizerBase

    from mars_ray.chat.call_format import ends_in_reasoning, markers_of
    from mars_ray.data.chat import ChatEncoder, template_of
    from mars_ray.errors import MarsRayError
    from mars_ray.model.architecture import decoder_config
    from mars_ray.model.folder import check_tokenizer, load_tokenizer
    from mars_ray.model.json_object import read_json_object
    from mars_ray.openai_api.infill import infill_markers

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if "messages" in task:
            if not tokenizer.chat_template:
                return {"error": "this model has no chat template; use /v1/completions."}
            encoder = ChatEncoder(tokenizer)
            text = encoder.prompt_text(task["messages"], task["tools"])
            return {"prompts": [encoder.ids(text)], "in_reasoning": ends_in_reasoning(text)}
        if "tokens" in task:
            return {"text": tokenizer.decode(task["tokens"])}
        return {"prompts": [tokenizer(text)["input_ids"] for text in task["texts"]]}

    try:
        config = decoder_config(read_json_object(folder / "config.json"), folder)
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, config, check_tokenizer(folder, config))
    except MarsRayError as error:
        _send({"error": str(error)})
        return
    _limit_memory()
    markers = {text: (marker.id, marker.special) for text, marker in markers_of(tokenizer).items()}
    infill = infill_markers(tokenizer.get_vocab())
    _send({"template": template_of(tokenizer), "markers": markers, "infill": infill})
    for line in sys.stdin:
        try:
            with _limited_time():
                reply = answer(json.loads(line))
        except MarsRayError as error:
            reply = {"error": str(error)}
        except MemoryError:
            reply = {"error": "the prompt takes too much memory."}
        except Exception:  # a tokenizer may fail on strange input, but other requests follow
            log.exception("a prompt cannot be tokenised")
            reply = {"error": "the tokenizer of this model cannot process the prompt."}
        _send(reply)


@contextmanager
def _limited_time() -> Iterator[None]:
    """Let the kernel end this process with SIGPROF if the block takes more than `CPU_SECONDS` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
