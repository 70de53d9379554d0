"""Imported first in a process, it lets no connection leave the machine and writes down each that was tried.

A connection is refused where Python's sockets and name resolution are asked for it, before it reaches the system. The
places that were asked for go into the file that `$NO_NETWORK_LOG` names, one a line.
"""

from __future__ import annotations

import os
import sys
from typing import Any

LOG_VARIABLE = "NO_NETWORK_LOG"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")
# Nothing that is imported after this may be told that there is no network: it has to find out, or not to ask.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TINKER_TELEMETRY"):
    os.environ.pop(name, None)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in EVENTS:
        return
    place = arguments[1] if event in EVENTS[:3] else arguments[0]
    host = place[0] if isinstance(place, tuple) else place
    is_file = isinstance(host, str | bytes) and event in EVENTS[:3] and not isinstance(place, tuple)
    if host in LOOPBACK or host is None or is_file:
        return
    with open(os.environ[LOG_VARIABLE], "a", encoding="utf-8") as log:
        log.write(f"{event} {host!r}\n")
    raise OSError(f"{event}: no connection leaves this machine, {host!r} was asked for")


sys.addaudithook(_refuse)
