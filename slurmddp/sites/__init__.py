"""The sites: which profiles there are, and which of them this host belongs to."""
