"""Parse the arguments of a `generate_until` request into sampling parameters and stop strings.

An unsupported argument that would change the answer raises an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from mars_ray.engine.request import STOP_CHARACTERS_MAX, STOP_STRINGS_MAX, SamplingParams, seed_of
from mars_ray.errors import ConfigError

SAMPLED_ONLY = ("top_p", "top_k", "min_p")
"""Arguments that are ignored in greedy decoding, because tasks then often set meaningless values."""

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}
"""Arguments of transformers that are not supported, each with its only accepted value, which has no effect."""

_HANDLED = ("until", "max_gen_toks", "do_sample", "temperature", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Settings for the generation of one text."""

    sampling: SamplingParams
    until: tuple[str, ...]
    """Strings at which the text is cut off. The engine stops only at those within its limits; `cut` applies all of
    them."""

    def cut(self, text: str) -> str:
        """Cut the text before the earliest occurrence of any string in `until`."""
        cut: str = postprocess_generated_text(text, list(self.until), None)
        return cut


def parse_gen_kwargs(arguments: Mapping[str, object], *, max_gen_toks: int, request: str) -> GenerationSettings:
    """Parse the arguments of a request. The request's seed is derived from the argument `seed` and the name `request`.

    If there is no `seed`, the engine draws one from Python's `random`, which the harness seeds. Raises `ConfigError`
    for an unsupported argument, and `RequestError` for a value out of range.
    """
    options = normalize_gen_kwargs(dict(arguments), max_gen_toks)
    for name, value in options.items():
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise ConfigError(f"{name} is {value!r} in the arguments of a generation; it must be {NEUTRAL[name]}.")
        if name not in (*_HANDLED, *SAMPLED_ONLY, *PENALTIES, *NEUTRAL):
            raise ConfigError(
                f"{name!r} in the arguments of a generation is not supported. Remove it from --gen_kwargs."
            )
    temperature = float(options.get("temperature", 0.0))
    names = PENALTIES + (SAMPLED_ONLY if temperature else ())
    seed = options.get("seed")
    until = tuple(text for text in options["until"] if text)
    stop = [text for text in until if len(text) <= STOP_CHARACTERS_MAX][:STOP_STRINGS_MAX]
    sampling = SamplingParams(
        max_tokens=options["max_gen_toks"],
        temperature=temperature,
        stop=tuple(stop),
        seed=seed_of(f"{seed} {request}") if isinstance(seed, int) else seed,
        **{name: options[name] for name in names if name in options},
    )
    return GenerationSettings(sampling=sampling, until=until)
