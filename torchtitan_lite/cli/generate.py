"""Generate text from a checkpoint or a Hugging Face model.

SOURCE is a step's folder, a run folder (its newest checkpoint), or a Hugging Face folder. One
process computes on one device, in bfloat16 or float32, never in float8.

Exit codes: 2 for a wrong option, 3 for a broken tokenizer, 4 for a broken or missing checkpoint, 5
for weights whose logits are not finite.
"""

import argparse
from dataclasses import asdict
from functools import partial

from torchtitan_lite.base.errors import ConfigError

from .parser import Parser, number, path_or_url, path_text, print_answer


def add_arguments(parser: Parser) -> None:
    """Add the options."""
    option, real = parser.add_argument, partial(number, kind=float)
    count, seed = partial(number, least=0), partial(number, least=0, most=2**63 - 1)
    option("source", type=path_or_url, metavar="SOURCE", help="where the weights are")
    option("prompts", nargs="+", metavar="PROMPT", help="text to continue")
    text = "tokens to generate at most (default: 64)"
    option("--max-new-tokens", type=number, default=64, metavar="N", help=text)
    text = "0 takes the likeliest token always; 1 samples as the model predicts (default: 0)"
    option(
        "--temperature", type=partial(real, least=0, most=100), default=0.0, metavar="X", help=text
    )
    text = "sample among the N likeliest tokens (default: all)"
    option("--top-k", type=count, default=0, metavar="N", help=text)
    text = "sample among the likeliest tokens of probability X together (default: 1, all)"
    option("--top-p", type=partial(real, least=1e-6, most=1), default=1.0, metavar="X", help=text)
    option("--seed", type=seed, default=0, metavar="N", help="seed of each sample (default: 0)")
    text = "file or folder (default: the model's own)"
    option("--tokenizer", type=path_text, metavar="PATH", help=text)
    option("--device", metavar="NAME", help="cpu or cuda:N (default: a GPU if there is one)")
    text = "of weights and computation (default: bfloat16 on a GPU, else float32)"
    option("--dtype", choices=("bfloat16", "float32"), help=text)
    option("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Generate and print. Raises RunError."""
    import torch  # takes seconds

    from torchtitan_lite.models.generate import Sampling, continue_prompts
    from torchtitan_lite.tools.generate import load_model

    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    try:
        device = torch.device(args.device) if args.device else None
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model, tokenizer = load_model(
        args.source, device=device, dtype=dtype, tokenizer_path=args.tokenizer
    )

    for sample in continue_prompts(model, tokenizer, args.prompts, sampling):
        print_answer(args, asdict(sample), f"{sample.prompt}{sample.text}")
