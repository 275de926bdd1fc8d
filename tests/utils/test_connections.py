from __future__ import annotations

import socket
import sys

import pytest

from atroposlib.utils.io import DEAD_PEER_S, open_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the options are those of Linux")


def test_open_socket_ends_with_a_peer_that_is_gone():
    (address, *_) = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)

    with open_socket(address) as opened:
        read = opened.getsockopt
        idle_s = read(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        probes_s = read(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * read(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT
        )

        assert read(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle_s + probes_s == DEAD_PEER_S
        assert read(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * DEAD_PEER_S
