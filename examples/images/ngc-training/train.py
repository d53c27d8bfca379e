"""Stands for a training script: says what it was asked for."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--name", required=True)
options = parser.parse_args()
print(f"{options.name}: {options.steps} steps")
