"""The error tree of the engine.

Turning an error into an HTTP body is left to `app/errors.py`; nothing here knows about HTTP.
"""


class EyasError(Exception):
    """Base of every error that Eyas raises on purpose: it says what was expected, found, and what to do."""


class ConfigError(EyasError):
    """The operator asked for something impossible: an unknown tree name, a bad size, an unknown key."""


class RequestError(EyasError):
    """A client's request cannot be served as written; `parameter` names the field to change."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ModelLoadError(EyasError):
    """A model folder or a weights file is missing, corrupt, or not what its config promises."""


class DraftMismatchError(ModelLoadError):
    """A draft head was made for another target: hidden size, vocabulary or base digest differ."""


class CapacityError(EyasError):
    """The engine has no room for one more request now; trying again later can succeed."""


class StepError(EyasError):
    """One decode step failed for the requests it names (for instance non-finite logits)."""


class AdmissionError(EyasError):
    """A sequence could not take its slot: nothing of its step has run, and it fails alone."""

    def __init__(self, slot: int) -> None:
        super().__init__(f"the state of slot {slot} could not be set")
        self.slot = slot


class EngineDeadError(EyasError):
    """The engine core process is gone, and its requests have failed, or hangs: replace the replica."""


class TrainingError(EyasError):
    """Draft training cannot go on: a loss is not finite, or the disk is full. Earlier files are intact."""
