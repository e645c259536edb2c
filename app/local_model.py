"""A model for the commands that need no server: its text side, and an engine in this process.

What the commands do with it is left to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.call import Message
from app.chat import ChatTemplate
from app.drafts import draft_folder
from app.tokenizer import Tokenizer
from engine import Engine, EngineConfig, RequestError, resolve_model


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Tokenizer, template and engine config of one model folder; the engine is loaded by `engine`."""

    tokenizer: Tokenizer
    template: ChatTemplate
    config: EngineConfig

    @staticmethod
    def open(sizes: EngineConfig, model: str, draft: str) -> "LocalModel":
        """Fill in the folders of `sizes`, fetching the model where it is absent.

        Raises `ModelLoadError` or `ConfigError`.
        """
        found = draft_folder(model, draft)
        folder = resolve_model(model, progress=True)
        return LocalModel(Tokenizer(folder), ChatTemplate(folder), replace(sizes, model=folder, draft=found))

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
