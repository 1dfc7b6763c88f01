"""A recorded script says what the reference decoder would have proposed."""

import numpy as np
import pytest

from benchmarks.decode.block_cache import decode_block_cache
from benchmarks.decode.script import Script, autoregressive_outputs, record
from benchmarks.decode.workload import Workload
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint

BLOCK = 4


@pytest.fixture(scope="module")
def scripts(bundled: Checkpoint, workload: Workload) -> list[Script]:
    return record(bundled, workload.prompts[:3], workload.lengths[:3], BLOCK)


def test_the_first_column_is_what_the_reference_decodes_one_token_at_a_time(
    bundled: Checkpoint, workload: Workload, scripts: list[Script]
) -> None:
    options = DecodeOptions(mode="ar", max_tokens=128, stop_ids=bundled.stop_ids)
    reference = decode(bundled.network, workload.prompts[:3], options, mask_id=bundled.mask_id)
    assert [script.tokens_SW[:, 0].tolist() for script in scripts] == [each.tokens for each in reference]
    assert autoregressive_outputs(bundled, workload.prompts[:3], 128) == [each.tokens for each in reference]


def test_every_row_is_the_window_of_the_reference_behind_that_many_tokens(
    bundled: Checkpoint, workload: Workload, scripts: list[Script]
) -> None:
    prompt, script = workload.prompts[1], scripts[1]
    output = script.tokens_SW[:, 0].tolist()
    prefixes = [[*prompt, *output[:generated]] for generated in range(len(output))]
    whole_window = DecodeOptions(threshold=0.0, block=BLOCK, max_tokens=BLOCK)
    windows = decode(bundled.network, prefixes, whole_window, mask_id=bundled.mask_id)
    assert script.tokens_SW.tolist() == [each.tokens for each in windows]
    np.testing.assert_allclose(script.confidences_SW, [each.confidences for each in windows], atol=1e-4)
    assert (script.tokens_SW.dtype, script.confidences_SW.dtype) == (np.int64, np.float32)


def test_past_its_end_a_script_repeats_its_last_position() -> None:
    script = Script(np.array([[1, 2], [3, 4]]), np.array([[0.5, 0.25], [1.0, 0.75]], dtype=np.float32))
    assert script.proposals(0, 2) == ([1, 2], [0.5, 0.25])
    assert script.proposals(1, 1) == ([3], [1.0])
    assert script.proposals(7, 2) == ([3, 4], [1.0, 0.75])


def test_replayed_for_other_prompts_the_recorded_output_comes_out(
    bundled: Checkpoint, workload: Workload, scripts: list[Script]
) -> None:
    options = DecodeOptions(threshold=1.0, block=BLOCK, max_tokens=128, stop_ids=bundled.stop_ids)
    others = [[1, 2, 3], [4], [5, 6]]
    decoded = decode_block_cache(
        bundled.network, others, options, mask_id=bundled.mask_id, cache_block=8, script=scripts
    )
    assert [each.tokens for each in decoded] == [script.tokens_SW[:, 0].tolist() for script in scripts]
