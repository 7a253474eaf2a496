"""Text in, batches out: sources, tasks, packing, the resumable pipeline, perplexity windows."""
