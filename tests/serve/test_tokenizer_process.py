"""Texts become ids in a process of its own, whatever the template does."""

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.process.json_process import JsonProcess
from mars_ray.errors import ModelError, RequestError, UnavailableError
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.serve.http.tokenizer_process import WALL_SECONDS, TokenizerProcess, Turns

FOLDER = resolve_model("bundled")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ünïcode 漢字 \u2028?"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
HUGE = "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}"
MISBEHAVING = {
    ENDLESS: "took more than",
    HUGE: "too much memory|died on this prompt|refuses it|took more than",
    "{{ ''.__class__.__mro__ }}": "refuses it",
    "{{ raise_exception('no such turn') }}": "no such turn",
}
"""Templates, and what is said of each."""


def model_with(template: str, folder: Path) -> Path:
    """The tokenizer of the bundled model under another chat template."""
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for the tests that share a process, whose start takes two seconds."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def tokenizer(loop: asyncio.Runner) -> Iterator[TokenizerProcess]:
    process = TokenizerProcess(FOLDER)
    yield process
    loop.run(process.close())


def test_ids_are_those_of_the_tokenizer_in_this_process(
    loop: asyncio.Runner, tokenizer: TokenizerProcess, bundled: Checkpoint
) -> None:
    async def test() -> None:
        texts = ["Hello.", "", "two\nlines", "<|user|>"]
        expected = [bundled.tokenizer(text)["input_ids"] for text in texts]
        assert await tokenizer.encode(texts) == expected
        rendered = await tokenizer.apply_chat_template(MESSAGES)
        assert rendered == (ChatEncoder(bundled.tokenizer).prompt(MESSAGES), False)
        assert await tokenizer.decode(expected[2]) == texts[2]

    loop.run(test())


def test_many_prompts_at_once_get_each_its_own_answer(
    loop: asyncio.Runner, tokenizer: TokenizerProcess, bundled: Checkpoint
) -> None:
    async def test() -> None:
        texts = [f"number {n}" for n in range(50)]
        got = await asyncio.gather(*(tokenizer.encode([text]) for text in texts))
        assert got == [[bundled.tokenizer(text)["input_ids"]] for text in texts]

    loop.run(test())


def test_a_caller_that_leaves_costs_the_others_nothing(
    loop: asyncio.Runner, tokenizer: TokenizerProcess, bundled: Checkpoint
) -> None:
    async def test() -> None:
        await tokenizer.start()
        worker = tokenizer._worker
        leaving = [asyncio.create_task(tokenizer.encode([f"gone {n}"])) for n in range(20)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        assert await tokenizer.encode(["here"]) == [bundled.tokenizer("here")["input_ids"]]
        assert tokenizer._worker is worker

    loop.run(test())


@pytest.fixture(scope="module")
def misbehaving(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    """A tokenizer whose template misbehaves if a message is a number, by the number."""
    cases = "".join(
        f"{{% if messages[0]['content'] == '{number}' %}}{template}{{% endif %}}"
        for number, template in enumerate(MISBEHAVING)
    )
    process = TokenizerProcess(model_with(f"{cases}fine", tmp_path_factory.mktemp("misbehaving") / "model"))
    yield process
    loop.run(process.close())


@pytest.mark.parametrize(("number", "said"), list(enumerate(MISBEHAVING.values())))
def test_a_template_that_misbehaves_fails_its_request_and_the_next_one_is_served(
    loop: asyncio.Runner, misbehaving: TokenizerProcess, number: int, said: str
) -> None:
    async def test() -> None:
        with pytest.raises(RequestError, match=said):
            await misbehaving.apply_chat_template([{"role": "user", "content": str(number)}])
        assert await misbehaving.apply_chat_template([{"role": "user", "content": "good"}])

    loop.run(test())


async def run_what_is_due() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def encoding_for(seconds: float, tokenizer: TokenizerProcess, text: str) -> asyncio.Task[list[list[int]]]:
    """Stop the process, ask it for the ids of `text`, and set the clock of the event loop forward by `seconds`."""
    await tokenizer.start()
    assert tokenizer._worker is not None
    tokenizer._worker.process.send_signal(signal.SIGSTOP)
    encoding = asyncio.create_task(tokenizer.encode([text]))
    await run_what_is_due()
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
    await run_what_is_due()
    return encoding


def test_a_process_that_gets_no_processor_for_a_while_still_answers(bundled: Checkpoint) -> None:
    async def test() -> None:
        tokenizer = TokenizerProcess(FOLDER)
        try:
            encoding = await encoding_for(WALL_SECONDS - 30, tokenizer, "late")
            assert tokenizer._worker is not None
            tokenizer._worker.process.send_signal(signal.SIGCONT)
            assert await encoding == [bundled.tokenizer("late")["input_ids"]]
        finally:
            await tokenizer.close()

    asyncio.run(test())


def test_a_process_that_hangs_is_started_again(bundled: Checkpoint) -> None:
    async def test() -> None:
        tokenizer = TokenizerProcess(FOLDER)
        try:
            encoding = await encoding_for(WALL_SECONDS + 1, tokenizer, "never")
            with pytest.raises(UnavailableError, match="did not answer within 60 s"):
                await encoding
            assert await tokenizer.encode(["a"]) == [bundled.tokenizer("a")["input_ids"]]
        finally:
            await tokenizer.close()

    asyncio.run(test())


def test_the_exit_status_of_a_process_is_known_once_nothing_can_be_received() -> None:
    async def test() -> None:
        child, _ = await JsonProcess.start("mars_ray.serve.http.tokenizer_worker", str(FOLDER))
        child.process.send_signal(signal.SIGPROF)
        with pytest.raises(ConnectionError):
            await child.receive()
        assert child.process.returncode == -signal.SIGPROF
        await child.close()

    asyncio.run(test())


def test_a_process_that_is_killed_is_started_again(
    loop: asyncio.Runner, tokenizer: TokenizerProcess, bundled: Checkpoint
) -> None:
    async def test() -> None:
        await tokenizer.start()
        assert tokenizer._worker is not None
        tokenizer._worker.process.kill()
        await tokenizer._worker.process.wait()
        assert await tokenizer.encode(["a"]) == [bundled.tokenizer("a")["input_ids"]]

    loop.run(test())


def test_a_folder_without_a_tokenizer_says_so_at_the_start(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()

    async def test() -> None:
        with pytest.raises(ModelError, match="no tokenizer"):
            await TokenizerProcess(tmp_path / "model").start()

    asyncio.run(test())


def test_a_key_with_one_prompt_waits_for_no_more_than_one_of_another_key(
    loop: asyncio.Runner, tokenizer: TokenizerProcess
) -> None:
    async def test() -> None:
        done: list[str] = []

        async def encode(key: str, text: str) -> None:
            await tokenizer.encode([text], key)
            done.append(key)

        await tokenizer.start()
        many = [asyncio.create_task(encode("many", "long " * 2000)) for _ in range(20)]
        while not done:
            await asyncio.sleep(0)
        before = len(done)
        await encode("one", "hello")
        assert done.index("one") - before <= 2  # one was on its way, and may have ended just before
        await asyncio.gather(*many)

    loop.run(test())


def test_keys_take_turns_and_those_who_left_are_passed_over() -> None:
    async def test() -> None:
        turns, order = Turns(), []

        async def wait(name: str) -> None:
            async with turns.turn(name[0]):
                order.append(name)

        async with turns.turn("x"):
            waiting = {name: asyncio.create_task(wait(name)) for name in ("a1", "a2", "a3", "b1", "c1", "c2", "b2")}
            await asyncio.sleep(0)
            waiting["a2"].cancel()
            waiting["c1"].cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        assert order == ["a1", "b1", "c2", "a3", "b2"]
        async with turns.turn("x"):
            pass

    asyncio.run(test())


def test_a_template_that_knows_tools_renders_them_and_shows_the_format_of_calls(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        '<tool_call>{"name": "{{ call.function.name }}"}</tool_call>'
        "{% endfor %}{% endfor %}<think>\n{# </think> #}"
    )
    tool = {"type": "function", "function": {"name": "now"}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}],
    }

    async def test() -> None:
        tokenizer = TokenizerProcess(model_with(template, tmp_path / "model"))
        try:
            await tokenizer.start()
            form = tokenizer.answer_format
            assert form.template_takes_tools and form.calls and form.reasoning
            assert (form.calls.name, form.reasoning.begin) == ("hermes", "<think>")
            rendered = await tokenizer.apply_chat_template([*MESSAGES[1:], call], tools=[tool])
            text = await tokenizer.decode(rendered.tokens)
            assert text.startswith('{"name": "now"}user:')
            assert text.endswith('assistant:<tool_call>{"name": "f"}</tool_call><think>\n')
            assert rendered.in_reasoning
        finally:
            await tokenizer.close()

    asyncio.run(test())
