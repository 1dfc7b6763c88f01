"""Task: follow links between digits. Hard to predict ahead, because each further digit needs one more lookup.

The prompt names the last digit instead of the number of links, so that a tiny model does not have to count.
"""

import random

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample

_PROMPTS = (
    "Follow the links from {start} to {end}: {links}",
    "Links: {links}. List the digits from {start} to {end}.",
    "{links}. Walk from {start} to {end}.",
    "Start at {start}, stop at {end}, follow: {links}",
)


def _make(rng: random.Random) -> TaskExample:
    # One cycle through 8 to 10 digits: each digit occurs once, with one link to it and one link from it.
    cycle = rng.sample("0123456789", rng.randint(8, 10))
    path = cycle[: rng.randint(6, min(8, len(cycle) - 1)) + 1]
    links = [f"{a}>{b}" for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    rng.shuffle(links)
    prompt = rng.choice(_PROMPTS).format(start=path[0], end=path[-1], links=" ".join(links))
    response = "".join(path)
    return TaskExample(family="follow_links", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="follow_links", kind="hard", weight=0.75, make=_make, verify=same_text)
