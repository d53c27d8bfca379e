"""The files of a build context: which a COPY takes, and how they get to the builder as they are.

ignore (.dockerignore) -> tree (what one source holds), archive (what ADD unpacks)
-> staging (gathered beside the definition file).
"""
