"""The names of vLLM that the loader uses, with its published signatures and rules."""
