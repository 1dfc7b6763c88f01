import json
import random
from itertools import islice

from mars_ray.data.tasks import FAMILIES, examples
from pipelines.made_up_words import spliced, with_made_up_words


def test_the_facts_of_a_sentence_get_made_up_words_and_the_request_stays() -> None:
    rng = random.Random(4)
    for example in islice(examples(FAMILIES["json_extract"], "train", 4), 300):
        renamed = with_made_up_words(example, rng, spliced)
        facts = json.loads(renamed.response)
        assert list(facts) == list(json.loads(example.response))
        assert all(str(value) in renamed.prompt for value in facts.values())
        assert ("with the keys" in renamed.prompt) == ("with the keys" in example.prompt)
