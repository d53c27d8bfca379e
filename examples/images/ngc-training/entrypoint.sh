#!/bin/sh
# Says where it runs, then trains with the arguments that it gets
echo "training on $(hostname)" >&2
exec python /opt/training/train.py "$@"
