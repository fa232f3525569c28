"""Speed of the encoder-decoder beside its peers: training tokens per second, and greedy decoding with a cache.

python benchmarks/sequence.py --config configs/multi30k_en_de.yaml

Trains the configuration's model and the same one built from torch.nn.Transformer on the same random batches in turns,
then decodes 128 tokens for 32 sources with our cache, without it, and with the transformers library's Marian model of
the same size where that is installed. Everything runs in one process, in turns; figures are medians over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vit_scratch import Transformer
from vit_scratch.config import SequenceConfig, read_config
from vit_scratch.data.sequences import BOS, PAD
from vit_scratch.tasks.sequence import create_transformer, model_arguments, smoothed_cross_entropy
from vit_scratch.training.optimizer import adamw
from vit_scratch.transformer.generation import greedy


class TorchTransformer(nn.Module):
    """The same model, with torch.nn.Transformer between the embeddings and the head of ours."""

    def __init__(self, ours: Transformer, config: SequenceConfig):
        super().__init__()
        m = config.model
        self.source_embedding, self.target_embedding, self.head = (
            ours.source_embedding,
            ours.target_embedding,
            ours.head,
        )
        self.body = nn.Transformer(
            m.dim,
            m.heads,
            m.encoder_depth,
            m.decoder_depth,
            m.hidden_dim or 4 * m.dim,
            m.dropout,
            m.activation,
            layer_norm_eps=1e-6,
            batch_first=True,
            norm_first=m.norm_first,
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(B, S), (B, N) -> (B, N, V)."""
        padding = source == PAD
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        x = self.body(
            self.source_embedding(source),
            self.target_embedding(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(x)


def in_turns(candidates: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each candidate, run in turns after a first run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def random_batch(rows: int, length: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Source and target ids (rows, length), sources padded to lengths that differ by up to a quarter."""
    source, target = torch.randint(3, vocabulary, (2, rows, length), device=device)
    lengths = torch.randint(3 * length // 4, length + 1, (rows, 1), device=device)
    return source.masked_fill(torch.arange(length, device=device) >= lengths, PAD), target


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor], lr: float) -> Callable[[], None]:
    """A function that does one update."""
    optimizer = adamw(model, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    source, target = batch

    def step() -> None:
        loss, _ = smoothed_cross_entropy(0.1, model, (source, target[:, :-1]), target[:, 1:])
        (loss / target[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@torch.inference_mode()
def without_cache(model: Transformer, source: Tensor, length: int) -> Tensor:
    """Greedy decoding that computes the whole target anew for each token; returns ids (B, length)."""
    memory, mask = model.encode(source)
    tokens = torch.full((len(source), 1), BOS, device=source.device)
    for _ in range(length):
        logits = model.decode(tokens, memory, mask)[:, -1]
        logits[:, [PAD, BOS]] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(dim=1, keepdim=True)], dim=1)
    return tokens[:, 1:]


def marian(config: SequenceConfig, vocabulary: int, device: torch.device) -> Any:
    """The transformers library's encoder-decoder of the same size, None where it is not installed."""
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError:
        return None
    m = config.model
    width = m.hidden_dim or 4 * m.dim
    peer = MarianConfig(
        vocab_size=vocabulary,
        d_model=m.dim,
        encoder_layers=m.encoder_depth,
        decoder_layers=m.decoder_depth,
        encoder_attention_heads=m.heads,
        decoder_attention_heads=m.heads,
        encoder_ffn_dim=width,
        decoder_ffn_dim=width,
        activation_function=m.activation,
        max_position_embeddings=512,
        pad_token_id=PAD,
        decoder_start_token_id=BOS,
        bos_token_id=BOS,
        eos_token_id=2,
        forced_eos_token_id=None,
    )
    model: nn.Module = MarianMTModel(peer)
    return model.to(device).eval()


def main() -> None:
    """Run and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/multi30k_en_de.yaml")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config, device = read_config(options.config), torch.device(options.device)
    vocabulary, length = config.data.vocabulary, 18
    torch.manual_seed(0)
    arguments = model_arguments(config.model, vocabulary, 512)
    ours = create_transformer(**arguments).to(device)
    theirs = TorchTransformer(create_transformer(**arguments), config).to(device)
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, vocabulary {vocabulary}")
    print(config.model)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    print(f"parameters: ours {counts[0]:,}, torch.nn.Transformer {counts[1]:,} (a norm more at each end if post-norm)")

    batch = random_batch(config.train.batch_tokens // length, length, vocabulary, device)
    steps = {"ours": train_step(ours.train(), batch, 1e-4), "torch.nn.Transformer": train_step(theirs, batch, 1e-4)}
    seconds = in_turns(steps, options.rounds, device)
    print(f"\ntraining, batches of {len(batch[0])} x {length} tokens:")
    for name, value in seconds.items():
        ratio = seconds["torch.nn.Transformer"] / value
        print(f"  {name:<24} {batch[1][:, 1:].numel() / value:8.0f} target tokens/s   {ratio:.2f} x")

    ours.eval()
    source, _ = random_batch(32, 20, vocabulary, device)
    cached = greedy(ours, source, bos_id=BOS, eos_id=-1, max_length=128)  # -1: none ends before the others
    same = torch.tensor([h.tokens for h in cached], device=device) == without_cache(ours, source, 128)
    print(f"\ngreedy decoding, 32 x 128 tokens (with and without cache {same.float().mean():.2%} the same):")
    candidates: dict[str, Callable[[], object]] = {
        "without cache": lambda: without_cache(ours, source, 128),
        "with cache": lambda: greedy(ours, source, bos_id=BOS, eos_id=-1, max_length=128),
    }
    peer = marian(config, vocabulary, device)
    if peer is None:
        print("  (transformers is not installed: no comparison with it)")
    else:
        mask = (source != PAD).long()
        options_ = {"do_sample": False, "num_beams": 1, "min_new_tokens": 128, "max_new_tokens": 128}
        candidates["transformers, Marian"] = lambda: peer.generate(source, attention_mask=mask, **options_)
    with torch.inference_mode():
        seconds = in_turns(candidates, max(options.rounds // 3, 3), device)
    for name, value in seconds.items():
        ratio = seconds["without cache"] / value
        print(f"  {name:<24} {32 * 128 / value:8.0f} tokens/s   {ratio:.2f} x")


if __name__ == "__main__":
    main()
