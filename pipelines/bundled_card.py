"""Write the README of the bundled model from the measurements in its cards."""

from collections.abc import Sequence

from mars_ray.evaluation.calibration import CURVE_HEAD, curve_row
from mars_ray.model.card import Card
from pipelines.pipeline_files import markdown_table

INTRODUCTION = """\
# The bundled model

A Qwen2 with {parameters:.2f} million parameters ({megabytes:.1f} MB in bfloat16) that does one small job well: the
thirteen generated task families of `mars_ray/data/tasks`. `mars-ray` uses it by default, in the demo and in the tests.
It knows nothing else: it answers prompts outside its families with nonsense.

Made by `python -m pipelines.build_bundled_model` from this repository alone, with fixed seeds: {ar_steps:,} steps of
autoregressive training from random weights ({ar_tokens:.1f} M tokens), then {mars_steps:,} steps of MARS
({mars_tokens:.1f} M tokens), both without tool calls, then {tool_steps:,} steps of MARS on a mixture with tool calls
({tool_tokens:.1f} M tokens in two halves), then {key_steps:,} steps from the weights in bfloat16 with more examples of
json_extract ({key_tokens:.1f} M tokens in five parts; the weights are the mean of those after the last two). The last
seven trainings have block {block}, {objective}.
Trained with {versions}.

Before the last five trainings, json_extract asked for three keys in a fixed order. The column "AR checkpoint" is of
that family; the pipeline now trains and measures all its models on the present one.

License: Apache-2.0, like the repository, which generates the training data.

## Measurements

Measured with `mars-ray calibrate --model bundled`: greedy decoding with the engine, bfloat16 weights in float32
arithmetic, {samples} samples of {per_family} held-out examples of each family (training contained none of these
prompts), {examples:,} examples in total; the AR checkpoint was measured on {before_examples:,}. This is one model from
one training seed. The number after ± is the standard deviation over samples. "Tokens per forward" is all tokens divided
by all forwards. "Agreement" is the share of tokens that autoregressive decoding would also choose, given the same
tokens before them. "Accuracy" is the mean over families, judged by their exact verifiers. At threshold 1 every token
ahead is verified.
"""


def card_text(card: Card, mars_cards: Sequence[Card], before_card: Card, *, parameters: int, file_bytes: int) -> str:
    """Return the README as Markdown. The other cards are those after each training with MARS, and of the AR checkpoint
    before it."""
    first_mars, *rest = mars_cards
    with_tools, with_keys = rest[:2], rest[2:]
    curve = card.calibration
    before = before_card.calibration[0]
    families = list(curve[0].by_family)
    introduction = INTRODUCTION.format(
        parameters=parameters / 1e6,
        megabytes=file_bytes / 1e6,
        ar_steps=before_card.steps,
        ar_tokens=before_card.tokens / 1e6,
        mars_steps=first_mars.steps,
        mars_tokens=first_mars.tokens / 1e6,
        tool_steps=sum(half.steps for half in with_tools),
        tool_tokens=sum(half.tokens for half in with_tools) / 1e6,
        key_steps=sum(part.steps for part in with_keys),
        key_tokens=sum(part.tokens for part in with_keys) / 1e6,
        block=card.block,
        objective=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in card.objective.items()),
        versions=", ".join(f"{name} {version}" for name, version in card.versions.items()),
        samples=curve[0].seeds,
        per_family=curve[0].by_family[families[0]].examples // curve[0].seeds,
        examples=curve[0].examples,
        before_examples=before.examples,
    )
    first, *figures = curve_row(before)
    overall = markdown_table(CURVE_HEAD, [(f"AR checkpoint, {first}", *figures), *map(curve_row, curve)])
    thresholds = [f"{point.threshold:g}" for point in curve]
    accuracy = markdown_table(
        ("accuracy", "AR checkpoint", *thresholds),
        (
            (
                family,
                f"{before.by_family[family].accuracy:.1%}",
                *(f"{point.by_family[family].accuracy:.1%}" for point in curve),
            )
            for family in families
        ),
    )
    speed = markdown_table(
        ("tokens per forward", *thresholds),
        ((family, *(f"{point.by_family[family].tokens_per_forward:.2f}" for point in curve)) for family in families),
    )
    return (
        f"{introduction}\n{overall}\n### Accuracy by family\n\n{accuracy}\n### Tokens per forward by family\n\n{speed}"
    )
