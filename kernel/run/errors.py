"""Expected failures end in one line."""

import os
import sys

import torch


def one_line_errors(stage: str) -> None:
    """Expected failures end in one line and a non-zero status; DEBUG=1 shows the traceback."""

    def hook(kind, error, traceback):
        if issubclass(kind, KeyboardInterrupt):
            print(f"\n{stage}: stopped. Run the same command again to go on.", file=sys.stderr)
        elif os.getenv("DEBUG"):
            sys.__excepthook__(kind, error, traceback)
        elif issubclass(kind, MemoryError) or "not enough memory" in str(error).lower():
            print(f"\n{stage}: error: out of memory; smaller batches need less", file=sys.stderr)
        elif issubclass(kind, torch.OutOfMemoryError):
            print(f"\n{stage}: error: out of memory on the device ({error})", file=sys.stderr)
        elif issubclass(kind, (ValueError, OSError, FloatingPointError)):
            text = " ".join(str(error).split())
            print(f"\n{stage}: error: {text}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = hook
