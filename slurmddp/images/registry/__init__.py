"""Reads what an image is (its digest and configuration) from an OCI or Docker registry, without pulling layers."""
