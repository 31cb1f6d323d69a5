"""Read DeepSpeed's checkpoints, ZeRO and universal ones, without DeepSpeed and without running code in them."""
