"""A tensor's memory and values: bytes, copies, quantized classes, torch's private names."""
