"""The float8 recipes: one row each, read by everything that treats recipes differently.

To add a recipe, add a row to RECIPES; planner/constants.py may say what it costs.
A linear multiplies three times, each with this rank's M tokens, K in_features and N out_features:
output [M, N] sums over K, grad_input [M, K] over N, grad_weight [N, K] over M.
"""

from dataclasses import dataclass
from typing import Literal

Matmul = Literal["output", "grad_input", "grad_weight"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How linears train in float8."""

    name: str
    converter: str = "torchtitan_lite.float8.convert:convert_to_torchao"
    """Function, as "module:name", that swaps linears; the default takes torchao's recipe of this
    name. Its arguments: the model, the names of the linears, Float8Config, whether to emulate."""
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

    @property
    def divides_tokens(self) -> bool:
        """Whether a float8 matmul sums over the tokens."""
        return "grad_weight" in self.matmuls


_ROWS = (
    Recipe(name="tensorwise", pads_tokens=True, gathers_float8=True),
    Recipe(name="rowwise", pads_tokens=True),
    Recipe(name="rowwise_with_gw_hp", matmuls=("output", "grad_input")),
    Recipe(
        name="mxfp8",
        converter="torchtitan_lite.float8.mxfp8:convert_to_mxfp8",
        size_multiple=32,
        compute_dtype="bfloat16",
        capability_major=10,  # Blackwell of data centres
        emulated_in=None,
    ),
    Recipe(
        name="blockwise",
        converter="torchtitan_lite.float8.blockwise:convert_to_blockwise",
        size_multiple=128,
        capability_major=9,  # Hopper
    ),
)
RECIPES = {recipe.name: recipe for recipe in _ROWS}
"""Every recipe by its name in [float8] recipe_name."""
DEFAULT_RECIPE = _ROWS[0].name
