"""`python -m slurmddp`: the same as the `slurmddp` command."""

from slurmddp.commands.app import main

if __name__ == "__main__":
    main()
