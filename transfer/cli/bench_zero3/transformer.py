"""A causal transformer of a wanted size, for measuring training steps. What it learns does not matter."""

from __future__ import annotations

from torch import Tensor, nn

VOCABULARY = 1024
HEAD_WIDTH = 64


def shape_of(parameters: int, multiple: int = HEAD_WIDTH) -> tuple[int, int]:
    """Layers and width of the model with about this many parameters, one layer for each 128 of its width.

    The width is a multiple of ``multiple``, itself one of ``HEAD_WIDTH``.
    """
    # A block has 12 hidden^2 parameters, so the model has about 12 hidden^3 / 128.
    width = (128 * parameters / 12) ** (1 / 3)
    hidden = max(1, round(width / multiple)) * multiple
    return max(1, round(parameters / (12 * hidden**2))), hidden


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // HEAD_WIDTH
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, values: Tensor) -> Tensor:
        batch, length, hidden = values.shape
        projected = self.query_key_value(self.attention_norm(values))
        query, key, value = projected.view(batch, length, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.output(attended.transpose(1, 2).reshape(batch, length, hidden))
        changed: Tensor = values + self.perceptron(values)
        return changed


class Transformer(nn.Module):
    """Blocks between two embeddings; called with tokens, it returns the loss of predicting each next one."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(layers)))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens))[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
