#!/usr/bin/env python3
"""How fast data is made and read, each beside a baseline in the same run, and how random its order
is.

Needs 2 GB of disk in the temporary folder.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from torchtitan_lite.data.measure import (
    compare_permutation,
    compare_tokenizing,
    compare_windows,
    lcg_orders,
    measure_opening,
    measure_randomness,
    synthetic_store,
)
from torchtitan_lite.data.permutation import Permutation
from torchtitan_lite.data.sources import build_source
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import RunError

ORDERS, LENGTH = 200, 2**14


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seq-len", type=int, default=8192, help="tokens of a window (default: 8192)"
    )
    parser.add_argument(
        "--source", default=None, help="text to tokenize (default: the running Python's library)"
    )
    parser.add_argument(
        "--tokenizer", default="", help="tokenizer file or folder (default: the one shipped)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = synthetic_store(
            folder / "store", shard_sizes=[2**25] * 8, documents=[2**15] * 8, sparse=False
        )
        for comparison in compare_windows(store, seq_len=args.seq_len, count=2048):
            print(comparison)
        print(compare_permutation(n=10**12, count=4_000_000))
        huge = synthetic_store(
            folder / "huge", shard_sizes=[2**29] * 1000, documents=[10**6] * 1000, sparse=True
        )
        opening = measure_opening(huge)
        print(
            f"a store of 10^9 documents opens in {opening.seconds:.3f} s and {opening.mib:.1f} MiB"
        )
        try:
            cores = len(os.sched_getaffinity(0))
            source, tokenizer = build_source(args.source), build_tokenizer(args.tokenizer)
            print(compare_tokenizing(folder, source, tokenizer, cores=cores))
        except RunError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    rng = np.random.default_rng(0)
    for what, orders in {
        "ours": np.array(
            [Permutation(LENGTH, key=f"seed 0 epoch {e}")(np.arange(LENGTH)) for e in range(ORDERS)]
        ),
        "numpy shuffles": np.array([rng.permutation(LENGTH) for _ in range(ORDERS)]),
        "LCG, multiplier 5": lcg_orders(LENGTH, multiplier=5, count=ORDERS),
    }.items():
        print(f"{ORDERS} orders of {LENGTH}, {what}: {measure_randomness(orders)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
