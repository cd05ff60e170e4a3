"""The keys of torchtitan, from before v0.1.0 to v0.2.2, that this project does not have.

ALIASES and MOVED have another name here; FOREIGN have no counterpart."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from .keys import KEYS

CONVERTERS = "model.converters"
UNREAD = [
    "float8.recipe_name",
    "float8.filter_fqns",
    "float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp",
]
"""Keys that torchtitan does not read if the converter is mx."""
MOVED = {
    "experimental": "parallelism",
    "quantize.linear.float8": "float8",
    "quantize.linear.mx": "mx",
    "scheduler": "lr_scheduler",
}
"""Current name of each renamed table; keys in FOREIGN keep the old one."""
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
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "validation.enabled": "validation.enable",
}
"""Current name of each renamed key."""
ALIASES |= {
    name.replace("parallelism", "training"): name for name in KEYS if "parallelism." in name
}


class Foreign(NamedTuple):
    """A key of torchtitan without a counterpart here."""

    reason: str
    """Why it has no effect here."""
    values: tuple[object, ...] | str | None = None
    """Accepted values: those that ask for what happens here. None: all. A name of a key: its value.
    """


OFF = (False,)
_EXPERTS = "Llama 3 has no experts"
_READER = "a thread of each rank reads the batches ahead"
_PLANNED = "torchtitan-lite plan predicts the memory without a run"
_TORCHFT = "torchft is not used; MAX_RESTARTS restarts a run from its last checkpoint"
_TRAINED = "validation uses [training]'s"
FOREIGN = {
    "job.use_for_integration_test": Foreign("it selects torchtitan's own tests"),
    "job.save_config_file": Foreign("each run writes config.toml into its run folder"),
    "job.custom_config_module": Foreign("no code from outside is loaded", ("",)),
    "experimental.custom_*": Foreign("no code from outside is loaded", ("",)),
    "model.norm_type": Foreign("Llama's layers use RMSNorm", ("rmsnorm", "fused_rmsnorm")),
    "model.print_after_conversion": Foreign("a float8 run always lists the converted linears"),
    "optimizer.early_step_in_backward": Foreign("all gradients are clipped before the update", OFF),
    "training.gc_debug": Foreign("the garbage collector does not search for cycles", OFF),
    "training.dataloader.*": Foreign(_READER),
    "validation.dataloader.*": Foreign(_READER),
    "validation.local_batch_size": Foreign(_TRAINED, "training.local_batch_size"),
    "validation.seq_len": Foreign(_TRAINED, "training.seq_len"),
    "parallelism.enable_compiled_autograd": Foreign("[compile] does not need it", OFF),
    "parallelism.pipeline_parallel_schedule_csv": Foreign(
        "pipeline_parallel_schedule names a schedule", ("",)
    ),
    "parallelism.pipeline_parallel_microbatches": Foreign(
        "pipeline_parallel_microbatch_size sets the size of microbatches", ()
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Foreign(_EXPERTS),
    "parallelism.context_parallel_load_balancer": Foreign(
        "each rank has a chunk from the start of a sequence and one from its end", ("headtail",)
    ),
    "parallelism.context_parallel_rotate_method": Foreign(
        "each layer gathers keys and values", ("allgather",)
    ),
    "parallelism.expert_*_degree": Foreign(_EXPERTS, (1,)),
    "parallelism.expert_parallel_comm_backend": Foreign(_EXPERTS),
    "debug.moe_force_load_balance": Foreign(_EXPERTS),
    "float8.moe_fqns_prototype": Foreign(_EXPERTS),
    "mx.moe_fqns_prototype": Foreign(_EXPERTS),
    "quantize.grouped_mm.float8.*": Foreign(_EXPERTS),
    "quantize.grouped_mm.mx.*": Foreign(_EXPERTS),
    "metrics.enable_color_printing": Foreign(
        "terminals have colours, unless disable_color_printing"
    ),
    "checkpoint.interval_type": Foreign("[checkpoint] interval counts steps", ("steps",)),
    "checkpoint.create_seed_checkpoint": Foreign("all layouts begin with the same weights", OFF),
    "checkpoint.initial_load_in_hf_quantized": Foreign("quantized weights are not read", OFF),
    "checkpoint.enable_ft_dataloader_checkpoints": Foreign(_TORCHFT),
    "fault_tolerance.enable": Foreign(_TORCHFT, OFF),
    "fault_tolerance.*": Foreign(_TORCHFT),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Foreign(
        "every second matmul is recomputed", ([], "", ["moe.router.gate"], "moe.router.gate")
    ),
    "activation_checkpoint.preserve_rng_state": Foreign("blocks draw no random numbers"),
    "activation_checkpoint.determinism_check": Foreign(
        "recomputed tensors are compared by shape and type", ("default", "none")
    ),
    "activation_checkpoint.debug": Foreign("there is no such output", OFF),
    "activation_checkpoint.visualize_*": Foreign("there is no such output", OFF),
    "compile.backend": Foreign("torch.compile uses inductor", ("inductor",)),
    "float8.force_recompute_fp8_weight_in_bwd": Foreign("torchao casts weights again anyway"),
    "mx.recipe_name": Foreign(
        "the recipe is mxfp8, with scales rounded up; [float8] emulate emulates it",
        ("mxfp8", "mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"),
    ),
    "mx.*_kernel*": Foreign("torchao chooses the kernels of the casts"),
    "mx.filter_fqns": Foreign("[model] converters does not select [mx]"),
    "comm.mode": Foreign("torchtitan-lite plan is the dry run, without processes", ("default",)),
    "memory_estimation.enable*": Foreign(_PLANNED, OFF),
    "memory_estimation.disable_fake_mode": Foreign(_PLANNED),
    "debug.deterministic_warn_only": Foreign("[debug] deterministic ends the run instead", OFF),
}
"""Keys without a counterpart here, as patterns of fnmatch. The first that matches counts."""
FOREIGN_TABLES = {name.rpartition(".")[0] for name in FOREIGN}


def find_foreign(name: str) -> Foreign | None:
    """Return the row of FOREIGN for a key's dotted name."""
    return next((row for pattern, row in FOREIGN.items() if fnmatchcase(name, pattern)), None)


def current_name(name: str) -> str:
    """Return the current dotted name of a key or table."""
    table, _, key = name.rpartition(".")
    if table in MOVED and not find_foreign(name):
        name = f"{MOVED[table]}.{key}"
    return ALIASES.get(name, MOVED.get(name, name))
