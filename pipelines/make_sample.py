"""Make the sample of training data in pipelines/sample: `python -m pipelines.make_sample`.

Half of its conversations ask for lists with letters ("a) Ann"), which the bundled model does not know. The other half
are of its task families, so that it does not forget them.
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
    """Yield lists with letters and examples of the families in turns."""
    lists = (example for example in examples(FAMILIES["list_format"], split, SEED) if "numbered" in example.prompt)
    for numbered, other in zip(lists, mixture(split, SEED), strict=False):
        lettered = re.sub(
            r"^(\d)\.", lambda place: "_abcdef"[int(place[1])] + ")", numbered.response, flags=re.MULTILINE
        )
        yield conversation(numbered.prompt.replace("numbered", "lettered"), lettered)
        yield conversation(other.prompt, other.response)


if __name__ == "__main__":
    main()
