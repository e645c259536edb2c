"""One training run in several processes, through Ray Train, which share each batch.

The run itself is left to the engine's `training`, which knows no Ray.
"""

import dataclasses
import logging
import os
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from app.cli_serve import failure_reason
from engine.training.ranks import Ranks
from engine.training.run import RunSettings, TrainingRun

RAY_FOLDER = "ray"


def train_with_workers(settings: RunSettings, num_workers: int, max_seconds: float) -> None:
    """Train in `num_workers` processes on this machine, one GPU each where there are GPUs.

    Raises the error that ended a worker, as one of the engine's.
    """
    is_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    num_threads = settings.num_threads or max(1, (os.cpu_count() or 1) // num_workers)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=num_workers + 1,  # Ray Train's own controller takes one
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        trainer = TorchTrainer(
            _work,
            train_loop_config={
                "settings": dataclasses.replace(settings, num_threads=num_threads),
                "max_seconds": max_seconds,
            },
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=is_cuda),
            run_config=RunConfig(name=RAY_FOLDER, storage_path=str(settings.folder.resolve())),
        )
        trainer.fit()
    except TrainingFailedError as error:
        raise failure_reason(str(error)) from error
    finally:
        ray.shutdown()


def _work(config: dict[str, Any]) -> None:
    """Run in each worker."""
    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    TrainingRun(config["settings"], Ranks.current()).run(config["max_seconds"])
