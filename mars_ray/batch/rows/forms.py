"""The forms there are, by their settings.

In:    settings that travel, a model folder.
Out:   the form.
Never: loads the model.
"""

from pathlib import Path

from mars_ray.batch.rows.form import Form
from mars_ray.batch.rows.openai_form import OpenAIForm, OpenAISettings
from mars_ray.batch.rows.plain_form import PlainForm, PlainSettings
from mars_ray.data.chat import ChatEncoder
from mars_ray.model.folder import check_folder
from mars_ray.model.tokenizer import load_tokenizer

FormSettings = PlainSettings | OpenAISettings


def open_form(settings: FormSettings, folder: Path) -> Form:
    """Return the form of rows with the tokenizer in `folder`. Raises `ModelError`, `ConfigError`."""
    found = check_folder(folder)
    tokenizer = load_tokenizer(folder, found.config, found.tokenizer_is_custom)
    if isinstance(settings, OpenAISettings):
        return OpenAIForm(settings, tokenizer, found.config.get_text_config().max_position_embeddings)
    return PlainForm(settings, ChatEncoder(tokenizer))
