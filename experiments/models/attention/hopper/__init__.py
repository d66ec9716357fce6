"""Flash attention kernels for Hopper GPUs, which read the first key of every query and visit no other document's blocks."""
