"""The files of a build context: which a COPY takes, and how they get to the builder as they are.

ignore (.dockerignore) -> tree (what one source holds) -> sources (of a COPY, and what ADD unpacks)
-> download (addresses) -> staging (gathered beside the definition file).
"""
