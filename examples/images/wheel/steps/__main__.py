"""Counts to the number that it is given."""

import sys

print(*range(1, int(sys.argv[1]) + 1))
