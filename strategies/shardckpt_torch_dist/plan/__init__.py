"""What a rank writes and reads: which bytes, in which files, in which order."""
