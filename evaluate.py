"""Evaluates a trained model: python evaluate.py runs/digits (the same as `vit-scratch evaluate`)."""

import sys

from vit_scratch.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]], prog="python evaluate.py"))
