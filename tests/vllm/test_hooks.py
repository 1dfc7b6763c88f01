"""The parts of vLLM that the plug-in overrides, calls or reads, in the Python files of each version it accepts.

The files of the installed vLLM are read, and those of other versions, whose wheels `make test-vllm` unpacks.
"""

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from mars_ray.vllm.engine.requirements import installed_version
from mars_ray.vllm.versions import HOOKS, minor

METHODS = {
    "v1/worker/gpu/model_states/default.py": {
        "DefaultModelState.__init__": "self vllm_config model encoder_cache device",
        "DefaultModelState.add_request": "self req_index new_req_data",
        "DefaultModelState.apply_staged_writes": "self",
        "DefaultModelState.prepare_inputs": "self input_batch req_states",
    },
    "v1/worker/gpu/model_states/interface.py": {"ModelState.custom_sampler": "self sampler"},
    "v1/worker/gpu/sample/sampler.py": {"Sampler.__call__": "self logits input_batch"},
    "v1/worker/gpu/buffer_utils.py": {
        "UvaBackedTensor.__init__": "self size dtype",
        "UvaBackedTensor.copy_to_uva": "self",
    },
    "v1/core/sched/scheduler.py": {
        "Scheduler.schedule": "self throttle_prefills",
        "Scheduler._update_after_schedule": "self scheduler_output",
        "Scheduler._update_request_with_output": "self request new_token_ids",
    },
    "model_executor/layers/linear.py": {
        "QKVParallelLinear.weight_loader": "self param loaded_weight loaded_shard_id",
        "MergedColumnParallelLinear.weight_loader": "self param loaded_weight loaded_shard_id",
        "RowParallelLinear.weight_loader": "self param loaded_weight",
    },
    "v1/core/kv_cache_coordinator.py": {"KVCacheCoordinator.cache_blocks": "self request num_computed_tokens"},
    "v1/metrics/loggers.py": {
        "StatLoggerBase.__init__": "self vllm_config engine_index",
        "StatLoggerBase.record": "self scheduler_stats iteration_stats",
    },
    "model_executor/models/config.py": {"VerifyAndUpdateConfig.verify_and_update_config": "vllm_config"},
}
"""First parameters of methods."""
ATTRIBUTES = {
    "v1/worker/gpu/input_batch.py": {
        "InputBatch": "req_ids num_tokens num_draft_tokens idx_mapping input_ids query_start_loc cu_num_logits"
    },
    "v1/worker/gpu/states.py": {"RequestState": "num_computed_tokens total_len all_token_ids"},
    "v1/worker/gpu/sample/output.py": {"SamplerOutput": "sampled_token_ids logprobs_tensors num_sampled num_rejected"},
    "v1/core/sched/scheduler.py": {"Scheduler": "running requests kv_cache_manager"},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": "coordinator"},
    "v1/core/sched/output.py": {"SchedulerOutput": "num_scheduled_tokens", "NewRequestData": "sampling_params"},
    "v1/request.py": {"Request": "num_tokens is_prefill_chunk spec_token_ids sampling_params"},
    "v1/metrics/stats.py": {
        "SchedulerStats": "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage",
        "IterationStats": "num_generation_tokens num_prompt_tokens num_preempted_reqs finished_requests "
        "time_to_first_tokens_iter",
        "FinishedRequestStats": "num_generation_tokens mean_time_per_output_token",
    },
    "model_executor/layers/linear.py": {
        "ColumnParallelLinear": "output_size_per_partition",
        "RowParallelLinear": "input_size_per_partition",
    },
    "model_executor/layers/vocab_parallel_embedding.py": {
        "VocabParallelEmbedding": "shard_indices",
        "VocabParallelEmbeddingShardIndices": "org_vocab_start_index org_vocab_end_index",
    },
    "config/diffusion.py": {"DiffusionConfig": "canvas_length"},
    "config/vllm.py": {
        "VllmConfig": "additional_config diffusion_config speculative_config kv_transfer_config attention_config "
        "use_v2_model_runner instance_id"
    },
    "config/parallel.py": {
        "ParallelConfig": "worker_extension_cls pipeline_parallel_size tensor_parallel_size "
        "enable_batch_sharded_sampling"
    },
    "config/model.py": {"ModelConfig": "logits_processors"},
    "config/scheduler.py": {
        "SchedulerConfig": "scheduler_cls policy async_scheduling max_num_seqs max_num_batched_tokens "
        "long_prefill_token_threshold"
    },
}
"""Fields, properties, and attributes that a class sets on itself."""
CALLS = {
    "v1/worker/gpu/model_runner.py": [
        "self.model_state.custom_sampler(self.sampler)",
        "self.model_state.prepare_inputs(input_batch, self.req_states)",
        "self.sampler(logits, input_batch)",
    ],
    "model_executor/layers/linear.py": [
        "output_parallel = self.quant_method.apply(self, input_, bias)",
        "output_parallel = self.quant_method.apply(self, input_parallel, bias_)",
    ],
    "v1/worker/gpu/model_states/__init__.py": ["model.get_model_state_cls()"],
}
"""Calls by which vLLM reaches the plug-in, apart from spaces and line ends."""
PROCESSOR_OF_V2 = {"add_request": "self req_idx sampling_params", "apply": "self logits ctx"}
"""Methods of logits processors that model runner V2 calls."""


@pytest.fixture(params=HOOKS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(version: str) -> Path:
    """The package of a version: the installed one, or one below the folder VLLM_SOURCES."""
    installed = find_spec("vllm")
    if installed is not None and minor(installed_version()) == version:
        return Path(str(installed.origin)).parent
    unpacked = Path(os.environ.get("VLLM_SOURCES", ".")) / f"vllm-{version}" / "vllm"
    if not unpacked.is_dir():
        pytest.skip(f"vLLM {version} is missing: run make test-vllm")
    return unpacked


@cache
def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def methods(definition: ast.ClassDef) -> dict[str, list[str]]:
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in definition.body
        if isinstance(node, ast.FunctionDef)
    }


def attributes(definition: ast.ClassDef) -> set[str]:
    fields = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    of_self = {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return fields | of_self | set(methods(definition))


def test_the_methods_that_the_plug_in_overrides_or_calls_have_the_parameters_it_gives(root):
    for file, expected in METHODS.items():
        for name, parameters in expected.items():
            owner, method = name.split(".")
            assert methods(classes(root / file)[owner])[method][: len(parameters.split())] == parameters.split(), name


def test_the_attributes_that_the_plug_in_reads_or_sets_exist(root):
    for file, expected in ATTRIBUTES.items():
        for owner, names in expected.items():
            assert set(names.split()) - attributes(classes(root / file)[owner]) == set(), owner


def test_vllm_calls_the_hooks_as_the_plug_in_expects(root):
    for file, calls in CALLS.items():
        text = "".join((root / file).read_text().split())
        for call in calls:
            assert "".join(call.split()) in text, call


def test_logits_processors_are_where_the_table_says_and_need_the_model_runner_that_it_says(version, root):
    hooks = HOOKS[version]
    file = root.parent / f"{hooks.processors.replace('.', '/')}.py"
    found = methods(classes(file)["LogitsProcessor"])
    assert found["validate_params"] == ["cls", "sampling_params"]
    unsupported = 'unsupported.append("custom logits processors")' in (root / "config/vllm.py").read_text()
    assert unsupported is hooks.processors_need_v1
    if not hooks.processors_need_v1:
        assert {name: " ".join(found[name]) for name in PROCESSOR_OF_V2} == PROCESSOR_OF_V2
