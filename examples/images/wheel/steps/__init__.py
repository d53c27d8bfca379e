"""A package that is built in one stage and used in the next."""
