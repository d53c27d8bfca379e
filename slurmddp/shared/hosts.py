"""Which hosts are this machine itself."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host without its port is this machine itself: localhost, 127.0.0.0/8 or ::1, in brackets or not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
