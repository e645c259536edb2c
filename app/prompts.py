"""The text side of a model: what a prompt's tokens are, without stalling other streams.

The tokenizer and the chat template are in modules of their own; whether a prompt fits is left to `choices`.
"""

import asyncio
from collections.abc import Sequence

from app.call import Message, Prompt, PromptShape, TokenizeCall
from app.chat import ChatTemplate
from app.tokenizer import Tokenizer

LONG_TEXT = 8192  # characters or tokens: more than this would stall other streams, so a thread does it


class Prompts:
    """Turns texts, chats and token ids into each other."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    async def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.encode, prompt, add_special_tokens)
        return self._tokenizer.encode(prompt, add_special_tokens)

    async def encode_chat(self, messages: Sequence[Message], shape: PromptShape) -> tuple[int, ...]:
        return await self.encode(self._template.render(messages, shape), add_special_tokens=False)

    async def encode_as_asked(self, call: TokenizeCall) -> tuple[int, ...]:
        """Return what /tokenize asks for: a text, or a chat as its template writes it."""
        if isinstance(call.source, str):
            return await self.encode(call.source, call.adds_special_tokens)
        text = self._template.render(call.source, call.shape)
        return await self.encode(text, call.adds_special_tokens)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens written out."""
        if len(token_ids) > LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.decode, token_ids, False)
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each token."""
        return [self._tokenizer.token_text(token_id) for token_id in token_ids]
