"""Read the arguments of a `generate_until` request: how the engine makes the text, and where it is cut.

An argument that would change the answer and that we do not have is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from mars_ray.engine.request import STOP_CHARACTERS_MAX, STOP_STRINGS_MAX, SamplingParams
from mars_ray.engine.seeds import seed_of
from mars_ray.errors import ConfigError

SAMPLED_ONLY = ("top_p", "top_k", "min_p")
"""Arguments without effect on greedy decoding, where tasks write values into them that mean nothing."""

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}
"""Arguments that transformers has and we do not, and the value of each that asks for nothing."""

_HANDLED = ("until", "max_gen_toks", "do_sample", "temperature", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """How one text is to be made."""

    sampling: SamplingParams
    until: tuple[str, ...]
    """The text ends before the first of these. The engine stops at those of them that it takes."""

    def cut(self, text: str) -> str:
        """Return the text as far as the task wants it."""
        cut: str = postprocess_generated_text(text, list(self.until), None)
        return cut


def parse_gen_kwargs(arguments: Mapping[str, object], *, max_gen_toks: int, request: str) -> GenerationSettings:
    """Read the arguments of a request, which draws by a seed of its own, made of `seed` and what `request` calls it.

    Without `seed` the engine asks Python's `random`, which the harness seeds. Raises `ConfigError` for an argument that
    we do not have, `RequestError` for a value out of range.
    """
    asked = normalize_gen_kwargs(dict(arguments), max_gen_toks)
    for name, value in asked.items():
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise ConfigError(f"{name} is {value!r} in the arguments of a generation; we have {NEUTRAL[name]} only.")
        if name not in (*_HANDLED, *SAMPLED_ONLY, *PENALTIES, *NEUTRAL):
            raise ConfigError(
                f"{name!r} in the arguments of a generation is unknown to us. Set --gen_kwargs without it."
            )
    temperature = float(asked.get("temperature", 0.0))
    names = PENALTIES + (SAMPLED_ONLY if temperature else ())
    seed = asked.get("seed")
    until = tuple(text for text in asked["until"] if text)
    stop = [text for text in until if len(text) <= STOP_CHARACTERS_MAX][:STOP_STRINGS_MAX]
    sampling = SamplingParams(
        max_tokens=asked["max_gen_toks"],
        temperature=temperature,
        stop=tuple(stop),
        seed=seed_of(f"{seed} {request}") if isinstance(seed, int) else seed,
        **{name: asked[name] for name in names if name in asked},
    )
    return GenerationSettings(sampling=sampling, until=until)
