"""A server that answers with given bytes after given pauses, and remembers what it was asked.

What the answers mean is left to the tests.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@dataclass
class ScriptedServer:
    """`script` is what every connection gets: bytes to send, or seconds to wait."""

    url: str
    script: tuple[bytes | float, ...]
    asked: list[bytes] = field(default_factory=list)


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def scripted_server(*script: bytes | float) -> Iterator[ScriptedServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ScriptedServer(f"http://127.0.0.1:{listener.getsockname()[1]}", script)

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # the test is over
                with connection:
                    server.asked.append(read_request(connection))
                    for part in script:
                        if isinstance(part, bytes):
                            connection.sendall(part)
                        else:
                            time.sleep(part)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
