"""A Jinja template of the job, filled with the columns of a row.

Columns are there under their own names, and as `row["any name"]`. One that is null can be asked about, not written: a
prompt with "None" or nothing in the place of a value would be answered. A template sees nothing but the columns.
"""

from functools import partial
from reprlib import repr as shortened
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.errors import BadRecordError, ConfigError

CHARACTERS_MAX = 1 << 20
"""Characters of a prompt at most, more than any model reads: a template may write without end."""


class _MissingColumnError(UndefinedError):
    """The template uses a column that the row lacks."""

    def __init__(self, message: str | None, column: str) -> None:
        super().__init__(message)
        self.column = column


class _MissingColumn(StrictUndefined):
    """The value of a column that the row lacks; using it raises `_MissingColumnError`."""

    def __init__(self, hint: str | None = None, obj: Any = missing, name: str | None = None, *_: Any) -> None:
        super().__init__(hint, obj, name, partial(_MissingColumnError, column=str(name)))  # type: ignore[arg-type]


class PromptTemplate:
    """A compiled template. Raises `ConfigError` for a text that is no template."""

    def __init__(self, source: str) -> None:
        sandbox = ImmutableSandboxedEnvironment(undefined=_MissingColumn, finalize=_not_null)
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
                f"the template cannot be filled: {error}. Its columns are {shortened(sorted(columns))}",
                missing=(error.column,) if isinstance(error, _MissingColumnError) else (),
            ) from error
        return prompt


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("a value to be written is null")
    return value
