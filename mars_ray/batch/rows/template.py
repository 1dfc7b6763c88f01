"""Fill a Jinja template with the columns of a row.

Each column is a variable, and is also available as `row["any name"]`. A template may test whether a column is null, but
it must not print a null column; otherwise, the model would answer a prompt with "None" or a gap in place of the value.
A template can access only the columns.
"""

from functools import partial
from reprlib import repr as shortened
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.chat.unicode_text import text_fault
from mars_ray.errors import BadRecordError, ConfigError, first_line

CHARACTERS_MAX = 1 << 20
"""Maximum length of a prompt in characters, more than any model reads. The limit stops a template that prints
endlessly."""


class _MissingColumnError(UndefinedError):
    """Raised when a template uses a column that the row lacks."""

    def __init__(self, message: str | None, column: str) -> None:
        super().__init__(message)
        self.column = column


class _MissingColumn(StrictUndefined):
    """Placeholder for a column that the row lacks. Using it raises `_MissingColumnError`."""

    def __init__(self, hint: str | None = None, obj: Any = missing, name: str | None = None, exc: Any = None) -> None:
        error: Any = exc or partial(_MissingColumnError, column=str(name))
        super().__init__(hint, obj, name, error)


class PromptTemplate:
    """A compiled template. Raises `ConfigError` if `source` is not a valid template."""

    def __init__(self, source: str) -> None:
        sandbox = ImmutableSandboxedEnvironment(undefined=_MissingColumn, finalize=_not_null)
        try:
            self._template = sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the template has an error in line {error.lineno}: {error.message}") from error

    def fill(self, columns: JsonRecord) -> str:
        """Return the prompt of a row. Raises `BadRecordError` if the template cannot be filled."""
        prompt = ""
        try:
            for piece in self._template.generate({"row": columns} | columns):
                prompt += piece
                if len(prompt) > CHARACTERS_MAX:
                    raise BadRecordError(f"the template makes a prompt of more than {CHARACTERS_MAX} characters")
            if fault := text_fault(prompt):
                raise BadRecordError(f"the template cannot be filled: it prints {fault}")
        except BadRecordError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise BadRecordError(
                f"the template cannot be filled: {first_line(error)}. "
                f"The row's columns are {shortened(sorted(columns))}",
                missing=(error.column,) if isinstance(error, _MissingColumnError) else (),
            ) from error
        return prompt


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("a value to print is null")
    return value
