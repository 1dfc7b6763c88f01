"""Questions of a workload."""

import gzip
import json
from pathlib import Path

from benchmarks.adapter import PROMPT_TOKENS_MAX, read_questions
from mars_ray.data.chat import ChatEncoder
from mars_ray.model.checkpoint import Checkpoint


def test_the_first_questions_with_a_short_prompt_are_read_with_their_judges(
    bundled: Checkpoint, tmp_path: Path
) -> None:
    texts = ["word " * PROMPT_TOKENS_MAX, "What is 1 and 2?", "What is 3 and 4?", "What is 5 and 6?"]
    lines = [json.dumps({"question": text, "answer": f"#### {number}"}) for number, text in enumerate(texts)]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    questions = read_questions("reasoning", 2, ChatEncoder(bundled.tokenizer), tmp_path)
    judges = [question.judge for question in questions]
    assert [[bool(judge and judge(f"It is {number}.")) for number in range(4)] for judge in judges] == [
        [False, True, False, False],
        [False, False, True, False],
    ]
