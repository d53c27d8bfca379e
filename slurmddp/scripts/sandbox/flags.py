"""Options of srun that take no value, or one behind `=` only."""

from __future__ import annotations

SRUN_FLAGS = {
    "label", "unbuffered", "verbose", "overlap", "exact", "exclusive", "pty", "quiet", "oversubscribe", "hold",
    "overcommit", "contiguous", "no-kill", "multi-prog", "preserve-env", "disable-status", "no-allocate", "test-only",
    "kill-on-bad-exit", "propagate",
    "spread-job", "use-min-nodes", "reboot", "container-writable", "no-container-writable", "container-readonly",
    "container-remap-root", "no-container-remap-root", "container-mount-home", "no-container-mount-home",
    "no-container-entrypoint", "whole", "async", "bcast", "compress", "consolidate-segments", "external-launcher",
    "help", "immediate", "nice", "oom-kill-step", "parsable", "quit-on-interrupt", "resv-ports", "send-libs",
    "spread-segments", "stepmgr", "usage", "version", "wait-for-children", "x11",
}  # fmt: skip
