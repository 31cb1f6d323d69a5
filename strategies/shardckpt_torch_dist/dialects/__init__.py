"""What a checkpoint stores, from every dialect of ``.metadata`` in one form."""
