"""KFAC in place of the solver of AID, AmIGO and MRBO: hypercleaning of MNIST."""
