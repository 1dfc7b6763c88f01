"""Parse lists of whole numbers on a command line."""

from mars_ray.errors import ConfigError


def whole_numbers(text: str) -> list[int]:
    """Return the numbers in a text such as "1,4,16". Raises a `ConfigError`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--batch is {text!r}; give whole numbers separated by commas, such as 1,4,16.") from None
