"""Which hosts are this machine itself."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a host (without port) is this machine: localhost, 127.0.0.0/8 or ::1, with or without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
