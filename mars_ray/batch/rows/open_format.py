"""Make a row format from its settings, with the tokenizer of a model folder; the model itself is not loaded."""

from pathlib import Path

from mars_ray.batch.rows.openai_format import OpenAIBatchFormat, OpenAIFormatSettings
from mars_ray.batch.rows.plain_format import PlainFormat, PlainFormatSettings
from mars_ray.batch.rows.row_format import RowFormat
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.model.folder import check_folder
from mars_ray.model.tokenizer import load_tokenizer

RowFormatSettings = PlainFormatSettings | OpenAIFormatSettings


def open_row_format(settings: RowFormatSettings, folder: Path) -> RowFormat:
    """Return the row format with the tokenizer in `folder`. Raises `ModelError`, `ConfigError`."""
    found = check_folder(folder)
    tokenizer = load_tokenizer(folder, found.config, found.tokenizer_is_custom)
    if isinstance(settings, OpenAIFormatSettings):
        positions = found.config.get_text_config().max_position_embeddings
        return OpenAIBatchFormat(settings, tokenizer, positions, generation_defaults(folder))
    return PlainFormat(settings, ChatEncoder(tokenizer))
