"""The ground floor: which kernels run, CUDA graphs, second-order kernels and batched linear algebra."""
