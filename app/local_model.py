"""A model for the commands that need no server: its text side, and an engine in this process.

What the commands do with it is left to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.call import Message
from app.chat import ChatTemplate
from app.config import EngineSection, ServerConfig
from app.tokenizer import Tokenizer
from engine import Engine, EngineConfig, RequestError


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Tokenizer, template and engine config of one model folder; the engine is loaded by `engine`."""

    tokenizer: Tokenizer
    template: ChatTemplate
    config: EngineConfig

    @staticmethod
    def open(model: str, draft: str, sizes: EngineSection) -> "LocalModel":
        """Fetch the model where it is absent. Raises `ModelLoadError` or `ConfigError`."""
        config = ServerConfig(model=model, draft=draft, engine=sizes)
        engine_config = config.engine_config(progress=True)
        folder = engine_config.model
        return LocalModel(Tokenizer(folder), ChatTemplate(folder), engine_config)

    def engine(self) -> Engine:
        return Engine.load(self.config)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.tokenizer.encode(self.template.render(messages), add_special_tokens=False)


def check_length(prompt_len: int, max_tokens: int, max_model_len: int) -> None:
    """Raise `RequestError` where a prompt and its answer do not fit the context."""
    if prompt_len + max_tokens > max_model_len:
        raise RequestError(
            f"the model's context is {max_model_len} tokens: a prompt of {prompt_len} and an answer of "
            f"{max_tokens} are too many"
        )
