"""Image and text towers, the dual encoder made of them, and the tokenizer of captions."""
