"""One rank of a training in two processes: `python two_ranks.py STORE RANK FOLDER`.

What its log must say is left to the test that starts it.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from engine.training.ranks import Ranks
from engine.training.trainer import Trainer
from tests.training.cases import tiny_head, tiny_target
from tests.training.test_trainer import ROWS, config

if __name__ == "__main__":
    store, rank, folder = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    target = tiny_target()
    settings = config(num_steps=8, checkpoint_every=5)
    Trainer(target, tiny_head(target), ROWS, settings, Path(folder), ranks=Ranks.current()).train()
    dist.destroy_process_group()
