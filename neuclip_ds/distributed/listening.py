"""Listen at the interface of MASTER_ADDR alone, as far as its name tells which one that is."""

import errno
import ipaddress
import socket

_BACKLOG = 4096


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at the address of this machine that `host` names; port 0 takes a free one.

    Listens at all interfaces where other nodes know `host` by an address that this machine does not (a name that
    /etc/hosts maps to 127.0.1.1, a forwarded address). Raises `OSError` if the port is taken.
    """
    for family, _, _, _, address in _resolve(host, port):
        if ipaddress.ip_address(address[0]).is_loopback and not _is_loopback(host):
            continue
        try:
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, int, int, str, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # a name that other nodes know
        return []
    return [entry for entry in found if entry[0] in (socket.AF_INET, socket.AF_INET6)]  # type: ignore[misc]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
