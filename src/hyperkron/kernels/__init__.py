"""The lowest layer: choice of kernels, CUDA graphs, second-order kernels and batched linear algebra."""
