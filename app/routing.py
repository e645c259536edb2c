"""Which replica a call goes to: the one that knows most of its prompt, unless another has much less to do.

Plain values only; Serve's protocol is left to `request_router`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.call import Call, ChatCall

BLOCK_BYTES = 512  # of a prompt that one key names; some 100 tokens of English
MOST_BLOCKS = 64  # keys of one prompt: what is longer is alike enough
MATCH_WORTH = 0.5  # a prompt that is cached whole outweighs so much more load, 1 being a full replica
MOST_KEYS = 100_000
_ANY_TEXT = ("utf-8", "surrogatepass")  # halves of surrogate pairs too


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica with its calls in flight and the number of sequences that it decodes at its objective."""

    name: str
    num_ongoing: float
    capacity: float


def rank(candidates: Sequence[Candidate], matched: Mapping[str, float]) -> list[str]:
    """Return the names, best first. `matched` says which share of the prompt, 0 to 1, each has seen.

    The load is the share of its capacity that a replica would be filled to by this call.
    """

    def cost(candidate: Candidate) -> tuple[float, float]:
        load = (candidate.num_ongoing + 1) / max(1.0, candidate.capacity)
        return load - MATCH_WORTH * matched.get(candidate.name, 0.0), load

    return [candidate.name for candidate in sorted(candidates, key=cost)]


def prefix_keys(call: Call) -> tuple[bytes, ...]:
    """Return a key per block of the prompt, each of which names all blocks before it too."""
    data, key, keys = _prompt_bytes(call), b"", []
    for start in range(0, min(len(data), BLOCK_BYTES * MOST_BLOCKS), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        if len(block) < BLOCK_BYTES and start > 0:
            break  # an end that no other prompt goes on from
        key = hashlib.blake2b(key + block, digest_size=12).digest()
        keys.append(key)
    return tuple(keys)


class PrefixTable:
    """Which replica saw which prompt block last, the latest `most_keys` of them."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def observe(self, keys: Sequence[bytes], replica: str) -> None:
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._most_keys:
            self._replicas.popitem(last=False)

    def match(self, keys: Sequence[bytes]) -> dict[str, float]:
        """Return the share of the prompt that each replica saw, up to the deepest block it was the last to
        see.
        """
        shares: dict[str, float] = {}
        for idx, key in enumerate(keys):
            replica = self._replicas.get(key)
            if replica is None:
                break
            shares[replica] = (idx + 1) / len(keys)
        return shares


def _prompt_bytes(call: Call) -> bytes:
    """Return the prompt as bytes that begin alike where prompts do. Only a call's first prompt counts.

    Whatever a client may send has some: this runs before the replica's checks, in Serve's router, which would
    leave a call whose router raises without an answer.
    """
    if isinstance(call, ChatCall):
        tools = "".join(f"{tool.name}\0{tool.description}\0" for tool in call.shape.tools)
        return (tools + "".join(f"{m.role}\0{m.content}\0" for m in call.messages)).encode(*_ANY_TEXT)
    prompt = call.prompts[0]
    if isinstance(prompt, str):
        return prompt.encode(*_ANY_TEXT)
    return b"".join((token_id & 0xFFFFFFFF).to_bytes(4, "little") for token_id in prompt)
