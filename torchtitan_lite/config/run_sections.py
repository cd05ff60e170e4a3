"""Sections about the run: its folder, checkpoints, validation, reports, communication, seed."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict

from torchtitan_lite.base.paths import open_path

from .types import (
    AllOrCount,
    Count,
    DatasetName,
    Name,
    NameOrURL,
    Names,
    OutsideNames,
    PathName,
    Peak,
    Seconds,
    Section,
    Text,
    Whole,
)


class JobConfig(Section):
    dump_folder: PathName = "./outputs"
    """Run folder: everything that the run leaves behind is under it."""
    description: str = ""
    """Free text, printed at start and kept in the run folder."""
    print_config: bool = False
    """Print the resolved config at start."""


class CheckpointConfig(Section):
    enable: bool = False
    """Save checkpoints, and resume from the newest one in the run folder."""
    folder: NameOrURL = "checkpoint"
    """Folder of the checkpoints, within job.dump_folder, or a URL such as s3://bucket/folder."""
    interval: Count = 500
    """Steps between saves; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to see at once whether saves work."""
    last_save_model_only: bool = False
    """Save only weights at the end of the run, which then cannot be resumed or extended."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights that last_save_model_only and last_save_in_hf save."""
    last_save_in_hf: bool = False
    """Save the weights at the end of the run as a Hugging Face model too, in folder step-...-hf."""
    load_only: bool = False
    """Load checkpoints, and never save one."""
    keep_latest_k: Whole = 10
    """Checkpoints kept; 0: all."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save during training, from a snapshot in CPU memory; pinned: copied faster (GPU runs)."""
    load_step: AllOrCount = -1
    """Step to resume from, and no other; -1: the newest that verifies, if any; 0: a new run."""
    initial_load_path: PathName | None = None
    """Weights for a new run: a checkpoint's folder or URL, also torchtitan's or Hugging Face's."""
    initial_load_in_hf: bool = False
    """Refuse any but a Hugging Face model; without initial_load_path it is model.tokenizer_path."""
    initial_load_model_only: bool = True
    """false: a new run goes on from all that the checkpoint at initial_load_path has."""
    exclude_from_loading: Annotated[tuple[Literal["optimizer"], ...], Strict(False)] = ()
    """["optimizer"]: a run that resumes starts with new moments. Nothing else can be left out."""

    def within(self, run_folder: Path) -> Path:
        """Return the folder of the checkpoints of a run. Raises ConfigError for a URL of an unknown
        scheme."""
        return open_path(self.folder) if "://" in self.folder else run_folder / self.folder


class ValidationConfig(Section):
    enable: bool = False
    """Report the loss on held-out data."""
    freq: Count = 100
    """Steps between validations; the last step always validates."""
    steps: AllOrCount = 16
    """Batches of local_batch_size sequences, divided among ranks; -1: all data of its own."""
    local_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Sequences in one forward pass of one data-parallel rank; unset: training.local_batch_size."""
    seq_len: Count | None = None
    """Tokens in a sequence; another length than training.seq_len (unset) needs data of its own."""
    dataset: DatasetName | None = None
    """Named dataset, if dataset_path is unset; both unset: windows held out of training data."""
    dataset_path: PathName | None = None
    """Token store or text to validate on, as in training.dataset_path."""
    prompts: Names = ()
    """Texts to continue at each validation, greedily, by rank 0: samples.jsonl, TensorBoard."""
    max_new_tokens: Count = 64
    """Tokens to continue each prompt by, at most."""

    def due(self, step: int, *, last: bool) -> bool:
        """Whether `step` ends with a validation."""
        return self.enable and step > 0 and (last or step % self.freq == 0)


class MetricsConfig(Section):
    log_freq: Count = 1
    """Steps between logged lines and points; rates are averages over them."""
    enable_tensorboard: bool = True
    """Write TensorBoard curves."""
    save_tb_folder: Name = "tb"
    """Folder of the TensorBoard files, within job.dump_folder."""
    save_for_all_ranks: bool = False
    """Every rank writes TensorBoard curves and a wandb run, with its own memory; else rank 0."""
    enable_wandb: bool = False
    """Log to Weights & Biases too; needs the wandb extra."""
    writers: OutsideNames = ()
    """Classes of your own that write the records elsewhere, see docs/library.md."""
    flops_convention: Literal["palm", "causal"] = "palm"
    """Attention FLOPs: the full square (PaLM, torchtitan) or the causal half (Megatron-LM)."""
    peak_tflops_bf16: Peak | None = None
    """Dense bf16 peak of a device; unset: the data sheet's, or on CPU measured at start."""
    peak_tflops_fp8: Peak | None = None
    """Dense float8 peak of a device; unset: the data sheet's."""


class ProfilingConfig(Section):
    enable_profiling: bool = False
    """Write torch.profiler traces."""
    save_traces_folder: Name = "profile_traces"
    """Folder of the traces, within job.dump_folder."""
    profile_freq: Count = 10
    """Steps between traces; the last steps of each period are traced."""
    profiler_active: Count = 1
    """Steps in a trace."""
    profiler_warmup: Whole = 3
    """Steps before a trace in which the profiler warms up, as far as profile_freq has them."""
    enable_memory_snapshot: bool = False
    """Write snapshots of CUDA memory, every profile_freq steps and when it runs out (GPU runs)."""
    save_memory_snapshot_folder: Name = "memory_snapshot"
    """Folder of the memory snapshots, within job.dump_folder."""


class CommConfig(Section):
    init_timeout_seconds: Seconds = 300
    """Seconds that a collective may take up to the first step, which compiles."""
    train_timeout_seconds: Seconds = 100
    """Seconds that a collective may take after the first step."""
    trace_buf_size: Annotated[int, Field(ge=0, le=1_000_000)] = 20000
    """Collectives that the flight recorder keeps for a report after a time-out (NCCL); 0: off."""
    save_traces_folder: Name = "comm_traces"
    """Folder of the flight recorder's reports, within job.dump_folder."""
    save_traces_file_prefix: Annotated[str, Field(pattern=r"^[^\x00/]*$")] = "rank_"
    """Beginning of the reports' names; the rank follows."""


class DebugConfig(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the weights and of the order of the data."""
    deterministic: bool = False
    """Use deterministic algorithms only, at some cost in speed."""


class ExperimentalConfig(Section):
    custom_import: Text = ""
    """Module of your own to import on every rank at the start of a run; "": none."""
