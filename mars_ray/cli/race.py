"""The race of `mars-ray demo --model`: three settings answer the same prompts."""

import json
from dataclasses import asdict

from rich.console import Console

from mars_ray.adapter.card import shipped_adapters
from mars_ray.race.prompts import PROMPTS
from mars_ray.race.replay import show
from mars_ray.race.track import Track


def race(model: str, adapter: str | None, as_json: bool) -> None:
    """Race every prompt, with the adapter that comes for the model where none is named; show each when it was run."""
    if adapter is None and model in shipped_adapters():
        adapter = model
    with Track(model, adapter) as track:
        races = show(map(track.race, PROMPTS), track.label, Console())
    if as_json:
        print(json.dumps({"track": track.label, "races": [asdict(each) for each in races]}))
