"""Convert a checkpoint to a model that Hugging Face's transformers reads.

  export RUN OUT   write a run's newest checkpoint, or a step's folder, as safetensors, config.json,
                   a model card and, if transformers can read it, the tokenizer, into a new folder

--dtype float8 writes the linears that trained in float8 as vLLM and transformers load them.

Exit codes: 2 if the folder exists, or nothing trained in float8, 4 if the weights are broken or do
not fit, 7 if the disk fails.
"""

import argparse

from torchtitan_lite.checkpoint.folders import find_checkpoints

from .parser import path_or_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add export."""
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face model")
    text = "run folder, or a step's folder"
    export.add_argument("run", type=path_or_url, metavar="RUN", help=text)
    export.add_argument("out", type=path_or_url, metavar="OUT", help="folder to make")
    choices = ("float32", "bfloat16", "float16", "float8", "keep")
    text = "type of the weights (default: keep, as saved)"
    export.add_argument("--dtype", choices=choices, default="keep", help=text)


def run(args: argparse.Namespace) -> None:
    """Export a checkpoint."""
    from torchtitan_lite.checkpoint.hf_export import export_hf  # torch takes seconds to import

    export_hf(find_checkpoints(args.run)[-1], args.out, dtype=args.dtype)
