"""Watches a script of the user's own from inside its ranks, without a change to it.

hooks/sitecustomize.py starts it once the script has imported torch. A thread reads what torch knows: optimizer steps,
and how many collectives each process group has issued. It stops nothing, unless the job asks for it.
"""
