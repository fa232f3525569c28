"""The encoder-decoder Transformer for sequence tasks: token embeddings, encoder, decoder, logits.

Shapes: B batch, N target tokens, S source tokens, D model width, V vocabulary.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from vit_scratch.transformer.decoder import Decoder, DecoderCache
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.linear import Linear, matrices
from vit_scratch.transformer.positions import SinusoidalPositions
from vit_scratch.transformer.residual import Dropout


class TokenEmbedding(nn.Module):
    """Token ids to vectors with sinusoidal positions ("Attention Is All You Need", sections 3.4 and 3.5).

    Args:
        vocabulary: number of token ids V.
        dim: model width D.
        dropout: probability of dropping an element of the sum.
        max_length: the most tokens a sequence may have.
    """

    def __init__(self, vocabulary: int, dim: int, *, dropout: float = 0.0, max_length: int = 5000):
        super().__init__()
        self.scale = math.sqrt(dim)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = SinusoidalPositions(dim, max_length)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Ids (B, N) -> vectors (B, N, D); the first id stands at position `start`."""
        return self.dropout(self.positions(self.embedding(tokens) * self.scale, start))


@dataclass
class DecodingState:
    """Where the step-by-step decoding of a batch stands.

    Attributes:
        memory, memory_mask: what `Transformer.encode` returned.
        cache: keys and values of all layers.
    """

    memory: Tensor
    memory_mask: Tensor
    cache: DecoderCache

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken more than once."""
        self.memory, self.memory_mask = self.memory[rows], self.memory_mask[rows]
        self.cache.select(rows)


TIES = ("none", "target", "all")


class Transformer(nn.Module):
    """The encoder-decoder Transformer of "Attention Is All You Need" (figure 1), on token ids, logits out.

    Args:
        encoder, decoder: of the same width D.
        source_vocabulary, target_vocabulary: number of token ids on each side, V for the target.
        pad_id: the id that fills up short sequences, at their end; nothing attends to it.
        dropout: probability of dropping an element of the embeddings.
        max_length: the most tokens a sequence may have.
        tie: what shares one matrix: "none", "target" (target embedding and head, "Using the Output Embedding to
            Improve Language Models") or "all" (the source embedding too, as section 3.4 of the 2017 paper).

    Raises:
        ValueError: encoder and decoder differ in width, `pad_id` is no id of both vocabularies, an unknown `tie`, or
            one that needs both vocabularies to be of the same size.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        *,
        source_vocabulary: int,
        target_vocabulary: int,
        pad_id: int = 0,
        dropout: float = 0.0,
        max_length: int = 5000,
        tie: str = "none",
    ):
        super().__init__()
        if tie not in TIES:
            raise ValueError(f"tie={tie!r} is unknown; choose from {', '.join(TIES)}")
        if tie == "all" and source_vocabulary != target_vocabulary:
            raise ValueError(
                f"tie='all' needs one vocabulary for both sides, not {source_vocabulary} and {target_vocabulary} ids; "
                "choose tie='target' or 'none'"
            )
        if encoder.dim != decoder.dim:
            raise ValueError(f"encoder.dim={encoder.dim} and decoder.dim={decoder.dim} differ; they must be equal")
        if not 0 <= pad_id < min(source_vocabulary, target_vocabulary):
            raise ValueError(
                f"pad_id={pad_id} is not an id of both vocabularies ({source_vocabulary} and {target_vocabulary} ids)"
            )
        self.pad_id = pad_id
        self.source_embedding = TokenEmbedding(source_vocabulary, encoder.dim, dropout=dropout, max_length=max_length)
        self.target_embedding = TokenEmbedding(target_vocabulary, decoder.dim, dropout=dropout, max_length=max_length)
        self.encoder = encoder
        self.decoder = decoder
        self.head = Linear(decoder.dim, target_vocabulary)
        if tie != "none":
            self.head.weight = self.target_embedding.embedding.weight
        if tie == "all":
            self.source_embedding.embedding.weight = self.target_embedding.embedding.weight
        initialise(self)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Source ids (B, S) -> memory (B, S, D) and its padding mask (B, 1, S), True at real tokens."""
        mask = (source != self.pad_id)[:, None]  # (B, 1, S)
        return self.encoder(self.source_embedding(source), mask), mask

    def decode(self, target: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """Target ids (B, N), memory (B, S, D) and its mask -> logits (B, N, V); position n sees ids 0..n only.

        That includes no padding, which stands at the end, so that the target needs no mask of its own.
        """
        return self.head(self.decoder(self.target_embedding(target), memory, None, memory_mask))

    def start(self, source: Tensor) -> DecodingState:
        """Encode source ids (B, S) for `step`; a source without tokens is one of padding."""
        if source.shape[1] == 0:
            source = source.new_full((len(source), 1), self.pad_id)
        return DecodingState(*self.encode(source), DecoderCache(self.decoder.depth))

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Ids (B,) of the next target token -> logits (B, V) for the one after it; the state moves on by one.

        With the same ids, the logits are those of `forward` at that position. For inference only.
        """
        x = self.target_embedding(tokens[:, None], state.cache.length)  # (B, 1, D)
        return self.head(self.decoder(x, state.memory, None, state.memory_mask, state.cache))[:, 0]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Predict the next target token at every position.

        Args:
            source: ids (B, S), padded with `pad_id`.
            target: ids (B, N) of the target as far as it is known, padded with `pad_id` at the end.

        Returns:
            Logits (B, N, V); those at position n are for token n + 1.
        """
        return self.decode(target, *self.encode(source))

    def hidden_matrices(self) -> dict[str, int]:
        """Names of the weight matrices inside encoder and decoder, and of how many stacked maps each consists."""
        parts = {"encoder": self.encoder, "decoder": self.decoder}
        return {f"{part}.{name}": stacked for part, m in parts.items() for name, stacked in matrices(m).items()}


def initialise(model: Transformer) -> None:
    """Set the first weights of a `Transformer`; encoder and decoder keep those they came with.

    | what              | distribution                                                      |
    |-------------------|-------------------------------------------------------------------|
    | token embeddings  | normal, standard deviation D^-0.5 (they are multiplied by D^0.5)  |
    | head              | Xavier uniform, bias 0; where it is tied, as the embedding        |
    """
    for embedding in (model.source_embedding.embedding, model.target_embedding.embedding):
        nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5)
    if model.head.weight is not model.target_embedding.embedding.weight:
        nn.init.xavier_uniform_(model.head.weight)
    nn.init.zeros_(model.head.bias)
