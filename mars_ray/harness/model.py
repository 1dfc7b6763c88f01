"""The model class for lm-evaluation-harness: `--model mars-ray`.

The engine generates texts, and plain forwards give log-probabilities. `--batch_size` has no effect, because the engine
chooses its own batch size. Texts are tokenised in the same way as for the harness's transformers models, so that
results are comparable.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_each
from mars_ray.engine.mode import DEFAULT_THRESHOLD, Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request
from mars_ray.errors import BadRecordError, ConfigError, ModelError, RunError, first_line
from mars_ray.harness.generation import GenerationSettings, parse_gen_kwargs
from mars_ray.harness.likelihood import Scored, likelihoods
from mars_ray.harness.settings import parse_settings
from mars_ray.model.checkpoint import load_model
from mars_ray.model.digest import folder_digest
from mars_ray.model.dtype import resolve_dtype
from mars_ray.model.folder import open_model
from mars_ray.progress import ProgressLine

LOG = logging.getLogger("lm_eval.mars_ray")
"""A child of the harness's logger, because the harness's command line shows the messages of no other logger."""

CACHE_KEY = "answered by"
"""Key of the entry for the model and settings in the `--use_cache` file; the harness itself keys answers only by
request."""

IGNORED_ARGUMENTS = ("batch_size", "max_batch_size")
"""Arguments that the harness passes to every model. They have no effect on answers."""

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""The (context, continuation) texts, or None for a window of a longer text; then the tokens of each."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A checkpoint and an engine that answer the harness's requests.

    Raises `ConfigError` for wrong arguments, and `ModelError` for a folder that cannot be loaded.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        settings = parse_settings({name: value for name, value in arguments.items() if name not in IGNORED_ARGUMENTS})
        self._settings = settings
        self._device = _device(settings.device)
        self._model = open_model(settings.model)
        # Torch computes the likelihoods, so "auto" depends on torch's speed, not on that of the engine.
        self._dtype = resolve_dtype(settings.dtype, self._model.parameters, torch.device(self._device).type)
        self._checkpoint = load_model(self._model, dtype=getattr(torch, self._dtype.name), device=self._device)
        self.tokenizer = self._checkpoint.tokenizer
        if self.tokenizer.eos_token_id is None:
            raise ModelError(f"{settings.model}: the tokenizer has no end-of-sequence token, which likelihoods need.")
        self._engine = Engine(self._checkpoint, EngineOptions(max_request_tokens=self.max_length))
        self._decode = settings.decode(block=self._engine.block)
        LOG.info(
            f"decoding on {self._device}, {self._dtype.name} ({self._dtype.reason}), "
            f"in blocks of {self._decode.block} tokens"
        )
        self._threshold = DEFAULT_THRESHOLD if settings.threshold is None else settings.threshold
        self._tokens = self._forwards = 0

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens per forward over all generated texts; None before the first text."""
        return self._tokens / self._forwards if self._forwards else None

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without context."""
        token: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else token

    @property
    def max_length(self) -> int:
        """Maximum sequence length of the model, in tokens."""
        return self._model.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the file names of the harness's request cache."""
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return entries for the `config` of the harness's results."""
        return self._decoding() | {"tokens_per_forward": self.tokens_per_forward}

    def _decoding(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "mode": settings.mode.value,
            "threshold": self._threshold if settings.mode is Mode.THRESHOLD else None,
            "metric": settings.metric.value,
            "block": self._decode.block,
            "dtype": self._dtype.name,
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Open the `--use_cache` file. Raises `ConfigError` if its answers come from another model or other
        settings."""
        super().set_cache_hook(cache_hook)
        if (cache := cache_hook.dbdict) is None:
            return
        current = self._decoding() | {
            "model": folder_digest(self._model.folder),
            "device": self._device.type,
            "max_gen_toks": self._settings.max_gen_toks,
        }
        cached = cache.get(CACHE_KEY, {} if len(cache) else current)
        if differences := [name for name in current if cached.get(name) != current[name]]:
            raise ConfigError(
                f"--use_cache: the file has answers with another {', '.join(differences)}. Give another file."
            )
        cache[CACHE_KEY] = current

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as text. Without a generation prompt, the last message is left unfinished."""
        if not self.tokenizer.chat_template:
            raise ModelError(f"{self._settings.model} has no chat template; leave out --apply_chat_template.")
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template is a program and may raise any error
            raise BadRecordError(f"the chat template refuses a conversation: {error}") from error
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_unused: object) -> list[int]:
        """Return token ids. By default, special tokens are added unless the text already begins with one."""
        bos = self.tokenizer.bos_token
        add_special = (not bos or not string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special)
        return ids

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of the context of each request.

        Raises `RunError` at the end if some answers are incomplete, because no score can include them.
        """
        del disable_tqdm  # progress is always one line on standard error
        contexts = [str(request.args[0]) for request in requests]
        repeats: Counter[str] = Counter()
        generations = []
        for context, request in zip(contexts, requests, strict=True):
            # An index over all requests would change the seeds when a stopped run resumes.
            name = f"{repeats[context]} {context}"
            generations.append(
                parse_gen_kwargs(request.args[1], max_gen_toks=self._settings.max_gen_toks, request=name)
            )
            repeats[context] += 1
        engine_requests = self._requests(contexts, generations)
        texts = [""] * len(requests)
        tokens = forwards = 0
        failed: list[str] = []
        with ProgressLine("generate", total=len(requests)) as progress:
            for finished, decoded in enumerate(decode_each(self._engine, engine_requests), start=1):
                number = int(decoded.request.id)
                if decoded.error:
                    failed.append(f"a prompt that ends in {contexts[number][-80:]!r}: {decoded.error}")
                    continue
                texts[number] = generations[number].cut(decoded.text)
                tokens += len(decoded.tokens)
                forwards += decoded.forwards
                progress.update(finished, {})
                # A cache would make repeats of a sampled request equal.
                if not generations[number].sampling.temperature:
                    self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        if failed:
            raise RunError(
                f"{len(failed)} of {len(requests)} prompts have no complete answer, such as {failed[0]} With "
                "--use_cache, greedy answers are kept, and the same command resumes."
            )
        self._tokens += tokens
        self._forwards += forwards
        rate = tokens / forwards if forwards else 0.0
        LOG.info(f"generated {tokens} tokens in {forwards} forwards: {rate:.3f} tokens per forward")
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text; a text longer than the model's context is read in windows."""
        del disable_tqdm
        windows: list[Pair] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            text_windows: list[Pair] = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += text_windows
            counts.append(len(text_windows))
        results = iter(self._loglikelihood_tokens(windows))
        sums = [sum(next(results)[0] for _ in range(count)) for count in counts]
        for request, logprob in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, logprob)
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_unused: object) -> list[tuple[float, bool]]:
        """Score each continuation. If a context is too long, its beginning is cut off."""
        texts = [self._scored(context, continuation) for _, context, continuation in requests]
        with ProgressLine("likelihood", total=len(texts)) as progress:
            results = likelihoods(self._checkpoint.network, texts, self._checkpoint.mask_id, progress)
        answers = [(result.logprob, result.greedy) for result in results]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _scored(self, context: list[int], continuation: list[int]) -> Scored:
        if not continuation:
            raise BadRecordError(
                "a continuation has no token of its own after its context, so it has no likelihood. Leave it out of "
                "the task."
            )
        if len(continuation) > self.max_length:
            raise BadRecordError(
                f"a continuation has {len(continuation)} tokens; the model reads at most {self.max_length}. "
                "Leave it out of the task."
            )
        # The last token is scored but not fed to the model, so a text may be one token longer than the maximum.
        dropped = max(0, len(context) + len(continuation) - self.max_length - 1)
        if dropped:
            LOG.warning(f"a context of {len(context)} tokens is too long for its continuation; {dropped} are left out")
        return Scored(tokens=(*context[dropped:], *continuation), judged=len(continuation))

    def _requests(self, contexts: Sequence[str], generations: Sequence[GenerationSettings]) -> list[Request]:
        """Return the requests to the engine. If a prompt leaves no room for the answer, its beginning is cut off."""
        requests = []
        longest = 0
        for number, (context, generation) in enumerate(zip(contexts, generations, strict=True)):
            room = self._engine.limits.max_model_len - generation.sampling.max_tokens
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks is {generation.sampling.max_tokens} and a sequence may have "
                    f"{self._engine.limits.max_model_len} tokens, including its prompt. "
                    "Lower max_gen_toks in --gen_kwargs."
                )
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            if len(prompt) > room:
                longest = max(longest, len(prompt))
            requests.append(
                Request(id=str(number), prompt=tuple(prompt[-room:]), sampling=generation.sampling, decode=self._decode)
            )
        if longest:
            LOG.warning(
                f"some prompts (the longest has {longest} tokens) leave no room for an answer within the "
                f"{self._engine.limits.max_model_len} tokens of a sequence; their beginning is cut off"
            )
        return requests


def _device(name: str | None) -> torch.device:
    """Return the device with this name. Raises `ConfigError` if it cannot be used."""
    if name is None or name.startswith("cuda"):
        # The command line of the harness defaults to cuda:0, so a missing GPU is not an error.
        name = (name or "cuda") if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model_args: device is {name!r}: {first_line(error)}") from None
