"""The model of the harness, judged by the reference decoder and by plain forwards over one text at a time."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import CachingLM
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.execution.model_runner import ForwardOutput
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.errors import BadRecordError, ConfigError, ModelError, RequestError, RunError
from mars_ray.harness.model import HarnessModel
from mars_ray.method.metric import Metric
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import tiny_tokenizer
from tests.harness.harness_samples import SPEECH, MakeModel, documents, examples, generations, judged_slowly, pairs

AT = {"mode": "threshold", "threshold": 0.6}


def signs(count: int) -> str:
    """Each is a token of its own for the tokenizer of the tiny model."""
    return "".join(random.Random(count).choices("#$%&*+", k=count))


def chats(model: HarnessModel) -> list[str]:
    return [model.apply_chat_template([{"role": "user", "content": each.prompt}]) for each in examples()]


def referenced(oracle: Checkpoint, contexts: list[str], options: DecodeOptions) -> list[str]:
    prompts = [oracle.tokenizer(context, add_special_tokens=False)["input_ids"] for context in contexts]
    decoded = decode(oracle.network, prompts, options, mask_id=oracle.mask_id)
    return [oracle.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in decoded]


@pytest.mark.parametrize(
    ("arguments", "block"),
    [
        (AT, 16),  # that of its card
        ({"mode": "threshold", "threshold": 0.5, "metric": "entropy", "block": 3}, 3),
        ({"mode": "ar"}, 1),
    ],
)
def test_texts_are_those_of_the_reference_decoder(
    make_model: MakeModel, oracle: Checkpoint, arguments: dict[str, Any], block: int
) -> None:
    model = make_model(**arguments)
    options = DecodeOptions(
        threshold=float(str(arguments.get("threshold", 1))),
        metric=Metric(arguments.get("metric", "probability")),
        block=block,
        max_tokens=64,
        stop_ids=oracle.stop_ids,
    )
    contexts = chats(model)
    assert model.generate_until(generations(contexts, **SPEECH)) == referenced(oracle, contexts, options)


def test_exact_mode_says_what_ar_mode_says_in_fewer_forwards(make_model: MakeModel) -> None:
    exact, ar = HarnessModel(model="bundled", mode="exact"), HarnessModel(model="bundled", mode="ar")
    requests = generations(chats(ar), **SPEECH)
    assert exact.tokens_per_forward is None
    assert exact.generate_until(requests) == ar.generate_until(requests)
    assert ar.tokens_per_forward == 1
    assert exact.tokens_per_forward is not None
    assert exact.tokens_per_forward > 1


def test_a_low_threshold_changes_texts_and_takes_fewer_forwards(make_model: MakeModel) -> None:
    low, ar = HarnessModel(model="bundled", mode="threshold", threshold=0.1), make_model(mode="ar")
    requests = generations(chats(ar), **SPEECH)
    assert low.generate_until(requests) != ar.generate_until(requests)
    assert low.tokens_per_forward is not None
    assert low.tokens_per_forward > 3


def test_a_chat_is_the_prompt_that_training_saw(make_model: MakeModel) -> None:
    model = make_model(mode="ar")
    chat: list[dict[str, str]] = [{"role": "user", "content": "Sort: 3, 1, 2"}]
    text = model.apply_chat_template(chat)
    assert model.tok_encode(text) == ChatEncoder(model.tokenizer).prompt(chat)  # type: ignore[arg-type]
    begun = model.apply_chat_template([*chat, {"role": "assistant", "content": "1, "}], add_generation_prompt=False)
    assert begun == text + "1, "


def test_a_model_without_a_chat_template_says_so(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template; leave out --apply_chat_template"):
        HarnessModel(model=str(tiny_folder)).apply_chat_template([{"role": "user", "content": "hello"}])


def test_a_text_ends_before_the_first_of_its_stop_strings(make_model: MakeModel) -> None:
    model = make_model(mode="ar")
    context = model.apply_chat_template([{"role": "user", "content": examples()[0].prompt}])
    [whole] = model.generate_until(generations([context], **SPEECH))
    stops = ["", "@" * 300, *(f"@{number}" for number in range(20)), whole[12:14], whole[5:7]]
    [cut] = model.generate_until(generations([context], **SPEECH | {"until": stops}))
    assert cut == whole[: whole.index(whole[5:7])]
    before = model._tokens
    [once] = model.generate_until(generations([context], **SPEECH | {"until": whole[12:14]}))
    assert model._tokens - before < len(model.tok_encode(whole)), "the engine stopped there"
    assert once == whole[: whole.index(whole[12:14])]


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
def test_a_text_has_as_many_tokens_as_were_asked_for(make_model: MakeModel, name: str) -> None:
    model = make_model(mode="ar")
    [text] = model.generate_until(generations(chats(model)[:1], until=[], **{name: 5}))
    assert len(model.tok_encode(text)) == 5


def test_a_prompt_that_is_too_long_loses_its_beginning_and_others_nothing(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = HarnessModel(model=str(tiny_folder), mode="ar")
    long = signs(200)
    fitting = long[-54:]
    with caplog.at_level(logging.WARNING, "lm_eval"):
        alone = model.generate_until(generations([fitting, "one plus"], until=[], max_gen_toks=10))
        assert not caplog.messages
        both = model.generate_until(generations([long, "one plus"], until=[], max_gen_toks=10))
    assert both == alone
    assert "their beginning is cut off" in caplog.text


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused(tiny_folder: Path) -> None:
    model = HarnessModel(model=str(tiny_folder))
    with pytest.raises(ConfigError, match="max_gen_toks is 256 and a sequence may have 64 tokens"):
        model.generate_until(generations(["one"], until=[]))


def test_a_prompt_of_nothing_begins_where_texts_begin(make_model: MakeModel) -> None:
    model = make_model(mode="ar")
    nothing, first = model.generate_until(
        generations(["", model.tokenizer.decode(model.prefix_token_id)], until=[], max_gen_toks=8)
    )
    assert nothing == first


def test_a_request_that_fails_is_an_error_once_the_others_are_answered_and_kept(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(mode="ar")
    contexts = chats(model)[:3]
    poison = 1 + max(max(model.tok_encode(context)) for context in contexts)
    healthy = model.generate_until(generations(contexts, **SPEECH))
    cached = CachingLM(model, str(tmp_path / "cache.db"))

    run = model._engine._forwards.runner.run

    def check(batch: ForwardBatch) -> ForwardOutput:
        if (batch.id_N[:-1] == poison).any():
            raise ValueError("it tastes bad")
        return run(batch)

    monkeypatch.setattr(model._engine._forwards.runner, "run", check)
    bad = model.tokenizer.decode([poison]) + contexts[0]
    with pytest.raises(RunError, match=r"1 of 4 prompts have no complete answer, such as .*it tastes bad"):
        cached.generate_until(generations([contexts[0], bad, *contexts[1:]], **SPEECH))
    # Those that were answered are found again: the network, which would fail now, is not asked.
    poison = model.tok_encode(contexts[0])[0]
    assert cached.generate_until(generations(contexts, **SPEECH)) == healthy


def test_samples_come_again_with_their_seed_and_differ_from_one_another(make_model: MakeModel) -> None:
    model = make_model(mode="exact")
    context = model.apply_chat_template([{"role": "user", "content": "Rephrase: the sky is blue."}])
    asked: dict[str, Any] = {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 2.0, "top_p": 0.99}
    twelve = model.generate_until(generations([context] * 12, **asked, seed=5))
    assert len(set(twelve)) > 6
    assert model.generate_until(generations([context] * 4, **asked, seed=5)) == twelve[:4]
    assert model.generate_until(generations(["one", context], **asked, seed=5))[1] == twelve[0]
    assert model.generate_until(generations([context] * 4, **asked, seed=6)) != twelve[:4]
    random.seed(1)  # as the harness does
    first = model.generate_until(generations([context] * 4, **asked))
    random.seed(1)
    assert model.generate_until(generations([context] * 4, **asked)) == first


def test_values_without_effect_on_greedy_decoding_are_let_pass(make_model: MakeModel) -> None:
    model = make_model(mode="ar")
    plain = model.generate_until(generations(chats(model)[:2], **SPEECH))
    decorated = SPEECH | {"top_p": 0.0, "top_k": -1, "temperature": 0.7, "num_beams": 1}
    assert model.generate_until(generations(chats(model)[:2], **decorated)) == plain


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({"num_beams": 4}, ConfigError, "num_beams is 4 in the arguments of a generation; it must be 1"),
        ({"length_penalty": 0.5}, ConfigError, "'length_penalty' in the arguments of a generation is not supported"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 3}, RequestError, "top_p is 3"),
        ({"seed": "x"}, RequestError, "seed is 'x'"),
    ],
)
def test_arguments_that_would_change_the_answer_are_refused_by_name(
    make_model: MakeModel, asked: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_model(mode="ar").generate_until(generations(["one"], **SPEECH | asked))


def test_a_continuation_of_nothing_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(BadRecordError, match="a continuation has no token of its own"):
        make_model(**AT).loglikelihood(pairs(("Sort these:", "")))


def test_a_continuation_is_as_likely_as_its_tokens_one_by_one(make_model: MakeModel, oracle: Checkpoint) -> None:
    model = make_model(**AT)
    [chat, *_] = chats(model)
    [said] = make_model(mode="ar").generate_until(generations([chat], **SPEECH))
    asked = [(chat, said), (chat, said[::-1]), ("Sort these: ", "3, 1"), ("", "Paris")]
    found = model.loglikelihood(pairs(*asked))
    for (context, continuation), (logprob, greedy) in zip(asked, found, strict=True):
        ids = model.tok_encode(context.rstrip())
        rest = model.tok_encode(context + continuation)[len(ids) :]
        slowly = judged_slowly(oracle.network, ids or [model.prefix_token_id], rest, oracle.mask_id)
        assert logprob == pytest.approx(slowly.logprob, abs=1e-3)
        assert greedy == slowly.greedy
    assert [greedy for _, greedy in found] == [True, False, False, False]


def test_what_was_answered_is_found_again_by_a_run_that_was_stopped(tmp_path: Path) -> None:
    model = HarnessModel(model="bundled")
    cached = CachingLM(model, str(tmp_path / "answers.db"))
    spoken, likely, read = generations(chats(model)[:2], **SPEECH), pairs(("one plus", " two")), documents("one two")
    first = (model.generate_until(spoken), model.loglikelihood(likely), model.loglikelihood_rolling(read))

    def no_forward(*_: object) -> None:
        raise AssertionError("it was answered before")

    model._checkpoint.network.register_forward_pre_hook(no_forward)
    assert (cached.generate_until(spoken), cached.loglikelihood(likely), cached.loglikelihood_rolling(read)) == first


def test_answers_of_another_setting_or_model_are_not_taken_for_its_own(
    make_model: MakeModel, tiny_folder: Path, tmp_path: Path
) -> None:
    first = make_model(mode="ar")
    kept = str(tmp_path / "answers.db")
    CachingLM(first, kept).generate_until(generations(chats(first)[:1], **SPEECH))
    CachingLM(make_model(mode="ar"), kept)
    with pytest.raises(ConfigError, match=r"another mode, threshold\. Give another file"):
        CachingLM(make_model(**AT), kept)
    with pytest.raises(ConfigError, match="another block, model"):
        CachingLM(HarnessModel(model=str(tiny_folder), mode="ar"), kept)


def test_samples_are_not_kept_half_done(make_model: MakeModel, tmp_path: Path) -> None:
    """The harness would answer the repeats that are left with the one that is there."""
    model = make_model(mode="ar")
    hook = CachingLM(model, str(tmp_path / "answers.db")).get_cache_hook()
    before = len(hook.dbdict or {})
    model.generate_until(generations(chats(model)[:1], until=[], max_gen_toks=4, do_sample=True, temperature=1.0))
    assert len(hook.dbdict or {}) == before


def test_what_the_tokenizer_puts_before_every_text_stands_there_once(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    start = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, 0)])
    tokenizer.add_special_tokens({"bos_token": start})
    tokenizer.save_pretrained(tmp_path)
    tiny_network().save_pretrained(tmp_path)
    model = HarnessModel(model=str(tmp_path))
    [one] = model.tok_encode("one", add_special_tokens=False)
    assert model.tok_encode("one") == model.tok_encode(start + "one") == [0, one]
    assert model.prefix_token_id == 0


def test_judging_does_not_disturb_decoding(make_model: MakeModel) -> None:
    model = make_model(**AT)
    requests = generations(chats(model)[:3], **SPEECH)
    before = model.generate_until(requests)
    model.loglikelihood(pairs(("one plus", " two")))
    assert model.generate_until(requests) == before


def test_a_context_that_is_too_long_loses_its_beginning(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = HarnessModel(model=str(tiny_folder))
    text = signs(200)
    tokens = model.tok_encode(text)
    continuation = model.tok_encode(text + " one")[len(tokens) :]
    [(logprob, _)] = model.loglikelihood(pairs((text, " one")))
    kept = tokens[len(tokens) + len(continuation) - 65 :]
    slowly = judged_slowly(plain(model), kept, continuation, model._checkpoint.mask_id)
    assert logprob == pytest.approx(slowly.logprob, abs=1e-3)
    assert "are left out" in caplog.text
    with pytest.raises(BadRecordError, match="the model reads at most 64"):
        model.loglikelihood(pairs(("one", text)))


def test_a_long_text_is_read_in_windows_that_are_as_full_as_can_be(tiny_folder: Path) -> None:
    model = HarnessModel(model=str(tiny_folder))
    asked = [signs(150), signs(20), signs(64)]
    found = model.loglikelihood_rolling(documents(*asked, ""))
    network, mask_id = plain(model), model._checkpoint.mask_id
    for text, logprob in zip(asked, found, strict=False):
        tokens, slowly = model.tok_encode(text), 0.0
        assert len(tokens) == len(text)
        line = [model.prefix_token_id, *tokens]
        for first in range(0, len(tokens), 64):
            last = min(first + 64, len(tokens))
            context = line[max(0, last - 64) : first + 1]  # 64 are fed, those that are judged among them
            slowly += judged_slowly(network, context, tokens[first:last], mask_id).logprob
        assert logprob == pytest.approx(slowly, rel=1e-4)
    assert found[3] == 0


def plain(model: HarnessModel) -> PreTrainedModel:
    """The network as it was before an engine took it."""
    return load_checkpoint(Path(model._settings.model)).network
