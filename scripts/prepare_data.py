"""The same as `torchtitan-lite data`."""

from torchtitan_lite.__main__ import main

if __name__ == "__main__":
    main("data")
