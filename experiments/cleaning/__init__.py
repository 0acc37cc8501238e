"""``hyperkron clean`` against its alternatives, on nine datasets."""
