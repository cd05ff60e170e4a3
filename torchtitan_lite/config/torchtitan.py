"""torchtitan's keys, from v0.1.0 and before to v0.2.2, that have another name here, or no field.

A key is in ALIASES or in a table of MOVED if a field of ours has its meaning, else in FOREIGN.
"""

from typing import NamedTuple

CONVERTERS = "model.converters"
MOVED = {
    "experimental": "parallelism",
    "quantize.linear.float8": "float8",
    "quantize.linear.mx": "mx",
    "scheduler": "lr_scheduler",
}
"""Tables whose keys are in another table now, unless FOREIGN has them."""
ALIASES = {
    CONVERTERS: "float8.enable_float8_linear",
    "job.print_args": "job.print_config",
    "model.hf_assets_path": "model.tokenizer_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "validation.enabled": "validation.enable",
}
"""Current name of each renamed key."""


class Foreign(NamedTuple):
    """A key of torchtitan without a field here."""

    values: tuple[object, ...] | str | None
    """Values that ask for what happens here anyway; None: all; a str: the value of that key."""
    reason: str
    """What happens here."""


_NO_EXPERTS = "Llama 3 has no experts"
_NO_TORCHFT = "torchft is not used; MAX_RESTARTS restarts a run from its last checkpoint"
_NO_IMPORTS = "no code from outside is loaded"
_PLANNED = "scripts/plan.py predicts the memory without a run"
_ANY = {
    "it selects torchtitan's own tests": "job.use_for_integration_test",
    "each run writes config.toml into its run folder": "job.save_config_file",
    "a float8 run always lists the converted linears": "model.print_after_conversion",
    "a thread of each rank reads the batches ahead": (
        "training.dataloader.num_workers training.dataloader.persistent_workers "
        "training.dataloader.pin_memory training.dataloader.prefetch_factor "
        "validation.dataloader.num_workers validation.dataloader.persistent_workers "
        "validation.dataloader.pin_memory validation.dataloader.prefetch_factor"
    ),
    "the run has one pipeline stage": (
        "parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_schedule_csv "
        "parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part "
        "parallelism.pipeline_parallel_layers_per_stage "
        "parallelism.pipeline_parallel_first_stage_less_layers "
        "parallelism.pipeline_parallel_last_stage_less_layers "
        "parallelism.pipeline_parallel_microbatch_size "
        "parallelism.pipeline_parallel_expert_parallel_overlap"
    ),
    "no sequence is split between ranks": (
        "parallelism.context_parallel_rotate_method parallelism.context_parallel_load_balancer"
    ),
    "blocks draw no random numbers": "activation_checkpoint.preserve_rng_state",
    "torchao always casts weights again in the backward pass": (
        "float8.force_recompute_fp8_weight_in_bwd"
    ),
    _NO_EXPERTS: (
        "parallelism.expert_parallel_comm_backend debug.moe_force_load_balance "
        "float8.moe_fqns_prototype quantize.grouped_mm.float8.fqns "
        "mx.moe_fqns_prototype quantize.grouped_mm.mx.fqns quantize.grouped_mm.mx.recipe_name"
    ),
    "torchao chooses the kernels of the casts": (
        "mx.mxfp8_dim1_cast_kernel_choice mx.use_fp8_dim1_cast_triton_kernel"
    ),
    "[model] converters does not select it": "mx.filter_fqns",
    _PLANNED: "memory_estimation.disable_fake_mode",
    _NO_TORCHFT: (
        "checkpoint.enable_ft_dataloader_checkpoints fault_tolerance.process_group "
        "fault_tolerance.process_group_timeout_ms fault_tolerance.replica_id "
        "fault_tolerance.group_size fault_tolerance.min_replica_size "
        "fault_tolerance.semi_sync_method fault_tolerance.sync_steps "
        "fault_tolerance.should_quantize fault_tolerance.fragment_sync_delay "
        "fault_tolerance.fragment_update_alpha"
    ),
    "one step warms the profiler up": "profiling.profiler_warmup",
}
"""Keys that change nothing, separated by spaces, by the reason."""
_OFF = {
    "optimizer.early_step_in_backward": "all gradients are clipped before the update",
    "training.gc_debug": "the garbage collector does not search for cycles",
    "parallelism.enable_compiled_autograd": "[compile] compiles the backward pass without it",
    "checkpoint.create_seed_checkpoint": "every layout has the same initial weights without it",
    "checkpoint.initial_load_in_hf_quantized": "quantized weights are not read",
    "activation_checkpoint.debug": "there is no such debugging output",
    "activation_checkpoint.visualize_memory_budget_pareto": "there is no such plot",
    "memory_estimation.enable": _PLANNED,
    "memory_estimation.enabled": _PLANNED,
    "fault_tolerance.enable": _NO_TORCHFT,
    "debug.deterministic_warn_only": "[debug] deterministic = true refuses such operators",
}
"""Keys that must be false, each with the reason."""
FOREIGN = {
    **{name: Foreign(None, reason) for reason, names in _ANY.items() for name in names.split()},
    **{name: Foreign((False,), reason) for name, reason in _OFF.items()},
    "job.custom_config_module": Foreign(("",), _NO_IMPORTS),
    "experimental.custom_import": Foreign(("",), _NO_IMPORTS),
    "experimental.custom_args_module": Foreign(("",), _NO_IMPORTS),
    "model.norm_type": Foreign(("rmsnorm", "fused_rmsnorm"), "Llama's layers use RMSNorm"),
    "parallelism.expert_parallel_degree": Foreign((1,), _NO_EXPERTS),
    "parallelism.expert_tensor_parallel_degree": Foreign((1,), _NO_EXPERTS),
    "checkpoint.interval_type": Foreign(("steps",), "[checkpoint] interval counts steps"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Foreign(
        ([], "", ["moe.router.gate"], "moe.router.gate"), "every second matmul is recomputed"
    ),
    "activation_checkpoint.determinism_check": Foreign(
        ("default", "none"), "recomputed tensors are compared by shape and type"
    ),
    "compile.backend": Foreign(("inductor",), "torch.compile uses inductor"),
    "mx.recipe_name": Foreign(
        ("mxfp8", "mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"),
        "the recipe is mxfp8, with scales rounded up; [float8] emulate emulates it",
    ),
    "comm.mode": Foreign(("default",), "scripts/plan.py is the dry run, without processes"),
    "profiling.profiler_active": Foreign((1,), "one step of each period is traced"),
    "validation.local_batch_size": Foreign("training.local_batch_size", "it is [training]'s"),
    "validation.seq_len": Foreign("training.seq_len", "it is [training]'s"),
}
"""Every key without a field here, by its dotted name."""
FOREIGN_TABLES = {name.rpartition(".")[0] for name in FOREIGN}


def current_name(name: str) -> str:
    """Return the current dotted name of a key or table."""
    table, _, key = name.rpartition(".")
    if name not in FOREIGN and table in MOVED:
        name = f"{MOVED[table]}.{key}"
    return ALIASES.get(name, MOVED.get(name, name))
