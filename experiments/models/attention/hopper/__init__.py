"""Attention kernels for Hopper GPUs, whose work lists name the blocks that some query of a document may read.

The algorithms are online softmax (Milakov and Gimelshein, 2018) and FlashAttention (Dao et al., 2022; Shah et al., 2024).
Persistent blocks share out the lists; in each, one warpgroup copies and two multiply.
"""
