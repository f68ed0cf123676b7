"""Large-scale CLIP training on DeepSpeed with one gradient and many normalisers."""
