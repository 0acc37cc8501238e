"""Whether the numbers of ``hyperkron clean`` are true, on 17 data sets."""
