"""A grid of models × λ × hypergradients × cross modes, each cell judged against an independent oracle.

``models`` and ``hypers`` make the problems, ``methods`` names the hypergradients, ``truth`` holds the oracle,
``kronecker`` the reference for KFAC and EKFAC, and ``cells`` says what is right. ``benchmarks/correctness_grid.py``
runs the whole grid (``make grid``), ``tests/test_grid.py`` a sample of it.
"""
