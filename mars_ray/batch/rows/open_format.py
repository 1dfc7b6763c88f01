"""Open a row format with the tokenizer of a model, without loading weights."""

from mars_ray.batch.rows.openai_format import OpenAIBatchFormat, OpenAIFormatSettings
from mars_ray.batch.rows.plain_format import PlainFormat, PlainFormatSettings
from mars_ray.batch.rows.row_format import RowFormat
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.model.folder import ResolvedModel

RowFormatSettings = PlainFormatSettings | OpenAIFormatSettings


def open_row_format(settings: RowFormatSettings, model: ResolvedModel) -> RowFormat:
    """Return the row format with the tokenizer of `model`.

    Raises `ModelError` for an unusable model, and `ConfigError` for an invalid template.
    """
    tokenizer = model.load_tokenizer()
    if isinstance(settings, OpenAIFormatSettings):
        return OpenAIBatchFormat(settings, tokenizer, model.max_positions, generation_defaults(model.folder))
    return PlainFormat(settings, tokenizer)
