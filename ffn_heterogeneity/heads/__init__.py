"""Heads: `head(params["head"], outputs, batch) -> predictions`, chosen by the task.

The language-model head is `models/causal_lm.py: logits` (its matrix may be the tied embedding, and
training never materialises its output); task heads on top of the same outputs live here.
"""
