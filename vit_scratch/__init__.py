"""A Transformer from scratch, and the Vision Transformer that stands on its encoder: the public names."""

from vit_scratch.transformer.attention import MultiHeadAttention, attention, causal_mask
from vit_scratch.transformer.decoder import Decoder, DecoderLayer
from vit_scratch.transformer.encoder import Encoder, EncoderLayer
from vit_scratch.transformer.feed_forward import FeedForward
from vit_scratch.transformer.generation import Hypothesis, beam_search, greedy, sample
from vit_scratch.transformer.positions import LearnedPositions, SinusoidalPositions
from vit_scratch.transformer.transformer import TokenEmbedding, Transformer
from vit_scratch.vision import timm_hook as _timm_hook  # noqa: F401 - registers our presets with timm
from vit_scratch.vision.patch_embedding import PatchEmbedding
from vit_scratch.vision.vit import PRESETS, VisionTransformer, create_vit

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Hypothesis",
    "LearnedPositions",
    "MultiHeadAttention",
    "PatchEmbedding",
    "SinusoidalPositions",
    "TokenEmbedding",
    "Transformer",
    "VisionTransformer",
    "attention",
    "beam_search",
    "causal_mask",
    "create_vit",
    "greedy",
    "sample",
]
