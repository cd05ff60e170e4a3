"""The optimizer, which steps it takes, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from torchtitan_lite.config import LRSchedulerConfig, OptimizerConfig, TrainingConfig
from torchtitan_lite.logger import logger
from torchtitan_lite.torchao_types import is_gathered_in_float8

LOSS_MEAN_DECAY = 0.98
"""Of the running mean of the losses: a loss counts half after 34 steps."""
BLOCK = 128
"""Neighbours in a row of a weight whose moments in 8 bits share a scale."""


def build_optimizer(
    parameters: Iterable[Parameter], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW over `parameters`, with the update implemented, and its moments kept, as asked for."""
    settings: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.state_dtype != "float32":
        return LowBitAdamW(parameters, state_dtype=optimizer.state_dtype, **settings)
    if optimizer.implementation != "fused":
        logger.info(
            f'[optimizer] implementation = "{optimizer.implementation}" waits for the device in every step, to learn '
            'whether the gradient is finite; "fused" does not'
        )
    return torch.optim.AdamW(
        parameters,
        fused=optimizer.implementation == "fused",
        foreach=optimizer.implementation == "foreach",
        **settings,
    )


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW that computes in float32, and keeps the two moments of each parameter in less: in
    bfloat16; or in 8 bits, with a float32 scale for each BLOCK neighbours in a row, by the map of
    8-bit Adam (arXiv 2110.02861), or as float8, the second moment, which spans more, with more
    exponent (e4m3 and e5m2: arXiv 2409.12517). In 8 bits are those of matrices whose rows, as this
    rank has them, are whole blocks; others stay float32. A second moment that is a floating-point
    number is rounded stochastically.

    Like torch's fused AdamW it takes a `found_inf`, on the device, with which a step leaves all
    as it was. On a GPU the update is compiled: to 2 kernels a parameter in bfloat16, 5 to 7 in 8
    bits."""

    found_inf: Tensor | None = None

    def __init__(
        self, parameters: Iterable[Parameter], *, state_dtype: str, **settings: Any
    ) -> None:
        """`state_dtype` is "bfloat16", "int8" or "float8"; `settings` are lr, betas, eps and
        weight_decay."""
        from torchao.optim.quant_utils import create_dynamic_map

        super().__init__(parameters, {**settings, "fused": True})
        self._state_dtype = state_dtype
        self._device = self.param_groups[0]["params"][0].device
        # What the codes of a moment in int8 stand for, as shares of their block's largest.
        maps = {name: create_dynamic_map(signed=signed) for name, signed in MOMENTS.items()}
        self._maps = {
            name: torch.tensor(values, device=self._device) for name, values in maps.items()
        }
        self._never = torch.zeros((), device=self._device)
        on_gpu = self._device.type == "cuda"
        self._update: Callable[..., None] = (
            torch.compile(_update, dynamic=False) if on_gpu else _update
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no loss is computed again
        """Update each parameter that has a gradient."""
        assert closure is None, "the loss is computed once a step"
        skip = self._never if self.found_inf is None else self.found_inf
        for group in self.param_groups:
            lr = torch.full(
                (), group["lr"], device=self._device
            )  # as a number it would be compiled anew for each
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = {"step": torch.zeros((), device=self._device)}
                    self.state[parameter] |= _empty_moments(parameter, self._state_dtype)
                self._update(
                    _local(parameter.detach()),
                    _local(parameter.grad),
                    {name: _local(tensor) for name, tensor in self.state[parameter].items()},
                    self._maps,
                    skip=skip,
                    lr=lr,
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, without torchao's wrapper of float8-gathered weights."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local._tensor if is_gathered_in_float8(local) else local


MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's two, and whether each has a sign."""
FLOAT8 = {"exp_avg": torch.float8_e4m3fn, "exp_avg_sq": torch.float8_e5m2}
"""Their types as float8."""


def _empty_moments(parameter: Tensor, state_dtype: str) -> dict[str, Tensor]:
    """The moments of `parameter` before its first step, and the scales of those in 8 bits,
    distributed as it is."""
    if state_dtype == "bfloat16":
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
    if parameter.ndim != 2 or _local(parameter).shape[-1] % BLOCK:
        return {name: torch.zeros_like(parameter) for name in MOMENTS}
    dtypes = FLOAT8 if state_dtype == "float8" else dict.fromkeys(MOMENTS, torch.uint8)
    moments = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in dtypes.items()}
    return moments | {f"{name}_scale": _scales_like(parameter) for name in MOMENTS}


def _scales_like(parameter: Tensor) -> Tensor:
    """A zero for each block of `parameter`, distributed as it is."""
    rows, columns = parameter.shape
    local = _local(parameter)
    scales = torch.zeros(len(local), local.shape[-1] // BLOCK, device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((rows, columns // BLOCK))
    return DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


def _decode(name: str, state: dict[str, Tensor], maps: dict[str, Tensor]) -> Tensor:
    """A moment in float32."""
    stored, scale = state[name], state.get(f"{name}_scale")
    if scale is None:
        return stored.float()
    if stored.dtype is torch.uint8:
        from torchao.optim.quant_utils import dequant_with_qmap

        return dequant_with_qmap(stored, maps[name], scale.flatten())
    return (stored.float().view(-1, BLOCK) * scale.view(-1, 1)).view(stored.shape)


MANTISSA_BITS = {torch.bfloat16: 7, torch.float8_e5m2: 2}
"""Of the types of a second moment."""


def _round_stochastically(x: Tensor, dtype: torch.dtype, step: Tensor) -> Tensor:
    """`x`, float32 and not negative, in `dtype`: each element rounded up with the probability by
    which it is nearer to the upper neighbour. To the nearest, a second moment hardly falls where 1
    - beta2 is less than half a rounding: 0.05 in e5m2, 0.001 in bfloat16. The random numbers are a
    hash of the step and of the element's place, so that they take no state, and are the same on all
    ranks that hold the same elements."""
    dropped, mask = 23 - MANTISSA_BITS[dtype], 2**31 - 1
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    # Odd factors modulo 2^32, negative to fit int32: Triton multiplies a place by no other.
    bits = (place * -0x61C8864F + step.long() * -0x7A143589) & mask
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # no product is above 2^63
        bits = ((bits >> shift) ^ bits) * factor & mask
    threshold = (bits >> (31 - dropped)).int()
    return ((x.view(torch.int32) + threshold) & -(1 << dropped)).view(torch.float32).to(dtype)


def _encode(
    name: str, moment: Tensor, state: dict[str, Tensor], maps: dict[str, Tensor], *, step: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What of `state` is to hold `moment` from `step` on."""
    stored, scale_name = state[name], f"{name}_scale"
    cast: Callable[[Tensor], Tensor] = methodcaller("to", stored.dtype)
    if name == "exp_avg_sq" and stored.dtype in MANTISSA_BITS:
        cast = partial(_round_stochastically, dtype=stored.dtype, step=step)
    if scale_name not in state:
        yield name, cast(moment)
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    scaled, scale = scale_tensor(moment, BLOCK)  # to 1 at most
    if stored.dtype is torch.uint8:
        yield name, quantize_8bit_with_qmap(scaled, maps[name])
    else:
        largest = torch.finfo(stored.dtype).max
        yield name, cast(scaled * largest)
        scale = scale / largest
    yield scale_name, scale.view(state[scale_name].shape)


def _update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    maps: dict[str, Tensor],
    *,
    skip: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW's step (arXiv 1711.05101, algorithm 2) in place, where `skip` is 0; elsewhere all stays
    as it is."""
    gradient = gradient.float()
    step = state["step"] + 1
    moments = {
        name: torch.lerp(
            gradient if name == "exp_avg" else gradient.square(), _decode(name, state, maps), beta
        )
        for name, beta in zip(MOMENTS, betas, strict=True)
    }
    mean, square = (
        moments[name] / (1 - beta**step) for name, beta in zip(MOMENTS, betas, strict=True)
    )
    updated = parameter * (1 - lr * weight_decay) - lr * mean / (square.sqrt() + eps)
    new = {"step": step}
    for name, moment in moments.items():
        new |= _encode(name, moment, state, maps, step=step)
    for old, value in (
        (parameter, updated),
        *((state[name], value) for name, value in new.items()),
    ):
        if old.dtype.itemsize == 1:  # the compiler selects no float8
            old, value = old.view(torch.uint8), value.view(torch.uint8)
        old.copy_(torch.where(skip == 0, value, old))


class UpdateGuard:
    """Decides on the device which steps have no update, and counts them there: those whose loss or
    gradient is not finite, and, with a loss_spike_factor, those whose loss is above that times the
    running mean of the losses before.

    Its tensors are [] float32 on `device`."""

    def __init__(
        self,
        training: TrainingConfig,
        *,
        device: torch.device,
        skipped_steps: int,
        consecutive_skips: int,
        loss_mean: float | None,
    ) -> None:
        """Goes on from the counts and the mean of the steps before."""
        self._spike_factor = training.loss_spike_factor
        self.skipped_steps = torch.tensor(float(skipped_steps), device=device)
        self.consecutive_skips = torch.tensor(float(consecutive_skips), device=device)
        """Steps without an update since the last one that had one."""
        self.loss_mean = torch.tensor(math.nan if loss_mean is None else loss_mean, device=device)
        """Nats, of the steps that had an update; NaN before the first."""

    def found_inf(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 if this step must not update the parameters, else 0. The same on all ranks if `loss`
        and `grad_norm`, [] float32, are; nothing is read on the host, which would stall the
        device."""
        good = loss.isfinite() & grad_norm.isfinite()
        if self._spike_factor:
            good &= ~(loss > self._spike_factor * self.loss_mean)  # of NaN, nothing is above
        mean = torch.where(
            self.loss_mean.isnan(), loss, torch.lerp(loss, self.loss_mean, LOSS_MEAN_DECAY)
        )
        self.loss_mean = torch.where(good, mean, self.loss_mean)
        skipped = 1 - good.float()
        self.skipped_steps = self.skipped_steps + skipped
        self.consecutive_skips = (self.consecutive_skips + 1) * skipped
        return skipped


def step_unless(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Update the parameters unless `found_inf`, [] float32 on their device, is 1. The fused update
    decides that on the device; for the others it is read here, which waits for the device."""
    if optimizer.defaults["fused"]:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # where torch's gradient scaler puts it too
        optimizer.step()
    elif not found_inf.item():
        optimizer.step()


def lr_factor(step: int, *, schedule: LRSchedulerConfig, training_steps: int) -> float:
    """Learning rate of `step` (1-based) as a share of the peak: warm-up, stable phase, decay (arXiv
    2404.06395).

    The warm-up rises linearly, and the step after it has the peak. The decay falls to
    min_lr_factor, which the step after total_steps would have, so that no step is wasted on a
    learning rate of 0."""
    total = schedule.total_steps or training_steps
    warmup = min(schedule.warmup_steps, total)
    if step <= warmup:
        return step / (warmup + 1)
    decay = (
        total - warmup
        if schedule.decay_ratio is None
        else min(round(total * schedule.decay_ratio), total - warmup)
    )
    progress = min(1.0, max(0.0, (step - (total - decay)) / (decay + 1)))
    remaining = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * remaining
