"""What the tests share: stub decoders, the scheduler's oracle, tiny models, checkpoint files."""
