"""Reading and writing of Hugging Face directories, and of our additions to them."""
