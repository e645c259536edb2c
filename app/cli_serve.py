"""`eyas serve`: Ray and Serve on this machine, until it is told to stop.

The application itself is in `main`. Ray is imported here only, once all that can be checked without it is
known to be right: starting it takes seconds and fails noisily.
"""

import argparse
import errno
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

import yaml

from app.api_keys import load_api_keys
from app.chat import ChatTemplate
from app.config import ServerConfig, load_config
from app.proxy import CALLBACK, CALLBACK_VARIABLE, QUICK_HOPS
from app.replica_watch import ReplicaWatch, ScaledReplicaWatch, Watch
from app.tokenizer import Tokenizer
from engine import ConfigError, EngineConfig, EyasError, ModelLoadError, check_config

APPLICATION = "eyas"
WATCH_SECONDS = 1.0
# Messages of tens of bytes and a few snapshots travel between processes: the least that Ray takes is plenty.
OBJECT_STORE_BYTES = 80 * 2**20
_FLAGS = {
    "model": "model",
    "draft": "draft",
    "served_model_name": "served_model_name",
    "host": "host",
    "port": "port",
    "dtype": "engine.dtype",
    "speculation": "engine.speculation.mode",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
}


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Serve until SIGINT or SIGTERM, then let streams end; a second signal stops at once."""
    given = {
        key: getattr(options, flag) for flag, key in _FLAGS.items() if getattr(options, flag) is not None
    }
    config = load_config(options.config, given)
    check_port(config.host, config.port)
    load_api_keys(config.api_key_file)
    engine_config = config.engine_config(progress=True)
    Tokenizer(engine_config.model)
    ChatTemplate(engine_config.model)
    check_config(engine_config)
    try:
        _stop_on_signals()
        with _ray(config) as log_folder, _application(config):
            _stop_on_signals()  # Ray has put its own handlers in place
            out.write(effective_configuration(config, engine_config))
            out.write(f"serving {config.name} at http://{config.host}:{config.port}/v1\n")
            out.flush()
            _watch(_watch_of(config, log_folder))
    except KeyboardInterrupt:
        return 0
    return 0


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` where nobody can listen on the port: Ray would say so late and at length."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is taken: choose another with --port") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error


def effective_configuration(config: ServerConfig, engine_config: EngineConfig) -> str:
    """Return the YAML of what really runs, defaults and resolved folders included."""
    values = config.model_dump(mode="json")
    values["engine"]["model"] = str(engine_config.model)
    values["engine"]["draft"] = None if engine_config.draft is None else str(engine_config.draft)
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None)


def failure_reason(text: str) -> EyasError:
    """Return the engine's error inside a report of Serve, which is a traceback of several processes."""
    found = re.findall(r"engine\.errors\.(\w+)\x1b?[^:\n]*: (.+)", text)
    if found:
        return ModelLoadError(found[-1][1].strip())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ModelLoadError(f"the server did not start: {lines[-1] if lines else 'Serve gave no reason'}")


def _stop_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    raise KeyboardInterrupt


@contextmanager
def _ray(config: ServerConfig) -> Iterator[str]:
    """Run a Ray of our own on this machine, without dashboard, usage report or worker logs; yield the folder
    of Serve's logs.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A replica that reserves no GPU may still see the machine's: `device: auto` then means what it says.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The port opens before the application is there: clients that poll it must read our errors, not Serve's.
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)
    for name, value in QUICK_HOPS.items():
        os.environ.setdefault(name, value)
    import ray

    context = ray.init(
        address="local",
        num_cpus=config.autoscaling.max_replicas or config.num_replicas,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield f"{context.address_info['session_dir']}/logs/serve"
    finally:
        ray.shutdown()


@contextmanager
def _application(config: ServerConfig) -> Iterator[None]:
    """Run the application; at the end its replicas finish their streams first."""
    from ray import serve

    from app.main import build

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": config.host, "port": config.port}, proxy_location="HeadOnly")
    try:
        serve.run(build(config), name=APPLICATION)
    except RuntimeError as error:
        reports = [str(error)]
        if (status := serve.status().applications.get(APPLICATION)) is not None:
            reports += [status.message, *(d.message for d in status.deployments.values())]
        raise failure_reason("\n".join(reports)) from error
    try:
        yield
    finally:
        sys.stderr.write("stopping when the running streams have ended; again to stop at once\n")
        serve.delete(APPLICATION)  # the rest of Serve ends with its Ray


def _watch_of(config: ServerConfig, log_folder: str) -> Watch:
    if config.autoscaling.max_replicas is not None:
        return ScaledReplicaWatch(config.autoscaling.min_replicas)
    return ReplicaWatch(config.num_replicas, log_folder)


def _watch(watch: Watch) -> None:
    """Tell of replicas that fail and come back, until a signal ends it."""
    from ray import serve

    from app.main import SERVER

    while True:
        time.sleep(WATCH_SECONDS)
        states = serve.status().applications[APPLICATION].deployments[SERVER].replica_states
        if (line := watch.observe(states.get("RUNNING", 0))) is not None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
