"""Step-by-step inference of target and head with explicit K/V lists: slow, plain, and no code of training."""

import torch

from engine.layers.rotary import rotate_qkv


class CachedAttention:
    """One sequence's K/V per layer as growing lists; `mark` and `cut` drop what a draft appended."""

    def __init__(self, num_layers, num_kv_heads):
        self.num_kv_heads = num_kv_heads
        self.keys = [[] for _ in range(num_layers)]
        self.values = [[] for _ in range(num_layers)]

    def attend(self, layer_idx, qkv, angles):
        q, k, v = rotate_qkv(qkv, angles, self.num_kv_heads)
        self.keys[layer_idx].append(k[0])
        self.values[layer_idx].append(v[0])
        keys, values = torch.stack(self.keys[layer_idx]), torch.stack(self.values[layer_idx])
        group = q.shape[1] // k.shape[1]
        heads = []
        for head_idx in range(q.shape[1]):
            scores = keys[:, head_idx // group] @ q[0, head_idx] / q.shape[2] ** 0.5
            heads.append(scores.softmax(0) @ values[:, head_idx // group])
        return torch.stack(heads)[None]

    def mark(self):
        return len(self.keys[0])

    def cut(self, length):
        for rows in (*self.keys, *self.values):
            del rows[length:]


def target_outputs(target, token_ids):
    """Return (features [n, F], logits [n, V]) of one sequence, one token at a time."""
    cache = CachedAttention(len(target.layers), target.config.num_kv_heads)
    outputs = [
        target(torch.tensor([token]), torch.tensor([position]), cache.attend)
        for position, token in enumerate(token_ids)
    ]
    features = torch.cat([output.features for output in outputs])
    return features, torch.cat([target.logits(output.hidden) for output in outputs])


class StepwiseDraft:
    """The head along one sequence: true pairs are committed, drafts are appended and dropped again."""

    def __init__(self, head, features):
        self.head = head
        self.features = torch.cat((torch.zeros(1, features.shape[1]), features))
        self.cache = CachedAttention(len(head.layers), head.config.num_kv_heads)
        self.position = -1

    def commit(self, token):
        """Read the next true token with the feature before it; return (feature, hidden)."""
        self.position += 1
        fused = self.head.fuse(self.features[self.position][None])
        return self._run(token, fused, self.position)

    def draft(self, path, state):
        """Return hidden states [len(path) + 1, H]: after the root, then after each token of `path`."""
        length, (feature, hidden) = self.cache.mark(), state
        hiddens = [hidden]
        for depth, token in enumerate(path, start=1):
            feature, hidden = self._run(token, feature, self.position + depth)
            hiddens.append(hidden)
        self.cache.cut(length)
        return torch.cat(hiddens)

    def _run(self, token, feature, position):
        return self.head(torch.tensor([token]), feature, torch.tensor([position]), self.cache.attend)
