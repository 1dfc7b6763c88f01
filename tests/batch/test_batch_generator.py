"""Many rows at once give what each gives alone, whatever the others are."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from mars_ray.batch.generator import Generator
from mars_ray.batch.outcomes import Generated, Rejected, outcome_table, read_outcomes
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import ModelError
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint

OPTIONS = DecodeOptions(threshold=0.5, block=4, max_tokens=6)
POISON = "~"


class FailingNetwork(Qwen2ForCausalLM):
    """A network whose forward fails on any batch that holds one token."""

    poison_id = -1

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if (input_ids == self.poison_id).any():
            raise RuntimeError("it tastes bad")
        return super().forward(input_ids=input_ids, **inputs)


def generator_of(checkpoint: Checkpoint) -> Generator:
    """A generator with a network of its own: the engine replaces its attention."""
    own = replace(checkpoint, network=deepcopy(checkpoint.network))
    sampling, decoding = SamplingParams(max_tokens=6), DecodeParams(threshold=0.5, block=4)
    return Generator(own, sampling, decoding, EngineOptions(rows=8, compiled=False))


def rows(*prompts: str) -> list[bytes]:
    return [json.dumps({"id": f"row-{number}", "prompt": prompt}).encode() for number, prompt in enumerate(prompts)]


def test_rows_come_back_in_order_as_if_each_were_alone(checkpoint: Checkpoint) -> None:
    generator = generator_of(checkpoint)
    raws = rows(*("abc" * (7 * number % 13 + 1) for number in range(40)))
    together = generator.run(raws)
    assert [outcome.id for outcome in together] == [f"row-{number}" for number in range(len(raws))]
    assert together == [outcome for raw in raws for outcome in generator.run([raw])]


def test_a_row_is_what_the_decoder_gives_for_its_conversation(checkpoint: Checkpoint) -> None:
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (generated,) = generator_of(checkpoint).run([json.dumps({"id": 1, "messages": conversation}).encode()])
    prompt = ChatEncoder(checkpoint.tokenizer).prompt(conversation)
    options = replace(OPTIONS, stop_ids=checkpoint.stop_ids)
    (decoded,) = decode(checkpoint.network, [prompt], options, mask_id=checkpoint.mask_id)
    assert generated == Generated(
        id="1",
        prompt="hello",
        text=checkpoint.tokenizer.decode(decoded.tokens, skip_special_tokens=True),
        tokens=len(decoded.tokens),
        forwards=decoded.forwards,
        finish_reason=decoded.finish_reason,
    )


def test_a_stop_token_counts_and_is_not_in_the_text(model_folder: Path) -> None:
    checkpoint = load_checkpoint(model_folder)
    prompt = ChatEncoder(checkpoint.tokenizer).prompt([{"role": "user", "content": "abc"}])
    (whole,) = decode(checkpoint.network, [prompt], OPTIONS, mask_id=checkpoint.mask_id)
    stop = whole.tokens[2]
    place = whole.tokens.index(stop)
    checkpoint.network.generation_config.eos_token_id = stop
    (generated,) = generator_of(checkpoint).run(rows("abc"))
    assert isinstance(generated, Generated)
    assert (generated.tokens, generated.finish_reason) == (place + 1, "stop")
    assert generated.text == checkpoint.tokenizer.decode(whole.tokens[:place], skip_special_tokens=True)


def test_an_answer_ends_with_the_context_and_a_prompt_that_leaves_no_room_is_refused(checkpoint: Checkpoint) -> None:
    # Three tokens of the template: 125 of the 128 positions are left.
    short, too_long = generator_of(checkpoint).run(rows("x" * 123, "x" * 125))
    assert isinstance(short, Generated)
    assert (short.tokens, short.finish_reason) == (2, "length")
    assert isinstance(too_long, Rejected)
    assert too_long.id == "row-1"
    assert "the prompt has 128 tokens and a sequence may have 128" in too_long.reason


def test_rows_that_are_none_do_not_disturb_the_others(checkpoint: Checkpoint) -> None:
    generator = generator_of(checkpoint)
    first, last = rows("one", "two")
    outcomes = generator.run([first, b"{oops \xff", b'{"id": 5, "prompt": 1}', last])
    assert [outcomes[0], outcomes[3]] == generator.run([first, last])
    assert [type(outcome) for outcome in outcomes[1:3]] == [Rejected, Rejected]
    assert [outcome.id for outcome in outcomes[1:3]] == [None, "5"]
    assert isinstance(outcomes[1], Rejected)
    assert outcomes[1].row == "{oops \ufffd"


def test_a_row_that_makes_decoding_fail_fails_alone(checkpoint: Checkpoint) -> None:
    network = FailingNetwork(checkpoint.network.config)
    network.load_state_dict(checkpoint.network.state_dict())
    network.poison_id = checkpoint.tokenizer.convert_tokens_to_ids(POISON)
    raws = rows("one", "two", f"bad {POISON}", "four")
    outcomes = generator_of(replace(checkpoint, network=network.eval())).run(raws)
    healthy = generator_of(checkpoint).run(raws)
    assert [outcomes[0], outcomes[1], outcomes[3]] == [healthy[0], healthy[1], healthy[3]]
    assert isinstance(outcomes[2], Rejected)
    assert outcomes[2].reason == "decoding failed: RuntimeError: it tastes bad. The engine serves other requests."


def test_no_rows_give_no_outcomes(checkpoint: Checkpoint) -> None:
    assert generator_of(checkpoint).run([]) == []


def test_a_model_without_chat_template_is_refused(model_folder: Path) -> None:
    checkpoint = load_checkpoint(model_folder)
    checkpoint.tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        generator_of(checkpoint)


def test_outcomes_survive_their_table() -> None:
    generated = Generated(id="a", prompt="p", text="t", tokens=3, forwards=2, finish_reason="stop")
    rejected = Rejected(id=None, reason="why", row="{")
    batch = read_outcomes(outcome_table([rejected, generated], decode_seconds=4.0))
    assert [Generated(**row) for row in batch.generated.to_pylist()] == [generated]
    assert batch.rejected == [rejected]
    assert batch.decode_seconds == 4.0
    nothing = read_outcomes(outcome_table([], decode_seconds=1.0))
    assert (nothing.generated.num_rows, nothing.rejected, nothing.decode_seconds) == (0, [], 0.0)
