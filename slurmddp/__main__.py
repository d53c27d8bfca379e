"""`python -m slurmddp`: the same as the `slurmddp` command."""

from slurmddp.cli.app import main

if __name__ == "__main__":
    main()
