"""A Jinja template of the job, filled with the columns of a row.

Columns are there under their own names, and as `row["any name"]`. One that is null can be asked about, not written: a
prompt with "None" or nothing in the place of a value would be answered. A template sees nothing but the columns.
"""

from reprlib import repr as shortened
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.errors import BadRecordError, ConfigError

CHARACTERS_MAX = 1 << 20
"""Characters of a prompt at most, more than any model reads: a template may write without end."""


class PromptTemplate:
    """A template, compiled. Raises `ConfigError` for one that is none."""

    def __init__(self, source: str) -> None:
        sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_not_null)
        try:
            self._template = sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the template has an error in line {error.lineno}: {error.message}") from error

    def fill(self, columns: JsonRecord) -> str:
        """Return the prompt of a row. Raises `BadRecordError`."""
        prompt = ""
        try:
            for piece in self._template.generate({"row": columns} | columns):
                prompt += piece
                if len(prompt) > CHARACTERS_MAX:
                    raise BadRecordError(f"the template makes more than {CHARACTERS_MAX} characters of it")
            prompt.encode()  # half of a surrogate pair may be spelt in the template
        except BadRecordError:
            raise
        except Exception as error:  # a template is a program: anything may come out of it
            raise BadRecordError(
                f"the template cannot be filled: {error}. Its columns are {shortened(sorted(columns))}"
            ) from error
        return prompt


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("a value to be written is null")
    return value
