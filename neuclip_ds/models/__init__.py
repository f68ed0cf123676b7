"""The dual encoder: timm image tower, transformers text tower, tokenizer. Knows nothing of losses or data."""
