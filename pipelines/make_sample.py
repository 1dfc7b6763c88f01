"""Make the sample of training data in pipelines/sample: `python -m pipelines.make_sample`.

Half of the conversations ask for lists with letters ("a) Ann"), which the bundled model cannot write. The other half
come from its task families, so that it does not forget them.
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
    """Write the training data and the held-out data."""
    write(FOLDER / "train.jsonl", islice(conversations("train"), 1000))
    write(FOLDER / "heldout.jsonl", islice(conversations("heldout"), 100))


def conversations(split: Split) -> Iterator[str]:
    """Yield lists with letters and examples of the families alternately."""
    lists = (example for example in examples(FAMILIES["list_format"], split, SEED) if "numbered" in example.prompt)
    for numbered, example in zip(lists, mixture(split, SEED), strict=False):
        lettered = re.sub(
            r"^(\d)\.", lambda match: "_abcdef"[int(match[1])] + ")", numbered.response, flags=re.MULTILINE
        )
        yield conversation(numbered.prompt.replace("numbered", "lettered"), lettered)
        yield conversation(example.prompt, example.response)


if __name__ == "__main__":
    main()
