"""Experiments whose results are on record. Not installed: run them from the checkout, ``python -m experiments.…``."""
