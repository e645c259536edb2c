"""What can be refused of a configuration before any weight is read: folders, headers, trees and sizes.

Loading, and whether the cache fits the memory that is free then, is left to `worker`.
"""

from engine.config import EngineConfig
from engine.dispatcher.static import StaticDispatcher
from engine.draft.loader import WEIGHTS, load_draft
from engine.model.config import ModelConfig
from engine.runner.calibrate import choose_device
from engine.runner.worker import build_library, count_positions
from engine.weights.safetensors import SafetensorsFile
from engine.weights.shards import open_weights


def check_config(config: EngineConfig) -> None:
    """Raise the `ModelLoadError` or `ConfigError` that would stop an engine at its start, where headers and
    the draft's manifest tell it. Costs the reading of the draft's files; the target's data stay unread.
    """
    model = ModelConfig.load(config.model)
    count_positions(config, model)
    device = choose_device(config)
    open_weights(config.model)
    draft = None
    if config.draft is not None:
        draft = load_draft(config.draft)
        draft.config.check_target(model, base_model_digest=None)
        SafetensorsFile(config.draft / WEIGHTS)
    sizes = config.device_sizes(device.type == "cuda")
    StaticDispatcher(config.speculation, sizes.table, build_library(config, draft))
