"""(zarr3, 1): a checkpoint that is a zarr v3 group. (zarr, 1) is Megatron's, of zarr v2 arrays."""
