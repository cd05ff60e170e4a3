"""What this package changes of torch and torchao at run time, but for float8/graph_passes.py.

Each function states its change, the reason, the report upstream if there is one, the versions with
the fault, and when to remove it. All can be called again, and import the heavy modules that they
change. `test_patches.py` shows each fault without its patch, and so fails once it is repaired.
"""

import hashlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]

# ----- The optimizer -----


def update_shards() -> None:
    """Let Adam update the shards of parameters, instead of DTensors.

    Changes: `Optimizer._group_tensors_by_device_and_dtype`.
    Why: DTensor's way to one fused kernel, through 5 tensors of each parameter, costs the host 3 ms
    a step for 57 parameters, and 0.1 s in the first. The kernel reads and writes the same memory.
    Seen: torch 2.13. Remove: when DTensor is as fast.
    """
    group = inspect.unwrap(Optimizer._group_tensors_by_device_and_dtype)

    @wraps(group)
    def group_shards(lists: list[list[Any]], with_indices: bool = False) -> Any:
        shards = [
            [x._local_tensor if isinstance(x, DTensor) else x for x in tensors] for tensors in lists
        ]
        return group(shards, with_indices)

    Optimizer._group_tensors_by_device_and_dtype = staticmethod(group_shards)  # type: ignore


# ----- FSDP -----


def replace_gathered(module: Any, replace: Callable[[nn.Module, Tensor, Any], Any]) -> None:
    """Hold another tensor in place of each weight that FSDP gathers for `module`, of linears with a
    `weight_caster`. After a gather `replace(linear, weight, held)` returns that tensor, and the
    plain ones in it; `held` is None, or the same tensor with freed storages, which it must refill:
    a backward pass may read them. What was gathered is freed.

    Changes: `init_unsharded_param` of the module's FSDPParams.
    Why: FSDP's own way, fsdp_post_all_gather, is a method of the shards. Of a tensor class of ours
    each operator would be slow, as in the optimizer, and it does not know of tensor parallelism.
    Seen: torch 2.13. Remove: when FSDP takes a function of what it has gathered.
    """

    def gather_and_replace(param: Any, linear: nn.Module, gather: Callable[[], None]) -> None:
        first = not hasattr(param, "gathered")
        if first:
            gather()  # it makes a parameter of what it gathers, now and later
            param.gathered, param.held = param._unsharded_param, None
        gathered = param.gathered.detach()
        param.held, param._unsharded_inner_tensors = replace(linear, gathered, param.held)
        for output in param.all_gather_outputs:
            output.untyped_storage().resize_(0)
        if first:
            weight = param.held
            if isinstance(gathered, DTensor):
                weight = DTensor(weight, gathered._spec, requires_grad=False)
            param._unsharded_param = nn.Parameter(weight, param.sharded_param.requires_grad)
            param.held = getattr(param._unsharded_param, "_local_tensor", param._unsharded_param)

    group = module._get_fsdp_state()._fsdp_param_group  # None if other modules have all weights
    for param in group.fsdp_params if group else ():
        linear = param._module_info.module
        if hasattr(linear, "weight_caster") and "init_unsharded_param" not in vars(param):
            gather = param.init_unsharded_param
            param.init_unsharded_param = partial(gather_and_replace, param, linear, gather)


# ----- The compiler -----


def tag_compiler_cache(label: str) -> None:
    """Compile and cache separately what runs under another `label`, or under other patches.

    Changes: `torch.compiler.config.cache_key_tag`.
    Why: the key of the compiler's cache lacks the rank's place in a DTensor's mesh, the attention
    backend, and this file. A rank would load another rank's code and train on a wrong loss.
    Upstream: pytorch/pytorch#188390 (ranks). Seen: torch 2.13. Remove: once the key has both.
    """
    tags = torch.compiler.config.cache_key_tag.split("; ")
    tags += [tag for tag in (VERSION, label) if tag not in tags]
    torch.compiler.config.cache_key_tag = "; ".join(tags)


def save_no_rng_state() -> None:
    """Do not save the state of the random generator for operators that are recomputed.

    Changes: `has_recomputable_rng_ops` of the compiler's partitioner.
    Why: attention counts as random, as it can apply dropout, which the model has not. The CPU
    generator's state takes the place of DTensor's mesh among the inputs, and compilation fails.
    Seen: torch 2.13 on CPU, full recomputation under tensor parallelism.
    Remove: once such a block compiles on CPU, or when the model gets a random operator.
    """
    from torch._functorch import partitioners

    partitioners.has_recomputable_rng_ops = lambda fx_g: False


def name_mxfp8_scales_in_cpp() -> None:
    """Give the compiler the C++ name of float8_e8m0fnu, the type of the scales of MXFP8.

    Changes: `DTYPE_TO_CPP` of Inductor's C++ backend.
    Why: a block that keeps such scales for its backward pass does not compile on CPU.
    Seen: torch 2.13. Remove: once `DTYPE_TO_CPP` has the type.
    """
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

    DTYPE_TO_CPP.setdefault(torch.float8_e8m0fnu, "at::Float8_e8m0fnu")


def ignore_vnni_and_amx() -> None:
    """Compile for AVX-512 or AVX2, without a look at the instructions beyond these.

    Changes: `supported_vec_isa_list` of Inductor.
    Why: to find out whether the C++ compiler knows VNNI and AMX it builds five programs, 1.7 s in
    each process; only quantized matmuls and templates, which we do not compile, use them.
    Seen: torch 2.13. Remove: when Inductor asks at their first use.
    """
    from torch._inductor import cpu_vec_isa as isa

    beyond = (isa.VecAMX, getattr(isa, "VecAVX512VNNI", isa.VecAMX))
    listed = isa.supported_vec_isa_list
    isa.supported_vec_isa_list = [each for each in listed if not isinstance(each, beyond)]


def weigh_cudnn_attention() -> None:
    """Count cuDNN's attention among the operators that are expensive to recompute.

    Changes: `get_default_op_list` of the compiler's partitioner.
    Why: the list has other attentions only. Under any memory budget the compiler would recompute
    cuDNN's, the most expensive operator of a block.
    Upstream: pytorch/pytorch#129533 added the others. Seen: torch 2.13. Remove: once it is listed.
    """
    from torch._functorch import partitioners

    default_op_list = inspect.unwrap(partitioners.get_default_op_list)

    @wraps(default_op_list)
    def get_default_op_list() -> partitioners.OpTypes:
        types = default_op_list()
        types.compute_intensive_ops.add(torch.ops.aten._scaled_dot_product_cudnn_attention)
        return types

    partitioners.get_default_op_list = get_default_op_list


def fuse_norms_with_their_gradients() -> None:
    """Compute the gradient of a norm's weight in the kernel that computes that of its input.

    Changes: `MixOrderReduction.get_fusion_score` of Inductor, for kernels on GPUs.
    Why: a fusion of sums over rows with sums over columns is rated by elements, others by bytes. So
    the weight gradients of a block's two norms are fused, and read again what both norms have read.
    Seen: torch 2.11 to 2.13. Remove: once such fusions are rated by bytes.
    """
    from torch._inductor.scheduler import BaseSchedulerNode, MixOrderReduction
    from torch._inductor.virtualized import V

    def shared_bytes(rows: BaseSchedulerNode, columns: BaseSchedulerNode) -> int:
        shared = MixOrderReduction.get_common_read(rows, columns)
        bytes_of_row = sum(V.graph.get_dtype(name).itemsize for name in shared)
        return MixOrderReduction.get_numel(rows) * bytes_of_row

    MixOrderReduction.get_fusion_score = staticmethod(shared_bytes)  # type: ignore


def store_transposes_in_tiles() -> None:
    """Store a transposed tensor from a kernel of its own rather than from a reduction.

    Changes: `InductorChoices.can_fuse`, Inductor's hook for such choices.
    Why: a reduction over rows works on tiles of one or a few rows. A transposed cast of the same
    tensor, fused with it, is stored byte by byte, a whole column apart. A kernel with square tiles
    reads the tensor once more, but stores 64 bytes or more at a time.
    Seen: torch 2.13, torchao 0.18, on GPUs.
    Remove: once `tiling_prevents_reduction_fusion` prevents it for tiles of the reduction's shape.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    default: Callable[..., bool] = inspect.unwrap(InductorChoices.can_fuse)

    @wraps(default)
    def can_fuse(
        scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared: int
    ) -> bool:
        if node1.is_reduction() != node2.is_reduction():
            pointwise = node2 if node1.is_reduction() else node1
            _, (elements, _) = pointwise.group
            tiling = TritonScheduling.select_tiling(pointwise.get_nodes(), elements)
            if len(tiling) > 2:  # two axes of the tensor, and that of a reduction
                return False
        return default(scheduler, node1, node2, shared)

    InductorChoices.can_fuse = staticmethod(can_fuse)  # type: ignore[assignment, method-assign]


def count_no_memory_for_meshes() -> None:
    """Count DTensor's mesh as 0 bytes of activations under a memory budget.

    Changes: `torch._functorch.config.unsafe_treat_script_objects_as_zero_size`, where it exists.
    Why: under tensor parallelism a block keeps the mesh for its backward pass, and the partitioner
    fails with "Cannot compute the size of FakeScriptObject". A mesh holds no activations.
    Seen: torch 2.12, where the config refuses the mode, and 2.13. Remove: once that is the default.
    """
    if hasattr(torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"):
        torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True


# ----- torchao -----


def scale_gathered_weights_over(mesh: DeviceMesh | None) -> None:
    """Scale the weights of float8 all-gathers by their amax over `mesh`; None: over FSDP's mesh.

    Changes: `WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather`.
    Why: torchao takes the amax over the ranks of FSDP. Under tensor parallelism as well, each of
    its shards would get a scale of its own, and results would depend on the layout.
    Seen: torchao 0.18. Remove: once torchao takes the amax over all shards of a weight.
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    cast_shard = inspect.unwrap(Weight.fsdp_pre_all_gather)

    @wraps(cast_shard)  # FSDP2 inspects the signature
    def cast_with_mesh(weight: Weight, fsdp_mesh: DeviceMesh) -> Any:
        return cast_shard(weight, mesh)

    Weight.fsdp_pre_all_gather = cast_shard if mesh is None else cast_with_mesh


def gather_float8_as_bytes() -> None:
    """Gather float8 activations as uint8.

    Changes: the all-gathers in torchao's `FLOAT8_OPS_TABLE`.
    Why: gloo, the backend on CPU, has no float8 types. Upstream: pytorch/pytorch#126338, solved
    for NCCL. Seen: torch 2.13, torchao 0.18. Remove: once gloo gathers float8 tensors.
    """
    from torchao.float8 import float8_ops
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    def gather(op: Any, args: tuple[Any, ...], kwargs: Any = None) -> Float8TrainingTensor:
        shard: Float8TrainingTensor = args[0]
        gathered = op(shard._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {}))
        return Float8TrainingTensor(
            gathered.view(shard._data.dtype),
            shard._scale,
            shard._orig_dtype,
            shard._linear_mm_config,
            shard._gemm_input_role,
        )

    for namespace in (torch.ops.c10d_functional, torch.ops._c10d_functional):
        float8_ops.FLOAT8_OPS_TABLE[namespace.all_gather_into_tensor.default] = gather


@contextmanager
def observe_float8_casts(observe: Callable[[Tensor, Any], None]) -> Iterator[None]:
    """Call `observe` with each tensor that is cast to float8 and its Float8TrainingTensor.

    Changes: the autograd function through which torchao makes all casts, until the end of the
    context. Compiled code is not observed.
    Why: torchao has no hook for casts. Seen: torchao 0.18. Remove: once it has one.
    """
    from torchao.float8 import float8_training_tensor as torchao_casts

    cast_function = torchao_casts._ToFloat8ConstrFunc

    def cast_and_observe(tensor: Tensor, *args: Any) -> Tensor:
        cast = cast_function.apply(tensor, *args)
        observe(tensor, cast)
        return cast

    torchao_casts._ToFloat8ConstrFunc = SimpleNamespace(apply=cast_and_observe)
    try:
        yield
    finally:
        torchao_casts._ToFloat8ConstrFunc = cast_function


# ----- The launcher -----


def allow_long_saves() -> None:
    """Let stopped workers run for TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds on torch 2.11 too.

    Changes: the default time-out of `PContext.close`, after which the agent kills its workers.
    Why: torch 2.11 ignores the variable and kills workers 30 s after a signal, in the middle of a
    long save. Later versions are not changed. Remove: when 2.11 is no longer supported.
    """
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.launcher.api import LaunchConfig

    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
        seconds = int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        PContext.close.__defaults__ = (None, seconds)  # of the parameters death_sig and timeout


def fork_workers(worker: Callable[..., Any]) -> None:
    """Let the agent start a `worker(words, env, stdout, stderr)` instead of a program.

    Changes: `SubprocessHandler._popen`.
    Why: each program would import torch again. torch's agent can fork functions, but with such a
    worker it loses the order of failures, and waits for ever for one that ends by `os._exit(0)`.
    Remove: when it has neither fault.
    """

    def start(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        _, *words = args  # the first is the program
        return worker(words, env, self._stdout, self._stderr)

    SubprocessHandler._popen = start  # type: ignore[method-assign]


def spare_compilers() -> None:
    """Send a signal that stops a run to the workers alone, not to the programs that they run.

    Changes: `SubprocessHandler.close`, which signals a worker's process group. SIGKILL still does.
    Why: an interrupted compiler leaves an empty file in the cache, at which every later run fails.
    Remove: when torch signals the process alone.
    """
    close = SubprocessHandler.close

    def close_worker(self: Any, death_sig: signal.Signals | None = None) -> None:
        if death_sig in (None, signal.SIGKILL):
            close(self, death_sig)
        else:
            self.proc.send_signal(death_sig)

    SubprocessHandler.close = close_worker  # type: ignore[method-assign]
