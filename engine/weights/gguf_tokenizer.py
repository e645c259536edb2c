"""The tokenizer of a GGUF file, rebuilt as the `tokenizer.json` and `tokenizer_config.json` of Hugging Face.

Weights and sizes are left to `convert_gguf`.
"""

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelLoadError

_CONTROL = 3  # token type of a special token in GGUF
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def build_tokenizer(fields: Mapping[str, Any]) -> str:
    """Return the text of `tokenizer.json` for the metadata `fields` of a GGUF file.

    Byte-level BPE with the "smollm" pre-tokenizer (every digit alone, then the GPT-2 pattern) is the one
    kind that is rebuilt; another one raises `ModelLoadError`.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ModelLoadError(
            "converting a GGUF file needs the tokenizers package: pip install tokenizers"
        ) from error

    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelLoadError(f"the GGUF tokenizer must be of kind ('gpt2', 'smollm'), found {kind}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelLoadError(f"the GGUF vocabulary repeats {len(tokens) - len(vocab)} of its tokens")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_read_merges(fields, vocab)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"the GGUF token_type must have {len(tokens)} entries, found {len(kinds)}")
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return str(tokenizer.to_str(pretty=False))


def build_tokenizer_config(fields: Mapping[str, Any], max_position: int) -> str:
    """Return the text of `tokenizer_config.json`: the named special tokens and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    config |= {name: tokens[fields[key]] for name, key in _SPECIAL_KEYS.items() if key in fields}
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _read_merges(fields: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in fields["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelLoadError(f"the GGUF merge {merge!r} names a token outside the vocabulary")
        merges.append((left, right))
    return merges
