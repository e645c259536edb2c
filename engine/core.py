"""The engine core process: an `Engine` behind a connection, alone in its interpreter.

Steps last milliseconds and must not share an interpreter lock with tokenizing, JSON and HTTP. Starting it is
left to `async_engine`; it is run as `python -m engine.core FD`, where FD is an inherited socket.
"""

import gc
import logging
import sys
from multiprocessing.connection import Connection

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError, EyasError, StepError
from engine.messages import (
    Abort,
    Add,
    AskStats,
    ClientMessage,
    CoreMessage,
    Deltas,
    Failed,
    LoadDraft,
    Ready,
    Refused,
    Shutdown,
    Switch,
)
from engine.request import Request

logger = logging.getLogger(__name__)

ADD_FAILED = "the engine could not take this request; its log has the reason"


class Core:
    """Steps the engine while it has work, and reads messages between steps."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._num_added = 0

    def run(self) -> None:
        """Serve until told to shut down; a closed connection says so too."""
        try:
            while self._receive():
                if self._engine.has_work:
                    self._send(Deltas(self._engine.step(), self._num_added))
        except (EOFError, ConnectionError):
            logger.info("engine core stops reason=client_gone")

    def _receive(self) -> bool:
        """Act on every message that is there, waiting for one where there is no work; False ends the
        process.
        """
        while not self._engine.has_work or self._connection.poll():
            message: ClientMessage = self._connection.recv()
            if isinstance(message, Shutdown):
                return False
            self._act(message)
        return True

    def _act(self, message: Add | Abort | AskStats | LoadDraft | Switch) -> None:
        match message:
            case Add(request):
                self._num_added += 1
                self._add(request)
            case Abort(request_id, is_finished):
                self._engine.abort(request_id, is_finished)
            case AskStats():
                self._send(self._engine.stats())
            case LoadDraft(folder, digest):
                self._engine.drafts.load(folder, digest)
            case Switch(mode):
                self._engine.switch_speculation(mode)

    def _add(self, request: Request) -> None:
        error: Exception
        try:
            self._engine.add(request)
            return
        except EyasError as refusal:
            error = refusal
        except Exception:  # the edge of one request: the others must not pay for it
            logger.exception("request refused request_id=%s", request.request_id)
            error = StepError(ADD_FAILED)
        self._send(Refused(request.request_id, error, self._num_added))

    def _send(self, message: CoreMessage) -> None:
        self._connection.send(message)


def main(fd: int) -> int:
    """Load the engine that the first message asks for, then serve it; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    connection = Connection(fd)
    try:
        config: EngineConfig = connection.recv()
        engine = Engine.load(config)
        gc.freeze()  # what is loaded stays: a collection that walks all of it stops every stream for long
        connection.send(Ready(engine.facts))
        Core(engine, connection).run()
    except EOFError:
        return 0
    except EyasError as error:
        connection.send(Failed(error))
        return 1
    except Exception as error:
        # The loop's edge: whatever it was, the client must fail its requests with the reason rather than
        # hang.
        logger.exception("engine core died")
        connection.send(Failed(EngineDeadError(f"{type(error).__name__}: {error}")))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
