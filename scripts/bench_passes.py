"""What the compiler makes of a block besides matmuls and attention, in bf16 and in each float8
recipe: python scripts/bench_passes.py. It compiles, and needs no GPU; docs/performance.md tells how
to read it."""

from torchtitan_lite.benchmarks.passes import format_passes
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger


def main(argv: list[str]) -> None:
    """Measure and print. Raises ConfigError for any argument."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    if argv:
        raise ConfigError(f'scripts/bench_passes.py takes no arguments, not "{argv[0]}"')
    print(format_passes())


if __name__ == "__main__":
    init_logger()
    run_script(main)
