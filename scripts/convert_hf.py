#!/usr/bin/env python3
"""Convert weights to the form that Hugging Face's transformers read, and back.

  export STEP_DIR OUT_DIR   write a checkpoint as a model: safetensors, config.json and, if
                            transformers can read it, the tokenizer
  import HF_DIR OUT_DIR     write a Llama model as a checkpoint; [checkpoint] initial_load_path
                            takes either of the two folders

OUT_DIR must be new or empty.
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lite.convert_hf import export_hf, import_hf
from torchtitan_lite.errors import RunError
from torchtitan_lite.logger import init_logger


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 2 if OUT_DIR is not empty, 4 if the weights are broken or do not fit, 7
    if the disk fails, 130 after Ctrl-C."""
    init_logger()
    args = parse_arguments(argv)
    try:
        if args.command == "export":
            export_hf(args.step_dir, args.out_dir, dtype=args.dtype)
        else:
            import_hf(args.hf_dir, args.out_dir)
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
