"""Task: rewrite a date between ISO, "5 March 2024" and "03/05/2024" (month first)."""

import random
from datetime import date, timedelta

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import MONTHS

_FIRST_DAY = date(1980, 1, 1)
_DAYS = (date(2040, 1, 1) - _FIRST_DAY).days

_FORMATS = ("YYYY-MM-DD", "MM/DD/YYYY", "day month year")

_PROMPTS = (
    "Write the date {source} in the form {target}.",
    "Rewrite {source} as a date like {target}.",
    "Change the date format to {target}: {source}",
    "The deadline is {source}. Give it as {target}.",
)


def _written(day: date, form: str) -> str:
    if form == "YYYY-MM-DD":
        return day.isoformat()
    if form == "MM/DD/YYYY":
        return f"{day.month:02}/{day.day:02}/{day.year}"
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def _make(rng: random.Random) -> TaskExample:
    day = _FIRST_DAY + timedelta(days=rng.randrange(_DAYS))
    source, target = rng.sample(_FORMATS, 2)
    prompt = rng.choice(_PROMPTS).format(source=_written(day, source), target=target)
    response = _written(day, target)
    return TaskExample(family="date_rewrite", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="date_rewrite", kind="easy", weight=1.0, make=_make, verify=same_text)
