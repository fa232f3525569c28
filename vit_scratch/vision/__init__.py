"""Images to tokens: patch embedding and the Vision Transformer around the encoder of `vit_scratch.transformer`."""
