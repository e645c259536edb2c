"""The process that compiles grammars: what breaks, hangs or eats memory here costs one request.

Starting it and its time limit are left to `compiler`; it is run as `python -m engine.grammar.compile_worker
FD`, where FD is an inherited socket.
"""

import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from engine.errors import EyasError
from engine.grammar.backend import open_backend
from engine.grammar.vocabulary import ModelTokens
from engine.guidance import Grammar

MAX_CPU_SECONDS = 30  # for one grammar, where nobody is left to end the process
MAX_MEMORY_BYTES = 2 << 30  # beyond what the process needs before its first grammar


def main(fd: int) -> int:
    """Open the library for the model that the first message names, answered by None or an error; then answer
    each grammar with its bytes or an error, until the socket closes."""
    connection = Connection(fd)
    try:
        model: ModelTokens = connection.recv()
        try:
            backend = open_backend(model)
        except EyasError as error:
            connection.send(error)
            return 1
        _limit_memory(MAX_MEMORY_BYTES)
        connection.send(None)
        while True:
            grammar: Grammar = connection.recv()
            _limit_time(MAX_CPU_SECONDS)
            try:
                answer: bytes | EyasError = backend.compile(grammar)
            except EyasError as error:
                answer = error
            connection.send(answer)
    except (EOFError, ConnectionError):
        return 0


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by `num_bytes` of address space at most."""
    page = resource.getpagesize()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * page
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, resource.RLIM_INFINITY))


def _limit_time(seconds: int) -> None:
    """Let the process compute for so many seconds more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
