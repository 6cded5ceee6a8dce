"""Text and token ids: tokenizers, chat templates, incremental detokenizing."""
