"""One save, one load: from a state dict to a committed directory, and back."""
