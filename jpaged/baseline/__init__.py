"""What continuous batching is measured against."""
