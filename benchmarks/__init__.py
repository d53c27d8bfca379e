"""Measurements that a person runs and reads; no test asserts a time. See docs/benchmarks.md."""
