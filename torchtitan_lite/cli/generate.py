"""Generate text from a checkpoint or a Hugging Face model.

SOURCE is a step's folder, a run folder (its newest checkpoint), or a Hugging Face folder. One
process computes on one device, in bfloat16 or float32, never in float8. The text of one prompt is
printed as it comes; several prompts are one batch, printed at its end.

Exit codes: 2 for a wrong option, 3 for a broken tokenizer, 4 for a broken or missing checkpoint, 5
for weights whose logits are not finite.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import strict_json

from .parser import path_text

MOST_CHARACTERS = 10_000_000
"""Of a --file of prompts, which may be a pipe or a device without end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("source", type=Path, metavar="SOURCE", help="where the weights are")
    option("prompts", nargs="*", default=[], metavar="PROMPT", help="text to continue")
    text = "prompts, one a line; - is standard input"
    option("--file", type=Path, metavar="FILE", help=text)
    text = "tokens to generate at most (default: 64)"
    option("--max-new-tokens", type=int, default=64, metavar="N", help=text)
    text = "0 takes the likeliest token always; 1 samples as the model predicts (default: 0)"
    option("--temperature", type=float, default=0.0, metavar="X", help=text)
    text = "sample among the N likeliest tokens (default: all)"
    option("--top-k", type=int, default=0, metavar="N", help=text)
    text = "sample among the likeliest tokens of probability X together (default: 1, all)"
    option("--top-p", type=float, default=1.0, metavar="X", help=text)
    option("--seed", type=int, default=0, metavar="N", help="seed of the samples (default: 0)")
    option("--ignore-eos", action="store_true", help="go on after the end of a document")
    text = "file or folder (default: the model's own)"
    option("--tokenizer", type=path_text, metavar="PATH", help=text)
    option("--device", metavar="NAME", help="cpu or cuda:N (default: a GPU if there is one)")
    text = "of weights and computation (default: bfloat16 on a GPU, else float32)"
    option("--dtype", choices=("bfloat16", "float32"), help=text)
    option("--json", action="store_true", help="print a JSON object for each prompt")


def run(args: argparse.Namespace) -> None:
    """Generate and print. Raises RunError."""
    prompts = [*args.prompts, *(read_lines(args.file) if args.file else [])]
    if not prompts:
        raise ConfigError("no prompt; give one after SOURCE, or a --file of them.")
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {args.max_new_tokens} must be 1 or more")

    # Imported here because torch takes seconds to import.
    import torch

    from torchtitan_lite.models.generate import Sampling
    from torchtitan_lite.tools.generate import load_generator

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    generator = load_generator(
        args.source, device=device, dtype=getattr(torch, dtype), tokenizer_path=args.tokenizer
    )

    streams = len(prompts) == 1 and not args.json
    if streams:
        print(prompts[0], end="", flush=True)
    try:
        samples = generator.run(
            prompts,
            max_new_tokens=args.max_new_tokens,
            sampling=sampling,
            ignore_eos=args.ignore_eos,
            write=partial(print, end="", flush=True) if streams else None,
        )
    finally:
        if streams:
            print()
    for sample in [] if streams else samples:
        print(strict_json(asdict(sample)) if args.json else f"{sample.prompt}{sample.text}\n")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of prompts that are not empty. Raises ConfigError."""
    try:
        is_input = str(path) == "-" and sys.stdin
        with nullcontext(sys.stdin) if is_input else path.open() as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {path} cannot be read: {error}") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"--file {path} has more than {MOST_CHARACTERS:,} characters; split it")
    return [line for line in text.splitlines() if line]
