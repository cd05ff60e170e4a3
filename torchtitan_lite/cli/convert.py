"""Convert weights to the form that Hugging Face's transformers read, and back.

  export STEP_DIR OUT_DIR   write a checkpoint as a model: safetensors, config.json and, if
                            transformers can read it, the tokenizer
  import HF_DIR OUT_DIR     write a Llama model as a checkpoint; [checkpoint] initial_load_path
                            takes either of the two folders

OUT_DIR must be new or empty.

Exit codes: 2 if it is not, 4 if the weights are broken or do not fit, 7 if the disk fails.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add export and import."""
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face model")
    export.add_argument(
        "step_dir", type=Path, help="checkpoint: outputs/debug_model/checkpoint/step-00000030"
    )
    export.add_argument("out_dir", type=Path, help="folder to make")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "keep"),
        default="keep",
        help="type of the weights (keep: as saved)",
    )
    import_ = commands.add_parser("import", help="write a Hugging Face model as a checkpoint")
    import_.add_argument("hf_dir", type=Path, help="folder with config.json and safetensors files")
    import_.add_argument("out_dir", type=Path, help="folder to make")


def run(args: argparse.Namespace) -> None:
    """Run the chosen command."""
    from torchtitan_lite.checkpoint.hf_export import (  # torch takes seconds to import
        export_hf,
        import_hf,
    )

    if args.command == "export":
        export_hf(args.step_dir, args.out_dir, dtype=args.dtype)
    else:
        import_hf(args.hf_dir, args.out_dir)
