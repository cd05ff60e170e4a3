"""The float8 recipes: one row each, read by everything that treats recipes differently.

To add a recipe, add a row to RECIPES. Standard library only, so that a config is checked without
importing torch.

A linear multiplies three times, each with this rank's M tokens, K in_features and N out_features:
output [M, N] sums over K, grad_input [M, K] over N, grad_weight [N, K] over M.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Matmul = Literal["output", "grad_input", "grad_weight"]


class Traffic(NamedTuple):
    """What a cast adds to a block in bf16: bytes read and written per element of the tensor, by how
    the kernels access memory, and kernels launched.

    Some bytes are negative: a norm whose kernel also casts its output stores 1 byte instead of 2,
    and if that kernel stores the transposed output too, all its bytes change their kind."""

    contiguous: float = 0
    """Loads and stores run along the same axis."""
    transposing: float = 0
    """Tiles are loaded along one axis and stored along the other."""
    strided: float = 0
    """A kernel that reduces rows also stores columns, or the reverse."""
    kernels: float = 0


class Casts(NamedTuple):
    """Costs of casting a linear's operands, in the forward and in the backward pass."""

    input: tuple[Traffic, Traffic]
    weight: tuple[Traffic, Traffic]
    grad_output: Traffic


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How linears train in float8."""

    name: str
    torchao_recipe: str | None
    """The recipe of torchao's Float8LinearConfig; None: our MXFP8Linear."""
    matmuls: tuple[Matmul, ...] = ("output", "grad_input", "grad_weight")
    """The matmuls that run in float8."""
    size_multiple: int = 16
    """Every size of a matmul on a rank must be a multiple of this. torch._scaled_mm takes rows of
    16-byte multiples; an MX block has 32 elements (OCP MX specification 1.0)."""
    pads_tokens: bool = False
    """Whether [float8] pad_inner_dim can pad the tokens to that multiple."""
    gathers_float8: bool = False
    """Whether FSDP can gather weights in float8, and tensor parallelism activations: shards can be
    cast before they are gathered if a tensor has one scale."""
    compute_dtype: str | None = None
    """The only [training] mixed_precision_param that its kernels cast; None: any."""
    capability_major: int | None = None
    """The only major compute capability with its kernels; None: every GPU with float8 units."""
    emulated_in: Literal["fp32"] | None = "fp32"
    """Precision of emulated matmuls; None: the compute type."""
    slow_accumulation: bool = True
    """Whether the matmuls of both gradients accumulate in float32, which is slower."""
    compiled_casts: Casts
    eager_casts: Casts
    casts_scaled_in_matmul: Casts | None = None
    """Compiled casts with [float8] scale_gradients_in_matmul; None: it would change nothing."""
    scale_reductions: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Small all-reduces of a compiled block under tensor parallelism, for the scales of what is
    split over the ranks: forward, backward, recomputed under "op" and under full activation
    checkpointing."""

    @property
    def divides_tokens(self) -> bool:
        """Whether a float8 matmul sums over the tokens."""
        return "grad_weight" in self.matmuls


# Eager, each operator of a cast reads and writes the whole tensor, mostly in float32: abs, max, to
# float32, multiply, clamp, to float8. The other kernels compute scales. Both gradients cast
# grad_output separately.
_TENSOR, _ROW = Traffic(33, kernels=11), Traffic(33, kernels=14)
# The casts of MXFP8 are kernels of torchao, compiled or not. Two more kernels, or one if compiled,
# bring the scales, a 32nd of the elements, into the order that the matmul takes.
_MX, _MX_EAGER = Traffic(3, kernels=2), Traffic(3, kernels=3)

# Compiled, a cast reads 2 bytes and writes 1, and backward casts again, into the layout of its
# matmuls. Inductor fuses the casts of inputs and gradients with the norms, SwiGLU and rotary
# embeddings beside them, so that their figures are means over a block: counted in its kernels for a
# block of Llama 3 8B on Hopper (torch 2.13, torchao 0.18) and split between the tensors that a
# kernel casts. tests/deviceless/test_deviceless_kernels.py counts them again.
_ROWS = (
    Recipe(
        name="tensorwise",
        torchao_recipe="tensorwise",
        pads_tokens=True,
        gathers_float8=True,
        # One scale per tensor needs its amax first: 2 bytes in two kernels. Backward computes that
        # of gradients only.
        compiled_casts=Casts(
            input=(Traffic(3, kernels=2.25), Traffic(-1.7, 3.6, kernels=1)),
            weight=(Traffic(5, kernels=3), Traffic(transposing=3, kernels=1)),
            grad_output=Traffic(-0.5, 4.4, kernels=2.3),
        ),
        eager_casts=Casts((_TENSOR, _TENSOR), (_TENSOR, _TENSOR), Traffic(66, kernels=22)),
        scale_reductions=(4, 7, 0, 3),
    ),
    Recipe(
        name="rowwise",
        torchao_recipe="rowwise",
        pads_tokens=True,
        # A row is scaled in one kernel, since it stays on the chip; a column needs an amax of its
        # own. torchao multiplies row-wise gradients unscaled, to avoid a slow kernel, and scales
        # them afterwards: grad_weight in a separate pass of 4 bytes, counted in the weight's;
        # grad_input in the kernel that reads it next, which then stores float32, and of a norm is
        # not fused with the weight's gradient.
        compiled_casts=Casts(
            input=(Traffic(-0.4, kernels=0.25), Traffic(0.5, 3.6, kernels=2)),
            weight=(Traffic(3, kernels=1), Traffic(6, 3, kernels=3.7)),
            grad_output=Traffic(6.2, 8.1, kernels=4.2),
        ),
        casts_scaled_in_matmul=Casts(
            input=(Traffic(-0.4, kernels=0.25), Traffic(0.5, 3.6, kernels=2)),
            weight=(Traffic(3, kernels=1), Traffic(2, 3, kernels=2.7)),
            grad_output=Traffic(1.7, 4.2, kernels=3.2),
        ),
        eager_casts=Casts((_ROW, _ROW), (_ROW, _ROW), Traffic(66, kernels=28)),
        scale_reductions=(2, 4, 0, 2),
    ),
    Recipe(
        name="rowwise_with_gw_hp",
        torchao_recipe="rowwise_with_gw_hp",
        matmuls=("output", "grad_input"),
        # grad_weight needs each input in bf16 too, which is stored beside its cast.
        compiled_casts=Casts(
            input=(Traffic(1.3, kernels=0.25), Traffic()),
            weight=(Traffic(3, kernels=1), Traffic(2, transposing=3, kernels=3)),
            grad_output=Traffic(3, kernels=1.3),
        ),
        casts_scaled_in_matmul=Casts(
            input=(Traffic(1.3, kernels=0.25), Traffic()),
            weight=(Traffic(3, kernels=1), Traffic(2, transposing=3, kernels=3)),
            grad_output=Traffic(1.5, kernels=1.9),
        ),
        eager_casts=Casts((_ROW, Traffic()), (_ROW, _TENSOR), _ROW),
        scale_reductions=(2, 4, 0, 2),
    ),
    Recipe(
        name="mxfp8",
        torchao_recipe=None,
        size_multiple=32,
        compute_dtype="bfloat16",
        capability_major=10,  # Blackwell of data centres
        emulated_in=None,
        slow_accumulation=False,
        compiled_casts=Casts((_MX, _MX), (_MX, _MX), Traffic(6, kernels=4)),
        eager_casts=Casts((_MX_EAGER, _MX_EAGER), (_MX_EAGER, _MX_EAGER), Traffic(6, kernels=6)),
    ),
)
RECIPES = {recipe.name: recipe for recipe in _ROWS}
"""Every recipe by its name in [float8] recipe_name."""
DEFAULT_RECIPE = _ROWS[0].name
