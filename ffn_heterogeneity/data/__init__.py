"""Data: sources, tasks, packing, the resumable input pipeline, perplexity windows."""
