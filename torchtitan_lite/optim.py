"""The optimizer, and the guard that decides which steps update the parameters."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from torchtitan_lite.config import OptimizerConfig, TrainingConfig
from torchtitan_lite.logger import logger
from torchtitan_lite.torchao_types import is_gathered_in_float8

LOSS_MEAN_DECAY = 0.98  # of the running mean: a loss has half its weight after 34 steps


def build_optimizer(
    parameters: Iterable[Parameter], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build AdamW over `parameters`, with the implementation and moments that [optimizer] names."""
    settings: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.state_dtype != "float32":
        return LowBitAdamW(parameters, state_dtype=optimizer.state_dtype, **settings)

    implementation = optimizer.implementation
    if implementation != "fused":
        logger.info(
            f'[optimizer] implementation = "{implementation}" waits for the device in every step '
            'to read whether the gradient is finite; "fused" does not'
        )
    fused, foreach = implementation == "fused", implementation == "foreach"
    return torch.optim.AdamW(parameters, fused=fused, foreach=foreach, **settings)


# ----- AdamW with moments in 16 or 8 bits -----

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # names in the state, and whether each is signed
BLOCK = 128  # neighbours in a row of a weight whose 8-bit moments share a scale
DROPPED_BITS = 16  # of a float32 that is stored as bfloat16


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and stores the two moments in 16 or 8 bits.

    `state_dtype` is "bfloat16", with stochastic rounding of second moments, or "int8" (codes of a
    dynamic map, as in 8-bit Adam, arXiv 2110.02861). In 8 bits each `BLOCK` neighbours in a row
    share a float32 scale, and moments of parameters whose rows on this rank are not whole blocks
    stay float32.

    Like torch's fused AdamW and unlike torchao's low-bit one, it reads `found_inf` on the device: a
    step with 1 changes nothing. On a GPU the update is compiled, to 2 kernels a parameter in
    bfloat16, 5 to 7 in 8 bits."""

    def __init__(
        self, parameters: Iterable[Parameter], *, state_dtype: str, **settings: Any
    ) -> None:
        # torchao is slow to import, and most runs have moments in float32.
        from torchao.optim.quant_utils import create_dynamic_map

        super().__init__(parameters, {**settings, "fused": True})
        self._in_8_bits = state_dtype == "int8"
        self._device = self.param_groups[0]["params"][0].device
        self.found_inf = torch.zeros((), device=self._device)
        # The value of each int8 code, as a share of the largest in its block.
        self._maps = {
            name: torch.tensor(create_dynamic_map(signed=signed), device=self._device)
            for name, signed in MOMENTS.items()
        }
        compiles = self._device.type == "cuda"
        self._update: Any = torch.compile(_update, dynamic=False) if compiles else _update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        assert closure is None, "the loss is computed once a step"
        for group in self.param_groups:
            # A tensor, since the compiler would compile the update again for each new number.
            settings = group | {"lr": torch.full((), group["lr"], device=self._device)}

            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=self._device)
                    state |= _empty_moments(parameter, in_8_bits=self._in_8_bits)
                self._update(
                    _local(parameter.detach()),
                    _local(parameter.grad),
                    {name: _local(tensor) for name, tensor in state.items()},
                    self._maps,
                    skip=self.found_inf,
                    **{name: settings[name] for name in ("lr", "betas", "eps", "weight_decay")},
                )


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, without torchao's wrapper for float8 all-gathers."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local._tensor if is_gathered_in_float8(local) else local


def _empty_moments(parameter: Tensor, *, in_8_bits: bool) -> dict[str, Tensor]:
    """Return zero moments, with scales for each block if in 8 bits, sharded like `parameter`."""
    local = _local(parameter)
    if not in_8_bits or parameter.ndim != 2 or local.shape[-1] % BLOCK:
        dtype = torch.float32 if in_8_bits else torch.bfloat16
        return {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}

    moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in MOMENTS}
    shape = torch.Size((len(parameter), parameter.shape[1] // BLOCK))
    for name in MOMENTS:
        scales = torch.zeros(len(local), local.shape[1] // BLOCK, device=local.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            scales = DTensor.from_local(
                scales, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
            )
        moments[f"{name}_scale"] = scales
    return moments


def _decode(name: str, state: dict[str, Tensor], maps: dict[str, Tensor]) -> Tensor:
    """Return a moment in float32."""
    if state[name].dtype is not torch.uint8:
        return state[name].float()
    # Imported here for the reason given in LowBitAdamW.
    from torchao.optim.quant_utils import dequant_with_qmap

    return dequant_with_qmap(state[name], maps[name], state[f"{name}_scale"].flatten())


def _encode(
    name: str, moment: Tensor, state: dict[str, Tensor], maps: dict[str, Tensor], *, step: Tensor
) -> dict[str, Tensor]:
    """Return the tensors of `state` that store `moment`, and its scales if it has any."""
    if state[name].dtype is not torch.uint8:
        rounds = name == "exp_avg_sq" and state[name].dtype is torch.bfloat16
        return {
            name: _round_stochastically(moment, step) if rounds else moment.to(state[name].dtype)
        }
    # Imported here for the reason given in LowBitAdamW.
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    scaled, scale = scale_tensor(moment, BLOCK)  # to at most 1
    scales = f"{name}_scale"
    return {
        name: quantize_8bit_with_qmap(scaled, maps[name]),
        scales: scale.view(state[scales].shape),
    }


def _round_stochastically(x: Tensor, step: Tensor) -> Tensor:
    """Round `x`, float32 and not negative, to a neighbour in bfloat16, so that the mean is exact.

    Rounded to the nearest, a second moment hardly falls if 1 - beta2 is less than half a rounding
    step, 0.001. The random bits are a hash of the step and of the element's position. They need no
    state and are equal on all ranks that hold the same elements.
    """
    mask = 2**31 - 1
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    # Odd factors modulo 2^32, negative so that they fit in int32: Triton refuses larger constants.
    bits = (place * -0x61C8864F + step.long() * -0x7A143589) & mask
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # no product exceeds 2^63
        bits = ((bits >> shift) ^ bits) * factor & mask
    threshold = (bits >> (31 - DROPPED_BITS)).int()
    rounded = (x.view(torch.int32) + threshold) & -(1 << DROPPED_BITS)
    return rounded.view(torch.float32).to(torch.bfloat16)


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
    """Make AdamW's step (arXiv 1711.05101, algorithm 2) in place, unless `skip` is 1."""
    gradient = gradient.float()
    step = state["step"] + 1
    inputs = {"exp_avg": gradient, "exp_avg_sq": gradient.square()}
    moments = {
        name: torch.lerp(inputs[name], _decode(name, state, maps), beta)
        for name, beta in zip(MOMENTS, betas, strict=True)
    }
    mean, square = (
        moments[name] / (1 - beta**step) for name, beta in zip(MOMENTS, betas, strict=True)
    )
    updated = parameter * (1 - lr * weight_decay) - lr * mean / (square.sqrt() + eps)

    # Store everything, or what was there before.
    new = {"step": step}
    for name, moment in moments.items():
        new |= _encode(name, moment, state, maps, step=step)
    for old, value in [(parameter, updated), *((state[name], new[name]) for name in new)]:
        old.copy_(torch.where(skip == 0, value, old))


# ----- Steps without an update -----


class UpdateGuard:
    """Decides on the device which steps do not update the parameters, and counts them there.

    These are steps whose loss or gradient is not finite and, with a `loss_spike_factor`, those
    whose loss exceeds that factor times the running mean of the losses before. It continues from
    the counts and the mean of the steps before.

    Its tensors are [] float32 on `device`. `consecutive_skips` counts the steps since the last one
    with an update; `loss_mean` is over the steps that had one, in nat, NaN before the first."""

    def __init__(
        self,
        training: TrainingConfig,
        *,
        device: torch.device,
        skipped_steps: int,
        consecutive_skips: int,
        loss_mean: float | None,
    ) -> None:
        self._spike_factor = training.loss_spike_factor
        self.skipped_steps = torch.tensor(float(skipped_steps), device=device)
        self.consecutive_skips = torch.tensor(float(consecutive_skips), device=device)
        self.loss_mean = torch.tensor(math.nan if loss_mean is None else loss_mean, device=device)

    def found_inf(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1 if this step must not update the parameters, else 0.

        Equal on all ranks if `loss` and `grad_norm`, [] float32, are. Does not wait for the
        device."""
        good = loss.isfinite() & grad_norm.isfinite()
        if self._spike_factor:
            good &= ~(loss > self._spike_factor * self.loss_mean)  # false if the mean is NaN

        mean = torch.lerp(loss, self.loss_mean, LOSS_MEAN_DECAY)
        mean = torch.where(self.loss_mean.isnan(), loss, mean)
        self.loss_mean = torch.where(good, mean, self.loss_mean)
        skipped = 1 - good.float()
        self.skipped_steps = self.skipped_steps + skipped
        self.consecutive_skips = (self.consecutive_skips + 1) * skipped
        return skipped


def step_unless(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Update the parameters unless `found_inf`, [] float32 on their device, is 1.

    The fused update reads it on the device. For the others it is read here, which waits."""
    if optimizer.defaults["fused"]:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # set as GradScaler does
        optimizer.step()
    elif not found_inf.item():
        optimizer.step()
