"""From logits to one token a row."""
