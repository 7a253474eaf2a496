"""Directories in the form of the Hugging Face hub, in and out, and what only ours keep."""
