"""Image and text towers, the dual encoder, tokenizers, pretrained checkpoints and export."""
