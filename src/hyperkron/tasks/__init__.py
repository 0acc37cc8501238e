"""Whole jobs, from data to a result a person can use."""
