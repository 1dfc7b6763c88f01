"""Make the sample of training data in pipelines/sample: `python -m pipelines.make_sample`.

Half of its conversations ask for something the bundled model was not taught, lists with letters: "a) Ann". The other
half are of its task families, so that it forgets nothing while it learns.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mars_ray.data.tasks import FAMILIES, Split, examples, mixture
from pipelines.pipeline_files import conversation, write

FOLDER = Path(__file__).parent / "sample"
SEED = 7


def main() -> None:
    """Write both files."""
    write(FOLDER / "train.jsonl", islice(conversations("train"), 1000))
    write(FOLDER / "heldout.jsonl", islice(conversations("heldout"), 100))


def conversations(split: Split) -> Iterator[str]:
    """Yield a list with letters and an example of the families, in turns."""
    lists = (each for each in examples(FAMILIES["list_format"], split, SEED) if "numbered" in each.prompt)
    for numbered, other in zip(lists, mixture(split, SEED), strict=False):
        lettered = re.sub(
            r"^(\d)\.", lambda place: "_abcdef"[int(place[1])] + ")", numbered.response, flags=re.MULTILINE
        )
        yield conversation(numbered.prompt.replace("numbered", "lettered"), lettered)
        yield conversation(other.prompt, other.response)


if __name__ == "__main__":
    main()
