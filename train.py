"""Trains a model: python train.py --config configs/digits.yaml (the same as `vit-scratch train`)."""

import sys

from vit_scratch.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], prog="python train.py"))
